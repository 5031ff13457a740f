"""Compile the portable kernels for GPU generations ahead of time, without a GPU; read spills from ptxas.

    python tests/kernels/compile_portable.py                   a set that covers kernels, sizes and targets
    python tests/kernels/compile_portable.py --all --jobs 8    every variant for every target
    python tests/kernels/compile_portable.py --all --targets 80 90

Exit status 1 if a kernel spills more than 64 bytes, needs more shared memory than its GPU has, has lost its
products, or ptxas says that it serialises them: any message C75xx but C7517 and C7519, which put in one wait
or arrive where an operand comes from registers (some releases do so for p, which a mask changes); or if, on
sm_90, ptxas forms the address of a tile from the same half twice; or if a loop writes to shared memory what
is made before it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
from machine_code import compiled_with_log, disassembled, stored_again, wrong_addresses
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from meshattn_kernels.portable import launch
from meshattn_kernels.portable.backward_dash import clear_rows_kernel, dash_kernel
from meshattn_kernels.portable.backward_two_loop import dkdv_kernel, dq_kernel
from meshattn_kernels.portable.finish import add_parts_kernel, row_terms_kernel, scale_and_cast_kernel
from meshattn_kernels.portable.forward import forward_kernel
from meshattn_kernels.portable.scores import row_words_kernel

TARGETS = (80, 86, 89, 90, 100, 120)
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB of a thread block
MAX_SPILLED_BYTES = 64
KERNELS: dict[launch.Pass, Any] = {
    "forward": forward_kernel,
    "dkdv": dkdv_kernel,
    "dq": dq_kernel,
    "dash": dash_kernel,
}
HEADS = 16
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
    softcap: bool = False
    dropout: bool = False
    aligned: bool = True

    def __str__(self) -> str:
        return (
            f"{self.which} {TYPES[self.dtype]} D{self.head_dim} D_v{self.head_dim_v} "
            f"{'band' if self.band else 'arrays'} {'first' if self.first else 'merge'}"
            f"{' softcap' if self.softcap else ''}{' dropout' if self.dropout else ''}"
            f"{'' if self.aligned else ' unaligned'}"
        )


@dataclass(frozen=True)
class Result:
    registers: int
    spilled_bytes: int
    shared_bytes: int
    products: bool
    messages: list[str]
    wrong_addresses: list[str]
    stored_again: list[str]
    seconds: float

    def failures(self, target: int, variant: Variant) -> list[str]:
        found = [line for line in self.messages if "(C7517)" not in line and "(C7519)" not in line]
        allowed = max_spilled_bytes(target, variant)
        found += [f"a wrong address: {line}" for line in self.wrong_addresses]
        found += [f"stored in every step: {line}" for line in self.stored_again]
        if not self.products:
            found.append("no matrix product is left in the code")
        if self.spilled_bytes > allowed:
            found.append(f"{self.spilled_bytes} bytes spilled, at most {allowed} allowed")
        if self.shared_bytes > SHARED_MEMORY[target] * 1024:
            found.append(
                f"{self.shared_bytes} bytes of shared memory, the GPU has {SHARED_MEMORY[target]} KiB"
            )
        return found


def max_spilled_bytes(target: int, variant: Variant) -> int:
    """64; 128 with dropout, whose random numbers take registers, which more warps or smaller tiles would have
    but for half the speed, and for a narrow head beside a wider one, whose tiles are widened and masked (see
    ``launch.padded_dims``); and exceptions for head sizes above 64 in 16 bits on sm_90, and for the forward
    that merges on sm_86, 89 and 120.

    Up to 128, dk, dv and the keys that are held fill the registers. What is spilled serves the loop of tiles
    that need a mask, which are few: 20 percent faster than tiles that leave registers free. Above 128, before
    its loop the forward that merges loads the sum of earlier blocks, half of all registers: it spills there,
    not in the loop, and tiles that do not reach 60 percent of the speed. dk and dv fill half of all registers
    too: some releases spill a little, and tiles that never do reach 75 percent of the speed.

    On sm_86, 89 and 120 ptxas stores what it spills before the loops, where the sum of earlier blocks comes
    into the layout of products, and loads it behind them: of some thirty to eighty such instructions, two at
    most are in a loop.
    """
    if not variant.aligned:
        return 1536  # every element has an address of its own, in a call that is slow anyway
    size = max(variant.head_dim, variant.head_dim_v)
    large = size > 128 and variant.dtype != torch.float32
    if target == 90 and 64 < size <= 128 and variant.which == "dkdv" and not variant.dropout:
        return 192
    if target == 90 and large and variant.which == "forward" and not variant.first:
        return 448
    if target == 90 and large and variant.which == "dkdv":
        return 128
    if target in (86, 89, 120) and size <= 64 and variant.which == "forward" and not variant.first:
        return 192
    widened = target == 90 and min(variant.head_dim, variant.head_dim_v) <= 32 < size
    return 128 if variant.dropout or widened else MAX_SPILLED_BYTES


def covering_set(target: int) -> Iterator[Variant]:
    """The share of one target in a set that has every kernel, type, head-size class and form of intervals:
    all targets together compile in a minute."""
    half, single = torch.bfloat16, torch.float32
    variants = [
        Variant(which, half, dim, dim, band=(n + m) % 2 == 0, first=(n + m) % 2 == 1)
        for n, which in enumerate(KERNELS)
        for m, dim in enumerate((64, 128, 256))
    ]
    variants += [Variant(which, single, 64, 64, band=True, first=which != "dq") for which in KERNELS]
    variants += [Variant("forward", torch.float16, 40, 24, band=True, first=False)]
    variants += [Variant("dkdv", torch.float16, 192, 128, band=True, first=True)]
    variants += [
        Variant(which, half, 64, 64, band=True, first=True, softcap=True, dropout=True)
        for which in ("dkdv", "forward")
    ]
    if target == 90:  # the address of a narrow tile, where ptxas may err
        yield Variant("dkdv", half, 16, 24, band=True, first=True, aligned=False)
    for n, variant in enumerate(variants):
        # One target further in every round, or some targets would see one head size only.
        if TARGETS[(n + n // len(TARGETS)) % len(TARGETS)] == target:
            yield variant


def all_variants() -> Iterator[Variant]:
    """float16 in one size: it differs from bfloat16 in the names of instructions alone."""
    sizes = [(16, 16), (40, 24), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
    for which, dtype, (head_dim, head_dim_v) in itertools.product(KERNELS, TYPES, sizes):
        if dtype == torch.float16 and (head_dim, head_dim_v) != (128, 128):
            continue
        for band, first in itertools.product((True, False), repeat=2):
            yield Variant(which, dtype, head_dim, head_dim_v, band, first)
        for softcap, dropout in ((True, False), (False, True), (True, True)):
            yield Variant(which, dtype, head_dim, head_dim_v, True, True, softcap, dropout)
        if dtype == torch.bfloat16:
            yield Variant(which, dtype, head_dim, head_dim_v, True, True, aligned=False)


def compile_variant(variant: Variant, target: int, tiles: launch.Tiling | None = None) -> Result:
    capability = divmod(target, 10)
    pad, pad_v = launch.padded_dims(variant.head_dim, variant.head_dim_v, capability)
    tiles = tiles or launch.tiling(variant.which, (pad, pad_v), variant.dtype, capability, variant.dropout)
    odd = 0 if variant.aligned else 3
    constants = {
        **{f"{x}_STRIDE": HEADS * variant.head_dim + odd for x in ("Q", "K")},
        **{f"{x}_STRIDE": HEADS * variant.head_dim_v + odd for x in ("V", "DO")},
        "STRIDE_UNIT": 8 if variant.aligned else 1,
        "D": variant.head_dim,
        "D_V": variant.head_dim_v,
        "PADDED_D": pad,
        "PADDED_D_V": pad_v,
        "Q_TILE": tiles.q_tile,
        "KV_TILE": tiles.kv_tile,
        "STAGES": tiles.stages,
        "SINGLE": variant.dtype == torch.float32,
        "HOIST": launch.hoists(variant.dtype, capability),
        "SOFTCAP": variant.softcap,
        "DROPOUT": variant.dropout,
        "BAND": variant.band,
        "FIRST": variant.first,
        "HELD": tiles.held,
        "FIRST_DQ": variant.first,
        "FIRST_DKV": variant.first,
        "ORDERED": True,
    }
    kernel = KERNELS[variant.which]
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {f"{name}_ptr": f"*{TYPES[variant.dtype]}" for name in ("q", "k", "v", "do")}
    return build(kernel, types, constants, tiles.warps, target, variant.aligned)


def build(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    target: int,
    aligned: bool = True,
) -> Result:
    """Arguments not in ``types``: tables are *i32, words *i64, other pointers *fp32, scales fp32, the rest
    i32. Pointers are multiples of 16; those in ``types`` only if ``aligned``."""
    tables = ("start", "end", "worker_start", "tasks", "steps", "counters", "tiles")
    defaults = dict.fromkeys(("factor", "scale", "cap_scale", "keep_scale"), "fp32") | {
        f"{name}_ptr": "*i32" for name in tables
    }
    defaults["words_ptr"] = "*i64"
    signature = {
        name: "constexpr"
        if name in constants
        else (defaults | types).get(name, "*fp32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    multiples = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name.endswith("_ptr") and (aligned or name not in types)
    }
    begun = time.perf_counter()
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=multiples)
    compiled, log = compiled_with_log(
        source,
        GPUTarget("cuda", target, 32),
        {"num_warps": warps, "launch_cooperative_grid": kernel is dash_kernel},
    )
    return Result(
        registers=int(re.findall(r"Used (\d+) registers", log)[-1]),
        spilled_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log)),
        shared_bytes=compiled.metadata.shared,
        products="mma" in compiled.asm["ptx"] or "fma.rn.f32" in compiled.asm["ptx"],
        messages=[line for line in log.splitlines() if "(C75" in line],
        wrong_addresses=wrong_addresses(disassembled(compiled.asm["cubin"])) if target == 90 else [],
        stored_again=stored_again(compiled.asm["ttgir"]),
        seconds=time.perf_counter() - begun,
    )


def compile_flat_kernels(target: int) -> None:
    """The kernels around them have nothing to spill: it is enough that they compile."""
    build(scale_and_cast_kernel, {"result_ptr": "*bf16"}, {"BLOCK": 4096}, 4, target)
    build(add_parts_kernel, {}, {"FIRST": False, "BLOCK": 4096}, 4, target)
    build(row_terms_kernel, {}, {"SINGLE": False, "BLOCK": 128}, 4, target)
    build(row_words_kernel, {}, {"BLOCK": 512}, 4, target)
    build(clear_rows_kernel, {}, {"Q_TILE": 64, "PADDED_WIDTH": 1024}, 4, target)


def compile_and_judge(job: tuple[int, Variant]) -> tuple[str, list[str]]:
    """A row of the table, and what is wrong."""
    target, variant = job
    result = compile_variant(variant, target)
    row = (
        f"| sm_{target} | {variant} | {result.registers} | {result.spilled_bytes} | {result.shared_bytes} | "
        f"{result.seconds:.1f} |"
    )
    return row, [f"sm_{target} {variant}: {failure}" for failure in result.failures(target, variant)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--targets", type=int, nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--all", action="store_true", help="every variant instead of the covering set")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    options = parser.parse_args()
    jobs = [
        (target, variant)
        for target in options.targets
        for variant in (all_variants() if options.all else covering_set(target))
    ]
    print(f"triton {triton.__version__}\n")
    print(
        "| target | variant | registers | spilled bytes | shared bytes | seconds |\n|---|---|---|---|---|---|"
    )
    failed = 0
    for target in options.targets:
        compile_flat_kernels(target)
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = map(compile_and_judge, jobs) if options.jobs == 1 else pool.map(compile_and_judge, jobs)
        for row, failures in results:
            print("\n".join((row, *failures)), flush=True)
            failed += bool(failures)
    print(f"\n{failed} of {len(jobs)} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
