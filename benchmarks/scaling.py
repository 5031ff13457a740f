"""How attention over very long sequences scales: Ring, double ring, Ulysses, USP and Mesh, emulated.

    python benchmarks/scaling.py --out scaling.jsonl      # all, ten minutes on one core
    python benchmarks/scaling.py --quick                  # 256 GPUs and a million tokens alone

Everything runs on the same emulator over the same links with the same measured kernels: forward and backward
of one attention layer, 32 heads of 128, bfloat16, partial results too (which is cheaper here for every
method). Every method takes the best of its cuts and placements (beyond 256 GPUs of the ``MOST`` with the
least bounds) whose blocks have been measured: no kernel time is extrapolated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import Pool
from pathlib import Path

from meshattn.plan.assignment import Tile, tiles
from meshattn.plan.cost import CallShape, Pace
from meshattn.plan.kernel_times import KernelTimes
from meshattn.plan.pace import pace_of
from meshattn.plan.passes import pass_script
from meshattn.plan.placement import Cut, MeshAxis
from meshattn.plan.planner import Question, rank_candidates
from meshattn.plan.prediction import Prediction
from meshattn.plan.script import Exchange
from meshattn.plan.timeline import Timeline, run
from meshattn.plan.topology import Topology, load_topology
from study.double_ring import double_ring

HEADS, HEAD_DIM = 32, 128
KV_HEADS = {"MHA": 32, "GQA": 8}
CLUSTERS = ("dgx-h200", "a3-high")
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
SOME_RANKS = (8, 32, 128, 256)
TOKENS = 4096
"""Of a GPU, in weak scaling."""
METHODS = ("ring", "double ring", "ulysses", "usp", "mesh", "mesh+heads")
MOST = 8
"""Candidates of a method that are emulated beyond 256 GPUs, those with the least bounds; else all."""
NEAR = 1.01
"""Of cuts whose times are this near to the least, the one that sends least stands for the method."""
NCCL_SHARE = 16 / 132
"""Of the multiprocessors, as NCCL's send and receive takes them."""


