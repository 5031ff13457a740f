"""Compile the portable kernels for GPU generations ahead of time, without a GPU; read spills from ptxas.

    python tests/kernels/compile_portable.py                   the covering set for every target
    python tests/kernels/compile_portable.py --all             every variant
    python tests/kernels/compile_portable.py --targets 80 90

Exit status 1 if a kernel spills more than 64 bytes (128 in float32, which has no tensor cores to feed),
needs more shared memory than its GPU has, has lost its products, or ptxas says that it serialises them:
C75xx, but for C7517 and C7519, which put in one wait or arrive where an accumulator starts from a loaded
row.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from meshattn_kernels.portable import launch
from meshattn_kernels.portable.backward_dash import clear_rows_kernel, dash_kernel
from meshattn_kernels.portable.backward_two_loop import dkdv_kernel, dq_kernel
from meshattn_kernels.portable.finish import add_parts_kernel, scale_and_cast_kernel
from meshattn_kernels.portable.forward import forward_kernel

TARGETS = (80, 86, 89, 90, 100, 120)
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB of a thread block
MAX_SPILLED_BYTES = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 128}
KERNELS: dict[launch.Pass, Any] = {
    "forward": forward_kernel,
    "dkdv": dkdv_kernel,
    "dq": dq_kernel,
    "dash": dash_kernel,
}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Variant:
    """One specialisation of one kernel."""

    which: launch.Pass
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    band: bool
    first: bool

    def __str__(self) -> str:
        return (
            f"{self.which} {TYPES[self.dtype]} D{self.head_dim} D_v{self.head_dim_v} "
            f"{'band' if self.band else 'arrays'} {'first' if self.first else 'merge'}"
        )


@dataclass(frozen=True)
class Result:
    registers: int
    spilled_bytes: int
    shared_bytes: int
    products: bool
    messages: list[str]
    seconds: float

    def failures(self, target: int, dtype: torch.dtype) -> list[str]:
        found = [line for line in self.messages if "(C7517)" not in line and "(C7519)" not in line]
        if not self.products:
            found.append("no matrix product is left in the code")
        if self.spilled_bytes > MAX_SPILLED_BYTES[dtype]:
            found.append(f"{self.spilled_bytes} bytes spilled, at most {MAX_SPILLED_BYTES[dtype]} allowed")
        if self.shared_bytes > SHARED_MEMORY[target] * 1024:
            found.append(
                f"{self.shared_bytes} bytes of shared memory, the GPU has {SHARED_MEMORY[target]} KiB"
            )
        return found


def covering_set() -> Iterator[Variant]:
    """Every pass, head-size class and form of intervals at least once: what a target compiles in a minute."""
    half = torch.bfloat16
    for which in KERNELS:
        yield Variant(which, half, 64, 64, band=False, first=False)
        yield Variant(which, half, 128, 128, band=True, first=True)
    yield Variant("forward", torch.float16, 192, 128, band=True, first=False)
    yield Variant("dkdv", torch.float32, 64, 64, band=True, first=True)


def all_variants() -> Iterator[Variant]:
    sizes = [(16, 16), (40, 24), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
    for which, dtype, (head_dim, head_dim_v) in itertools.product(KERNELS, TYPES, sizes):
        for band, first in itertools.product((True, False), repeat=2):
            yield Variant(which, dtype, head_dim, head_dim_v, band, first)


def compile_variant(variant: Variant, target: int, tiles: launch.Tiling | None = None) -> Result:
    pad, pad_v = launch.padded(variant.head_dim), launch.padded(variant.head_dim_v)
    capability = divmod(target, 10)
    tiles = tiles or launch.tiling(variant.which, max(pad, pad_v), variant.dtype, capability)
    constants = {
        "D": variant.head_dim,
        "D_V": variant.head_dim_v,
        "PADDED_D": pad,
        "PADDED_D_V": pad_v,
        "Q_TILE": tiles.q_tile,
        "KV_TILE": tiles.kv_tile,
        "STAGES": tiles.stages,
        "PRECISION": launch.precision(variant.dtype),
        "BAND": variant.band,
        "FIRST": variant.first,
        "FIRST_DQ": variant.first,
        "FIRST_DKV": variant.first,
        "ORDERED": True,
    }
    kernel = KERNELS[variant.which]
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {f"{name}_ptr": f"*{TYPES[variant.dtype]}" for name in ("q", "k", "v", "do")}
    return build(kernel, types, constants, tiles.warps, target)


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, target: int) -> Result:
    """Arguments not in ``types``: tables are *i32, other pointers *fp32, scale is fp32, the rest i32."""
    tables = ("start", "end", "worker_start", "tasks", "steps", "counters", "tiles")
    defaults = {"scale": "fp32"} | {f"{name}_ptr": "*i32" for name in tables}
    signature = {
        name: "constexpr"
        if name in constants
        else (defaults | types).get(name, "*fp32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name.endswith("_ptr") or "_stride_" in name
    }
    begun = time.perf_counter()
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", target, 32),
        options={"num_warps": warps, "launch_cooperative_grid": kernel is dash_kernel},
    )
    log = ptxas_log(compiled.asm["ptx"], target)
    return Result(
        registers=int(re.findall(r"Used (\d+) registers", log)[-1]),
        spilled_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log)),
        shared_bytes=compiled.metadata.shared,
        products="mma" in compiled.asm["ptx"] or "fma.rn.f32" in compiled.asm["ptx"],
        messages=[line for line in log.splitlines() if "(C75" in line],
        seconds=time.perf_counter() - begun,
    )


def compile_flat_kernels(target: int) -> None:
    """The kernels around them have nothing to spill: it is enough that they compile."""
    build(scale_and_cast_kernel, {"result_ptr": "*bf16"}, {"BLOCK": 1024}, 4, target)
    build(add_parts_kernel, {}, {"FIRST": False, "BLOCK": 1024}, 4, target)
    build(clear_rows_kernel, {}, {"Q_TILE": 64, "PADDED_WIDTH": 1024}, 4, target)


def ptxas_log(ptx: str, target: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        return subprocess.run(
            [
                get_ptxas(target).path,
                "-v",
                f"-arch={sm_arch_from_capability(target)}",
                path,
                "-o",
                "/dev/null",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--targets", type=int, nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--all", action="store_true", help="every variant instead of the covering set")
    options = parser.parse_args()
    failed = 0
    print(f"triton {triton.__version__}\n")
    print(
        "| target | variant | registers | spilled bytes | shared bytes | seconds |\n|---|---|---|---|---|---|"
    )
    for target in options.targets:
        compile_flat_kernels(target)
        for variant in all_variants() if options.all else covering_set():
            result = compile_variant(variant, target)
            print(
                f"| sm_{target} | {variant} | {result.registers} | {result.spilled_bytes} | "
                f"{result.shared_bytes} | {result.seconds:.1f} |",
                flush=True,
            )
            for failure in result.failures(target, variant.dtype):
                failed += 1
                print(f"sm_{target} {variant}: {failure}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
