"""A sequence spread over a mesh: which tokens are here, and how tensors go in and out.

Letters: S global sequence length, P ranks, L = ceil(S / P) rows that every rank holds, padding included.
Rows beyond the rank's real ones are padding: a suffix that is never read. The layout cuts the sequence into
one chunk for each set of ranks that share out heads; each of them holds a run of L rows of it, so that their
runs, one behind the other, are the chunk. Packed documents are cut like any
other tokens: where one begins has nothing to do with where a rank's rows begin.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshattn.documents import Documents, PackedDocuments, checked_cu_seqlens, checked_integers
from meshattn.layouts import Layout, LayoutKind
from meshattn.masks import BlockMasks, MaskRule, chunk_positions
from meshattn.packing import as_bits, as_written
from meshattn.transport.base import TransportError
from meshattn.trouble import Trouble
from meshattn_kernels.intervals import UNBOUNDED

if TYPE_CHECKING:
    from meshattn.mesh import AttentionMesh

IGNORED_LABEL = -100  # the default ignore_index of torch.nn.functional.cross_entropy
_KEPT_MASKS = 8  # rules of one sequence whose intervals are kept: those of all kinds of layers of a model


class ShardedSequence:
    """The cut of S tokens over the ranks of a mesh. Build it with ``mesh.sequence``."""

    def __init__(
        self,
        mesh: AttentionMesh,
        seq_len: int,
        layout: LayoutKind,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        document_lengths: Sequence[int] | Tensor | None = None,
    ) -> None:
        if not isinstance(seq_len, int) or isinstance(seq_len, bool):
            raise ValueError(f"seq_len is {seq_len!r}: it must be a whole number of tokens")
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}: a sequence has at least one token")
        rows = -(-seq_len // mesh.size) * mesh.heads
        if rows > UNBOUNDED:
            raise ValueError(
                f"seq_len is {seq_len}: {rows} rows in each of {mesh.chunks} chunks are more than "
                f"the {UNBOUNDED} that kernels can count; use more ranks"
            )
        self.mesh = mesh
        self.layout = Layout(layout, seq_len, mesh.chunks, rows)
        self.documents = _documents(seq_len, cu_seqlens, document_lengths)
        # How many sequences with documents the ranks had agreed on with this one.
        self._agreed: int | None = None
        self._gaps: dict[torch.device, Tensor] = {}
        self._masks: OrderedDict[object, BlockMasks] = OrderedDict()
        self.ready: OrderedDict[object, Any] = OrderedDict()  # checked calls, by their looks; see attention

    @property
    def seq_len(self) -> int:
        """Global length S."""
        return self.layout.seq_len

    @property
    def rows(self) -> int:
        """Rows L of every rank's shard, padding included."""
        return self.layout.rows // self.mesh.heads

    @property
    def real_rows(self) -> int:
        """Rows of this rank's shard that hold tokens; the others, behind them, are padding."""
        return len(self._positions(self.mesh.rank))

    def _positions(self, rank: int) -> Tensor:
        """Global positions of the real rows of a rank, rising: its run of the rows of its chunk."""
        chunk, part = divmod(rank, self.mesh.heads)
        return chunk_positions(self.layout, chunk)[part * self.rows : (part + 1) * self.rows]

    def __repr__(self) -> str:
        packed = "" if self.documents is None else f" in {self.documents.count} documents"
        return self._words(packed)

    def __copy__(self) -> ShardedSequence:
        return self

    def __deepcopy__(self, _: object) -> ShardedSequence:
        """The same sequence, which is not changed: a copy of a module that holds it uses one with the
        module."""
        return self

    @property
    def stated(self) -> str:
        """What all ranks compare at every call: which documents by how long ago they were agreed on, so that
        new ones in every step are the same words."""
        if self.documents is None:
            return self._words("")
        if self._agreed is None:
            return self._words(" in documents")
        ago = self.mesh.agreement.compared - self._agreed
        return self._words(f" in the documents agreed on {ago} sequences ago")

    def _words(self, packed: str) -> str:
        return (
            f"ShardedSequence({self.seq_len} tokens{packed}, {self.layout.kind}, "
            f"{self.rows} rows on each of {self.mesh.size} ranks)"
        )

    def agree(self, trouble: Trouble) -> None:
        """Compare the documents with those of the other ranks, once for a sequence. Collective.

        Raises on every rank if they differ, or if one of them has ``trouble``.
        """
        if self.documents is None or self._agreed is not None:
            return
        lists = {"cu_seqlens": self.documents.bounds, "document_lengths": self.documents.lengths or ()}
        self.mesh.agreement.compare(
            "the documents of a sequence", {"sequence": repr(self)}, trouble, lists=lists
        )
        self._agreed = self.mesh.agreement.compared

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a tensor that holds the whole sequence.

        Args:
            tensor: [.., S, ..] with S at ``dim``; the same on every rank. No communication.

        Returns:
            [.., L, ..], padding rows 0.
        """
        self._require("tensor", tensor, dim, self.seq_len)
        _refuse_grad(tensor, "shard")
        mine = self._positions(self.mesh.rank).to(tensor.device)
        shard = as_bits(as_written(tensor)).index_select(dim, mine)
        missing = self.rows - len(mine)
        if missing:
            shard = torch.cat([shard, _filled(shard, dim, missing, 0)], dim)
        return shard.view(tensor.dtype)

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence on every rank, from every rank's rows. Collective.

        Args:
            tensor: [.., L, ..] with L at ``dim``, as ``shard`` and the attention calls return it.

        Returns:
            [.., S, ..] in global order.
        """
        self.mesh.require_open()
        trouble = Trouble()
        stated = {"sequence": repr(self), "dim": str(dim)}
        with trouble:
            self._require("tensor", tensor, dim, self.rows)
            _refuse_grad(tensor, "unshard")
            stated["tensor"] = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
            rows = as_bits(as_written(tensor).contiguous())
        with self.mesh.agreement.one_thread:
            self.mesh.agreement.enter("unshard", stated, trouble)
            try:
                parts = self.mesh.connection.transport.all_gather(rows)
            except TransportError as failure:
                raise self.mesh.explain(failure) from failure
        shape = list(tensor.shape)
        shape[dim] = self.seq_len
        whole = rows.new_empty(shape)
        for rank, part in enumerate(parts):
            positions = self._positions(rank).to(tensor.device)
            whole.index_copy_(dim, positions, part.narrow(dim, 0, len(positions)))
        return whole.view(tensor.dtype)

    def position_ids(self, device: torch.device | str | None = None) -> Tensor:
        """Position of every row of this rank in its document, or in the sequence where there are none.

        int64 [L]; 0 for rows of no document and for padding.
        """
        if not (device is None or isinstance(device, (torch.device, str))):
            raise ValueError(f"device is {device!r}: give a torch.device, its name, or None for the CPU")
        mine = self._positions(self.mesh.rank)
        ids = torch.zeros(self.rows, dtype=torch.int64, device="cpu")
        ids[: len(mine)] = mine if self.documents is None else self.documents.place(mine)[0]
        return ids.to(device) if device is not None else ids

    def shift_labels(self, input_ids: Tensor, dim: int = 1) -> Tensor:
        """The next token of every row of this rank, also where that token lies on another rank.

        Args:
            input_ids: [.., S, ..] integer tokens of the whole sequence, the same on every rank. No
                communication.

        Returns:
            int64 [.., L, ..]; -100 for the last token of the sequence and of each document, for tokens of no
            document and for padding.
        """
        self._require("input_ids", input_ids, dim, self.seq_len)
        if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
            raise ValueError(f"input_ids is {input_ids.dtype}: labels are made from integer tokens")
        mine = self._positions(self.mesh.rank)
        last = mine == self.seq_len - 1 if self.documents is None else self.documents.place(mine)[1] <= 0
        following = (mine + 1).clamp_(max=self.seq_len - 1).to(input_ids.device)
        labels = input_ids.index_select(dim, following).to(torch.int64)
        labels.index_fill_(dim, last.nonzero().squeeze(1).to(input_ids.device), IGNORED_LABEL)
        missing = self.rows - len(mine)
        return torch.cat([labels, _filled(labels, dim, missing, IGNORED_LABEL)], dim) if missing else labels

    def without_gaps(self, tensor: Tensor) -> Tensor:
        """[B, L, ..] with 0 in the rows that are gaps inside the slots of documents; differentiable.

        Padding and what lies behind the last document are never read, but these rows lie between others.
        """
        if self.documents is None or self.documents.lengths is None:
            return tensor
        if tensor.device not in self._gaps:
            mine = self._positions(self.mesh.rank)
            with torch.inference_mode(False):  # kept also for calls whose backward pass reads it
                gaps = torch.zeros(self.rows, dtype=torch.bool, device="cpu")
                gaps[: len(mine)] = self.documents.place(mine)[1] < 0
                self._gaps[tensor.device] = gaps.to(tensor.device)
        gaps = self._gaps[tensor.device]
        return tensor.masked_fill(gaps.view(1, -1, *[1] * (tensor.dim() - 2)), 0)

    def masks(
        self, keys: ShardedSequence, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
    ) -> BlockMasks:
        """Which keys of the sequence ``keys`` the rows of this one see; kept for the next layer and step.

        Raises ValueError for a wrong window, and for documents on one side only or in other numbers.
        """
        wanted = (causal, tuple(window_size), keys.layout, keys.documents)
        if wanted not in self._masks:
            if (self.documents is None) != (keys.documents is None):
                with_documents = "seq" if keys.documents is None else "kv_seq"
                raise ValueError(
                    f"only {with_documents} has documents: give both sequences cu_seqlens, of equally many "
                    "documents (a document may be empty)"
                )
            documents = None
            if self.documents is not None and keys.documents is not None:
                documents = Documents.of(self.documents, keys.documents)
            rule = MaskRule.build(causal=causal, window_size=window_size, documents=documents)
            self._masks[wanted] = BlockMasks(rule, self.layout, keys.layout)
            if len(self._masks) > _KEPT_MASKS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(wanted)
        return self._masks[wanted]

    def _require(self, name: str, tensor: Tensor, dim: int, rows: int) -> None:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}: it must be a tensor")
        check_dense(name, tensor)
        if type(dim) is not int:
            raise ValueError(f"dim is {dim!r}: give the number of the dim of {name} that holds the rows")
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"{name} has {tensor.dim()} dims, so there is no dim {dim}")
        if tensor.shape[dim] != rows:
            raise ValueError(
                f"{name} is {list(tensor.shape)}: dim {dim} must have {rows} rows ({self!r}), "
                f"not {tensor.shape[dim]}"
            )


def check_dense(name: str, tensor: Tensor) -> None:
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else str(tensor.layout)
        raise ValueError(f"{name} is {kind}: it must be a dense tensor")
    if hasattr(tensor, "to_local"):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}: it must be a plain tensor of this rank; pass "
            f"{name}.to_local()"
        )


def _documents(
    seq_len: int,
    cu_seqlens: Sequence[int] | Tensor | None,
    document_lengths: Sequence[int] | Tensor | None,
) -> PackedDocuments | None:
    if cu_seqlens is None:
        if document_lengths is not None:
            raise ValueError("document_lengths is given without cu_seqlens, whose slots it shortens")
        return None
    bounds = checked_cu_seqlens(cu_seqlens, seq_len)
    lengths = None if document_lengths is None else checked_integers(document_lengths, "document_lengths")
    return PackedDocuments(bounds, lengths)


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
