"""The options of a call, and what is wrong with them."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch

from meshattn.masks import checked_window
from meshattn.mesh_arguments import check_switch

_SOFTCAPS = 1e-30, 1e30  # within float32, with room for the factors that kernels put to them


class Options(NamedTuple):
    causal: bool
    softmax_scale: float | None
    window_size: tuple[int, int]
    softcap: float
    dropout_p: float
    deterministic: bool
    return_lse: bool
    reduce_dtype: torch.dtype | None
    kernel: str | None
    unknown: tuple[str, ...] = ()

    def words(self) -> dict[str, str]:
        """What all ranks must have alike; an unknown option is an error of its own."""
        return {name: str(value) for name, value in self._asdict().items() if name != "unknown"}


_INSTEAD = {
    "attn_mask": "masks are causal, window_size and the documents of mesh.sequence(cu_seqlens=...)",
    "attn_bias": "there are no biases; rotate q and k for positions",
    "alibi_slopes": "there are no biases; rotate q and k for positions",
    "is_causal": "the name is causal",
    "scale": "the name is softmax_scale",
    "dropout": "the name is dropout_p",
    "window": "the name is window_size, (left, right)",
    "enable_gqa": "k and v may have fewer heads than q without it",
    "return_attn_probs": "the name is return_lse, for what there is of it",
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k"),
        "the documents belong to the sequence: mesh.sequence(seq_len, cu_seqlens=...)",
    ),
    **dict.fromkeys(
        ("tile", "heads", "head_groups", "transport", "timeout"), "give it to init_attention_mesh"
    ),
}
"""Options of other attention calls, and what there is in their place."""


def check_options(options: Options) -> None:
    for name in options.unknown:
        instead = _INSTEAD.get(name, "see help(meshattn.mesh_attention) for those that there are")
        raise NotImplementedError(f"{name} is no option of this attention: {instead}")
    checked_window(options.window_size)
    check_softcap(options.softcap)
    check_dropout(options.dropout_p)
    for name in ("causal", "deterministic", "return_lse"):
        check_switch(name, getattr(options, name))
    scale = options.softmax_scale
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise ValueError(
            f"softmax_scale is a {type(scale).__name__}: it must be a number, which carries no gradient"
        )
    if scale is not None and not 0 < scale <= sys.float_info.max:
        raise ValueError(f"softmax_scale is {scale}: it must be positive and finite, or None for D ** -0.5")


def check_softcap(cap: float) -> None:
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 0 <= cap <= sys.float_info.max:
        raise ValueError(f"softcap is {cap!r}: it must be a finite number, positive or 0.0 for none")
    least, most = _SOFTCAPS
    if cap and not least <= cap <= most:
        raise ValueError(f"softcap is {cap}: give one from {least:g} to {most:g}, or 0.0 for none")


def check_dropout(p: float) -> None:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise ValueError(f"dropout_p is {p!r}: it must be a probability, from 0.0 for none and below 1.0")


def is_seed(seed: object) -> bool:
    return seed is None or (type(seed) is int and 0 <= seed < 2**64)


def check_seed(seed: object) -> None:
    if not is_seed(seed):
        raise ValueError(
            f"dropout_seed is {seed!r}: it must be a whole number from 0 to 2**64 - 1, or None to draw one"
        )


def check_kernel_name(kernel: str | None) -> None:
    if kernel is not None and not isinstance(kernel, str):
        raise ValueError(f"kernel is a {type(kernel).__name__}: give its name, or None")