@dataclass(frozen=True)
class Case:
    """One question; ``sm_share`` is what exchanges between nodes take from kernels."""

    cluster: str
    ranks: int
    seq_len: int
    heads: str
    causal: bool
    sm_share: float = 0.0

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        taken = f"-sm{self.sm_share:.2f}" if self.sm_share else ""
        return f"{self.cluster}-P{self.ranks}-S{self.seq_len}-{self.heads}-{mask}{taken}"

    def topology(self) -> Topology:
        return _topology(self.cluster, self.sm_share)

    def shape(self, reduce_itemsize: int) -> CallShape:
        rows, kv_heads = -(-self.seq_len // self.ranks), KV_HEADS[self.heads]
        return CallShape(1, rows, HEADS, kv_heads, HEAD_DIM, HEAD_DIM, 2, reduce_itemsize, 4, self.causal)


@lru_cache
def _topology(cluster: str, sm_share: float) -> Topology:
    topology = load_topology(cluster)
    return replace(topology, between=replace(topology.across, sm_share=sm_share))


@dataclass(frozen=True)
class Figures:
    """Of one method in one case: microseconds and bytes of forward and backward."""

    case: Case
    method: str
    cut: str
    where: str
    reduce_itemsize: int
    total_us: float
    kernels_us: float
    exposed_us: float
    rank: int
    card: int
    leaving: int
    memory: int

    def line(self) -> str:
        """As JSON, with the name of the case in front."""
        return json.dumps({"name": str(self.case), **asdict(self)})

    @staticmethod
    def read(line: str) -> Figures:
        """The inverse of `line`."""
        data = json.loads(line)
        del data["name"]
        return Figures(**data | {"case": Case(**data["case"])})


def candidates(method: str, ranks: int, gpus_per_node: int) -> list[tuple[Cut, tuple[MeshAxis, ...]]]:
    """The cuts and placements among which a method chooses."""
    widths = [w for w in range(1, ranks + 1) if ranks % w == 0 and HEADS % w == 0]
    cuts: list[Cut] = []
    if method == "ring":
        cuts = [Cut(1, Tile(1, ranks))]
    elif method == "ulysses":
        cuts = [Cut(w, Tile(1, 1)) for w in widths if w == ranks]
    elif method == "usp":
        cuts = [Cut(w, Tile(1, ranks // w)) for w in widths if 1 < w < ranks]
    elif method == "mesh":
        cuts = [Cut(1, tile) for tile in tiles(ranks) if tile.a > 1]
    elif method == "mesh+heads":
        cuts = [Cut(w, tile) for w in widths if w > 1 for tile in tiles(ranks // w) if tile.a > 1]
    return [(cut, order) for cut in cuts for order in cut.orders(gpus_per_node)]


def block_shapes(case: Case, method: str) -> set[CallShape]:
    """The blocks that the cuts of a method are made of, before any is cut in two."""
    topology, shape = case.topology(), case.shape(2)
    question = Question(case.ranks, shape, topology)
    if method == "double ring":
        return {shape}
    return {question.inner(*each) for each in candidates(method, case.ranks, topology.gpus_per_node)}


def is_measured(inner: CallShape, kernels: KernelTimes) -> bool:
    """Whether the table has this very block."""
    wanted = inner.head_dim, inner.heads, inner.kv_heads, inner.rows, inner.causal
    return wanted in {(b.head_dim, b.heads, b.kv_heads, b.rows, b.causal) for b in kernels.blocks}


def figures(case: Case, method: str, reduce_itemsize: int) -> Figures | None:
    """None where the method cannot be used, or where the time of none of its blocks has been measured."""
    topology, shape = case.topology(), case.shape(reduce_itemsize)
    if method == "double ring":
        return _double_ring(case, shape, topology) if is_measured(shape, topology.kernels) else None
    question = Question(case.ranks, shape, topology)
    every = candidates(method, case.ranks, topology.gpus_per_node)
    choice = [each for each in every if is_measured(question.inner(*each), topology.kernels)]
    if not choice:
        return None
    found = rank_candidates(question, choice, at_most=MOST if case.ranks > 256 else None)
    near = [each for each in found if each.total_us <= NEAR * found[0].total_us]
    best = min(near, key=lambda each: each.links.rank)
    return Figures(
        case=case,
        method=method,
        cut=str(best.cut),
        where=best.where,
        reduce_itemsize=reduce_itemsize,
        total_us=best.total_us,
        kernels_us=best.kernels_us,
        exposed_us=best.exposed_us,
        rank=best.links.rank,
        card=best.links.card,
        leaving=best.links.leaving,
        memory=best.memory,
    )


def _double_ring(case: Case, shape: CallShape, topology: Topology) -> Figures | None:
    if case.ranks <= topology.gpus_per_node:
        return None
    total = exposed = 0.0
    inside = across = 0
    for direction in ("forward", "backward"):
        script = double_ring(direction, shape, case.ranks, topology)
        # By copy engines, which keep all copies in order, or by other means, as is better for it.
        links = (replace(topology.inside, copy_engines=which) for which in (True, False))
        timelines = [run(script, replace(topology, inside=link)) for link in links]
        timeline = min(timelines, key=lambda one: one.total_us)
        total += timeline.total_us
        exposed += timeline.exposed_us
        for entry in script.entries:
            if isinstance(entry, Exchange):
                inside += entry.num_bytes * (entry.axis == "row")
                across += entry.num_bytes * (entry.axis == "col")
    ring = Cut(1, Tile(1, case.ranks))
    question = Question(case.ranks, shape, topology)
    return Figures(
        case=case,
        method="double ring",
        cut=f"{topology.gpus_per_node} in a node, {case.ranks // topology.gpus_per_node} nodes",
        where="inner ring inside a node",
        reduce_itemsize=shape.reduce_itemsize,
        total_us=total,
        kernels_us=question.kernels_us(ring),
        exposed_us=exposed,
        rank=inside + across,
        card=across * topology.gpus_per_nic,
        leaving=across * case.ranks,
        memory=question.memory(ring),
    )


def one_tile(case: Case, tile: Tile, pace: Pace | None = None) -> Prediction:
    """A tile whose rows lie inside a node, in a case; by default with lists for its cluster."""
    order: tuple[MeshAxis, ...] = ("row", "col", "heads")
    return Question(case.ranks, case.shape(2), case.topology()).predict(Cut(1, tile), order, pace=pace)


def forwards(case: Case, tiles: Sequence[Tile]) -> list[Timeline]:
    """What happens in the forward of some tiles, rows inside a node."""
    topology, order = case.topology(), ("row", "col", "heads")
    paces = [pace_of(topology, Cut(1, tile), order) for tile in tiles]
    return [
        run(
            pass_script("forward", case.shape(2), Cut(1, tile), topology, order=order, pace=pace),
            topology,
            record=True,
        )
        for tile, pace in zip(tiles, paces, strict=True)
    ]


def answer(case: Case) -> list[Figures]:
    """All methods with partial results in the type of the inputs, the ring with the cheaper of both types;
    nothing where a ring's blocks have not been measured."""
    found = []
    for method in METHODS:
        each = [figures(case, method, size) for size in ((2, 4) if method == "ring" else (2,))]
        both = [one for one in each if one is not None]
        if both:
            found.append(min(both, key=lambda one: one.total_us))
        elif method == "ring":
            break
    return found


def grid() -> Iterator[Case]:
    """Everything, the most wanted first: a million tokens on all numbers of GPUs, other lengths on some and
    where every GPU has 4096 tokens."""
    every = [(cluster, heads) for heads in KV_HEADS for cluster in CLUSTERS]
    for cluster, heads in every:
        yield Case(cluster, 256, 2**20, heads, True, NCCL_SHARE)
    for causal, numbers in ((True, RANKS), (False, SOME_RANKS)):
        for cluster, heads in every:
            yield from (Case(cluster, ranks, 2**20, heads, causal) for ranks in numbers)
    for seq_len in (2**22, 2**18, 2**19, 2**21, 2**17):
        some = {*SOME_RANKS, seq_len // TOKENS, *((1024,) if seq_len == 2**22 else ())}
        for cluster, heads in every:
            yield from (Case(cluster, ranks, seq_len, heads, True) for ranks in sorted(some))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("scaling.jsonl"), help="figures, a line each")
    parser.add_argument("--quick", action="store_true", help="256 GPUs and a million tokens alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args(argv)
    wanted = list(grid())
    if args.quick:
        wanted = [case for case in wanted if (case.ranks, case.seq_len) == (256, 2**20)]
    known = set()
    if args.out.exists():
        known = {json.loads(line)["name"] for line in args.out.read_text().splitlines()}
    wanted = [case for case in wanted if str(case) not in known]
    with Pool(args.jobs) as pool, args.out.open("a") as lines:
        for number, found in enumerate(pool.imap(answer, wanted), 1):
            for one in found:
                print(one.line(), file=lines, flush=True)
            if not found:
                print(f"{number}/{len(wanted)} has blocks that were not measured", flush=True)
                continue
            ring = found[0]
            times = ", ".join(f"{one.method} {ring.total_us / one.total_us:.2f}x" for one in found[1:])
            print(
                f"{number}/{len(wanted)} {ring.case}: ring {ring.total_us / 1e3:.1f} ms, {times}", flush=True
            )


if __name__ == "__main__":
    main()
