"""The copy-engine transport on simulated streams: every order of execution gives the right bytes, or none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import meshattn as ma
from cases import Shape
from distributed import Case, Packed, assert_equals_oracle, assert_same_bits, run_cases
from fake_streams import COMPUTE, Op, SharedMemory, Shuffled, Threaded, World
from meshattn.plan.assignment import Tile, tiles
from meshattn.plan.hops import Paths
from meshattn.testing import run_ranks
from meshattn.transport.base import Message, Traffic, TransportError
from meshattn.transport.exchange import CopyEngine, Place
from meshattn.transport.slots import SlotLayout
from meshattn.transport.symmetric import SymmetricTransport
from meshattn.transport.threads import ThreadTransport

CPU = torch.device("cpu")
NBYTES = 32


_made: list[CopyEngine] = []


@pytest.fixture(autouse=True)
def _no_watch_outlives_its_test() -> Iterator[None]:
    """Some tests leave exchanges that never end, for which a watch would end the process."""
    yield
    while _made:
        _made.pop().close()


class Rank:
    """One rank of a ring that runs a shuffled world."""

    def __init__(
        self,
        world: World,
        memory: SharedMemory,
        rank: int,
        ranks: int,
        *,
        one_queue: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.ops = Shuffled(world, rank, one_queue=one_queue)
        self.engine = CopyEngine(
            self.ops, lambda n: memory.allocate(rank, n), rank, [10 + r for r in range(ranks)], timeout
        )
        _made.append(self.engine)
        self.transport = SymmetricTransport(self.engine, None, Traffic())  # type: ignore[arg-type]

    def message(self, slot: int, number: int = 0, *, made: bool = True, again: bool = False) -> Message:
        left, right = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
        label = f"forward step {number}/9, kv #1"
        return Message("forward", "col", "inward", label, left, right, slot, made, again)

    def compute(self, run: Callable[[], object]) -> None:
        self.ops.enqueue(self.ops.stream, Op(run, name="compute"))


def _ring_pass(rank: Rank, hops: int, slots: int, seen: list[int], tag: int, made: bool = False) -> None:
    """A ring as the engine runs it: start, compute on the last chunk, wait, release when both are done.

    If what is sent is said to be made in the pass, it may also be.
    """
    received = rank.transport.buffers("col", "inward", NBYTES, slots, CPU)
    own = torch.empty(NBYTES, dtype=torch.uint8)
    rank.compute(lambda: own.fill_(tag + rank.rank))
    current, held = own, None

    def use(chunk: Tensor, poison: bool) -> None:
        seen.extend(sorted({int(x) for x in chunk}))
        if poison:
            chunk.fill_(255)

    for hop in range(hops):
        slot = hop % slots
        message = rank.message(slot, hop, made=made, again=not made and hop + slots < hops)
        if made:
            rank.compute(lambda chunk=current: chunk.add_(100).sub_(100))
        handle = rank.transport.start(message, [current], received[slot])
        rank.compute(lambda chunk=current: use(chunk, False))
        handle.wait()
        rank.compute(lambda chunk=current: chunk.fill_(255))  # also the own one, which may be freed now
        if held is not None:
            held.release()
        current, held = received[slot], handle
    rank.compute(lambda chunk=current: use(chunk, True))
    if held is not None:
        held.release()


def _expected(rank: int, ranks: int, hops: int, tag: int) -> list[int]:
    return [tag + (rank + hop) % ranks for hop in range(hops + 1)]


@pytest.mark.parametrize("one_queue", [False, True], ids=["queues", "one-queue"])
@pytest.mark.parametrize("slots", [2, 3], ids="{}-slots".format)
@pytest.mark.parametrize("ranks", [2, 3, 5], ids="P{}".format)
def test_a_ring_in_any_order(ranks: int, slots: int, one_queue: bool) -> None:
    """Passes follow each other without a pause, on slots that are poisoned once they are free."""
    for seed in range(10):
        world, memory = World(seed), SharedMemory(ranks)
        members = [Rank(world, memory, r, ranks, one_queue=one_queue) for r in range(ranks)]
        seen: list[list[int]] = [[] for _ in members]
        for number, tag in enumerate((0, 50, 100)):
            for member in members:
                _ring_pass(member, ranks + 1, slots, seen[member.rank], tag, made=(seed + number) % 3 == 0)
        assert world.run(), f"standstill with seed {seed}"
        for member in members:
            want = [x for tag in (0, 50, 100) for x in _expected(member.rank, ranks, ranks + 1, tag)]
            assert seen[member.rank] == want, f"seed {seed}"


@pytest.mark.parametrize("slots", [2, 3], ids="{}-slots".format)
def test_chunks_go_on_while_the_first_is_still_computed_with(slots: int) -> None:
    """As far as there are slots; the others wait for those that are freed."""
    ranks, busy = 5, [True]
    for seed in range(5):
        world, memory, busy[0] = World(seed), SharedMemory(ranks), True
        members = [Rank(world, memory, r, ranks) for r in range(ranks)]
        seen: list[list[int]] = [[] for _ in members]
        for member in members:
            received = member.transport.buffers("col", "inward", NBYTES, slots, CPU)
            own = torch.full((NBYTES,), member.rank, dtype=torch.uint8)
            current: tuple[Tensor, Any] = own, None
            for hop in range(ranks - 1):
                slot = hop % slots
                message = member.message(slot, hop, made=False, again=hop + slots < ranks - 1)
                handle = member.transport.start(message, [current[0]], received[slot])
                if hop == 0:  # a block that takes long
                    member.ops.enqueue(COMPUTE, Op(lambda: None, lambda: not busy[0], "long"))
                handle.wait()
                member.compute(lambda x=current[0], log=seen[member.rank]: log.append(int(x[0])))
                if current[1] is not None:
                    member.compute(lambda x=current[0]: x.fill_(255))
                    current[1].release()
                current = received[slot], handle
            member.compute(lambda x=current[0], log=seen[member.rank]: log.append(int(x[0])))
            current[1].release()
        assert not world.run(), "the long block still runs"
        for member in members:
            here = [int(x[0]) for x in member.transport.buffers("col", "inward", NBYTES, slots, CPU)]
            assert here == [(member.rank + hop + 1) % ranks for hop in range(slots)], f"seed {seed}"
            assert not seen[member.rank]
        busy[0] = False
        assert world.run()
        assert seen == [_expected(rank, ranks, ranks - 1, 0) for rank in range(ranks)], f"seed {seed}"


def _pairs(world: World, ranks: int, slots: int, passes: int) -> list[list[int]] | None:
    """Every rank pushes again and again into the same slots, waits, reads, releases; None: a standstill."""
    memory = SharedMemory(ranks)
    seen: list[list[int]] = [[] for _ in range(ranks)]
    members = [Rank(world, memory, r, ranks) for r in range(ranks)]
    for number in range(passes):
        for member in members:
            slot = number % slots
            received = member.transport.buffers("col", "inward", NBYTES, slots, CPU)
            own = torch.empty(NBYTES, dtype=torch.uint8)
            member.compute(lambda own=own, value=number: own.fill_(value))
            handle = member.transport.start(member.message(slot), [own], received[slot])
            handle.wait()

            def use(
                chunk: Tensor = received[slot], log: list[int] = seen[member.rank], own: Tensor = own
            ) -> None:
                log.extend(sorted({int(x) for x in chunk}))
                chunk.fill_(255)
                own.fill_(254)

            member.compute(use)
            handle.release()
    return seen if world.run() else None


@pytest.mark.parametrize("slots", [1, 2, 3], ids="{}-slots".format)
@pytest.mark.parametrize("ranks", [2, 4], ids="P{}".format)
def test_slots_are_filled_again_only_when_free(ranks: int, slots: int) -> None:
    for seed in range(15):
        assert _pairs(World(seed), ranks, slots, 8) == [list(range(8))] * ranks, f"seed {seed}"


def _without_waits(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    """Exchanges do not wait for this flag."""
    wait, left_out, of = Shuffled.wait, set[int](), Place.of

    def placed(*args: Any) -> Place:
        place = of(*args)
        left_out.add(getattr(place, flag))
        return place

    def some(self: Shuffled, stream: int, address: int, value: int) -> None:
        if address not in left_out:
            wait(self, stream, address, value)

    monkeypatch.setattr(Place, "of", placed)
    monkeypatch.setattr(Shuffled, "wait", some)


def test_without_grants_a_slot_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the test above can fail."""
    _without_waits(monkeypatch, "granted")
    assert any(_pairs(World(seed), 3, 1, 8) != [list(range(8))] * 3 for seed in range(15))


