"""The benchmark of the kernels, without a GPU: what it counts, checks, refuses and reports."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from harness import Machine, Record, Timing
from meshattn_kernels import get_kernel
from one_rank import attention_cases as shapes
from one_rank import contenders, kernel_report, peers, timing
from one_rank.attention_cases import BACKWARD_TOTAL, FORWARD_TOTAL, PASSES, Case
from one_rank.checks import Oracle
from one_rank.wanted import requirements

CPU = torch.device("cpu")
CASES = [
    Case(16, True, 37, 2, 4, 2),
    Case(8, False, 21, 1, 3, 3, 50),
    Case(16, False, 50, 3, 4, 1, 21),
    Case(16, True, 40, 2, 4, 2, window=7),
    Case(8, True, 90, 1, 3, 1, documents="packed"),
    Case(8, True, 90, 1, 2, 2, documents="long"),
]


def all_comparisons() -> list[shapes.Comparison]:
    return [comparison for suite in shapes.SUITES.values() for comparison in suite((128, 64))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_is_read_from_its_name(case: Case) -> None:
    assert Case.parse(str(case)) == case
    assert Case.parse(f"{case}x") is None


def test_a_causal_case_must_be_square() -> None:
    with pytest.raises(ValueError, match="only square ones are causal"):
        Case(16, True, 8, 1, 1, 1, 9)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operations_are_those_of_the_products(case: Case) -> None:
    pairs = case.rows * case.num_keys / (2 if case.causal else 1)
    if case.window or case.documents:
        pairs = contenders.intervals_of(case, CPU).num_pairs
    product = 2 * case.batch * case.heads * pairs * case.head_dim
    for what in PASSES:
        assert case.flop(what) == product * (5 if "backward" in what else 2)


@pytest.mark.parametrize("rows", [1, 40, 16384])
@pytest.mark.parametrize("draw", shapes.DRAWS)
def test_documents_fill_the_rows(draw: str, rows: int) -> None:
    lengths = shapes.document_lengths(draw, rows)
    assert sum(lengths) == rows and min(lengths) >= 0
    assert max(lengths) >= rows // 2 if draw == shapes.LONG else len(lengths) > 1 or rows == 1


def test_every_ratio_is_between_figures_that_take_turns() -> None:
    for comparison in all_comparisons():
        assert len(set(comparison.figures)) == len(comparison.figures)
        for ours, peer in comparison.ratios:
            assert {ours, peer} <= set(comparison.figures)


def test_every_requirement_is_answered_by_a_suite() -> None:
    measured = [
        (str(ours), str(peer), ours.case)
        for comparison in all_comparisons()
        for ours, peer in comparison.ratios
    ]
    for requirement in requirements():
        answers = [
            case
            for ours, peer, case in measured
            if (ours, peer) == (requirement.ours, requirement.peer) and requirement.counts(case)
        ]
        assert answers, requirement.measure
        if "default schedule" not in requirement.measure:
            assert {case.causal for case in answers} == {False, True}


def dense(case: Case, inputs: contenders.Inputs) -> contenders.Results:
    q, k, v = (x.double().clone().requires_grad_() for x in inputs[:3])
    group = case.heads // case.kv_heads
    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(group, 2)) * case.head_dim**-0.5
    if case.causal:
        seen = torch.ones(case.rows, case.rows).tril().bool()
        if case.window:
            seen = seen.triu(1 - case.window)
        if case.documents:
            lengths = torch.tensor(shapes.document_lengths(case.documents, case.rows))
            document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            seen &= document[:, None] == document
        scores = scores.masked_fill(~seen, -math.inf)
    out = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v.repeat_interleave(group, 2))
    return contenders.Results(out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.do.double()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_oracle_is_dense_attention(case: Case) -> None:
    inputs = contenders.make_inputs(case, CPU, torch.float64)
    right = dense(case, inputs)
    oracle = Oracle(case, inputs)
    assert max(oracle.errors(right).values()) < 1e-9
    for name in right._fields:
        for spoil in (lambda x: x.mul(1.02), lambda x: x.fill_(math.nan)):
            wrong = right._replace(**{name: getattr(right, name).clone()})
            getattr(wrong, name)[0] = spoil(getattr(wrong, name)[0])
            assert oracle.errors(wrong)[name] > 1
            assert max(error for other, error in oracle.errors(wrong).items() if other != name) < 1e-9


def test_the_oracle_sees_one_wrong_number() -> None:
    case = CASES[0]
    inputs = contenders.make_inputs(case, CPU, torch.float64)
    right = dense(case, inputs)
    right.out[0, 5, 1, 3] += 0.035 * right.out.abs().max()
    assert Oracle(case, inputs).errors(right)["out"] > 1


def test_the_oracle_sees_one_wrong_row_in_the_last_head() -> None:
    case = CASES[0]
    inputs = contenders.make_inputs(case, CPU, torch.float64)
    right = dense(case, inputs)
    right.dq[-1, -1, -1] = right.dq.abs().max()
    assert Oracle(case, inputs).errors(right)["dq"] > 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_our_kernels_give_attention_alone_and_merged(case: Case) -> None:
    inputs = contenders.make_inputs(case, CPU, torch.float32)
    ours = contenders.Ours(contenders.our_kernel("reference"), case, inputs)
    oracle = Oracle(case, inputs)
    for results in (ours.results(), ours.doubled_results(), ours.step()):
        assert max(oracle.errors(results).values()) < 1e-2
    for run in ours.passes.values():
        run()
    assert set(ours.passes) == set(PASSES)


def test_variants_of_kernels_are_named() -> None:
    plain: Any = contenders.our_kernel("triton-dash")
    assert contenders.our_kernel("triton-dash-unordered") == replace(plain, deterministic=False)
    assert contenders.our_kernel("triton-dash@naive") == replace(plain, schedule="naive")


@pytest.mark.parametrize("name", ["fa2", "fa2-deterministic"])
def test_a_peer_of_torch_gives_attention(name: str) -> None:
    case = Case(32, True, 64, 2, 4, 4)
    inputs = contenders.make_inputs(case, CPU, torch.bfloat16)
    peer = peers.make_peer(name, case, inputs)
    assert max(Oracle(case, inputs).errors(peer.results()).values()) < 1
    assert set(peer.passes) == {FORWARD_TOTAL, BACKWARD_TOTAL}
    assert not torch.are_deterministic_algorithms_enabled()


class Slow:
    """A clock that notes who was timed."""

    matmul_flop = 1.0

    def __init__(self) -> None:
        self.bursts: list[tuple[timing.Run, int]] = []

    def warm(self, seconds: float) -> None:
        pass

    def once(self, run: timing.Run) -> tuple[float, float]:
        spent = run()
        assert isinstance(spent, float)
        return spent, 0.5

    def burst(self, run: timing.Run, settle: int, repeats: int, lead_ms: float) -> list[float]:
        self.bursts.append((run, repeats))
        assert settle <= repeats and (lead_ms > timing.LEAD_MS) == (run() < 0.15)  # type: ignore[operator]
        spent = run()
        assert isinstance(spent, float)
        return [spent] * repeats

    def matmul(self) -> None:
        pass


def test_runs_take_turns() -> None:
    clock = Slow()
    runs: dict[str, Callable[[], float]] = {
        "short": lambda: 0.01,
        "middle": lambda: 2.0,
        "long": lambda: 50.0,
    }
    times = timing.alternate(clock, runs, rounds=6, burst_ms=40.0)
    assert {name: timing.median for name, timing in times.items()} == {
        "short": 0.01,
        "middle": 2.0,
        "long": 50.0,
    }
    assert {name: timing.turns for name, timing in times.items()} == {
        name: (run(),) * 6 for name, run in runs.items()
    }
    assert set(Counter(run for run, _ in clock.bursts).values()) == {6}
    assert {name: dict(clock.bursts)[run] for name, run in runs.items()} == {
        "short": 100,
        "middle": 20,
        "long": 2,
    }
    rounds = [clock.bursts[n : n + 3] for n in range(0, 18, 3)]
    assert all(len({run for run, _ in each}) == 3 for each in rounds)
    assert {each[0][0] for each in rounds} == set(runs.values())
    assert [run for run, _ in rounds[1]] == [run for run, _ in reversed(rounds[0])]


def test_a_ratio_is_of_turns_side_by_side() -> None:
    ours, peer = (Timing(2.0, 1.0, 4.0, turns) for turns in ((1.0, 2.0, 4.0), (1.1, 2.4, 5.2)))
    ratio, error = ours.times_faster(peer)
    assert ratio == pytest.approx(1.2) and error == pytest.approx(0.1 / 3**0.5)
    assert peer.times_faster(peer) == (1.0, 0.0)
    alone = replace(ours, turns=(1.5,))
    assert alone.times_faster(replace(peer, turns=(1.2,))) == (pytest.approx(0.8), None)


def run_cpu(folder: Path) -> list[dict[str, Any]]:
    kernels.main(["--device", "cpu", "--suite", "quick", "--rounds", "1", "--out", str(folder)])
    return records_in(folder)


def records_in(folder: Path) -> list[dict[str, Any]]:
    (lines,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in lines.read_text().splitlines()]


def test_a_trial_on_the_cpu_leaves_records_and_a_report(tmp_path: Path) -> None:
    records = run_cpu(tmp_path)
    timed = {record["metric"] for record in records if record["peer"] == kernel_report.MATMUL}
    assert timed == {f"reference: {what} TF/s" for what in PASSES}
    (report,) = tmp_path.glob("*.md")
    assert all(f"## TF/s: {what}" in report.read_text() for what in PASSES)


class Altered:
    """The reference kernel, one of whose methods does something else."""

    def __init__(self, name: str, method: Callable[..., Any]) -> None:
        self._kernel, self._name, self._method = get_kernel("reference"), name, method

    def __getattr__(self, name: str) -> Any:
        original = getattr(self._kernel, name)
        return partial(self._method, original) if name == self._name else original


def spoil_dk(original: Any, kind: Any, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = original(kind, *args, **options)
    if kind == "dkv":
        results[0][0, 3, 0, 1] += 10
    return results


def merge_nothing(original: Any, *args: Any, first: bool, **options: Any) -> None:
    if first:
        original(*args, first=first, **options)


def add_nothing(original: Any, *args: Any, first_dq: bool, **options: Any) -> None:
    if first_dq:
        original(*args, first_dq=first_dq, **options)


@pytest.mark.parametrize(
    ("name", "method"),
    [("finish", spoil_dk), ("forward", merge_nothing), ("backward", add_nothing)],
    ids=["dk", "merging", "adding"],
)
def test_a_wrong_kernel_is_reported_and_not_timed(
    name: str, method: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "our_kernel", lambda _: Altered(name, method))
    with pytest.raises(SystemExit, match="1 kernels were wrong"):
        run_cpu(tmp_path)
    records = records_in(tmp_path)
    assert [record["ours"] > 1 for record in records if record["metric"] == "reference: error"] == [True]
    assert not [
        record for record in records if "reference" in record["metric"] and "TF/s" in record["metric"]
    ]
    assert "WRONG, not timed" in next(tmp_path.glob("*.md")).read_text()


def test_a_refusal_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ValueError("not on a Sunday")

    monkeypatch.setattr(kernels, "our_kernel", refuse)
    run_cpu(tmp_path)
    assert (
        "reference, absent (ValueError: not on a Sunday): 1 case(s)"
        in next(tmp_path.glob("*.md")).read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no CUDA device is here"),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["--join", "nowhere.jsonl"], "--join: no such file: nowhere.jsonl"),
        (["--device", "cpu", "--suite", "launch"], "launches are those of a GPU"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        kernels.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def forward_ratio(case: Case, ratio: float) -> Record:
    return Record(
        "kernels", str(case), f"hopper: {FORWARD_TOTAL} TF/s", 600.0, f"fa4: {FORWARD_TOTAL}", ratio, 0.01
    )


@pytest.mark.parametrize(("ratio", "met"), [(1.004, "yes"), (0.996, "no (0.996)")])
def test_the_report_says_what_is_met(ratio: float, met: str) -> None:
    case = shapes.of_hidden(128, True, 16384)
    records = [forward_ratio(case, ratio), forward_ratio(replace(case, causal=False), 1.2)]
    text = kernel_report.render([(Machine("a GPU", "1", "abc", "2026-11-29"), records)])
    rows = [line for line in text.splitlines() if line.startswith("| forward / FA4 forward, D128, 16k")]
    assert len(rows) == 1
    assert rows[0].split("|")[-2].strip() == met
    assert "D64, 16k" not in text


def test_the_report_says_how_well_a_ratio_is_known() -> None:
    record = replace(forward_ratio(shapes.of_hidden(128, True, 16384), 1.004), error=0.0031)
    text = kernel_report.render([(Machine("a GPU", "1", "abc", "2026-11-29"), [record])])
    assert text.count("1.004 +- 0.003") == 2  # beside what is wanted, and in the table of ratios


def test_runs_are_joined(tmp_path: Path) -> None:
    paths = []
    for name, head_dim in (("first", 128), ("second", 64)):
        machine = Machine("a GPU", "1", name, "2026-11-29")
        records = [forward_ratio(shapes.of_hidden(head_dim, True, 16384), 1.1)]
        kernel_report.publish(name, [(machine, records)], tmp_path)
        paths.append(str(tmp_path / f"2026-11-29-{name}.jsonl"))
    kernels.main(["--join", *paths, "--out", str(tmp_path), "--note", "One run was cut off."])
    text = (tmp_path / "2026-11-29-kernels.md").read_text()
    assert "\n\nOne run was cut off.\n\n" in text
    assert "commit first" in text and "commit second" in text
    assert "D128, 16k" in text and "D64, 16k" in text
    lines = (tmp_path / "2026-11-29-kernels.jsonl").read_text().splitlines()
    assert [json.loads(line)["commit"] for line in lines] == ["first", "second"]
