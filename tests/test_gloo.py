"""Attention over real processes (gloo), on every kind of group that a user may pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh

import meshattn as ma
from cases import Results, Shape, make_inputs
from distributed import assert_equals_oracle, assert_same_bits, check_cases, run_case, run_cases
from mesh_cases import LAYOUTS, Case
from meshattn.plan.assignment import Tile, tiles
from meshattn.testing import run_ranks

GQA = Shape(B=2, S=11, H=4, H_kv=2, D=8, D_v=16)


def _all_cases(ranks: int) -> list[Case]:
    cases = [
        Case(tile, Shape(B=1, S=seq_len, H=3, H_kv=1, D=8), layout, causal, seed=seq_len)
        for tile, layout, causal, seq_len in itertools.product(
            tiles(ranks), LAYOUTS, (True, False), (ranks - 1, 4 * ranks + 3)
        )
    ]
    cases += [
        Case(tile, GQA, dtype=dtype) for tile in tiles(ranks) for dtype in (torch.float32, torch.bfloat16)
    ]
    return [
        *cases,
        Case(Tile(2, ranks // 2) if ranks % 2 == 0 else Tile(ranks, 1), GQA, reduce_dtype=None, ring=True),
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4], ids="P{}".format)
def test_every_tile_and_layout(ranks: int) -> None:
    check_cases(_all_cases(ranks), "gloo")


def test_same_bits_as_simulated_ranks() -> None:
    """The merge order is the list's on every transport."""
    cases = [Case(tile, GQA, dtype=dtype) for tile in tiles(4) for dtype in (torch.float32, torch.bfloat16)]
    for gloo, threads in zip(run_cases(cases, "gloo"), run_cases(cases, "threads"), strict=True):
        assert_same_bits(gloo, threads)


def _on(group: Any, case: Case) -> tuple[int, tuple[int, int], Tensor, Tensor, Results]:
    """Mesh rank, coordinates, positions, an unsharded sequence and the results of one rank."""
    mesh = ma.init_attention_mesh(group, tile=case.tile, timeout=30)
    seq = mesh.sequence(case.shape.S, layout=case.layout)
    whole = seq.unshard(seq.position_ids()[: seq.rows], dim=0)
    return mesh.rank, mesh.coordinates(), seq.position_ids(), whole, run_case(mesh, case)


def _check_members(case: Case, answers: Sequence[Any], members: Sequence[int]) -> None:
    """``members`` are the global ranks in mesh order: coordinates, rows and results follow that order."""
    layout = case.chunks
    for place, member in enumerate(members):
        rank, coordinates, positions, whole, _ = answers[member]
        assert rank == place
        assert coordinates == divmod(place, case.tile.a)
        real = layout.rows_in(place)
        assert positions[:real].tolist() == list(layout.positions(place))[:real]
        assert positions[real:].tolist() == [0] * (layout.rows - real)
        assert whole.tolist() == list(range(case.shape.S))
    assert_equals_oracle(case, [answers[member][-1] for member in members])


@pytest.mark.parametrize(
    "members",
    [(0, 1, 2, 3), (1, 2), (3, 0), (2, 0, 3, 1), (2,)],
    ids=lambda members: "ranks-" + "-".join(map(str, members)),
)
def test_list_of_global_ranks_in_its_order(members: tuple[int, ...]) -> None:
    case = Case(Tile(1, len(members)) if len(members) < 4 else Tile(2, 2), GQA)

    def on_rank(_: object) -> Any:
        return _on(members, case) if dist.get_rank() in members else None

    _check_members(case, run_ranks(4, on_rank, "gloo"), members)


def test_default_group_and_process_group() -> None:
    whole, half = Case(Tile(2, 2), GQA), Case(Tile(2, 1), GQA)

    def on_rank(_: object) -> Any:
        everybody = _on(None, whole)
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        return everybody, _on(halves[dist.get_rank() % 2], half)

    answers = run_ranks(4, on_rank, "gloo")
    _check_members(whole, [answer[0] for answer in answers], (0, 1, 2, 3))
    for members in ((0, 2), (1, 3)):
        _check_members(half, [answer[1] for answer in answers], members)


def test_axes_of_a_device_mesh_with_permuted_ranks() -> None:
    """Coordinates follow the DeviceMesh, not sorted ranks, along both of its axes."""
    layout = [[3, 0], [2, 1]]
    case = Case(Tile(1, 2), GQA)

    def on_rank(_: object) -> Any:
        devices = DeviceMesh("cpu", layout, mesh_dim_names=("dp", "cp"))
        return _on(devices["cp"], case), _on(devices["dp"], case)

    answers = run_ranks(4, on_rank, "gloo")
    for members in layout:
        _check_members(case, [answer[0] for answer in answers], members)
    for members in zip(*layout, strict=True):
        _check_members(case, [answer[1] for answer in answers], members)


