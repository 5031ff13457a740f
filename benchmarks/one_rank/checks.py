"""Whether a kernel is right at the very shape that is timed: all rows of some heads against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from one_rank.attention_cases import Case
from one_rank.contenders import Inputs, Results

NORM_LIMIT = 1e-2
PEAK_LIMIT = 3e-2
"""Greatest error of a tensor in bf16 or fp16: its norm against the oracle's norm, and its greatest against
the oracle's greatest."""


class Oracle:
    """Exact results of the first key/value head of the first sequence and the last of the last."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        places = dict.fromkeys([(0, 0), (case.batch - 1, case.kv_heads - 1)])
        self._group = case.heads // case.kv_heads
        self._exact = {place: _exact(case, self._cut(inputs, *place)) for place in places}

    def _cut(self, tensors: Sequence[Tensor], batch: int, kv_head: int) -> list[Tensor]:
        """One group of heads of (q, k, v, do) or (dq, dk, dv, out)."""
        heads = slice(kv_head * self._group, (kv_head + 1) * self._group)
        one = slice(kv_head, kv_head + 1)
        return [x[batch, :, heads if owner == "q" else one] for x, owner in zip(tensors, "qkkq", strict=True)]

    def errors(self, results: Results) -> dict[str, float]:
        """Of out, dq, dk and dv in parts of what is allowed: above 1 or NaN is wrong."""
        out, dq, dk, dv = results
        worst = dict.fromkeys(Results._fields, 0.0)
        for place, exact in self._exact.items():
            mine = self._cut((dq, dk, dv, out), *place)
            for name, x in zip(("dq", "dk", "dv", "out"), mine, strict=True):
                found = _error(x, exact[name])
                worst[name] = max(worst[name], found) if math.isfinite(found) else math.inf
        return worst


def _exact(case: Case, cut: list[Tensor]) -> dict[str, Tensor]:
    """Of the query heads of one key/value head: q, do [S_q, G, D], k, v [S_k, 1, D]."""
    q, k, v, do = (x.double() for x in cut)
    k, v = k[:, 0], v[:, 0]
    first = torch.tensor(case.first_keys(), device=q.device)[:, None] if case.causal else None
    heads = [_one_head(q[:, g], k, v, do[:, g], first) for g in range(q.shape[1])]
    out, dq, dk, dv = zip(*heads, strict=True)
    return {
        "out": torch.stack(out, dim=1),
        "dq": torch.stack(dq, dim=1),
        "dk": sum(dk[1:], start=dk[0])[:, None],
        "dv": sum(dv[1:], start=dv[0])[:, None],
    }


def _one_head(q: Tensor, k: Tensor, v: Tensor, do: Tensor, first: Tensor | None) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv); rows are taken a few at a time, to hold few numbers at once. ``first``: the first
    key that each row of a causal mask sees."""
    scale = q.shape[-1] ** -0.5
    outs, dqs, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    for begin, end in _runs(len(q), 2048):
        keys = end if first is not None else len(k)
        scores = q[begin:end] @ k[:keys].T * scale
        if first is not None:
            row = torch.arange(begin, end, device=q.device)[:, None]
            key = torch.arange(keys, device=q.device)
            scores.masked_fill_((key > row) | (key < first[begin:end]), -math.inf)
        p = scores.softmax(-1)
        out = p @ v[:keys]
        dp = do[begin:end] @ v[:keys].T
        ds = p * (dp - (do[begin:end] * out).sum(-1, keepdim=True)) * scale
        outs.append(out)
        dqs.append(ds @ k[:keys])
        dk[:keys] += ds.T @ q[begin:end]
        dv[:keys] += p.T @ do[begin:end]
    return torch.cat(outs), torch.cat(dqs), dk, dv


def _runs(length: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, length, step):
        yield begin, min(begin + step, length)


def _error(x: Tensor, exact: Tensor) -> float:
    difference = x.detach().double() - exact
    norm = float(difference.norm() / exact.norm())
    peak = float(difference.abs().max() / exact.abs().max())
    return max(norm / NORM_LIMIT, peak / PEAK_LIMIT)
