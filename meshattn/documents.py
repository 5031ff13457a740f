"""Packed documents: where each begins and ends in a sequence, and how to find that out.

A sequence may hold several documents one behind the other. Document d fills the slot cu_seqlens[d] ..
cu_seqlens[d + 1] - 1, or the first ``lengths[d]`` positions of it; what is left of a slot (a gap), and what
lies behind the last slot, belongs to no document: it sees nothing and is seen by nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of one sequence. Raises ValueError for bounds or lengths that are not valid.

    ``bounds`` is cu_seqlens, as from ``checked_cu_seqlens``; ``lengths`` are the positions used of each slot,
    None where all are.
    """

    bounds: tuple[int, ...]
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        checked_cu_seqlens(self.bounds, self.bounds[-1] if self.bounds else 0)
        if self.lengths is None:
            return
        if len(self.lengths) != self.count:
            raise ValueError(
                f"document_lengths has {len(self.lengths)} entries and cu_seqlens {self.count} documents; "
                "give the length of each"
            )
        for d, length in enumerate(self.lengths):
            slot = self.bounds[d + 1] - self.bounds[d]
            if not 0 <= length <= slot:
                raise ValueError(f"document_lengths[{d}] is {length}; its slot holds 0 to {slot} positions")

    @property
    def count(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.bounds) - 1

    def place(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Position inside its document, and positions of that document that follow, for global positions.

        int64 in and out, on the CPU; (0, -1) for a position of no document.
        """
        starts, ends = self._spans
        document = torch.searchsorted(starts, position, right=True) - 1
        inside = position < ends[document]
        within = (position - starts[document]).where(inside, 0)
        return within, (ends[document] - 1 - position).where(inside, -1)

    @cached_property
    def _spans(self) -> tuple[Tensor, Tensor]:
        """First position and end of every document that is not empty; the first begins at or before 0."""
        bounds = torch.tensor(self.bounds, dtype=torch.int64, device="cpu")
        starts, ends = bounds[:-1], bounds[1:]
        if self.lengths is not None:
            ends = starts + torch.tensor(self.lengths, dtype=torch.int64, device="cpu")
        some = starts < ends
        nothing = bounds[:1]  # an empty document at 0: every position finds one at or before it
        return torch.cat([nothing, starts[some]]), torch.cat([nothing, ends[some]])

    def __hash__(self) -> int:
        return self._hash  # looked up by it on every call

    @cached_property
    def _hash(self) -> int:
        return hash((self.bounds, self.lengths))


@dataclass(frozen=True)
class Documents:
    """Packed documents of queries and of keys, by cumulated lengths: queries of d see keys of d only.

    Raises ValueError for lengths that are not cumulated from 0 and for two sides with unequal numbers of
    documents.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.q) != len(self.k):
            raise ValueError(
                f"seq has {len(self.q) - 1} documents and kv_seq {len(self.k) - 1}: their cu_seqlens must "
                "have equally many (a document may be empty)"
            )
        for name, bounds in (("cu_seqlens of seq", self.q), ("cu_seqlens of kv_seq", self.k)):
            checked_cu_seqlens(bounds, bounds[-1] if bounds else 0, name)

    @classmethod
    def of(cls, q: PackedDocuments, k: PackedDocuments) -> Documents:
        """The documents of two sequences, paired in order.

        A gap of the queries becomes a document without keys, a gap of the keys one without queries.
        """
        if q.lengths is None and k.lengths is None:
            return cls(q.bounds, k.bounds)
        if q.count != k.count:
            return cls(q.bounds, k.bounds)  # which raises
        bounds_q, bounds_k = [0], [0]
        for d in range(q.count):
            end_q, end_k = q.bounds[d + 1], k.bounds[d + 1]
            used_q = end_q if q.lengths is None else q.bounds[d] + q.lengths[d]
            used_k = end_k if k.lengths is None else k.bounds[d] + k.lengths[d]
            bounds_q += [used_q, end_q, end_q]
            bounds_k += [used_k, used_k, end_k]
        return cls(tuple(bounds_q), tuple(bounds_k))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.q, self.k))

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query ends, key starts, key ends and shifts of the documents; then one empty document for the
        tail."""
        q, k = (torch.tensor(bounds, dtype=torch.int64, device="cpu") for bounds in (self.q, self.k))
        ends = torch.cat([k[1:], k[-1:]])
        return q[1:], k, ends, ends - torch.cat([q[1:], q[-1:]])


def checked_cu_seqlens(
    cu_seqlens: Sequence[int] | Tensor, seq_len: int, name: str = "cu_seqlens"
) -> tuple[int, ...]:
    """``cu_seqlens`` as a tuple of integers: document d holds the positions cu_seqlens[d] .. cu_seqlens[d +
    1] - 1.

    It starts at 0, does not decrease (a document may be empty) and ends at or below ``seq_len``; positions
    beyond its end belong to no document and see nothing. Copies a tensor to the CPU once. Raises ValueError.
    """
    bounds = checked_integers(cu_seqlens, name)
    if len(bounds) < 2 or bounds[0] != 0:
        raise ValueError(
            f"{name} is {_shortened(bounds)}; it must hold the bounds of documents: cumulated lengths behind "
            "a 0, one entry more than documents"
        )
    for d in range(len(bounds) - 1):
        if bounds[d] > bounds[d + 1]:
            raise ValueError(
                f"{name} decreases from {bounds[d]} to {bounds[d + 1]} at entry {d + 1}; "
                "it must hold the cumulated lengths of the documents"
            )
    if bounds[-1] > seq_len:
        raise ValueError(f"{name} ends at {bounds[-1]}, beyond the sequence length {seq_len}")
    return bounds


def checked_integers(values: Sequence[int] | Tensor, name: str) -> tuple[int, ...]:
    """A sequence or 1-D tensor of integers as a tuple. Copies a tensor to the CPU once. Raises ValueError."""
    if isinstance(values, Tensor):
        if values.dim() != 1 or not _holds_integers(values):
            raise ValueError(
                f"{name} is a {values.dtype} tensor of shape {list(values.shape)}; "
                "it must be a 1-D tensor of integers"
            )
        if values.is_meta or values.layout != torch.strided:
            raise ValueError(
                f"{name} is a {values.layout} tensor on {values.device}; it must be dense, on a device that "
                "holds data"
            )
        return tuple(values.tolist())
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise ValueError(
            f"{name} is a {type(values).__name__} of other things than integers; it must be a sequence or a "
            "1-D tensor of integers"
        ) from None


def cu_seqlens_from_position_ids(position_ids: Tensor) -> Tensor:
    """Bounds of packed documents from positions that restart at 0 in each of them.

    Args:
        position_ids: integers [S] or [B, S] of a whole sequence; all rows must be cut alike.

    Returns:
        int64 [documents + 1] on the CPU, for ``mesh.sequence(S, cu_seqlens=...)``.

    Raises:
        ValueError: a position that neither continues the one before it nor restarts at 0, and rows that are
            cut differently.
    """
    rows = _checked_rows(position_ids, "position_ids")
    before = torch.cat([rows.new_full((len(rows), 1), -1), rows[:, :-1]], dim=1)
    jumps = ((rows != 0) & (rows != before + 1)).nonzero()
    if len(jumps):
        row, token = jumps[0].tolist()
        raise ValueError(
            f"position_ids goes from {int(before[row, token])} to {int(rows[row, token])} at token {token}; "
            "a position must continue the one before it or restart at 0"
        )
    return _bounds_of_starts(rows == 0, "position_ids")


def cu_seqlens_from_end_tokens(input_ids: Tensor, end_token: int) -> Tensor:
    """Bounds of packed documents, each of which ends with ``end_token``, but for the last one perhaps.

    Args:
        input_ids: integer tokens [S] or [B, S] of a whole sequence; all rows must be cut alike.
        end_token: the token that closes a document; it belongs to the document that it closes.

    Returns:
        int64 [documents + 1] on the CPU, for ``mesh.sequence(S, cu_seqlens=...)``.

    Raises:
        ValueError: tokens that are no integers, an end token that is not one integer, and rows that are cut
            differently.
    """
    rows = _checked_rows(input_ids, "input_ids")
    try:
        end = operator.index(end_token)
    except TypeError:
        raise ValueError(f"end_token is {end_token!r}; it must be one integer token") from None
    first = rows.new_ones((len(rows), 1), dtype=torch.bool)
    return _bounds_of_starts(torch.cat([first, rows[:, :-1] == end], dim=1), "input_ids")


def _checked_rows(tensor: Tensor, name: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}: it must be a tensor")
    if tensor.dim() not in (1, 2) or 0 in tensor.shape:
        raise ValueError(f"{name} is {list(tensor.shape)}: it must be [S] or [B, S], of a whole sequence")
    if not _holds_integers(tensor):
        raise ValueError(f"{name} is {tensor.dtype}: it must hold integers")
    return tensor.detach().cpu().reshape(-1, tensor.shape[-1])


def _holds_integers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _bounds_of_starts(starts: Tensor, name: str) -> Tensor:
    """From a mask [B, S] of first tokens."""
    if not bool((starts == starts[0]).all()):
        raise ValueError(
            f"the rows of {name} are cut into different documents, but one cu_seqlens serves all rows: "
            "pack them one behind the other into one long row, or give each row a sequence of its own"
        )
    length = torch.tensor([starts.shape[1]], device="cpu")
    return torch.cat([starts[0].nonzero().squeeze(1), length])


def _shortened(bounds: tuple[int, ...]) -> str:
    return str(list(bounds)) if len(bounds) <= 8 else f"{[*bounds[:3]]} ... of {len(bounds)} entries"