def test_without_the_ready_flag_a_slot_is_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_waits(monkeypatch, "ready")
    assert any(_pairs(World(seed), 2, 1, 4) != [list(range(4))] * 2 for seed in range(15))


def _many_peers(world: World, ranks: int, slots: int, one_queue: bool) -> list[list[int]] | None:
    """Every rank gets from each other rank in turn, several exchanges under way at once."""
    memory = SharedMemory(ranks)
    seen: list[list[int]] = [[] for _ in range(ranks)]
    members = [Rank(world, memory, r, ranks, one_queue=one_queue) for r in range(ranks)]
    for _ in range(2):
        for member in members:
            received = member.transport.buffers("col", "inward", NBYTES, slots, CPU)
            own = torch.full((NBYTES,), member.rank, dtype=torch.uint8)
            handles: list[Any] = []

            def take(member: Rank = member, handles: list[Any] = handles) -> None:
                handle, chunk = handles.pop(0)
                handle.wait()
                log = seen[member.rank]

                def use() -> None:
                    log.extend(sorted({int(x) for x in chunk}))
                    chunk.fill_(255)

                member.compute(use)
                handle.release()

            for offset in range(1, ranks):
                slot = (offset - 1) % slots
                if len(handles) == slots:
                    take()
                to, source = (member.rank - offset) % ranks, (member.rank + offset) % ranks
                message = Message("forward", "col", "inward", f"direct {offset}", to, source, slot)
                handles.append((member.transport.start(message, [own], received[slot]), received[slot]))
            while handles:
                take()
            member.compute(lambda own=own: own.fill_(254))
    return seen if world.run() else None


