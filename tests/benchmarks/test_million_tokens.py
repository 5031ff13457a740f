"""The million-token benchmark: its oracle, what its checks notice, and a run on two CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import million_tokens
from across_ranks import sampled_oracle
from across_ranks.sampled_oracle import errors_of_sums, sample, sampled_errors, sums
from meshattn import reference
from million_tokens import digest

PROGRAM = Path(million_tokens.__file__)
S, H, H_KV, D = 131, 6, 2, 8
NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(1, S, heads, D, generator=generator, dtype=torch.float64) for heads in (H, H_KV, H_KV, H)
    )


@pytest.fixture(scope="module")
def dense(inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out, _ = reference.attention(q, k, v, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), inputs[3])
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


@pytest.mark.parametrize("scores", [2**27, 3 * S], ids=["at-once", "row-by-row"])
def test_samples_are_those_of_dense_attention(
    inputs: tuple[Tensor, ...], dense: dict[str, Tensor], scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled_oracle, "SCORES", scores)
    samples = sample(inputs, spread=5, last=23, num_keys=7)
    assert samples.rows[-23:].tolist() == list(range(S - 23, S)) and len(samples.rows) == 28
    assert len(samples.keys) == 7 and samples.keys[0] == S - 23 and samples.keys[-1] == S - 1
    for name in NAMES:
        wanted = dense[name][0, samples.positions(name)]
        torch.testing.assert_close(samples.exact[name], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_row_is_noticed_by_the_rank_that_has_it(
    inputs: tuple[Tensor, ...], dense: dict[str, Tensor], name: str
) -> None:
    samples = sample(inputs, spread=5, last=23, num_keys=7)
    spoilt = {key: tensor.clone() for key, tensor in dense.items()}
    row = int(samples.positions(name)[-3])
    spoilt[name][0, row, 1] *= 1.01
    for rank in range(2):
        errors = sampled_errors(
            samples, torch.arange(rank, S, 2), {n: x[:, rank::2] for n, x in spoilt.items()}
        )
        assert {key for key, error in errors.items() if error > 1e-9} == (
            {name} if row % 2 == rank else set()
        )
        if row % 2 == rank:
            assert errors[name] == pytest.approx(0.01)


def test_the_first_row_is_held_against_the_length_of_others(
    inputs: tuple[Tensor, ...], dense: dict[str, Tensor]
) -> None:
    """It sees one key, so that its dq is zero, of which no error is a part."""
    samples = sample(inputs, spread=5, last=S, num_keys=7)
    assert samples.rows[0] == 0 and not dense["dq"][0, 0].any()
    everywhere = torch.arange(S)
    assert max(sampled_errors(samples, everywhere, dense).values()) < 1e-9
    longest = dense["dq"][0, :, 1].norm(dim=-1).max()
    spoilt = dense["dq"].clone()
    spoilt[0, 0, 1, 3] = 0.01 * longest
    assert sampled_errors(samples, everywhere, dense | {"dq": spoilt})["dq"] == pytest.approx(0.01)


@pytest.mark.parametrize("name", ["dk", "dv"])
def test_sums_over_all_keys_hold_and_notice_a_key_that_no_sample_has(
    inputs: tuple[Tensor, ...], dense: dict[str, Tensor], name: str
) -> None:
    spoilt = {key: tensor.clone() for key, tensor in dense.items()}
    spoilt[name][0, 2, 1] = 0.0
    for results, bad in ((dense, set()), (spoilt, {f"{name} over all keys"})):
        parts = [
            sums([x[:, rank::3] for x in inputs], {n: x[:, rank::3] for n, x in results.items()})
            for rank in range(3)
        ]
        errors = errors_of_sums(sum(parts[1:], parts[0]))
        assert {key for key, error in errors.items() if error > 1e-10} == bad


def test_any_bit_changes_the_digest() -> None:
    results = [torch.randn(1, 5, 2, 8), torch.randn(1, 5, 1, 8).bfloat16()]
    before = digest(results)
    assert before == digest([x.clone() for x in results])
    for result in results:
        result.view(torch.int16)[0, 3, 0, 2] ^= 1
        assert digest(results) != before
        result.view(torch.int16)[0, 3, 0, 2] ^= 1
    results[0][0, [0, 1]] = results[0][0, [1, 0]]
    assert digest(results) != before


def test_two_ranks_run_check_and_report_it(tmp_path: Path) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM)]
    sizes = "--seq-len 1501 --heads 4 --kv-heads 2 --head-dim 16 --dtype float32 --transport p2p --last 60"
    run = subprocess.run(
        [
            sys.executable,
            *start,
            *sizes.split(),
            "--cut",
            "1x2",
            "2x1",
            "2x1x1",
            "1x2",
            "--out",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (path,) = tmp_path.glob("*million-tokens.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for cut in ("1x2", "2x1", "2x1x1"):
        mine = [record for record in records if record["case"].endswith(f"-{cut}-p2p")]
        assert {
            record["ratio"]
            for record in mine
            if record["metric"].endswith(" bytes") and "peak" not in record["metric"]
        } == {1.0}
        assert max(record["ours"] for record in mine if record["metric"].startswith("error")) < 1e-5
    digests = [record["metric"] for record in records if "digest" in record["metric"]]
    assert digests[0] == digests[3] and len(set(digests)) == 3
