"""NVIDIA's compute-sanitizer over small shapes of our kernels.

    python benchmarks/sanitize.py                           every tool that suits the kernel
    python benchmarks/sanitize.py --tool memcheck --kernel hopper

Needs compute-sanitizer on PATH. Every tensor gets memory of its own, so that a step beyond one is seen.

racecheck does not suit the Hopper kernels: it takes for races the words in shared memory by which Triton's
own code hands work to the parts of a warp-specialised kernel. It reports these (a kernel's first line and its
``warp_specialize``), and nothing else, on every run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from harness import REPORTS, Machine, Record
from one_rank.attention_cases import LONG, PACKED, Case
from one_rank.contenders import Ours, make_inputs, our_kernel
from one_rank.kernel_report import publish

BENCHMARK = "sanitizer"
CLEAN = "clean"
TOOLS = ("memcheck", "racecheck", "synccheck")
SUITABLE = {"hopper": ("memcheck", "synccheck"), "triton": TOOLS, "triton-dash": TOOLS}
KERNELS = tuple(SUITABLE)
FOUND_ERRORS = 9
CASES = (
    Case(128, True, 300, 1, 2, 1),
    Case(64, True, 300, 1, 2, 1),
    Case(128, False, 129, 2, 2, 2, 257),
    Case(64, False, 129, 2, 2, 2, 257),
    Case(80, True, 200, 1, 1, 1),
    Case(128, False, 1450, 1, 13, 13, 1408),  # the last tasks in pieces
    Case(128, True, 1201, 1, 4, 2, documents=PACKED),
    Case(64, True, 1201, 1, 3, 3, documents=LONG),
    Case(128, True, 517, 1, 3, 1, window=190),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", choices=TOOLS, nargs="+", help="default: all that suit")
    parser.add_argument("--kernel", choices=KERNELS, nargs="+", default=KERNELS)
    parser.add_argument("--seconds", type=int, default=600, help="limit of one tool over one kernel")
    parser.add_argument("--commit", help="name of the code, where it is no git checkout")
    parser.add_argument("--out", default=str(REPORTS), help="folder of records and report")
    parser.add_argument("--bare", action="store_true", help="run the kernels without a tool")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device is here")
    if options.bare:
        _run(options.kernel)
        return
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    _run(options.kernel)  # compiles, so that the tool has less to look at
    verdicts = {
        (tool, kernel): _sanitized(tool, kernel, options.seconds)
        for kernel in options.kernel
        for tool in options.tool or SUITABLE[kernel]
    }
    records = [
        Record(
            BENCHMARK,
            tool,
            f"{kernel}: {verdict}",
            float(verdict == CLEAN),
            "wanted clean",
            float(verdict == CLEAN),
        )
        for (tool, kernel), verdict in verdicts.items()
    ]
    for record in records:
        print(f"{record.case} {record.metric}")
    machine = Machine.here(commit=options.commit)
    print(f"written to {publish(BENCHMARK, [(machine, records)], Path(options.out))}")
    if not all(record.ours for record in records):
        sys.exit("some results are not as wanted")


def _sanitized(tool: str, kernel: str, seconds: int) -> str:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND_ERRORS)]
    command += [sys.executable, __file__, "--bare", "--kernel", kernel]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        code = subprocess.run(command, env=environment, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return f"not finished within {seconds} s"
    return {0: CLEAN, FOUND_ERRORS: "found errors"}.get(code, f"ended with code {code}")


def _run(kernels: Sequence[str]) -> None:
    """Forward, merging, backward and adding, over every case."""
    for kernel in kernels:
        for case in CASES:
            ours = Ours(our_kernel(kernel), case, make_inputs(case, torch.device("cuda"), torch.bfloat16))
            ours.results()
            ours.doubled_results()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
