"""By its memory a pass is found again: all that it reads and writes is there, scratch aside."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshattn as ma
from meshattn import calls, engine
from meshattn.mesh import AttentionMesh
from meshattn.packing import Packing, Views
from meshattn.recording import Work
from meshattn.testing import run_ranks
from meshattn.transport.base import Message, Transport

B, S, H, H_KV, D = 2, 12, 4, 2, 16
Place = tuple[int, int]  # address and size of a storage


def _place(tensor: Tensor) -> Place:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class _Touched(TorchDispatchMode):
    """The memory that operations are given which they have not made themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.given: set[Place] = set()
        self._made: dict[Place, Tensor] = {}  # kept, so that their memory is no other one's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() and x.numel()]
        self.given |= {_place(x) for x in leaves} - self._made.keys()
        results = func(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, Tensor) and _place(x) not in self.given:
                self._made[_place(x)] = x
        return results


class _Looking:
    """In place of a recorder: executes passes, and looks at what they touch."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []
        self.given: list[set[Place]] = []  # by pass
        self.moved: list[set[int]] = []

    def run(self, program: Any, work: Work, execute: Callable[[], None]) -> None:
        self.keys.append(work.memory())
        self.moved.append(set(work.moved()))
        with _Touched() as touched:
            execute()
        self.given.append(touched.given)


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> dict[int, _Looking]:
    """Of every rank that makes a call."""
    made: dict[int, _Looking] = {}

    def recorder(mesh: AttentionMesh, device: torch.device) -> _Looking:
        return made.setdefault(mesh.rank, _Looking())

    monkeypatch.setattr(AttentionMesh, "recorder", recorder)
    monkeypatch.setattr(calls, "_can_be_recorded", lambda call: True)
    return made


def _attend(tile: str, what: str) -> int:
    """Both passes of a call on every rank; how many these are."""
    ranks = {"1x1": 1, "1x3": 3, "2x2": 4}[tile]
    dtype = torch.bfloat16 if what == "rounded" else torch.float32

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, tile=tile)
        sizes = [(B, S // ranks, heads, D) for heads in (H, H_KV, H_KV, H)]
        q, k, v, do = (torch.randn(size, dtype=dtype) for size in sizes)
        if what == "strided":
            q, k, v, do = (x.mT.contiguous().mT for x in (q, k, v, do))
        for x in (q, k, v):
            x.requires_grad_()
        sinks = torch.randn(H) if what == "sinks" else None
        reduced = torch.bfloat16 if what == "rounded" else None
        out, lse = ma.mesh_attention(
            q, k, v, mesh.sequence(S), causal=True, sinks=sinks, reduce_dtype=reduced, return_lse=True
        )
        ends = (out, lse) if what == "lse" else (out,)
        torch.autograd.backward(ends, (do, torch.ones_like(lse))[: len(ends)])
        mesh.close()

    run_ranks(ranks, on_rank)
    return ranks


@pytest.mark.parametrize("what", ["plain", "sinks", "lse", "rounded", "strided"])
@pytest.mark.parametrize("tile", ["1x1", "1x3", "2x2"])
def test_all_that_a_pass_touches_is_in_its_memory(tile: str, what: str, looking: dict[int, _Looking]) -> None:
    """Of received memory ranks see that of each other: those that send are the threads of this process."""
    ranks = _attend(tile, what)
    assert len(looking) == ranks
    for number in range(2):  # forward, backward
        passes = [(each.keys[number], each.given[number]) for each in looking.values()]
        addresses = [x for key, _ in passes for x in tree_leaves(key) if isinstance(x, int)]
        for begin, nbytes in set.union(*(given for _, given in passes)):
            assert any(begin <= address < begin + nbytes for address in addresses), f"{nbytes} bytes"


def test_other_strides_at_the_same_address_are_other_memory(looking: dict[int, _Looking]) -> None:
    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group)
        seq = mesh.sequence(H)  # as many rows as heads
        x = torch.randn(B, H, H, D)
        with torch.no_grad():
            for q in (x, x.transpose(1, 2)):
                ma.mesh_attention(q, x, x, seq)
        mesh.close()

    run_ranks(1, on_rank)
    first, second = ([y for y in tree_leaves(key)] for key in looking[0].keys)
    assert first[0] == second[0] and first[1:5] != second[1:5]


@pytest.mark.parametrize("what", ["plain", "rounded"])
@pytest.mark.parametrize("tile", ["1x3", "2x2"])
def test_all_that_is_exchanged_is_told(
    tile: str, what: str, looking: dict[int, _Looking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies and NCCL know allocations, whose numbers are looked up."""
    exchanged: dict[str, set[int]] = {"forward": set(), "backward": set()}
    start = Transport.start

    def spy(self: Transport, message: Message, send: Any, recv: Any) -> Any:
        exchanged[message.phase] |= {tensor.data_ptr() for tensor in (*(send or ()), *(recv or ()))}
        return start(self, message, send, recv)

    monkeypatch.setattr(Transport, "start", spy)
    _attend(tile, what)
    for number, phase in enumerate(("forward", "backward")):
        moved = set.union(*(each.moved[number] for each in looking.values()))
        begins = {begin for each in looking.values() for begin, _ in each.given[number]}
        assert exchanged[phase] and exchanged[phase] & begins <= moved
        assert all(any(at <= x < at + 2**16 for at in moved) for x in exchanged[phase])


@pytest.mark.parametrize("recorded", [True, False])
def test_results_take_memory_behind_the_blocks_unless_the_pass_may_be_recorded(
    recorded: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels keep memory while they work on a block; the results need not be there at the same time."""
    if recorded:
        request.getfixturevalue("looking")
    events: list[str] = []
    finish, tensors = engine._Pass.finish, Packing.tensors

    def finishes(self: engine._Pass) -> None:
        events.append("behind the blocks")
        finish(self)

    def makes(self: Packing, device: torch.device) -> Views:
        made = tensors(self, device)
        if any(x.dtype == torch.bfloat16 for x in made.values()):  # accumulators are float32
            events.append("results")
        return made

    monkeypatch.setattr(engine._Pass, "finish", finishes)
    monkeypatch.setattr(Packing, "tensors", makes)

    def on_rank(group: Any) -> None:
        x = torch.randn(B, S, H, D, dtype=torch.bfloat16, requires_grad=True)
        out = ma.mesh_attention(x, x, x, ma.init_attention_mesh(group).sequence(S))
        assert isinstance(out, Tensor)
        out.sum().backward()

    run_ranks(1, on_rank)
    forward, backward = ["results"], ["results", "results"]  # of out; of dq and of dkv
    for made in (forward, backward):
        now, events = events[: len(made) + 1], events[len(made) + 1 :]
        assert now == ([*made, "behind the blocks"] if recorded else ["behind the blocks", *made])
    assert not events
