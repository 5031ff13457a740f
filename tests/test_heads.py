"""The head axis: every combination with a tile against the oracle, its bytes, its memory, its overlap."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import meshattn as ma
from cases import Shape, make_inputs
from distributed import (
    LAYOUTS,
    Case,
    Packed,
    assert_equals_oracle,
    assert_same_bits,
    build_mesh,
    check_cases,
    local_inputs,
    run_case,
    run_cases,
)
from meshattn import engine, heads, reference
from meshattn.layouts import Layout, LayoutKind
from meshattn.plan.assignment import Tile, tiles
from meshattn.plan.cost import traffic
from meshattn.plan.heads import exchange, exchange_memory, head_groups, inner_shape
from meshattn.program import Call
from meshattn.testing import run_ranks
from meshattn.transport.base import Message
from meshattn.transport.threads import ThreadTransport
from test_traffic import DIRECTIONS, Count, Flow, call_shape, counted
from tolerance import assert_close

SHAPE = Shape(B=2, S=29, H=12, H_kv=4, D=8, D_v=16)
SMALL = [
    (2, 1, 1),
    (3, 1, 1),
    (2, 2, 1),
    (2, 1, 2),
    (4, 1, 1),
    (3, 2, 1),
    (3, 1, 2),
    (2, 1, 3),
    (2, 3, 1),
    (6, 1, 1),
]
LARGE = [(2, 2, 2), (4, 1, 2), (2, 4, 1), (12, 1, 1), (3, 2, 2), (4, 2, 2), (2, 2, 4)]


def _name(axes: tuple[int, int, int]) -> str:
    w, a, b = axes
    return f"P{w * a * b}-{w}x{a}x{b}"


def _case(axes: tuple[int, int, int], shape: Shape = SHAPE, **options: Any) -> Case:
    w, a, b = axes
    return Case(Tile(a, b), shape, heads=w, **options)


@pytest.mark.parametrize("axes", SMALL, ids=_name)
def test_every_axis_and_layout(axes: tuple[int, int, int]) -> None:
    """Key/value heads that divide, that are copied, and copied unevenly: 12 query heads on 4."""
    check_cases(
        [
            _case(axes, replace(SHAPE, S=seq_len), layout=layout, causal=causal)
            for seq_len, (layout, causal) in zip(
                (29, 5, 36, 30, 31, 1), itertools.product(LAYOUTS, (True, False)), strict=True
            )
        ]
    )


@pytest.mark.parametrize("axes", LARGE, ids=_name)
def test_larger_groups(axes: tuple[int, int, int]) -> None:
    documents = Packed((0, 3, 3, 17, 40), (3, 0, 11, 23))
    shape = replace(SHAPE, S=43, S_k=37)
    check_cases(
        [
            _case(axes, replace(shape, S_k=None), documents=documents, window_size=(7, -1)),
            _case(axes, shape, layout="zigzag", kv_layout="contiguous", window_size=(9, 2), softcap=3.0),
        ]
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", range(2, 17), ids="P{}".format)
def test_every_factorisation(ranks: int) -> None:
    """Heads that the axis divides, and a key/value head for each, for all, and for every other one."""
    for w in (w for w in range(2, ranks + 1) if ranks % w == 0):
        for tile, kv_heads, layout, causal in itertools.product(
            tiles(ranks // w), {1, w, 2 * w}, LAYOUTS, (True, False)
        ):
            shape = Shape(B=2, S=3 * ranks + 2, H=2 * w, H_kv=kv_heads, D=8, D_v=16)
            check_cases([Case(tile, shape, layout, causal, heads=w)])


@pytest.mark.parametrize("axes", [(4, 1, 1), (2, 2, 1), (2, 1, 2)], ids=_name)
def test_over_processes(axes: tuple[int, int, int]) -> None:
    """gloo against the oracle, with the bits of simulated ranks."""
    cases = [_case(axes, layout=layout, head_groups=1) for layout in LAYOUTS]
    cases += [
        _case(axes, dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        for reduce_dtype in (None, torch.bfloat16)
    ]
    for case, gloo, threads in zip(cases, run_cases(cases, "gloo"), run_cases(cases), strict=True):
        assert_equals_oracle(case, gloo)
        assert_same_bits(gloo, threads)


GROUPED = Shape(B=3, S=23, H=16, H_kv=8, D=8)


@pytest.mark.parametrize("axes", [(2, 1, 1), (2, 1, 2), (2, 2, 1)], ids=_name)
def test_groups_of_heads(axes: tuple[int, int, int]) -> None:
    cases = [_case(axes, GROUPED, head_groups=groups) for groups in (1, 2, 4)]
    check_cases([*cases, replace(cases[1], dropout_p=0.3, dropout_seed=7)])


@pytest.mark.parametrize("axes", [(2, 1, 1), (2, 1, 2), (2, 2, 2)], ids=_name)
def test_groups_change_no_bits(axes: tuple[int, int, int]) -> None:
    """The order of blocks does not follow from the size of a group."""
    cases = [_case(axes, GROUPED, dtype=torch.float32, head_groups=groups) for groups in (1, 2, 4)]
    one, two, four = run_cases(cases)
    assert_same_bits(one, two)
    assert_same_bits(one, four)


@pytest.mark.parametrize("taken", [0, 16], ids="{}-multiprocessors".format)
def test_no_groups_where_exchanges_take_multiprocessors(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadTransport, "multiprocessors", taken)
    shape = replace(call_shape(_case((2, 1, 1), GROUPED)), rows=2**20, key_rows=2**20)

    def on_rank(group: Any) -> int:
        return ma.init_attention_mesh(group, heads=2).split_heads(shape, torch.device("cpu"))[1]

    assert run_ranks(2, on_rank) == [1 if taken else head_groups(shape, 2)] * 2
    assert head_groups(shape, 2) == 4


def test_the_bits_are_those_of_the_tile_alone() -> None:
    """Rows and heads go to other ranks and back, the sums stay the same; so also on every run."""
    shape = replace(GROUPED, S=32)
    for tile, dtype in itertools.product((Tile(2, 2), Tile(1, 1)), (torch.float32, torch.bfloat16)):
        case = Case(tile, shape, dtype=dtype, heads=2, head_groups=1)
        (joined,), (again,), (alone,) = (run_cases([x]) for x in (case, case, replace(case, heads=1)))
        assert_same_bits(joined, again)
        for name in alone[0]._fields:
            rows = 2 if name == "lse" else 1
            for chunk, one in enumerate(alone):
                both = [getattr(joined[2 * chunk + place], name) for place in range(2)]
                assert torch.equal(torch.cat(both, rows), getattr(one, name)), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axes", [(2, 1, 2), (3, 1, 1), (4, 2, 1), (2, 3, 1)], ids=_name)
def test_rows_of_consecutive_ranks_are_a_chunk(axes: tuple[int, int, int], layout: LayoutKind) -> None:
    """In order, so that nothing is permuted; every token is on one rank, and padding ends its shard."""
    w, a, b = axes

    def on_rank(group: Any) -> list[tuple[list[int], list[int], int, int]]:
        mesh = ma.init_attention_mesh(group, tile=(a, b), heads=w)
        found = []
        for seq_len in range(1, 3 * w * a * b + 2):
            seq = mesh.sequence(seq_len, layout=layout)
            shard = seq.shard(torch.arange(1, seq_len + 1), dim=0)
            labels = seq.shift_labels(torch.arange(seq_len), dim=0)
            assert seq.unshard(shard, dim=0).tolist() == list(range(1, seq_len + 1))
            assert (shard[: seq.real_rows] - 1).tolist() == seq.position_ids()[: seq.real_rows].tolist()
            wanted = [x if 0 < x < seq_len else -100 for x in shard.tolist()]
            assert labels.tolist() == wanted
            found.append((shard.tolist(), labels.tolist(), seq.rows, seq.real_rows))
        return found

    by_rank = run_ranks(w * a * b, on_rank)
    for number, seq_len in enumerate(range(1, 3 * w * a * b + 2)):
        whole = Layout(layout, seq_len, a * b, w * -(-seq_len // (w * a * b)))
        for chunk in range(a * b):
            shards = [by_rank[chunk * w + place][number] for place in range(w)]
            joined = [x for shard, *_ in shards for x in shard]
            expected = [x + 1 if x < seq_len else 0 for x in whole.positions(chunk)]
            assert joined == expected
            assert all(shard[:real] == [x for x in shard if x] for shard, _, _, real in shards)


def formula(case: Case) -> dict[Flow, Count]:
    """What every rank sends, by phase, axis and flow."""
    outside = _outside(case)
    groups = head_groups(outside, case.heads) if case.head_groups == "auto" else int(case.head_groups)
    found = {}
    for direction in DIRECTIONS:
        moved = traffic(direction, case.tile, inner_shape(outside, case.heads))
        parts = {axes: Count(x.num_messages * groups, x.num_bytes) for axes, x in moved.items()}
        for way, part in exchange(direction, outside, case.heads, groups).items():
            parts["heads", way] = Count(part.num_messages, part.num_bytes)
        found |= {(direction, *flow): part for flow, part in parts.items() if part.messages}
    return found


def _outside(case: Case) -> Any:
    rows, key_rows = (chunks.rows // case.heads for chunks in (case.chunks, case.key_chunks))
    return replace(call_shape(case), rows=rows, key_rows=key_rows)


TRAFFIC = [(1, 2, 2), (2, 1, 1), (4, 1, 1), (2, 2, 1), (3, 1, 2), (2, 2, 2)]


@pytest.mark.parametrize("axes", TRAFFIC, ids=_name)
def test_counters_equal_the_formula(axes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the bytes that are handed to the exchanges, counted again."""
    cases = [
        _case(axes, replace(SHAPE, S_k=S_k), dtype=dtype, reduce_dtype=reduce_dtype, kv_layout=kv_layout)
        for dtype, reduce_dtype in (
            (torch.float64, None),
            (torch.bfloat16, None),
            (torch.bfloat16, torch.bfloat16),
        )
        for S_k, kv_layout in ((None, None), (41, "contiguous"))
    ]
    if axes[0] == 2:
        cases += [_case(axes, GROUPED, head_groups=groups, causal=False) for groups in (1, 2, 4)]
    sent: defaultdict[int, Counter[Flow]] = defaultdict(Counter)
    exchange = ThreadTransport._exchange

    def spy(self: ThreadTransport, message: Message, send: Sequence[Tensor], recv: Tensor) -> Any:
        sent[self.rank][message.phase, message.axis, message.flow] += sum(part.nbytes for part in send)
        return exchange(self, message, send, recv)

    monkeypatch.setattr(ThreadTransport, "_exchange", spy)

    def on_rank(group: Any) -> list[dict[Flow, Count]]:
        found = []
        for case in cases:
            mesh = build_mesh(group, case)
            sent[mesh.rank].clear()
            run_case(mesh, case)
            found.append(counted(mesh.traffic()))
            assert sent[mesh.rank] == {flow: count.num_bytes for flow, count in found[-1].items()}
        return found

    for rank, found in enumerate(run_ranks(cases[0].ranks, on_rank)):
        for case, flows in zip(cases, found, strict=True):
            assert flows == formula(case), f"{case}, rank {rank}"


