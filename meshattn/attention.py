"""The public calls.

Letters: B batch, L rows of a rank's shard, H and H_kv query and key/value heads, D and D_v head sizes of q,
    k and of v, out.
"""

from __future__ import annotations

from typing import Never

import torch
from torch import Tensor

from meshattn.arguments import Arguments, check_kind
from meshattn.calls import attend
from meshattn.options import Options, check_dropout, check_kernel_name, check_softcap
from meshattn.sequence import ShardedSequence
from meshattn_kernels import choose_kernel


def mesh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: ShardedSequence,
    *,
    kv_seq: ShardedSequence | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    reduce_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a whole sequence, spread over the ranks of the mesh that `seq` belongs to (arXiv
    2512.20968).

    Collective: every rank calls it with the same shapes, types and options, and so for the backward pass.
    The result has the same bits on every run. Differentiable once in q, k and v.

    Args:
        q: [B, L, H, D], this rank's rows, as ``seq.shard`` cuts them.
        k: [B, L_kv, H_kv, D], rows of `kv_seq`; H_kv divides H, and query head h uses key/value head
            h // (H / H_kv) (GQA, MQA).
        v: [B, L_kv, H_kv, D_v].
        seq: how the sequence is spread.
        kv_seq: another sequence for keys and values, of the same mesh and of any length; by default `seq`.
            With documents both have equally many, and queries of document d see keys of document d.
        causal: a query sees the keys at its own global position and before. Where there are more or fewer
            keys than queries, the last query is aligned with the last key, in each document if there are
            documents.
        softmax_scale: factor on q k^T, by default D ** -0.5.
        window_size: (left, right) keys that a query sees before and after its own, -1 for no bound; causal
            is right = 0. Together with documents inside each document.
        sinks: [H], a logit for each query head that takes part in the softmax of every row and has no value
            (as in gpt-oss); rows that see no key are not touched. Its gradient on a rank is this rank's part:
            the parts of all ranks add up to the whole, as for any weight (see `replicated`).
        softcap: c from 1e-30 to 1e30 bounds the scores: c * tanh(score / c), as in flash-attn; 0.0 is off.
            The "hopper" kernel does not have it.
        dropout_p: probability, from 0 and below 1 and in steps of 2**-32, with which an attention probability
            is dropped; others are divided by 1 - dropout_p. Which ones follows from the seed and from batch,
            head, query and key position in the whole sequence, whatever mesh, tile, layout and kernel. The
            "hopper" kernel does not have it.
        dropout_seed: from 0 to 2**64 - 1, the same on all ranks and another in every call; by default drawn
            from torch's CPU generator, which all ranks must have seeded alike.
        deterministic: True refuses kernels that are not bitwise deterministic.
        return_lse: also return lse; gradients flow through it as through out.
        reduce_dtype: type in which partial results travel: the accumulator type (default; float32, float64
            for float64) or the type of q.
        kernel: name of the local kernel, which is taken or refused; None takes the one that `kernel_for`
            names.
        unknown: no other option exists; one that a single rank gives is an error on all.

    Returns:
        out [B, L, H, D_v] in the type of q; with ``return_lse`` also lse [B, H, L], natural log, in the
        accumulator type. Rows that see no key, and padding, have lse -inf; their out and gradients are 0.

    Raises:
        ValueError: wrong shapes, types or options, on every rank alike and before any transfer.
        NotImplementedError: in the backward pass, a gradient through lse with a kernel that would lose it.
        RankMismatchError: a ValueError; the ranks disagree, or one did not come to a call that is compared.
        TransportError: a rank died or stalled during a call; the message names the step and the peer.
    """
    options = Options(
        causal,
        softmax_scale,
        window_size,
        softcap,
        dropout_p,
        deterministic,
        return_lse,
        reduce_dtype,
        kernel,
        tuple(sorted(unknown)),
    )
    return _outside_graphs(Arguments("mesh_attention", q, k, v, seq, kv_seq, sinks, dropout_seed, options))


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: ShardedSequence,
    *,
    kv_seq: ShardedSequence | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    reduce_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Ring-Attention (arXiv 2310.01889): `mesh_attention` with the tile (1, P), whatever the tile of the
    mesh; beside a head axis the tile (1, P / heads).

    The same engine, arguments, results and errors; the baseline to compare with.
    """
    options = Options(
        causal,
        softmax_scale,
        window_size,
        softcap,
        dropout_p,
        deterministic,
        return_lse,
        reduce_dtype,
        kernel,
        tuple(sorted(unknown)),
    )
    return _outside_graphs(Arguments("ring_attention", q, k, v, seq, kv_seq, sinks, dropout_seed, options))


def kernel_for(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    kernel: str | None = None,
) -> str:
    """Name of the local kernel that attention runs on such tensors.

    Args:
        device: of q, k and v.
        dtype: of q, k and v; under autocast, its type.
        head_dim: of q and k.
        head_dim_v: of v, by default that of q and k.
        softcap, dropout_p: as given to `mesh_attention`.
        kernel: as given to `mesh_attention`.

    Raises:
        ValueError: a type, head size, softcap or dropout that attention does not take; no kernel serves
            them, or the named one does not: the message says which would.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    check_kind(dtype, head_dim, head_dim_v)
    check_kernel_name(kernel)
    check_softcap(softcap)
    check_dropout(dropout_p)
    changes = {"softcap": softcap > 0, "dropout": dropout_p > 0}
    return choose_kernel(kernel, torch.device(device), dtype, head_dim, head_dim_v, **changes)


def _outside_graphs(given: Arguments) -> Tensor | tuple[Tensor, Tensor]:
    """torch.compile leaves its graph here and comes back after the call: exchanges cannot be traced."""
    if torch.compiler.is_compiling():
        from meshattn.graph_break import attend as untraced

        result: Tensor | tuple[Tensor, Tensor] = untraced(given)
        return result
    return attend(given)
