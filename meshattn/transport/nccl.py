"""NCCL beside kernels that take the whole GPU: a head start, and an end for exchanges that stand still."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import dlpack

from meshattn.transport.cuda_driver import enter_watching_thread
from meshattn.transport.watch import Watch, end_process, outlasting

_TELLING = 0.2  # seconds until NCCL's kernels know of the abort
_HEAD_START = 20_000  # clock cycles, about 10 us: more than twice what NCCL's kernel lags behind
_SUSPICIOUS = 5.0  # seconds for the end of a communicator
_HELD_UP = (
    "meshattn: destroy_process_group() waits for the end of CUDA graphs that captured calls on a mesh: "
    "delete them, or call their reset(), and close the mesh before it"
)


class NcclGroup:
    """What NCCL needs beside sends and receives: a head start, and somebody who sees that it stands still.

    Its kernel needs 16 whole multiprocessors. If an attention kernel, which takes all, starts first, then
    NCCL's begins when that one ends, and nothing overlaps. Both wait for the same event and NCCL's for one
    more, so it loses the race unless the current stream dawdles a little.

    Args:
        group: a process group that carries exchanges alone.
        device: whose tensors it exchanges.
        timeout: seconds that an exchange may take once nothing of this rank holds it up.
    """

    MULTIPROCESSORS: ClassVar[int] = 16  # of its send and receive kernel

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self._device = device
        # Who destroys one of these waits for its communicator. PyTorch takes None for all.
        self._ends_with = (None, group, dist.group.WORLD)
        self._backend = group._get_backend(device)
        # PyTorch's own watch would end the process, and name neither step nor transfer.
        self._backend._set_default_timeout(timedelta(seconds=outlasting(timeout)))
        self._watch = Watch(
            timeout, lambda: enter_watching_thread(device), end_process, look_around=self._make_way
        )
        self._aborted = False
        self._started = False
        self.captured = False  # CUDA graphs of the user's know the communicator
        self._held_up_since: float | None = None
        self._forget: Callable[[], None] | None = None  # drops the graphs of the mesh
        self._recorded: list[Callable[[], str]] | None = None  # exchanges, while they go into one

    def record(self, forget: Callable[[], None]) -> None:
        """Exchanges that follow go into a graph of the mesh, which ``forget`` drops with all others."""
        self._forget, self._recorded = forget, []

    def recorded(self) -> Sequence[Callable[[], str]]:
        """What to say of each of them if it does not end."""
        assert self._recorded is not None
        recorded, self._recorded = self._recorded, None
        return recorded

    def replay(self, recorded: Sequence[Callable[[], str]]) -> Replaying:
        """Called before a graph with these exchanges is launched on the current stream."""
        begun = self._recorded_event()

        def where() -> str:
            more = len(recorded) - 1
            return recorded[0]() + (f", or one of the {more} behind it in this pass" if more else "")

        return Replaying(lambda: self.follow(where, begun))

    def begin(self) -> torch.cuda.Event | None:
        """Called before the sends and receives of an exchange."""
        self._watch.check()
        self._started = True
        if self._recorded is not None:
            return None
        if torch.cuda.is_current_stream_capturing():
            self.captured = True
            return None  # a captured exchange runs later, and often
        return self._recorded_event()

    def note(self, where: Callable[[], str]) -> None:
        """An exchange has been started."""
        if self._recorded is not None:
            self._recorded.append(where)

    def follow(self, where: Callable[[], str], begun: torch.cuda.Event) -> None:
        """Called when the current stream waits for them: see that they end. Their buffers are not kept."""
        done = self._recorded_event()
        self._watch.add(_Exchange(where, begun, done, self._abort))

    def _recorded_event(self) -> torch.cuda.Event:
        event: Any = torch.cuda.Event
        recorded: torch.cuda.Event = event()
        # Without a device, PyTorch first looks for one: longer than all the rest takes.
        recorded.record(torch.cuda.current_stream(self._device))
        return recorded

    def _abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            # It first tells its kernels to end, and then waits for the end of graphs that know it, which in
            # turn do not end before their kernels do.
            aborting = threading.Thread(target=self._backend.abort, name="meshattn-abort", daemon=True)
            aborting.start()
            if self._forget is not None:
                aborting.join(_TELLING)
                self._forget()

    def _make_way(self) -> None:
        """Who destroys process groups before the mesh is closed would wait for the end of its graphs without
        end: NCCL waits in a call that has let go of the interpreter, and PyTorch tells nobody before."""
        if not (self._forget or self.captured) or not self._is_destroyed():
            self._held_up_since = None
            return
        if self._forget is not None:
            self._forget()
            self._forget = None
        self._held_up_since = self._held_up_since or time.monotonic()
        if self.captured and time.monotonic() - self._held_up_since > _SUSPICIOUS:
            self.captured = False  # once
            print(_HELD_UP, file=sys.stderr, flush=True)

    def _is_destroyed(self) -> bool:
        return any(
            any(frame.f_locals.get("group") is one for one in self._ends_with)
            for frame in running(dist.destroy_process_group)
        )

    def give_head_start(self) -> None:
        """Hold up the current stream, once, after exchanges have been started."""
        if self._started:
            self._started = False
            dawdle: Any = torch.cuda._sleep
            dawdle(_HEAD_START)

    def check(self) -> None:
        """TransportError if an exchange is known to have failed."""
        self._watch.check()

    def close(self) -> None:
        """No more exchanges."""
        self._watch.stop()


def running(function: Callable[..., object]) -> Iterator[FrameType]:
    """Its frames in all threads."""
    code = getattr(inspect.unwrap(function), "__code__", None)  # somebody's replacement may have none
    for frame in sys._current_frames().values():
        inner: FrameType | None = frame
        while inner is not None:
            if inner.f_code is code:
                yield inner
            inner = inner.f_back


def may_record() -> bool:
    """Whether exchanges may go into graphs of the mesh.

    NCCL registers the buffers of captured sends and receives, unless the environment says otherwise, and
    demands that both sides do; but ranks record when the memory of each recurs. It reads the variable when
    something is captured for the first time.
    """
    return os.environ.setdefault("NCCL_GRAPH_REGISTER", "0") == "0"


def unrecorded(buffer: Tensor) -> Tensor:
    """The same memory as a tensor that PyTorch's allocator does not know.

    Of whatever is sent or received, PyTorch tells the allocator that NCCL's stream uses it. Memory that is
    freed then waits until the GPU has come that far before it is used again, and a host that runs ahead takes
    new memory for every pass. Who keeps the buffers until the current stream waits for the exchange needs
    none of that: whatever gets their memory next comes behind it on that stream.
    """
    if torch.cuda.get_allocator_backend() != "native":  # others do not pass over what they do not know
        return buffer
    plain: Any = dlpack
    same: Tensor = plain.from_dlpack(plain.to_dlpack(buffer))
    return same


@dataclass(frozen=True)
class Replaying:
    """A graph that is about to be launched."""

    enqueued: Callable[[], None]


@dataclass(frozen=True)
class _Exchange:
    """What the watch looks at."""

    where: Callable[[], str]
    begun: Any  # event before it
    done: Any  # event behind it
    let_go: Callable[[], None]

    @property
    def failure(self) -> str:
        return f"{self.where()} did not end"

    def has_begun(self) -> bool:
        return bool(self.begun.query())

    def is_done(self) -> bool:
        return bool(self.done.query())

    def recycle(self) -> None:
        pass