@pytest.mark.parametrize("groups", [1, 2, 4], ids="groups{}".format)
def test_messages_take_the_memory_of_the_formula(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most bytes in use at once, of all buffers of the head axis: receive buffers for a pass, what is
    sent until its exchange is released."""
    case = _case((2, 1, 2), GROUPED, dtype=torch.bfloat16, head_groups=groups)
    here = threading.local()
    most: dict[str, int] = {}
    in_rows, received = heads._in_rows, ThreadTransport.received

    def made(num_bytes: int) -> None:
        here.bytes += num_bytes
        here.most = max(here.most, here.bytes)

    def sending(part: Any) -> tuple[Tensor, ...]:
        sent = in_rows(part)
        pairs = zip(sent, part.values(), strict=True)
        made(sum(x.nbytes for x, given in pairs if x.data_ptr() != given.data_ptr()))
        return sent

    def receiving(self: ThreadTransport, axis: str, *arguments: Any) -> Any:
        packed = received(self, axis, *arguments)
        if axis == "heads":
            made(sum(x.flat.nbytes for x in packed))
        return packed

    def during(direction: str, run: Any) -> Any:
        def wrapper(call: heads.HeadCall, *tensors: Any) -> Any:
            here.bytes = here.most = 0
            result = run(call, *tensors)
            assert most.setdefault(direction, here.most) == here.most, "the same on every rank"
            return result

        return wrapper

    class Watched(heads._AllToAll):
        def start(self, group: int, parts: Any) -> None:
            before = here.bytes
            super().start(group, parts)
            self.sent = here.bytes - before

        def release(self) -> None:
            super().release()
            here.bytes -= self.sent

    monkeypatch.setattr(heads, "_in_rows", sending)
    monkeypatch.setattr(ThreadTransport, "received", receiving)
    monkeypatch.setattr(heads, "_AllToAll", Watched)
    for direction in DIRECTIONS:
        monkeypatch.setattr(heads, direction, during(direction, getattr(heads, direction)))
    run_cases([case])
    assert most == {
        direction: exchange_memory(direction, _outside(case), 2, groups) for direction in DIRECTIONS
    }


def test_exchanges_run_beside_the_attention_of_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the start and the end of an exchange lies the attention of a group, but for the first one in
    and the last one out; both ways and in both passes."""
    case = _case((2, 1, 1), GROUPED, head_groups=4)
    log: list[str] = []

    def spy(owner: Any, name: str, words: Any) -> None:
        run = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == "first":
                log.append(words(*args))
            return run(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    spy(heads._AllToAll, "start", lambda self, group, parts: f"{self._direction} {self._way} {group}")
    spy(heads._AllToAll, "finish", lambda self: f"{self._direction} {self._way} end")
    for direction in DIRECTIONS:
        spy(engine, direction, lambda *args, name=direction: f"{name} computed")

    def on_rank(group: Any) -> None:
        mesh = build_mesh(group, case)
        if mesh.rank == 0:
            threading.current_thread().name = "first"
        run_case(mesh, case)

    run_ranks(2, on_rank)
    for direction in DIRECTIONS:
        events = [event for event in log if event.startswith(direction)]
        for way, exposed in (("inward", 0), ("outward", 3)):
            ends = [place for place, event in enumerate(events) if event == f"{direction} {way} end"]
            for group in range(4):
                between = events[events.index(f"{direction} {way} {group}") : ends[group]]
                assert between.count(f"{direction} computed") == (group != exposed), f"{way} of group {group}"


def test_gradients_through_lse_and_sinks_and_again() -> None:
    """Sinks are shared out with their heads; their gradients sum over ranks; a second derivative raises."""
    case = _case((2, 2, 1), GROUPED, head_groups=2)
    values = torch.linspace(-1.0, 1.0, 16, dtype=torch.float64)

    def on_rank(group: Any) -> list[Tensor]:
        mesh = build_mesh(group, case)
        q, k, v, do = (x.requires_grad_() for x in local_inputs(case, mesh.rank))
        sinks = values.clone().requires_grad_()
        seq = mesh.sequence(case.shape.S)
        out, lse = ma.mesh_attention(q, k, v, seq, causal=True, sinks=sinks, return_lse=True)
        seen = lse.masked_fill(lse == -torch.inf, 0.0)
        loss = (out * do.detach().nan_to_num()).sum() + seen.square().sum()
        grads = torch.autograd.grad(loss, (q, k, v, sinks), create_graph=True)
        for gradient in grads:
            with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
                torch.autograd.grad(gradient.sum(), (q, sinks), retain_graph=True)
        wholes = [seq.unshard(x.detach()) for x in grads[:3]]
        return [*wholes, grads[3].detach()]

    q, k, v, do = (x.requires_grad_() for x in make_inputs(case.shape))
    sinks = values.clone().requires_grad_()
    out, lse = reference.attention(q, k, v, causal=True, sinks=sinks)
    expected = torch.autograd.grad((out * do).sum() + lse.square().sum(), (q, k, v, sinks))
    by_rank = run_ranks(4, on_rank)
    for name, mine, exact in zip(("dq", "dk", "dv"), by_rank[0], expected, strict=False):
        assert_close(name, mine, exact)
    assert_close("dsinks", sum(results[3] for results in by_rank), expected[3])


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _every_other(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


def _from_an_odd_place(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("lay", [_transposed, _every_other, _from_an_odd_place])
def test_tensors_may_lie_anyhow(lay: Any) -> None:
    """Of 2 bytes an element, which are moved as words of 8."""
    case = _case((2, 1, 1), dtype=torch.bfloat16)

    def on_rank(group: Any) -> bool:
        mesh = build_mesh(group, case)
        seq = mesh.sequence(SHAPE.S)
        results = []
        for change in (lambda x: x, lay):
            q, k, v, do = map(change, local_inputs(case, mesh.rank))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = ma.mesh_attention(*leaves, seq, causal=True)
            assert isinstance(out, Tensor)
            results.append([out, *torch.autograd.grad(out, leaves, do)])
        return all(torch.equal(x, y) for x, y in zip(*results, strict=True))

    assert all(run_ranks(2, on_rank))


def test_checkpoints_and_autocast() -> None:
    """The recomputed pass exchanges again, with the same bits."""
    case = _case((2, 1, 2), dtype=torch.float32)

    def on_rank(group: Any) -> bool:
        mesh = build_mesh(group, case)
        seq = mesh.sequence(SHAPE.S)
        leaves = [x.requires_grad_() for x in local_inputs(case, mesh.rank)[:3]]

        def attend(*tensors: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = ma.mesh_attention(*tensors, seq, causal=True)
            assert isinstance(out, Tensor) and out.dtype == torch.bfloat16
            return out.float()[:, : seq.real_rows]

        plain = torch.autograd.grad(attend(*leaves).square().sum(), leaves)
        again = torch.autograd.grad(checkpoint(attend, *leaves, use_reentrant=False).square().sum(), leaves)
        return all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))

    assert all(run_ranks(4, on_rank))


def test_the_ring_keeps_the_head_axis() -> None:
    """It is the tile (1, P / heads) on the same mesh, with its bits."""
    ring = replace(_case((2, 4, 1), dtype=torch.float32), ring=True)
    (mine,), (same,) = run_cases([ring]), run_cases([_case((2, 1, 4), dtype=torch.float32)])
    assert_equals_oracle(ring, mine)
    assert_same_bits(mine, same)


def test_a_tile_chosen_by_bytes() -> None:
    """Inside, a rank has fewer heads and a longer chunk; the ranks that share it out are fewer."""

    def on_rank(group: Any) -> Any:
        mesh = ma.init_attention_mesh(group, heads=2)
        assert "heads 2" in mesh.describe() and "tile auto" in mesh.describe()
        seq = mesh.sequence(16)
        q, k = torch.randn(1, seq.rows, 4, 8), torch.randn(1, seq.rows, 2, 8)
        ma.mesh_attention(q, k, k, seq)
        return {record.axis for record in mesh.traffic()}

    assert all("heads" in axes for axes in run_ranks(8, on_rank))


@pytest.mark.parametrize(
    ("groups", "kv_heads", "query_heads", "words"),
    [
        ("auto", 2, 4, (r"q has 4 heads, which the 3 ranks", r"\(1, 2, 4\)")),
        (2, 6, 6, ()),
        (2, 3, 6, ("head_groups=2", "has 1 key/value heads", "head_groups='auto'")),
    ],
    ids=["heads-of-4-on-3", "groups-that-fit", "groups-that-do-not"],
)
def test_heads_that_cannot_be_shared_out(
    groups: Any, kv_heads: int, query_heads: int, words: tuple[str, ...]
) -> None:
    """On every rank, before anything moves, with the way out; the mesh can be used on."""

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, heads=3, head_groups=groups)
        seq = mesh.sequence(7)
        q, k = torch.ones(1, seq.rows, query_heads, 8), torch.ones(1, seq.rows, kv_heads, 8)
        for word in words:
            with pytest.raises(ValueError, match=word):
                ma.mesh_attention(q, k, k, seq)
        assert mesh.traffic() == () or not words
        six = torch.ones(1, seq.rows, 6, 8)
        ma.mesh_attention(six, six, six, seq)

    run_ranks(3, on_rank)


def test_a_rank_that_fails_is_named_with_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = engine.forward

    def broken(call: Call, *tensors: Any) -> Any:
        if threading.current_thread().name == "victim":
            raise RuntimeError("trouble of its own")
        return forward(call, *tensors)

    monkeypatch.setattr(engine, "forward", broken)

    def on_rank(group: Any) -> None:
        if group.rank == 1:
            threading.current_thread().name = "victim"
        run_case(build_mesh(group, case), case)

    case = _case((3, 1, 1))
    first, victim, last = run_ranks(3, on_rank, return_exceptions=True)
    assert str(victim) == "trouble of its own"
    for other in (first, last):
        # Which exchange, and with whom, depends on who looks first; why does not.
        assert str(other).startswith("forward head group 1/1, ") and ": no exchange with rank " in str(other)
        assert "rank 1 has failed (RuntimeError: trouble of its own)" in str(other)


def test_ranks_that_disagree_on_the_axis() -> None:
    def on_rank(group: Any) -> None:
        with pytest.raises(ma.RankMismatchError, match="heads is 1 on rank 2, but 2 on ranks 0, 1, 3"):
            ma.init_attention_mesh(group, heads=1 if group.rank == 2 else 2, timeout=5)

    run_ranks(4, on_rank)


# The comparisons can fail


def _keys_of_the_next_place(patch: pytest.MonkeyPatch) -> None:
    heads_of = heads.HeadCall.heads_of

    def mutant(self: heads.HeadCall, name: str, place: int, group: int) -> range:
        return heads_of(self, name, (place + (name in heads.KEYS)) % self.split.ranks, group)

    patch.setattr(heads.HeadCall, "heads_of", mutant)


def _swap_rows(patch: pytest.MonkeyPatch) -> None:
    some_rows = heads._some_rows
    patch.setattr(
        heads, "_some_rows", lambda call, x, place: some_rows(call, x, call.split.ranks - 1 - place)
    )


def _first_copy_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heads, "_sum_of_copies", lambda call, x: x[:, :, :: call.split.copies].to(call.inner.dtype))


def _sum_all_copies_twice(patch: pytest.MonkeyPatch) -> None:
    total = heads._sum_of_copies
    patch.setattr(heads, "_sum_of_copies", lambda call, x: total(call, x) * min(2, call.split.copies))


MUTANTS = {
    "keys-of-the-next-place": (_keys_of_the_next_place, _case((3, 1, 1), replace(SHAPE, H_kv=12))),
    "rows-of-another-place": (_swap_rows, _case((2, 1, 1))),
    "one-copy-of-a-gradient": (_first_copy_alone, _case((12, 1, 1))),
    "copies-summed-twice": (_sum_all_copies_twice, _case((3, 1, 1))),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_comparison_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, case = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=r"error .* > |padding rows"):
        check_cases([case])
