"""Causal attention and its gradients in float64 at sampled rows and keys of a sequence that is too long for
dense attention: independent of the library, its kernels and their lse.

A row of out and of dq needs this row and all keys. A row of dk and of dv needs all queries behind it, with
their lse and delta, which cost as much as their rows of out: so keys are sampled among the last ones, and
what all keys get together is held against sums that no attention is needed for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = 2**27
"""Of one head group at a time: 1 GiB in float64."""


@dataclass(frozen=True)
class Samples:
    """Exact results; positions are global, int64 and rising, all tensors lie on the device of the inputs."""

    rows: Tensor
    keys: Tensor
    exact: Mapping[str, Tensor]  # out, dq [rows, H, D] and dk, dv [keys, H_kv, D], float64

    def positions(self, name: str) -> Tensor:
        """At which rows of a result its exact numbers are."""
        return self.rows if name in ("out", "dq") else self.keys


def sample(inputs: Sequence[Tensor], *, spread: int, last: int, num_keys: int) -> Samples:
    """Exact results of causal attention.

    Args:
        inputs: q, k, v, do [1, S, H, D] of the whole sequence.
        spread: so many rows evenly over all but the first ones, which see too few keys for a relative error.
        last: all of so many rows at the end, and among them
        num_keys: so many keys, evenly.
    """
    q, k, v, do = (x[0] for x in inputs)
    length, device = len(q), q.device
    last = min(last, length)
    window = torch.arange(length - last, length, device=device)
    keys = torch.linspace(length - last, length - 1, min(num_keys, last), device="cpu", dtype=torch.float64)
    keys = keys.long().unique().to(device)
    ahead = torch.linspace(length // 64, length - 1 - last, spread, dtype=torch.float64)
    rows = torch.cat([ahead.long().clamp(min=0).to(device), window]).unique()
    parts: dict[str, list[Tensor]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    group = q.shape[1] // k.shape[1]
    for head in range(k.shape[1]):
        of_queries = slice(head * group, (head + 1) * group)
        found = _of_head(
            q[:, of_queries], k[:, head].double(), v[:, head].double(), do[:, of_queries], rows, keys
        )
        for name, tensor in found.items():
            parts[name].append(tensor)
    return Samples(rows, keys, {name: torch.cat(x, 1) for name, x in parts.items()})


def _of_head(q: Tensor, k: Tensor, v: Tensor, do: Tensor, rows: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """Of a key/value head with all its query heads: q, do [S, g, D], k, v [S, D] in float64."""
    group, size = q.shape[1:]
    scale = size**-0.5
    outs, dqs = [], []
    dk, dv = torch.zeros_like(k[keys]), torch.zeros_like(v[keys])
    for some in rows.split(max(1, SCORES // (len(k) * group))):
        seen = int(some[-1]) + 1
        mine, grad = (x[some].double().flatten(0, 1) for x in (q, do))  # [rows * g, D]
        at = some.repeat_interleave(group)[:, None]
        scores = mine @ k[:seen].T * scale
        scores.masked_fill_(torch.arange(seen, device=k.device) > at, -torch.inf)
        probs = scores.sub_(scores.logsumexp(1, keepdim=True)).exp_()
        out = probs @ v[:seen]
        dscores = (grad @ v[:seen].T).sub_((grad * out).sum(1, keepdim=True)).mul_(probs).mul_(scale)
        outs.append(out.view(len(some), group, -1))
        dqs.append((dscores @ k[:seen]).view(len(some), group, -1))
        visited = keys[keys < seen]  # every query behind a sampled key is among the rows
        dk[: len(visited)] += dscores[:, visited].T @ mine
        dv[: len(visited)] += probs[:, visited].T @ grad
    return {"out": torch.cat(outs), "dq": torch.cat(dqs), "dk": dk[:, None], "dv": dv[:, None]}


def sampled_errors(samples: Samples, positions: Tensor, results: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest error of a row and head of each result, relative to the length of the exact one; 0 where this
    rank has none of the sampled rows. Where the exact one is zero but for rounding, as dq of the row that
    sees one key alone, the longest of this head stands for it.

    Args:
        positions: [L], of the rows of this rank, rising.
        results: out, dq, dk, dv [1, L, H, D].
    """
    errors = {}
    for name, tensor in results.items():
        wanted = samples.positions(name)
        place = torch.searchsorted(positions, wanted).clamp(max=len(positions) - 1)
        mine = positions[place] == wanted
        exact = samples.exact[name][mine]
        length = exact.norm(dim=-1)
        longest = samples.exact[name].norm(dim=-1).max(0).values
        length = torch.where(length > 1e-9 * longest, length, longest)
        apart = (tensor[0, place[mine]].double() - exact).norm(dim=-1) / length
        errors[name] = float(apart.max()) if apart.numel() else 0.0
    return errors


def sums(inputs: Sequence[Tensor], results: Mapping[str, Tensor]) -> Tensor:
    """Of the rows of one rank, what all ranks together must get twice: [2, H_kv, D + 1].

    Every query gives all of its do to the keys, since its probabilities add up to one, so that dv over all
    keys is do over all queries. And dscore * score over all pairs is q * dq over all rows as well as k * dk
    over all keys.
    """
    q, k, _, do = (x[0] for x in inputs)
    grads = {name: tensor[0] for name, tensor in results.items()}
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]

    def add(x: Tensor, y: Tensor | None, heads: int) -> Tensor:
        total = torch.zeros(heads, x.shape[2], dtype=torch.float64, device=x.device)
        for begin in range(0, len(x), 2**14):
            part = x[begin : begin + 2**14].double()
            total += (part if y is None else part * y[begin : begin + 2**14].double()).sum(0)
        return total

    by_queries = [add(do, None, kv_heads * group), add(q, grads["dq"], kv_heads * group).sum(1, keepdim=True)]
    by_keys = [add(grads["dv"], None, kv_heads), add(k, grads["dk"], kv_heads).sum(1, keepdim=True)]
    queries = torch.cat(by_queries, 1).view(kv_heads, group, -1).sum(1)
    return torch.stack([queries, torch.cat(by_keys, 1)])


def errors_of_sums(both: Tensor) -> dict[str, float]:
    """Largest of any key/value head, relative; of what ``sums`` gives for all ranks together."""
    queries, keys = both
    dv = (queries - keys)[:, :-1].norm(dim=1) / queries[:, :-1].norm(dim=1)
    dk = (queries - keys)[:, -1].abs() / queries[:, -1].norm() * len(queries) ** 0.5
    return {"dv over all keys": float(dv.max()), "dk over all keys": float(dk.max())}
