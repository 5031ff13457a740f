"""A sequence spread over a mesh: which tokens are here, and how tensors go in and out.

Letters: S global sequence length, P ranks, L = ceil(S / P) rows that every rank holds, padding included.
Rows beyond the rank's real ones are padding: a suffix that is never read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshattn.layouts import Layout, LayoutKind
from meshattn.masks import MaskRule, block_intervals, chunk_positions
from meshattn.transport.base import TransportError
from meshattn_kernels import Intervals

if TYPE_CHECKING:
    from meshattn.mesh import AttentionMesh

IGNORED_LABEL = -100  # the default ignore_index of torch.nn.functional.cross_entropy


class ShardedSequence:
    """The cut of S tokens over the ranks of a mesh. Build it with ``mesh.sequence``."""

    def __init__(self, mesh: AttentionMesh, seq_len: int, layout: LayoutKind) -> None:
        if not isinstance(seq_len, int) or isinstance(seq_len, bool):
            raise ValueError(f"seq_len is {seq_len!r}: it must be a whole number of tokens")
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}: a sequence has at least one token")
        self.mesh = mesh
        self.layout = Layout(layout, seq_len, mesh.size, -(-seq_len // mesh.size))
        self._intervals: dict[tuple[MaskRule, int, int], Intervals] = {}

    @property
    def seq_len(self) -> int:
        """Global length S."""
        return self.layout.seq_len

    @property
    def rows(self) -> int:
        """Rows L of every rank's shard, padding included."""
        return self.layout.rows

    @property
    def real_rows(self) -> int:
        """Rows of this rank's shard that hold tokens; the others, behind them, are padding."""
        return self.layout.rows_in(self.mesh.rank)

    def __repr__(self) -> str:
        return (
            f"ShardedSequence({self.seq_len} tokens, {self.layout.kind}, "
            f"{self.rows} rows on each of {self.mesh.size} ranks)"
        )

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a tensor that holds the whole sequence.

        Args:
            tensor: [.., S, ..] with S at ``dim``; the same on every rank. No communication.

        Returns:
            [.., L, ..], padding rows 0.
        """
        self._require("tensor", tensor, dim, self.seq_len)
        _refuse_grad(tensor, "shard")
        mine = chunk_positions(self.layout, self.mesh.rank).to(tensor.device)
        shard = tensor.index_select(dim, mine)
        missing = self.rows - len(mine)
        return shard if missing == 0 else torch.cat([shard, _filled(shard, dim, missing, 0)], dim)

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence on every rank, from every rank's rows. Collective.

        Args:
            tensor: [.., L, ..] with L at ``dim``, as ``shard`` and the attention calls return it.

        Returns:
            [.., S, ..] in global order.
        """
        self.mesh.require_open()
        error: Exception | None = None
        stated = {"sequence": repr(self), "dim": str(dim)}
        try:
            self._require("tensor", tensor, dim, self.rows)
            _refuse_grad(tensor, "unshard")
            stated["tensor"] = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
        except Exception as failure:  # whatever it is, the other ranks must not wait for this one
            error = failure
        self.mesh.agreement.enter("unshard", stated, error)
        try:
            parts = self.mesh.connection.transport.all_gather(tensor.contiguous())
        except TransportError as failure:
            raise self.mesh.explain(failure) from failure
        shape = list(tensor.shape)
        shape[dim] = self.seq_len
        whole = tensor.new_empty(shape)
        for rank, part in enumerate(parts):
            positions = chunk_positions(self.layout, rank).to(tensor.device)
            whole.index_copy_(dim, positions, part.narrow(dim, 0, len(positions)))
        return whole

    def position_ids(self, device: torch.device | str | None = None) -> Tensor:
        """Global position of every row of this rank, int64 [L]; 0 for padding."""
        mine = chunk_positions(self.layout, self.mesh.rank)
        ids = torch.zeros(self.rows, dtype=torch.int64, device="cpu")
        ids[: len(mine)] = mine
        return ids.to(device) if device is not None else ids

    def shift_labels(self, input_ids: Tensor, dim: int = 1) -> Tensor:
        """The next token of every row of this rank, also where that token lies on another rank.

        Args:
            input_ids: [.., S, ..] integer tokens of the whole sequence, the same on every rank. No
                communication.

        Returns:
            int64 [.., L, ..]; -100 for the last token of the sequence and for padding.
        """
        self._require("input_ids", input_ids, dim, self.seq_len)
        if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
            raise ValueError(f"input_ids is {input_ids.dtype}: labels are made from integer tokens")
        following = chunk_positions(self.layout, self.mesh.rank).to(input_ids.device) + 1
        labels = input_ids.index_select(dim, following[following < self.seq_len]).to(torch.int64)
        missing = self.rows - labels.shape[dim]
        return torch.cat([labels, _filled(labels, dim, missing, IGNORED_LABEL)], dim) if missing else labels

    def block_intervals(self, rule: MaskRule, query_chunk: int, key_chunk: int) -> Intervals:
        """Which keys of a chunk the rows of another see under `rule`; kept for the next layer and step."""
        key = (rule, query_chunk, key_chunk)
        if key not in self._intervals:
            self._intervals[key] = block_intervals(rule, self.layout, query_chunk, self.layout, key_chunk)
        return self._intervals[key]

    def _require(self, name: str, tensor: Tensor, dim: int, rows: int) -> None:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}: it must be a tensor")
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"{name} has {tensor.dim()} dims, so there is no dim {dim}")
        if tensor.shape[dim] != rows:
            raise ValueError(
                f"{name} is {list(tensor.shape)}: dim {dim} must have {rows} rows ({self!r}), "
                f"not {tensor.shape[dim]}"
            )


def _filled(like: Tensor, dim: int, rows: int, value: int) -> Tensor:
    shape = list(like.shape)
    shape[dim] = rows
    return like.new_full(shape, value)


def _refuse_grad(tensor: Tensor, what: str) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{what}: the tensor requires grad, but {what} has no gradient; pass tensor.detach(), "
            "or shard the integer tokens before the embedding"
        )