@pytest.mark.parametrize("one_queue", [False, True], ids=["queues", "one-queue"])
@pytest.mark.parametrize("slots", [1, 2, 3], ids="{}-slots".format)
def test_a_slot_may_be_filled_by_another_rank_each_time(slots: int, one_queue: bool) -> None:
    for seed in range(15):
        want = [[(rank + offset) % 5 for _ in range(2) for offset in range(1, 5)] for rank in range(5)]
        assert _many_peers(World(seed), 5, slots, one_queue) == want, f"seed {seed}"


def test_a_pass_on_another_stream_waits_for_the_last_one() -> None:
    for seed in range(15):
        world, memory = World(seed), SharedMemory(2)
        members = [Rank(world, memory, r, 2) for r in range(2)]
        seen: list[list[int]] = [[], []]
        for number, tag in enumerate((0, 50, 100, 150)):
            for member in members:
                member.ops.stream = COMPUTE + 100 * (number % 2)
                _ring_pass(member, 3, 2, seen[member.rank], tag)
        assert world.run()
        want = [[x for tag in (0, 50, 100, 150) for x in _expected(r, 2, 3, tag)] for r in range(2)]
        assert [sorted(x) for x in seen] == [sorted(x) for x in want], f"seed {seed}"


def test_halves_that_are_left_out_leave_the_flags_alone() -> None:
    """Rank 0 sends nothing now and then, of which rank 1 knows."""
    for seed in range(20):
        world, memory = World(seed), SharedMemory(2)
        members = [Rank(world, memory, r, 2) for r in range(2)]
        seen: list[list[int]] = [[], []]
        for number in range(9):
            for member in members:
                (received,) = member.transport.buffers("col", "inward", NBYTES, 1, CPU)
                own = torch.full((NBYTES,), number, dtype=torch.uint8)
                skipped = number % 3 == 1
                send = None if skipped and member.rank == 0 else [own]
                recv = None if skipped and member.rank == 1 else received
                handle = member.transport.start(member.message(0), send, recv)
                handle.wait()
                if recv is not None:
                    log = seen[member.rank]
                    member.compute(lambda log=log, x=recv: log.append(int(x[0])))
                member.compute(lambda own=own: own.fill_(255))
                handle.release()
        assert world.run()
        assert seen == [list(range(9)), [n for n in range(9) if n % 3 != 1]]


