"""The comparison of masks, tried out on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mask_costs
from meshattn_kernels import get_kernel
from one_rank.attention_cases import Case


def test_every_variant_is_timed_against_the_plain_one(tmp_path: Path) -> None:
    mask_costs.main(["--device", "cpu", "--rounds", "1", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for what in ("forward", "backward"):
        for name in ("causal", "documents", "window", "softcap", "dropout"):
            (one,) = [r for r in records if r["metric"] == f"reference {what}, {name}: ms"]
            assert one["peer"] == "causal" and one["ratio"] > 0
    parts = {r["metric"]: r["ours"] for r in records if r["ratio"] is None}
    assert parts["causal: part of pairs"] == parts["dropout: part of pairs"] == 1
    assert 0 < parts["window: part of pairs"] < parts["documents: part of pairs"] < 1
    assert path.with_suffix(".md").read_text().count("| reference") == 10


def test_a_variant_that_is_wrong_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mask_costs.variants

    def spoiled(kernel: str, case: Any, device: torch.device) -> Iterator[tuple[str, Any, Any]]:
        """The window of the kernel is that of the reference, but for one key."""
        for name, attention, mask in real(kernel, case, device):
            if name == "window" and kernel == "checked":
                mask = replace(mask, hi=mask.hi - 1)
            yield name, attention, mask

    monkeypatch.setattr(mask_costs, "variants", spoiled)
    monkeypatch.setattr(mask_costs, "get_kernel", lambda name, *cap: get_kernel("reference", *cap))
    with pytest.raises(RuntimeError, match="checked, window: out is wrong"):
        mask_costs.check("checked", Case(16, True, 40, 1, 4, 2), torch.device("cpu"))
    mask_costs.check("reference", Case(16, True, 40, 1, 4, 2), torch.device("cpu"))


@pytest.mark.parametrize("rows", [40, 1000])
def test_documents_fill_the_rows(rows: int) -> None:
    mask = mask_costs.documents(rows, torch.device("cpu"))
    starts = mask.start.unique().tolist()
    assert starts[0] == 0 and len(starts) > 4 and mask.end.tolist() == list(range(1, rows + 1))
    assert all(mask.start[start] == start for start in starts)
