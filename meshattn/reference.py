"""Dense attention: the oracle of the tests, and an eager baseline. Any device, any float type, any mask of
ours.

It builds the whole S_q x S_k matrix and knows nothing of chunks, intervals or blocks: use it for small sizes,
in float64 as a reference, in a lower type as the measure of what plain attention loses there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from meshattn.documents import PackedDocuments, checked_cu_seqlens, checked_integers
from meshattn.masks import checked_window
from meshattn_kernels.contract import accumulator_dtype
from meshattn_kernels.dropout import Dropout


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    cu_seqlens_q: Sequence[int] | Tensor | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    document_lengths_q: Sequence[int] | Tensor | None = None,
    document_lengths_k: Sequence[int] | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q to k and v, differentiable in all three and in the sinks.

    Args:
        q: queries [B, S_q, H, D].
        k: keys [B, S_k, H_kv, D]; query head h uses key/value head h // (H / H_kv).
        v: values [B, S_k, H_kv, D_v].
        softmax_scale: factor of the scores, 1 / sqrt(D) by default.
        softcap: c > 0 makes the scores c * tanh(score / c).
        dropout_p, dropout_seed: as in ``mesh_attention``, with a seed.
        sinks: [H], one more score in every row of a head, for a key without value; in rows that see a key.
        causal, window_size, cu_seqlens_q, cu_seqlens_k, document_lengths_q, document_lengths_k: as in
            ``visible_pairs``.

    Returns:
        out [B, S_q, H, D_v] in the type of q, and lse [B, H, S_q], the natural log of the sum of exp(scores)
        in float32 (float64 for float64 inputs). The two products are in the type of q, the softmax in that of
        lse. A query that sees no key has out 0, lse -inf and a zero gradient.

    Raises:
        ValueError: shapes that do not fit each other, or a mask argument that is not valid.
    """
    group = _checked_group(q, k, v)
    visible = visible_pairs(
        q.shape[1],
        k.shape[1],
        causal=causal,
        window_size=window_size,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        document_lengths_q=document_lengths_q,
        document_lengths_k=document_lengths_k,
    ).to(q.device)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k).to(accumulator_dtype(q.dtype)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    sees_none = ~visible.any(-1)
    # A row of -inf alone has NaN gradients: one that sees nothing gets scores of 0, and drops out below.
    scores = scores.masked_fill(~visible & ~sees_none[:, None], -math.inf).masked_fill(
        sees_none[:, None], 0.0
    )
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column.masked_fill(sees_none[:, None], 0.0)], dim=-1)
    lse = scores.logsumexp(-1).masked_fill(sees_none, -math.inf)
    p = scores.softmax(-1).masked_fill(sees_none[:, None], 0.0).to(q.dtype)[..., : k.shape[1]]
    if dropout_p:
        dropout = Dropout(dropout_p, dropout_seed)
        kept = dropout.kept(len(q), q.shape[2], (0, q.shape[1]), (0, k.shape[1]), q.device)
        p = p * kept * dropout.keep_scale
    return torch.einsum("bhst,bthd->bshd", p, v), lse


def visible_pairs(
    seq_len_q: int,
    seq_len_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens_q: Sequence[int] | Tensor | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    document_lengths_q: Sequence[int] | Tensor | None = None,
    document_lengths_k: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """The mask as a matrix: bool [S_q, S_k] on the CPU, True where the query sees the key.

    The last query is aligned with the last key, in each document if there are documents. ``causal`` hides the
    keys after a query's own; ``window_size`` (left, right) hides keys farther than that before and after it,
    -1 for no bound. ``cu_seqlens_q`` are the cumulated lengths of packed documents, from 0, each of which
    sees itself only; ``cu_seqlens_k`` are those of the keys, by default the same. ``document_lengths_q`` and
    ``document_lengths_k`` are the positions that each document uses of its slot, by default all and those of
    the queries. What lies behind a document in its slot, or beyond the last slot, sees nothing.
    """
    left, right = checked_window(window_size)
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k is given without cu_seqlens_q; give both, or the latter alone")
        cu_seqlens_q, cu_seqlens_k = (0, seq_len_q), (0, seq_len_k)
    q_spans = _spans("q", cu_seqlens_q, document_lengths_q, seq_len_q)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
        document_lengths_k = document_lengths_q if document_lengths_k is None else document_lengths_k
    k_spans = _spans("k", cu_seqlens_k, document_lengths_k, seq_len_k)
    if len(q_spans) != len(k_spans):
        raise ValueError(
            f"cu_seqlens_q has {len(q_spans)} documents and cu_seqlens_k {len(k_spans)}; "
            "they must have equally many (a document may be empty)"
        )
    visible = torch.zeros(seq_len_q, seq_len_k, dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(q_spans, k_spans, strict=True):
        # How far the key lies before the query's own key.
        distance = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            seen &= distance >= 0
        if right is not None:
            seen &= distance >= -right
        if left is not None:
            seen &= distance <= left
        visible[q0:q1, k0:k1] = seen
    return visible


def _spans(
    side: str, cu_seqlens: Sequence[int] | Tensor, lengths: Sequence[int] | Tensor | None, seq_len: int
) -> list[tuple[int, int]]:
    """First position and end of each document."""
    bounds = checked_cu_seqlens(cu_seqlens, seq_len, f"cu_seqlens_{side}")
    if lengths is None:
        return list(pairwise(bounds))
    used = checked_integers(lengths, f"document_lengths_{side}")
    PackedDocuments(bounds, used)  # refuses lengths that do not fit
    return [(start, start + length) for start, length in zip(bounds, used, strict=False)]


def _checked_group(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Query heads of a key/value head. Raises ValueError if the shapes do not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [B, S, heads, head size]")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} and q {q.dtype} on {q.device}; they must be equal"
            )
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit; "
            "they must be [B, S_q, H, D], [B, S_k, H_kv, D] and [B, S_k, H_kv, D_v]"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads and k {k.shape[2]}; H must be a multiple of H_kv")
    return q.shape[2] // k.shape[2]
