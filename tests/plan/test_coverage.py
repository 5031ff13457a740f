"""What a plan takes from outside of the table of kernel times, and the command that measures that."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from meshattn.command.calibrate import add_calibrate
from meshattn.plan.coverage import coverage
from meshattn.plan.kernel_times import BlockTime, KernelTimes
from meshattn.plan.planner import Question, plan
from plan.topology_cases import call, cluster


@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), [(6, 12, 3), (8, 40, 2)], ids=["P6", "P8"])
def test_the_command_measures_a_table_that_has_all_of_it(ranks: int, heads: int, kv_heads: int) -> None:
    """Also the halves of blocks that some lists compute."""
    question = Question(ranks, call(700, heads=heads, kv_heads=kv_heads, causal=True), cluster())
    found = plan(question)
    said = coverage(question, found, "bf16")
    assert said.lacking and not said.beyond
    parser = argparse.ArgumentParser()
    add_calibrate(parser)
    args = parser.parse_args(said.command.split(" calibrate ")[1].split())
    blocks = tuple(
        BlockTime(args.head_dim, number, shared, rows, causal, 1.0, 1.0, 2.0, 2.0)
        for rows, number, shared in args.block
        for causal in (True, False)
    )
    table = KernelTimes("measured", blocks, args.dtype)
    measured = replace(question, topology=replace(question.topology, kernels=table))
    assert coverage(measured, found, "bf16").lacking == ()
    for shape in {question.inner(each.cut, each.order) for each in found}:
        sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": 128, "causal": True}
        assert not table.lacks(rows=shape.rows, keys=-(-shape.rows // 2), **sizes)


def test_blocks_that_take_long_are_left_out_and_said() -> None:
    question = Question(2, replace(call(2**22, heads=4), head_dim=64), cluster())
    said = coverage(question, plan(question), "fp16")
    assert said.beyond and f"but {said.beyond}, which would take long" in said.text("a table")
    longest = replace(question, shape=replace(question.shape, rows=2**26))
    said = coverage(longest, plan(longest), "fp16")
    assert not said.command and said.text("a table").endswith("would take long.")
