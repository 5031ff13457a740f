"""What a mesh takes for "auto" on a cluster, with and without being told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshattn.mesh_arguments import auto_heads
from meshattn.plan.cost import NOMINAL
from meshattn.plan.planner import Question, choose
from meshattn.plan.prediction import Prediction, size_of


@dataclass(frozen=True)
class Taken:
    """What one way to build a mesh takes."""

    by: str
    told: bool
    """Whether the mesh is given the topology."""
    prediction: Prediction

    def as_json(self) -> dict[str, object]:
        return {"taken_by": self.by, **self.prediction.as_json()}


def taken_by_auto(question: Question, seq_len: int, heads: int | None) -> list[Taken]:
    """For tile="auto" with ``heads`` ranks of the head axis (None: without one, and with heads="auto")."""
    every = []
    for told in (True, False):
        topology, end = (question.topology, "") if told else (None, ", no topology")
        shape, ranks = question.shape, question.ranks
        wanted = {f'tile="auto"{end}': heads or 1}
        if heads is None:
            numbers = shape.heads, shape.kv_heads
            found = auto_heads("auto", numbers, seq_len if told else None, "auto", ranks, topology)
            wanted[f'heads="auto"{end}'] = int(found)
        for by, number in wanted.items():
            seen = None if question.mask is None else question.mask(number).visibility
            cut = choose(ranks, shape, heads=number, topology=topology, visibility=seen)
            order = cut.orders(question.topology.gpus_per_node)[0]
            every.append(Taken(by, told, question.predict(cut, order, pace=None if told else NOMINAL)))
    return every


def why_auto(best: Prediction, taken: Sequence[Taken], *, masked: bool) -> str:
    """In words: why auto is not the best of all, where it is not; ``masked``: windows or documents."""
    text = "auto keeps the axes in the library's own order, heads, rows, columns"
    told, untold = (next(each for each in taken if each.told == which) for which in (True, False))
    times = told.prediction.total_us / best.total_us
    if masked:
        text += f", and where masks leave blocks out it counts what a rank sends: {times:.2f} times the best"
    elif times > 1.005:
        text += f" (see --placements), and has no head axis unless heads= says so: {times:.2f} times the best"
    a, b = told.prediction, untold.prediction
    if a.cut == b.cut:
        return f"{text}. Without topology= it takes the same tile, with lists for links of a nominal speed."
    return (
        f"{text}. Without topology= it counts what a rank sends and knows neither links nor kernels: {b.cut} "
        f"with {size_of(b.links.rank)} instead of {size_of(a.links.rank)}, in {b.total_us / a.total_us:.2f} "
        "times the time."
    )