def test_memory_grows_with_the_largest_pass_and_is_used_again() -> None:
    world, memory = World(0), SharedMemory(2)
    members = [Rank(world, memory, r, 2) for r in range(2)]

    def addresses(nbytes: int, slots: int, flow: str = "inward") -> list[list[int]]:
        made = [m.transport.buffers("col", flow, nbytes, slots, CPU) for m in members]
        assert all(x.numel() == nbytes and x.dtype == torch.uint8 for own in made for x in own)
        return [[x.data_ptr() for x in own] for own in made]

    first = addresses(1000, 2)
    assert addresses(900, 1) == [own[:1] for own in first]
    assert memory.sizes == [SlotLayout.of(2, 1000, 2).nbytes]
    assert addresses(1000, 2, "outward") != first, "chunks and partial results are live together"
    assert addresses(1000, 2) == first
    grown = addresses(3000, 1)
    assert len(memory.sizes) == 3 and addresses(1000, 2)[0][0] == grown[0][0]
    assert addresses(10, 0) == [[], []] and len(memory.sizes) == 3


def test_memory_does_not_grow_inside_a_graph() -> None:
    member = Rank(World(0), SharedMemory(1), 0, 1)
    member.transport.buffers("col", "inward", 64, 1, CPU)
    member.ops.in_capture = True
    member.transport.buffers("col", "inward", 64, 1, CPU)
    with pytest.raises(ValueError, match="run it once before it is captured"):
        member.transport.buffers("col", "inward", 65_000, 1, CPU)


def test_a_pass_that_broke_off_is_remembered() -> None:
    world, memory = World(0), SharedMemory(2)
    members = [Rank(world, memory, r, 2) for r in range(2)]
    for member in members:
        (received,) = member.transport.buffers("col", "inward", NBYTES, 1, CPU)
        member.transport.start(member.message(0), [torch.zeros(NBYTES, dtype=torch.uint8)], received)
    with pytest.raises(TransportError, match="broke off with 1 exchange"):
        members[0].transport.buffers("col", "inward", NBYTES, 1, CPU)


def test_events_are_used_again() -> None:
    world, memory = World(0), SharedMemory(2)
    members = [Rank(world, memory, r, 2) for r in range(2)]
    made = []
    for number in range(4):
        for member in members:
            _ring_pass(member, 2, 2, [], number)
        assert world.run()
        time.sleep(0.4)  # the watch takes them back
        made.append(len(members[0].ops._events))
    assert made[3] == made[1] <= made[0] + 4


def test_a_lost_peer_is_named_and_its_bytes_become_nan() -> None:
    """Rank 1 of two does not push; rank 0 is let go, and reads NaN."""
    world, memory = World(0), SharedMemory(2)
    members = [Rank(world, memory, r, 2, timeout=0.3) for r in range(2)]
    (received,), _ = (m.transport.buffers("col", "inward", NBYTES, 1, CPU) for m in members)
    me = members[0]
    own = torch.zeros(NBYTES, dtype=torch.uint8)
    me.transport.start(me.message(0, 4), [own], received).wait()
    assert not world.run(), "it waits"
    assert not received.any()
    _until_failure(me)
    assert world.run()
    assert received.view(torch.float32).isnan().all()
    told = r"^forward step 4/9, kv #1: (nothing from rank 11|rank 11 did not take it) within 0.3 s$"
    with pytest.raises(TransportError, match=told):
        me.transport.check()
    with pytest.raises(TransportError, match=told):
        me.transport.start(me.message(0), [own], received)


