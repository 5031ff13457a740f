"""Launches of flat passes: those of ``finish``, and the words of rows for dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from meshattn_kernels.dropout import Dropout
from meshattn_kernels.portable.finish import add_parts_kernel, row_terms_kernel, scale_and_cast_kernel
from meshattn_kernels.portable.launch import on_device
from meshattn_kernels.portable.scores import row_words_kernel
from meshattn_kernels.portable.tiles import TERM_ROWS
from meshattn_kernels.portable.variants import Launcher

FLAT_BLOCK = 4096
WORDS_BLOCK = 512

_add_parts = Launcher(add_parts_kernel)
_scale_and_cast = Launcher(scale_and_cast_kernel)
_row_terms = Launcher(row_terms_kernel)
_row_words = Launcher(row_words_kernel)


def add_parts(parts: Tensor, acc: Tensor, factor: float, first: bool) -> None:
    """Add ``factor`` times the sum of parts [n, *acc.shape], from the first to the last, to ``acc``; with
    ``first`` write it."""
    numbers = acc.numel(), len(parts), factor
    with on_device(acc.device):
        _add_parts(_grid(acc), (parts, acc), numbers, (first, FLAT_BLOCK), warps=4)


def scale_into(result: Tensor, acc: Tensor, scale: float) -> None:
    """result = acc * scale, both contiguous."""
    with on_device(acc.device):
        _scale_and_cast(_grid(acc), (acc, result), (acc.numel(), scale), (FLAT_BLOCK,), warps=4)


def row_terms(lse: Tensor, delta: Tensor, n_q: int, dtype: torch.dtype) -> Tensor:
    """[B, H, rows of whole tiles, 2]: see ``finish.row_terms_kernel``; ``dtype`` is that of the inputs.

    Once, and not in every step of a loop, which it would make 5 percent longer.
    """
    batch, heads, rows = lse.shape
    lse, delta = lse.contiguous(), delta.contiguous()
    blocks = -(-rows // TERM_ROWS.value)
    terms = lse.new_empty((batch, heads, blocks * TERM_ROWS.value, 2))
    with on_device(lse.device):
        _row_terms(
            (blocks, heads, batch),
            (lse, delta, terms),
            (rows, n_q, heads),
            (dtype == torch.float32, TERM_ROWS.value),
            warps=4,
        )
    return terms


def row_words(dropout: Dropout, q: Tensor) -> Tensor:
    """int64 [B, H, C_q]: see ``scores.row_words_kernel``; q is [B, C_q, H, D]."""
    batch, rows, heads, _ = q.shape
    words = torch.empty(batch, heads, rows, dtype=torch.int64, device=q.device)
    with on_device(q.device):
        grid = -(-rows // WORDS_BLOCK), heads, batch
        _row_words(grid, (words,), (rows, heads, *dropout.row_numbers), (WORDS_BLOCK,), warps=4)
    return words


def _grid(x: Tensor) -> tuple[int, int, int]:
    return -(-x.numel() // FLAT_BLOCK), 1, 1
