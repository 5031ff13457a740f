"""Bytes of exchanges by copy engines under random delays, and what happens to them without grants."""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist

import meshattn as ma
from gpu.rank_talk import LONGEST_DELAY, say
from meshattn.plan import Assignment, Tile, tiles
from meshattn.transport.base import Message, Transport
from meshattn.transport.exchange import Place

STEPS = 200
NBYTES = 4 * 2**20


def race(options: argparse.Namespace) -> None:
    """No wrong byte with 1 to 3 slots on rows and columns; some without grants."""
    ranks = dist.get_world_size()
    square = next(tile for tile in reversed(tiles(ranks)) if tile.a <= tile.b)
    mesh = ma.init_attention_mesh(tile=square, transport="symmetric", timeout=options.timeout)
    say(mesh.describe())
    device = torch.device("cuda", torch.cuda.current_device())
    for slots in (1, 2, 3):
        begin = time.monotonic()
        wrong = _race(mesh, mesh.transports(square, device), square, slots, STEPS)
        mesh.check()
        dist.barrier()
        say(f"{slots} slots: {wrong} wrong words in {STEPS} steps, {time.monotonic() - begin:.1f} s")
        assert wrong == 0, f"{wrong} wrong words with {slots} slots"
    mesh.close()
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":  # where a standstill ends the process
        _control(square)


def _control(tile: Tile) -> None:
    """Without waiting for grants: wrong bytes, or a standstill that the watch ends."""
    mesh = ma.init_attention_mesh(tile=tile, transport="symmetric", timeout=2.0)
    device = torch.device("cuda", torch.cuda.current_device())
    engine_ = mesh.connection.engine
    assert engine_ is not None
    wait, of, grants = engine_.ops.wait, Place.of, set[int]()

    def placed(*args: Any) -> Place:
        place = of(*args)
        grants.add(place.granted)
        return place

    engine_.ops.wait = lambda stream, address, value: address in grants or wait(stream, address, value)  # type: ignore[method-assign]
    Place.of = placed  # type: ignore[method-assign]
    spoilt = 0
    try:
        spoilt = _race(mesh, mesh.transports(tile, device), tile, 1, 50)
        say(f"without grants: {spoilt} wrong words")
        mesh.check()
    except ma.TransportError as error:
        say(f"without grants: {error}")
        spoilt = max(spoilt, 1)
    Place.of = of  # type: ignore[method-assign]
    torch.cuda.synchronize()
    seen = torch.tensor([spoilt])
    dist.all_reduce(seen)
    mesh.close()  # before somebody captures a graph: who drops it leaves its memory to the garbage collector
    assert int(seen) > 0, "the check sees nothing"


def _race(
    mesh: ma.AttentionMesh, transports: dict[str, Transport], tile: Tile, slots: int, steps: int
) -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    engine_ = mesh.connection.engine
    assert engine_ is not None
    comm = torch.cuda.ExternalStream(engine_.ops.comm_stream)
    rings = {axis: mesh._ring(Assignment(tile), axis) for axis in ("row", "col") if tile.size(axis) > 1}  # type: ignore[arg-type]
    chance = random.Random(mesh.rank)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    sends = {axis: [torch.empty(NBYTES, dtype=torch.uint8, device=device) for _ in "ab"] for axis in rings}
    received = {axis: transports[axis].buffers(axis, "inward", NBYTES, slots, device) for axis in rings}
    for step in range(steps):
        handles = {}
        for number, (axis, ring) in enumerate(rings.items()):
            torch.cuda._sleep(chance.randrange(LONGEST_DELAY))
            send = sends[axis][step % 2]
            send.view(torch.int32).fill_(mesh.rank * 100_000 + step * 10 + number)
            source, to = ring[mesh.rank], ring.index(mesh.rank)
            slot = step % slots
            message = Message("forward", axis, "inward", f"race {axis} {step}", to, source, slot)
            handles[axis] = transports[axis].start(message, [send], [received[axis][slot]])
            with torch.cuda.stream(comm):
                torch.cuda._sleep(chance.randrange(LONGEST_DELAY))
        for number, (axis, ring) in enumerate(rings.items()):
            torch.cuda._sleep(chance.randrange(LONGEST_DELAY))
            handles[axis].wait()
            got = received[axis][step % slots]
            wrong += (got.view(torch.int32) != ring[mesh.rank] * 100_000 + step * 10 + number).sum()
            got.fill_(255)
            handles[axis].release()
    torch.cuda.synchronize()
    return int(wrong)