def test_a_peer_that_never_frees_its_slot_is_named_and_gets_nan() -> None:
    world, memory = World(0), SharedMemory(2)
    members = [Rank(world, memory, r, 2, timeout=0.3) for r in range(2)]
    for number in range(2):
        for member in members[: 2 - number]:
            (received,) = member.transport.buffers("col", "inward", NBYTES, 1, CPU)
            own = torch.full((NBYTES,), number, dtype=torch.uint8)
            handle = member.transport.start(member.message(0), [own], received)
            if member.rank == 0 and number == 0:
                handle.wait()
                handle.release()
    assert not world.run()
    _until_failure(members[0])
    assert world.run()
    assert members[0].engine.watch.failure == "forward step 0/9, kv #1: rank 11 did not take it within 0.3 s"
    theirs = members[1].transport._arenas["col", "inward"].region.local[:NBYTES]
    assert theirs.view(torch.float32).isnan().all()


def _until_failure(rank: Rank) -> None:
    deadline = time.monotonic() + 10
    while rank.engine.watch.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)


# The engine on threads


@pytest.fixture
def on_copy_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CopyEngine]]:
    """Meshes of simulated groups move everything by copy engines that are threads."""
    engines: list[CopyEngine] = []
    memories: dict[int, SharedMemory] = {}
    lock = threading.Lock()

    def of(mesh: Any) -> Any:
        whole = mesh.connection.transport
        assert isinstance(whole, ThreadTransport)
        if not hasattr(mesh, "fake_engine"):
            with lock:
                memory = memories.setdefault(whole._connection, SharedMemory(mesh.size))
            ops = Threaded(mesh.rank, longest_delay=0.002)
            mesh.fake_engine = CopyEngine(
                ops,
                lambda n: memory.allocate(mesh.rank, n),
                mesh.rank,
                mesh.connection.names,
                mesh.connection.timeout,
            )
            mesh.fake_transport = SymmetricTransport(mesh.fake_engine, whole, whole.traffic)
            engines.append(mesh.fake_engine)
        return mesh.fake_transport

    def transports(mesh: Any, tile: Tile, device: torch.device, paths: Paths) -> dict[str, Any]:
        return dict.fromkeys(("row", "col"), of(mesh))

    monkeypatch.setattr(ma.AttentionMesh, "transports", transports)
    monkeypatch.setattr(ma.AttentionMesh, "head_transport", lambda mesh, device: of(mesh))
    yield engines
    for engine in engines:
        engine.close()


