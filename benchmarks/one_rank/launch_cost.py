"""What the host pays for a launch, and whether launches can be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from harness import Record
from one_rank.attention_cases import Case
from one_rank.contenders import Contender, Ours, make_inputs, our_kernel
from one_rank.peers import make_peer
from one_rank.timing import host_us

WANTED_US = 40.0
KERNELS = ("hopper", "triton", "triton-dash")


def launch_records(benchmark: str, head_dims: Sequence[int]) -> Iterator[Record]:
    """Microseconds of host time a call, and 1 or 0 for graphs that give the bits of ordinary launches."""
    for head_dim in head_dims:
        case = Case(head_dim, True, 512, 1, 4, 4)
        for name, run in _calls(case):
            spent = host_us(run)
            print(f"{case} {name}: {spent:.1f} us", flush=True)
            yield Record(benchmark, str(case), f"{name} host us", spent, "wanted at most", spent / WANTED_US)
        for kernel in KERNELS:
            try:
                same = float(_graph_equals_launches(kernel, case))
            except RuntimeError as reason:
                print(f"{case} {kernel}: cannot be captured: {reason}", flush=True)
                same = 0.0
            print(f"{case} {kernel}: graph of forward and backward equals launches: {same:.0f}", flush=True)
            yield Record(benchmark, str(case), f"{kernel}: graph gives the same bits", same)


def _calls(case: Case) -> Iterator[tuple[str, Callable[[], object]]]:
    inputs = make_inputs(case, torch.device("cuda"), torch.bfloat16)
    for kernel in KERNELS:
        ours = Ours(our_kernel(kernel), case, inputs)
        for what, run in ours.passes.items():
            yield f"{kernel}: {what}", run
        yield f"{kernel}: delta", ours.row_delta
        yield f"{kernel}: conversion of dq, dk, dv", ours.finish_gradients
    try:
        peer: Contender = make_peer("fa4-deterministic", case, inputs)
    except RuntimeError:
        return
    for what, run in peer.passes.items():
        yield f"fa4-deterministic: {what}", run


def _graph_equals_launches(kernel: str, case: Case) -> bool:
    """Capture a forward and a whole backward, then replay them with other inputs."""
    inputs = make_inputs(case, torch.device("cuda"), torch.bfloat16)
    ours = Ours(our_kernel(kernel), case, inputs)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours.step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        captured = ours.step()
    for mine, other in zip(
        inputs, make_inputs(case, torch.device("cuda"), torch.bfloat16, seed=2), strict=True
    ):
        mine.copy_(other)
    graph.replay()
    replayed = [x.clone() for x in captured]
    launched = ours.step()
    return all(torch.equal(a, b) for a, b in zip(replayed, launched, strict=True))
