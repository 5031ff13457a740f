"""The comparison of masks, tried out on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import mask_costs


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


@pytest.mark.parametrize("rows", [40, 1000])
def test_documents_fill_the_rows(rows: int) -> None:
    mask = mask_costs.documents(rows, torch.device("cpu"))
    starts = mask.start.unique().tolist()
    assert starts[0] == 0 and len(starts) > 4 and mask.end.tolist() == list(range(1, rows + 1))
    assert all(mask.start[start] == start for start in starts)