SHAPE = Shape(B=1, S=29, H=2, H_kv=1, D=8)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("tile", [t for ranks in (2, 4, 6) for t in tiles(ranks)], ids=str)
def test_the_engine_gives_the_same_bits(tile: Tile, on_copy_engines: list[CopyEngine]) -> None:
    """Two calls with other sizes, a ring on the same mesh, and partial results in the input type."""
    cases = [
        Case(tile, SHAPE, dtype=torch.float32),
        Case(tile, replace(SHAPE, S=41, B=2), layout="zigzag", dtype=torch.bfloat16),
        Case(tile, SHAPE, dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        Case(tile, SHAPE, dtype=torch.float32, causal=False),
        Case(tile, SHAPE, layout="contiguous", dtype=torch.float32),  # ranks exchange with many peers
    ]
    if tile.a == 1 or tile.b == 1:
        cases.append(Case(tile, SHAPE, dtype=torch.float32, ring=True))
    mine = run_cases(cases)
    assert len(on_copy_engines) == tile.ranks and not any(e.watch.failure for e in on_copy_engines)
    for case, by_rank in zip(cases, mine, strict=True):
        assert_equals_oracle(case, by_rank)
    again = run_cases(cases)
    for first, second in zip(mine, again, strict=True):
        assert_same_bits(first, second)


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("heads", "tile"), [(2, Tile(1, 1)), (3, Tile(1, 1)), (2, Tile(2, 1)), (2, Tile(1, 2))], ids=str
)
def test_exchanges_of_heads(heads: int, tile: Tile, on_copy_engines: list[CopyEngine]) -> None:
    """With every peer of the axis, one group in while another goes out, beside the rings of a tile."""
    shape = Shape(B=2, S=29, H=12, H_kv=6, D=8)
    cases = [
        Case(tile, shape, dtype=torch.float32, heads=heads, head_groups=1),
        Case(tile, replace(shape, S=43, H_kv=12), "zigzag", dtype=torch.bfloat16, heads=heads, head_groups=2),
        Case(tile, shape, "contiguous", dtype=torch.float32, window_size=(4, 0), heads=heads, head_groups=1),
        Case(tile, replace(shape, H_kv=1), dtype=torch.bfloat16, heads=heads, head_groups=1),
    ]
    mine, again = run_cases(cases), run_cases(cases)
    assert not any(e.watch.failure for e in on_copy_engines)
    for case, by_rank, others in zip(cases, mine, again, strict=True):
        assert_equals_oracle(case, by_rank)
        assert_same_bits(by_rank, others)


@pytest.mark.timeout(60)
def test_two_layers_share_memory(on_copy_engines: list[CopyEngine]) -> None:
    """The forward pass of the second layer comes before the backward pass of the first."""
    case = Case(Tile(2, 2), SHAPE, dtype=torch.float32)

    def on_rank(group: Any) -> list[Tensor]:
        mesh = ma.init_attention_mesh(group, tile=case.tile)
        seq = mesh.sequence(SHAPE.S)
        generator = torch.Generator().manual_seed(mesh.rank)
        x = torch.randn(1, seq.rows, 2, 8, generator=generator, requires_grad=True)
        once = ma.mesh_attention(x, x[:, :, :1], x[:, :, :1], seq, causal=True)
        assert isinstance(once, Tensor)
        twice = ma.mesh_attention(once, once[:, :, :1], x[:, :, :1], seq)
        assert isinstance(twice, Tensor)
        (gradient,) = torch.autograd.grad(twice.square().sum(), x)
        return [twice.detach(), gradient]

    mine = run_ranks(4, on_rank)
    assert run_ranks(4, on_rank)[0][1].equal(mine[0][1])
    assert not any(e.watch.failure for e in on_copy_engines)
    assert all(x.isfinite().all() for results in mine for x in results)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("tile", [t for ranks in (2, 4) for t in tiles(ranks)], ids=str)
def test_hops_that_masks_leave_out(tile: Tile, on_copy_engines: list[CopyEngine]) -> None:
    """Halves of exchanges that do not take place, rings that turn, axes that are direct; in turns, so that
    the slots are used with and without."""
    packed = Packed((0, 3, 8, 8, 16, 21))
    shape = replace(SHAPE, S_k=37)
    cases = [
        Case(tile, SHAPE, "contiguous", dtype=torch.float32, documents=packed),
        Case(tile, SHAPE, dtype=torch.float32),
        Case(tile, SHAPE, "contiguous", dtype=torch.float32),
        Case(tile, SHAPE, "contiguous", dtype=torch.float32, window_size=(4, 0)),
        Case(tile, SHAPE, "zigzag", dtype=torch.float32, causal=False, documents=packed),
        Case(tile, shape, "striped", dtype=torch.float32, kv_layout="contiguous"),
        Case(tile, replace(SHAPE, S=1, S_k=9), dtype=torch.float32, kv_layout="striped"),
    ]
    mine = run_cases(cases)
    assert not any(e.watch.failure for e in on_copy_engines)
    for case, by_rank in zip(cases, mine, strict=True):
        assert_equals_oracle(case, by_rank)
