"""The picture of the report: rates by sequence length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from one_rank.attention_cases import BACKWARD_TOTAL, FORWARD_TOTAL, HIDDEN, TOKENS, Case

Rates = Mapping[str, Mapping[Case, Mapping[str, float]]]
"""TF/s by pass, case and kernel."""

COLOURS = {
    "hopper": "#c0392b",
    "hopper-unordered": "#e59866",
    "triton": "#7d3c98",
    "triton-dash": "#bb8fce",
    "fa4": "#1f618d",
    "fa4-deterministic": "#5dade2",
    "cudnn": "#1e8449",
    "flex": "#b7950b",
    "fa2": "#7f8c8d",
    "fa2-deterministic": "#bdc3c7",
}


def draw(rates: Rates, path: Path) -> bool:
    """A picture with a column for each head size and mask and a row for each pass: TF/s against the length, a
    line a kernel. Returns whether it was drawn: there must be lengths to draw, and matplotlib."""
    cases = sorted(
        {case for by_case in rates.values() for case in by_case if _is_batch(case)},
        key=lambda case: (-case.head_dim, case.causal),
    )
    columns = list(dict.fromkeys(map(_column, cases)))
    passes = [what for what in (FORWARD_TOTAL, BACKWARD_TOTAL) if any(map(_is_batch, rates.get(what, {})))]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not columns or not passes:
        return False
    figure = Figure(figsize=(4 * len(columns), 3.4 * len(passes)), layout="constrained")
    axes = figure.subplots(len(passes), len(columns), squeeze=False, sharey="row")
    for row, what in enumerate(passes):
        for number, column in enumerate(columns):
            ax = axes[row][number]
            for kernel, colour in COLOURS.items():
                points = sorted(
                    (case.rows, by_kernel[kernel])
                    for case, by_kernel in rates[what].items()
                    if _is_batch(case) and _column(case) == column and kernel in by_kernel
                )
                if points:
                    dashed = (
                        "--" if kernel.endswith("unordered") or kernel in ("fa4", "cudnn", "fa2") else "-"
                    )
                    ax.plot(*zip(*points, strict=True), dashed, marker="o", color=colour, label=kernel)
            ax.set_xscale("log", base=2)
            lengths = sorted({case.rows for case in rates[what] if _is_batch(case)})
            ax.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
            ax.set_title(f"{what}, D {column[0]}, {'causal' if column[1] else 'full'}", fontsize=10)
            ax.grid(alpha=0.3)
        axes[row][0].set_ylabel("TF/s")
        axes[row][0].set_ylim(0, 1.05 * axes[row][0].get_ylim()[1])
        lines = {line.get_label(): line for ax in axes[row] for line in ax.get_lines()}
        names = [kernel for kernel in COLOURS if kernel in lines]
        axes[row][-1].legend([lines[name] for name in names], names, fontsize=7)
    figure.suptitle("TF/s by sequence length; dashed: backward not deterministic", fontsize=11)
    figure.savefig(path, dpi=110)
    return True


def _is_batch(case: Case) -> bool:
    heads = HIDDEN // case.head_dim
    return (case.heads, case.kv_heads, case.num_keys) == (heads, heads, case.rows) and case.batch == max(
        1, TOKENS // case.rows
    )


def _column(case: Case) -> tuple[int, bool]:
    return case.head_dim, case.causal