def test_a_device_mesh_of_two_axes_is_refused() -> None:
    def on_rank(_: object) -> str:
        devices = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "cp"))
        with pytest.raises(
            ValueError, match=r"2 axes \('dp', 'cp'\): pass the one axis .*device_mesh\['cp'\]"
        ) as info:
            ma.init_attention_mesh(devices)
        return str(info.value)

    first, second = run_ranks(2, on_rank, "gloo")
    assert first == second


def test_groups_of_one_world_build_meshes_on_their_own() -> None:
    """Half of the world builds a mesh and the other half three; later all build one together."""
    half, whole = Case(Tile(2, 1), GQA), Case(Tile(2, 2), GQA)

    def on_rank(_: object) -> Any:
        first = dist.get_rank() < 2
        mine = [_on([0, 1] if first else [2, 3], half) for _ in range(1 if first else 3)]
        return mine[-1], _on(None, whole)

    answers = run_ranks(4, on_rank, "gloo", timeout=40)
    for members in ((0, 1), (2, 3)):
        _check_members(half, [answer[0] for answer in answers], members)
    _check_members(whole, [answer[1] for answer in answers], (0, 1, 2, 3))


def test_one_half_builds_a_mesh_and_the_other_does_not() -> None:
    case = Case(Tile(1, 2), GQA)

    def on_rank(_: object) -> Any:
        return _on([1, 2], case) if dist.get_rank() in (1, 2) else None

    answers = run_ranks(4, on_rank, "gloo", timeout=40)
    assert answers[0] is None and answers[3] is None
    _check_members(case, answers, (1, 2))


def test_two_meshes_used_in_turn_and_closed() -> None:
    """Each has a connection of its own; closing one leaves the other and the default group working."""
    cases = [Case(Tile(1, 3), GQA), Case(Tile(3, 1), GQA)]

    def on_rank(_: object) -> list[Results]:
        meshes = [ma.init_attention_mesh(tile=case.tile, timeout=30) for case in cases]
        results = [run_case(mesh, case) for _ in range(2) for mesh, case in zip(meshes, cases, strict=True)]
        meshes[0].close()
        results.append(run_case(meshes[1], cases[1]))
        meshes[1].close()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 3
        again = ma.init_attention_mesh(tile=cases[0].tile, timeout=30)
        return [*results, run_case(again, cases[0])]

    by_rank = run_ranks(3, on_rank, "gloo")
    for number, case in enumerate([*cases, *cases, cases[1], cases[0]]):
        assert_equals_oracle(case, [results[number] for results in by_rank])


def test_attention_is_the_first_communication_of_a_program() -> None:
    """No collective went before it, and the default group is used by others in between."""
    case = Case(Tile(2, 2), GQA)

    def on_rank(_: object) -> Results:
        mesh = ma.init_attention_mesh(tile=case.tile, timeout=30)
        first = run_case(mesh, case)
        gathered = [torch.empty(1) for _ in range(4)]
        dist.all_gather(gathered, torch.full((1,), float(dist.get_rank())))
        assert [int(x) for x in gathered] == [0, 1, 2, 3]
        assert_same_bits([first], [run_case(mesh, case)])
        return first

    assert_equals_oracle(case, run_ranks(4, on_rank, "gloo"))


def test_results_of_functional_collectives_are_waited_for() -> None:
    """They have no memory to be read before; q, a gradient that comes in, and what is gathered."""

    def on_rank(_: Any) -> list[tuple[Tensor, Tensor]]:
        mesh = ma.init_attention_mesh(timeout=30)
        seq = mesh.sequence(11)
        whole = make_inputs(Shape(B=1, S=11, H=2, H_kv=1, D=8))
        plain = [seq.shard(x) for x in (whole.q, whole.k, whole.v, whole.do)]
        late = [all_gather_tensor(x, 0, dist.group.WORLD)[:1] for x in plain]
        assert all(type(x).__name__ == "AsyncCollectiveTensor" for x in late)
        first = [all_gather_tensor(x, 0, dist.group.WORLD)[:1].clone() for x in plain]
        pairs = [(seq.unshard(late[0]), seq.unshard(first[0]))]
        answers = []
        for q, k, v, do in (late, first):
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = ma.mesh_attention(*leaves, seq, causal=True)
            assert isinstance(out, Tensor)
            answers.append([out, *torch.autograd.grad(out, leaves, do)])
        return [*pairs, *zip(*answers, strict=True)]

    for pairs in run_ranks(2, on_rank, "gloo"):
        assert all(torch.equal(x, y) for x, y in pairs)
