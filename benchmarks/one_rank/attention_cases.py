"""What is timed: shapes, the passes over them, and which pass of which kernel is compared with which."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

FORWARD = "forward"
"""The kernel's forward into a float32 accumulator that it overwrites."""
FORWARD_TOTAL = "forward total"
"""All that a user pays where one block is all: out in the type of the inputs, and lse."""
MERGING = "merging forward"
"""The forward into an accumulator that holds an earlier block."""
BACKWARD = "backward"
"""The kernel's backward into float32 accumulators that it overwrites."""
ADDING = "adding backward"
"""The backward added to what the accumulators hold."""
BACKWARD_TOTAL = "backward total"
"""All that a user pays where one block is all: delta, the backward, dq, dk and dv in the inputs' type."""

PASSES = (FORWARD, FORWARD_TOTAL, MERGING, BACKWARD, ADDING, BACKWARD_TOTAL)

TOKENS, HIDDEN = 16384, 2048
"""Tokens of a batch and numbers of a token over all heads, if nothing else is said."""


PACKED, LONG = "packed", "long"
DRAWS = (PACKED, LONG)
"""Documents that fill the rows: of any length up to 2 / 11 of them, and a long one, half of the rows, among
short ones of up to 1 / 32."""


def document_lengths(draw: str, rows: int) -> list[int]:
    """Rows of each document of a draw; the same in every run."""
    numbers, longest = random.Random(0), max(1, rows // 32 if draw == LONG else 2 * rows // 11)
    lengths: list[int] = []

    def fill(end: int) -> None:
        while (left := end - sum(lengths)) > 0:
            lengths.append(min(left, numbers.randint(1, longest)))

    if draw == LONG:
        fill(rows // 4)
        lengths.append(rows // 2)
    fill(rows)
    return lengths


@dataclass(frozen=True)
class Case:
    """B sequences of S_q query and S_k key rows. A causal case is square."""

    head_dim: int
    causal: bool
    rows: int
    batch: int
    heads: int
    kv_heads: int
    keys: int = 0
    """S_k; 0 for as many as query rows."""
    window: int = 0
    """Keys that a row of a causal case sees at most; 0 for all up to its own."""
    documents: str = ""
    """Draw of documents that the rows of a causal case belong to, each of which sees itself alone."""

    def __post_init__(self) -> None:
        if self.causal and self.num_keys != self.rows:
            raise ValueError(
                f"a causal case of {self.rows} rows and {self.keys} keys; only square ones are causal"
            )

    def __str__(self) -> str:
        length = f"S{self.rows}" if self.num_keys == self.rows else f"S{self.rows}x{self.num_keys}"
        mask = "causal" if self.causal else "full"
        if self.window or self.documents:
            mask = self.documents or f"window{self.window}"
        return f"D{self.head_dim}-{mask}-{length}-B{self.batch}-H{self.heads}-H_kv{self.kv_heads}"

    @staticmethod
    def parse(text: str) -> Case | None:
        """The case of that name, None if it names none."""
        found = re.fullmatch(
            r"D(\d+)-(causal|full|window(\d+)|packed|long)-S(\d+)(?:x(\d+))?-B(\d+)-H(\d+)-H_kv(\d+)", text
        )
        if found is None:
            return None
        mask = found[2]
        head_dim, window, *sizes = (int(found[i] or 0) for i in (1, 3, 4, 6, 7, 8, 5))
        return Case(head_dim, mask != "full", *sizes, window, mask if mask in DRAWS else "")

    @property
    def num_keys(self) -> int:
        return self.keys or self.rows

    def flop(self, what: str) -> float:
        """Floating-point operations of the products that a pass needs: two forward, five backward."""
        pairs: float = self.rows * self.num_keys
        if self.window or self.documents:
            pairs = sum(row + 1 - key for row, key in enumerate(self.first_keys()))
        elif self.causal:
            pairs /= 2
        return 4 * self.batch * self.heads * pairs * self.head_dim * (2.5 if "backward" in what else 1.0)

    def borders(self) -> list[int]:
        """The first row of each document, and the number of rows."""
        return [*accumulate(document_lengths(self.documents, self.rows), initial=0)]

    def first_keys(self) -> list[int]:
        """The first key that each row of a causal case sees."""
        if self.documents:
            borders = self.borders()
            return [a for a, b in pairwise(borders) for _ in range(a, b)]
        return [max(0, row + 1 - self.window) if self.window else 0 for row in range(self.rows)]


@dataclass(frozen=True)
class Figure:
    """One thing to be timed."""

    kernel: str
    case: Case
    what: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.what}"


@dataclass(frozen=True)
class Comparison:
    """Figures that are timed in turns, so that all ratios between them count."""

    figures: tuple[Figure, ...]
    ratios: tuple[tuple[Figure, Figure], ...] = field(default=())
    turns: int = 1
    """How many times as many turns as others: more where ratios are close to what is wanted of them."""

    @property
    def kernels(self) -> tuple[tuple[str, Case], ...]:
        """(kernel, case) pairs, each once, in order."""
        return tuple(dict.fromkeys((figure.kernel, figure.case) for figure in self.figures))


def of_hidden(head_dim: int, causal: bool, rows: int, tokens: int = TOKENS) -> Case:
    """Equal heads of queries and keys, ``HIDDEN`` numbers a token, ``tokens`` tokens or one sequence."""
    heads = HIDDEN // head_dim
    return Case(head_dim, causal, rows, max(1, tokens // rows), heads, heads)


def _compare(
    case: Case, passes: Mapping[str, Sequence[str]], pairs: Sequence[tuple[str, str, str]]
) -> Comparison:
    """``passes`` by kernel; ``pairs`` of kernels with a pass that both have."""
    figures = [Figure(kernel, case, what) for kernel, whats in passes.items() for what in whats]
    ratios = [(Figure(ours, case, what), Figure(peer, case, what)) for ours, peer, what in pairs]
    return Comparison(tuple(figures), tuple(ratios))


TOTALS = (FORWARD_TOTAL, BACKWARD_TOTAL)
AGAINST_FA4 = (
    ("hopper", "fa4", FORWARD_TOTAL),
    ("hopper", "fa4-deterministic", BACKWARD_TOTAL),
    ("hopper", "fa4", BACKWARD_TOTAL),
    ("hopper", "hopper-unordered", BACKWARD_TOTAL),
    ("hopper-unordered", "fa4", BACKWARD_TOTAL),
)
QUICK = {
    "hopper": TOTALS,
    "hopper-unordered": (BACKWARD_TOTAL,),
    "fa4": TOTALS,
    "fa4-deterministic": (BACKWARD_TOTAL,),
}
CUDNN = (("hopper", "cudnn", FORWARD_TOTAL), ("hopper", "cudnn", BACKWARD_TOTAL))
OTHERS = {
    "triton": TOTALS,
    "triton-dash": (BACKWARD_TOTAL,),
    "cudnn": TOTALS,
    "fa2": TOTALS,
    "fa2-deterministic": (BACKWARD_TOTAL,),
    "flex": TOTALS,
}
AGAINST_OTHERS = (
    *CUDNN,
    ("hopper", "fa2-deterministic", BACKWARD_TOTAL),
    ("hopper", "flex", FORWARD_TOTAL),
    ("hopper", "flex", BACKWARD_TOTAL),
    ("triton", "flex", FORWARD_TOTAL),
    ("triton", "flex", BACKWARD_TOTAL),
    ("triton-dash", "flex", BACKWARD_TOTAL),
    ("triton", "fa2-deterministic", BACKWARD_TOTAL),
)


def quick(head_dims: Sequence[int]) -> list[Comparison]:
    """Ours and FlashAttention-4 at 16k and 4k."""
    return [_compare(case, QUICK, AGAINST_FA4) for case in _squares(head_dims, (16384, 4096))]


def peers(head_dims: Sequence[int]) -> list[Comparison]:
    """All kernels at 16k and 4k."""
    return [
        _compare(case, {**QUICK, **OTHERS}, (*AGAINST_FA4, *AGAINST_OTHERS))
        for case in _squares(head_dims, (16384, 4096))
    ]


def portable(head_dims: Sequence[int]) -> list[Comparison]:
    """The portable kernels and those that also run on other GPUs than Hopper, at 16k and 4k."""
    kernels = {name: OTHERS[name] for name in ("triton", "triton-dash", "fa2", "fa2-deterministic", "flex")}
    pairs = [pair for pair in AGAINST_OTHERS if pair[0] in kernels]
    return [_compare(case, kernels, pairs) for case in _squares(head_dims, (16384, 4096))]


def lengths(head_dims: Sequence[int]) -> list[Comparison]:
    """Ours, FlashAttention-4 and cuDNN at the lengths that ``peers`` leaves out."""
    return [
        _compare(case, {**QUICK, "cudnn": TOTALS}, (*AGAINST_FA4, *CUDNN))
        for case in _squares(head_dims, (1024, 2048, 8192, 32768))
    ]


SCHEDULES = ("naive", "descending", "shortest_first", "longest_first", "halves", "split_shift")


def schedules(head_dims: Sequence[int]) -> list[Comparison]:
    """The backward by every schedule that the mask allows, and without an order."""
    comparisons = []
    for case in _squares(head_dims, (16384, 4096)):
        names = [f"hopper@{name}" for name in (*SCHEDULES, "symmetric_shift" if case.causal else "shift")]
        every = ("hopper", *names, "hopper-unordered")
        pairs = [(ours, "hopper@naive", BACKWARD) for ours in every if ours != "hopper@naive"]
        pairs += [(ours, "hopper-unordered", BACKWARD) for ours in every[:-1]]
        comparisons.append(_compare(case, dict.fromkeys(every, (BACKWARD,)), pairs))
    return comparisons


def groups(head_dims: Sequence[int]) -> list[Comparison]:
    """Query heads that share key/value heads against as many of each: 32/8 at 16k, 8/1 in blocks."""
    comparisons = []
    for head_dim in head_dims:
        for rows, heads, kv_heads in ((16384, 32, 8), (8192, 8, 1), (4096, 8, 1), (2048, 8, 1)):
            for causal in (True, False):
                shared = Case(head_dim, causal, rows, 1, heads, kv_heads)
                alone = Case(head_dim, causal, rows, 1, heads, heads)
                pairs = tuple(
                    (Figure("hopper", shared, what), Figure("hopper", alone, what))
                    for what in (FORWARD, BACKWARD)
                )
                figures = tuple(figure for pair in pairs for figure in pair)
                comparisons.append(Comparison(figures, pairs))
    return comparisons


def blocks(head_dims: Sequence[int]) -> list[Comparison]:
    """Blocks of a mesh step: square ones (as in causal striping) and others, alone and into accumulators that
    hold something."""
    comparisons = []
    square = [(rows, rows, causal) for rows in (8192, 2048, 4096, 16384) for causal in (False, True)]
    oblong = [(2048, 8192, False), (8192, 2048, False), (4096, 16384, False), (16384, 4096, False)]
    for head_dim in head_dims:
        heads = HIDDEN // head_dim
        for rows, keys, causal in (*square, *oblong):
            case = Case(head_dim, causal, rows, 1, heads, heads, keys if keys != rows else 0)
            passes = {"hopper": (FORWARD, MERGING, BACKWARD, ADDING)}
            plain = _compare(case, passes, [])
            merging, adding = (
                (Figure("hopper", case, a), Figure("hopper", case, b))
                for a, b in ((MERGING, FORWARD), (ADDING, BACKWARD))
            )
            comparisons.append(Comparison(plain.figures, (merging, adding)))
    return comparisons


def documents(head_dims: Sequence[int]) -> list[Comparison]:
    """Packed documents and a window, for as many key/value heads and for groups of four, and all pairs of one
    causal sequence of the same rows."""
    kernels = {**QUICK, "flex": TOTALS}
    pairs = (*AGAINST_FA4, ("hopper", "flex", FORWARD_TOTAL), ("hopper", "flex", BACKWARD_TOTAL))
    comparisons = []
    for head_dim in head_dims:
        plain = of_hidden(head_dim, True, TOKENS)
        grouped = replace(plain, heads=2 * plain.heads, kv_heads=plain.heads // 2)
        for case in (plain, grouped):
            masks = [replace(case, documents=draw) for draw in DRAWS] + [replace(case, window=2048)]
            comparisons += [_compare(masked, kernels, pairs) for masked in masks]
    return comparisons


def required(head_dims: Sequence[int]) -> list[Comparison]:
    """What ``wanted.py`` asks for and nothing else, so that one run of some minutes answers all of it."""
    close = [replace(comparison, turns=2) for comparison in quick(head_dims)]
    naive = {"hopper": (BACKWARD,), "hopper@naive": (BACKWARD,)}
    flex = {name: (BACKWARD_TOTAL,) for name in ("triton", "triton-dash", "flex")}
    against_flex = [(name, "flex", BACKWARD_TOTAL) for name in ("triton", "triton-dash")]
    return [
        *close,
        *(
            _compare(of_hidden(d, True, 16384), naive, [("hopper", "hopper@naive", BACKWARD)])
            for d in head_dims
        ),
        *(
            found
            for found in blocks(head_dims)
            if found.figures[0].case.rows == found.figures[0].case.num_keys == 8192
        ),
        *groups(head_dims),
        *(_compare(case, flex, against_flex) for case in _squares(head_dims, (16384,))),
    ]


def _squares(head_dims: Sequence[int], rows: Sequence[int]) -> list[Case]:
    return [of_hidden(d, causal, s) for d in head_dims for s in rows for causal in (True, False)]


SUITES = {
    "quick": quick,
    "required": required,
    "peers": peers,
    "portable": portable,
    "lengths": lengths,
    "schedules": schedules,
    "groups": groups,
    "blocks": blocks,
    "documents": documents,
}
