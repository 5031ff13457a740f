"""Every cut of 4 ranks and of all ranks on every transport, with as many key/value heads as query heads and
with fewer: equal to the oracle, and the same bits again.

    torchrun --nproc-per-node 8 benchmarks/self_test.py --transport symmetric p2p

Of more than four ranks, each four in a row make meshes of their own too, all at once. Ends with code 1 if
anything differs or a transport cannot serve; a rank that waits in vain ends it after --timeout seconds.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import meshattn as ma
from across_ranks.rank_check import CHECKED_ERROR, errors, on_short, oracle
from across_ranks.rank_contenders import Case
from across_ranks.rank_cuts import name_of
from across_ranks.rank_start import join
from harness import REPORTS, Machine, Record, table, write
from meshattn.plan.placement import Cut
from meshattn.plan.planner import cuts

FEW = 4
BEGAN = time.monotonic()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", nargs="+", default=["p2p"], choices=("auto", "symmetric", "p2p"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8, help="fewer than heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernel", help="local kernel by name (default: what the library chooses)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a rank waits for another")
    parser.add_argument("--out", default=str(REPORTS), help="folder of the report")
    parser.add_argument("--commit", help="name of the code, where it is no git checkout")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device = join(options.timeout)
    rows: list[Row] = []
    report = ""
    meshes = _meshes(options)
    for number, of_a_mesh in enumerate(_rows(options, device, meshes), 1):
        rows += of_a_mesh
        if dist.get_rank() == 0:  # after each: what takes long may be stopped
            report = _report(rows, options, len(meshes) - number)
    if dist.get_rank() == 0:
        print(report)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if all(good for *_, good in rows) else 1


# Case, largest error, what its bits were compared with, whether all is well.
Row = tuple[str, float, str, bool]


# Ranks of a group, how they are cut, transport.
Mesh = tuple[list[int], Cut, str]


def _meshes(options: argparse.Namespace) -> list[Mesh]:
    shape = _cases(options)["GQA"].shape(1)
    return [
        (group, cut, transport)
        for group in _groups()
        for cut in cuts(len(group), shape)
        for transport in options.transport
    ]


def _cases(options: argparse.Namespace) -> dict[str, Case]:
    return {
        name: Case(
            seq_len=0,
            batch=2,
            heads=options.heads,
            kv_heads=kv_heads,
            head_dim=options.head_dim,
            dtype=getattr(torch, options.dtype),
            causal=True,
            layout="striped",
            kernel=options.kernel,
        )
        for name, kv_heads in (("MHA", options.heads), ("GQA", options.kv_heads))
    }


def _rows(options: argparse.Namespace, device: torch.device, meshes: Sequence[Mesh]) -> Iterator[list[Row]]:
    """Those of one mesh after the other, which cost more than what runs on them: each serves both numbers of
    heads."""
    cases = _cases(options)
    exact = {name: oracle(case, device) for name, case in cases.items()}
    earlier: dict[tuple[int, Cut, str], tuple[Tensor, ...]] = {}
    for group, cut, transport in meshes:
        on = f"P{len(group)}-{name_of(cut)}-{transport}"
        try:
            mesh = ma.init_attention_mesh(
                group, tile=cut.tile, heads=cut.heads, transport=transport, timeout=options.timeout
            )
        except ValueError as error:  # on all ranks alike; it costs the others nothing
            yield [_of_all_ranks((on, math.nan, str(error), False))]
            continue
        rows = []
        for name, case in cases.items():
            found, again = on_short(mesh, case, device), on_short(mesh, case, device)
            same = all(map(torch.equal, found, again))
            compared = "a second run"
            before = earlier.setdefault((len(group), cut, name), found)
            if before is not found:
                same = same and all(map(torch.equal, found, before))
                compared += f" and {options.transport[0]}"
            worst = max(errors(found, exact[name]).values())
            good = same and worst <= CHECKED_ERROR[case.dtype]
            compared = compared if same else "DIFFERENT BITS"
            rows.append(_of_all_ranks((f"{on}-{name}", worst, compared, good)))
        mesh.close()
        yield rows


def _untested(left: int) -> str:
    return f", {left} meshes have not been tested" if left else ""


def _groups() -> list[list[int]]:
    """All ranks, and each ``FEW`` of more than that."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = [list(range(ranks))]
    if ranks > FEW and ranks % FEW == 0:
        first = rank // FEW * FEW
        groups.append(list(range(first, first + FEW)))
    return groups


def _of_all_ranks(row: Row) -> Row:
    """That of the rank for which it came out worst."""
    rows: list[Row] = [row] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    worst = max(rows, key=lambda one: (not one[3], one[1]))
    if dist.get_rank() == 0:
        print(f"{time.monotonic() - BEGAN:5.1f} s  {worst[0]}: {worst[2]}", file=sys.stderr, flush=True)
    return worst


def _report(rows: list[Row], options: argparse.Namespace, left: int) -> str:
    """Writes it, while so many meshes are left; its text."""
    machine, ranks = Machine.here(commit=options.commit), dist.get_world_size()
    head = ["case", "error against float64", "same bits as", ""]
    cells = [[case, f"{error:.1e}", bits, "good" if good else "WRONG"] for case, error, bits, good in rows]
    bad = sum(not good for *_, good in rows)
    text = "\n\n".join(
        [
            f"# Self-test, {ranks} ranks",
            machine.describe(),
            f"{len(rows) - bad} of {len(rows)} cases are good{_untested(left)}.",
            table(head, cells),
        ]
    )
    records = [Record("self-test", case, "error", error, "float64 oracle") for case, error, *_ in rows]
    records.append(Record("self-test", f"P{ranks}", "wrong cases", bad))
    records.append(Record("self-test", f"P{ranks}", "meshes left", left))
    write(f"self-test-{ranks}-ranks", [(machine, records)], f"{text}\n", Path(options.out))
    return text


if __name__ == "__main__":
    sys.exit(main())
