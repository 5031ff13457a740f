"""Compile the Hopper kernels for sm_90 ahead of time, without a GPU, and read what ptxas says.

    python tests/kernels/compile_hopper.py          the covering set
    python tests/kernels/compile_hopper.py --all    every variant

A variant fails if it spills more than 64 bytes, if it needs more shared memory than a thread block can have,
or if ptxas serialises tensor-core products: any message C75xx but C7517, and more of that than the backward
has on purpose. C7517 is one added wait for a pending product whose accumulator starts at a loaded row; C7510,
C7512 and C7514 mean that all products run one after the other. Its machine code is looked through, too
(machine_code.py)."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.experimental.gluon.language as gl
from machine_code import compiled_with_log, disassembled, wrong_addresses
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from meshattn_kernels.hopper import bind, plans
from meshattn_kernels.hopper.backward import backward_kernel
from meshattn_kernels.hopper.forward import forward_kernel
from meshattn_kernels.hopper.join import join_parts_kernel
from meshattn_kernels.hopper.ordered_add import segment_of
from meshattn_kernels.hopper.plans import ARRAY, BAND, FULL, KV_TILE, head_tile
from meshattn_kernels.hopper.prepare import (
    add_parts_kernel,
    finish_dkv_kernel,
    finish_dq_kernel,
    prepare_kernel,
)

TARGET = GPUTarget("cuda", 90, 32)
MAX_SPILLED_BYTES = 64
MAX_ADDED_WAITS = 3
GLUON_TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
MASKS = {FULL: "full", BAND: "band", ARRAY: "array"}
INT_POINTERS = (
    "start_ptr", "end_ptr", "worker_start", "tasks", "steps", "counters", "mailbox", "joins",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One specialisation of one kernel: ``types`` of its pointers and descriptors, and its constants."""

    name: str
    function: Any
    num_warps: int
    types: dict[str, str]
    constants: dict[str, Any] = field(hash=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Result:
    registers: int
    spilled_bytes: int
    shared_bytes: int
    wrong_addresses: list[str]
    messages: list[str]
    seconds: float

    def failures(self) -> list[str]:
        found = [line for line in self.messages if "(C7517)" not in line]
        added = len(self.messages) - len(found)
        if added > MAX_ADDED_WAITS:
            found.append(f"{added} added waits (C7517), at most {MAX_ADDED_WAITS} allowed")
        if self.spilled_bytes > MAX_SPILLED_BYTES:
            found.append(f"{self.spilled_bytes} bytes spilled, at most {MAX_SPILLED_BYTES} allowed")
        found += [f"a wrong address: {line}" for line in self.wrong_addresses]
        if self.shared_bytes > plans.SHARED_BYTES:
            found.append(f"{self.shared_bytes} bytes of shared memory, there are {plans.SHARED_BYTES}")
        return found


def tile(dtype: str, *block: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), GLUON_TYPES[dtype])
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def forward(
    head_dim: int,
    mask: int,
    *,
    first: bool,
    finished: bool = False,
    parts: bool = False,
    head_dim_v: int | None = None,
    dtype: str = "bf16",
) -> Variant:
    head_dim_v = head_dim_v or head_dim
    d_tile, dv_tile = head_tile(head_dim), head_tile(head_dim_v)
    tiling = plans._FORWARD[max(d_tile, dv_tile), mask]
    staged = not first and plans.has_room_for_out(tiling, d_tile, dv_tile)
    types = {
        "q_desc": tile(dtype, 1, 1, 64, d_tile),
        "k_desc": tile(dtype, 1, 1, KV_TILE, d_tile),
        "v_desc": tile(dtype, 1, 1, KV_TILE, dv_tile),
        "earlier_desc": tile("fp32", 1, 1, 64, dv_tile) if staged else tile(dtype, 1, 1, KV_TILE, d_tile),
        "out_desc": tile(dtype if finished else "fp32", 1, 1, 64, dv_tile),
        "out_ptr": f"*{dtype}" if finished else "*fp32",
    }
    constants = {
        "CONSUMERS": tiling.consumers, "KV_TILE": KV_TILE, "D_TILE": d_tile, "DV_TILE": dv_tile,
        "HEAD_DIM_V": head_dim_v, "STAGES": tiling.stages, "CARRY_PROBS": tiling.carry_probs,
        "TOGETHER": tiling.together, "MASK": mask, "FIRST": first, "PARTS": parts,
        "STAGED": staged, "OUT_BY_TMA": finished and plans.sends_out(tiling, d_tile, dv_tile),
    }  # fmt: skip
    name = f"forward {dtype} D{head_dim} D_v{head_dim_v} {MASKS[mask]} {'first' if first else 'merge'}"
    name += " parts" * parts + " finished" * finished
    return Variant(name, forward_kernel, 4, types, constants)


def backward(
    head_dim: int,
    mask: int,
    *,
    first_dq: bool = True,
    first_dkv: bool = True,
    grouped: bool = False,
    parts: bool = False,
    ordered: bool = True,
    finished: bool = False,
    head_dim_v: int | None = None,
    dtype: str = "bf16",
) -> Variant:
    head_dim_v = head_dim_v or head_dim
    d_tile, dv_tile = bind.backward_tiles(head_dim, head_dim_v)
    q_tile = 64 if max(d_tile, dv_tile) == 128 else 128
    segment = segment_of(head_dim)
    by_tma = finished and plans.sends_dkv(head_dim, head_dim_v, mask, grouped=grouped, parts=parts)
    types = {
        "q_desc": tile(dtype, 1, 1, q_tile, d_tile),
        "do_desc": tile(dtype, 1, 1, q_tile, dv_tile),
        "k_desc": tile(dtype, 1, 1, KV_TILE, d_tile),
        "v_desc": tile(dtype, 1, 1, KV_TILE, dv_tile),
        "dq_desc": tile("fp32", 1, 64, 64 // segment, segment),
        "init_desc": tile("fp32", q_tile),
        "dk_desc": tile(dtype if finished else "fp32", 1, 1, 64, d_tile),
        "dv_desc": tile(dtype if finished else "fp32", 1, 1, 64, dv_tile),
        "dk_ptr": f"*{dtype}" if finished else "*fp32",
        "dv_ptr": f"*{dtype}" if finished else "*fp32",
    }
    constants = {
        "Q_TILE": q_tile, "KV_TILE": KV_TILE, "D_TILE": d_tile, "DV_TILE": dv_tile, "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v, "STAGES": bind.STAGES, "Q_HALVES": q_tile // 64, "MASK": mask,
        "FIRST_DQ": first_dq, "FIRST_DKV": first_dkv, "GROUPED": grouped, "PARTS": parts,
        "ORDERED": ordered, "DKV_BY_TMA": by_tma,
    }  # fmt: skip
    traits = {
        "add_dq": not first_dq,
        "add_dkv": not first_dkv,
        "grouped": grouped,
        "parts": parts,
        "finished": finished,
    }
    traits["unordered"] = not ordered
    named = " ".join(trait for trait, here in traits.items() if here)
    name = f"backward {dtype} D{head_dim} D_v{head_dim_v} {MASKS[mask]} {named}"
    return Variant(name, backward_kernel, 4, types, constants)


def small_kernels() -> Iterator[Variant]:
    yield Variant("prepare", prepare_kernel, 4, {}, {"BLOCK": bind.PREPARE_BLOCK})
    types = {"dq_ptr": "*bf16", "dk_ptr": "*bf16", "dv_ptr": "*bf16"}
    for head_dim in (48, 64, 128):
        constants = {
            "HEAD_DIM": head_dim, "D_TILE": head_tile(head_dim), "SEGMENT": segment_of(head_dim),
            "ROWS": bind.FINISH_ROWS, "PLUS": head_dim == 64,
        }  # fmt: skip
        yield Variant(f"finish dq D{head_dim}", finish_dq_kernel, 4, types, constants)
    constants = {
        "HEAD_DIM": 96, "HEAD_DIM_V": 64, "D_TILE": 128, "DV_TILE": 64, "KV_TILE": KV_TILE,
        "ROWS": bind.PART_ROWS, "FIRST": False,
    }  # fmt: skip
    yield Variant("add parts", add_parts_kernel, 4, {"num_parts": "*i32"}, constants)
    finished = {"num_parts": "*i32", "dk_ptr": "*bf16", "dv_ptr": "*bf16"}
    yield Variant("add parts finished", add_parts_kernel, 4, finished, {**constants, "FIRST": True})
    constants = {"BLOCK": 192, "ROWS": bind.JOIN_ROWS, "HEAD_DIM_V": 96, "DV_TILE": 128, "FIRST": False}
    yield Variant("join parts", join_parts_kernel, 4, {}, constants)
    constants = {"BLOCK": 128, "ROWS": bind.JOIN_ROWS, "HEAD_DIM_V": 128, "DV_TILE": 128, "FIRST": True}
    yield Variant("join parts finished", join_parts_kernel, 4, {"out_ptr": "*bf16"}, constants)
    for plus in (False, True):
        constants = {"BLOCK": bind.FINISH_BLOCK, "PLUS": plus}
        yield Variant(f"finish dkv{' plus' * plus}", finish_dkv_kernel, 4, types, constants)


def covering_set() -> Iterator[Variant]:
    """Every kernel, head tile, kind of mask and option at least once, in about a minute."""
    yield from small_kernels()
    yield forward(128, FULL, first=True)
    yield forward(128, BAND, first=False)
    yield forward(128, BAND, first=True, finished=True)
    yield forward(64, BAND, first=True, head_dim_v=128, finished=True)
    yield forward(64, ARRAY, first=True)
    yield forward(64, FULL, first=False, dtype="fp16")
    yield forward(96, ARRAY, first=False, head_dim_v=64)
    yield forward(80, BAND, first=True, finished=True)
    yield forward(128, FULL, first=True, parts=True, finished=True)
    yield forward(64, BAND, first=False, parts=True)
    yield backward(128, FULL)
    yield backward(128, FULL, parts=True, finished=True)
    yield backward(64, BAND, finished=True)
    yield backward(128, BAND, first_dq=False, first_dkv=False, grouped=True, parts=True)
    yield backward(128, ARRAY, grouped=True)
    yield backward(64, BAND)
    yield backward(64, ARRAY, first_dq=False, parts=True)
    yield backward(80, BAND, ordered=False, dtype="fp16")
    yield backward(96, ARRAY, grouped=True, parts=True, finished=True)
    yield backward(112, FULL, first_dkv=False, grouped=True)


def all_variants() -> Iterator[Variant]:
    yield from small_kernels()
    both = (False, True)
    for dtype, head_dim, mask in itertools.product(("bf16", "fp16"), (128, 64, 96, 48), MASKS):
        for parts in both:
            for first in both:
                yield forward(head_dim, mask, first=first, parts=parts, dtype=dtype)
            yield forward(head_dim, mask, first=True, parts=parts, finished=True, dtype=dtype)
        for first_dq, first_dkv, grouped, parts in itertools.product(both, both, both, both):
            if first_dq and first_dkv:
                yield backward(head_dim, mask, grouped=grouped, parts=parts, finished=True, dtype=dtype)
            yield backward(
                head_dim,
                mask,
                first_dq=first_dq,
                first_dkv=first_dkv,
                grouped=grouped,
                parts=parts,
                dtype=dtype,
            )
    for head_dim, head_dim_v in ((128, 64), (64, 128)):
        yield forward(head_dim, BAND, first=True, head_dim_v=head_dim_v)
        yield backward(head_dim, BAND, head_dim_v=head_dim_v)
        yield backward(head_dim, BAND, ordered=False)


def compile_variant(variant: Variant) -> Result:
    """Pointers not in ``types`` are *fp32 (tables *i32), ``scale`` is fp32, other arguments i32; what the
    kernel does not exempt from specialisation is a multiple of 16, as at a launch."""
    function, names = variant.function, variant.function.arg_names
    signature: dict[str, str] = {}
    for name in names:
        pointer = "*i32" if name in INT_POINTERS else "*fp32"
        is_pointer = name in INT_POINTERS or name.endswith(("_ptr", "_acc", "_parts"))
        default = "fp32" if name == "scale" else pointer if is_pointer else "i32"
        signature[name] = "constexpr" if name in variant.constants else variant.types.get(name, default)
    exempt = set(function.do_not_specialize_on_alignment)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") and name not in exempt
    }
    begun = time.perf_counter()
    source = GluonASTSource if function.is_gluon() else ASTSource
    code = source(fn=function, signature=signature, constexprs=variant.constants, attrs=aligned)
    compiled, log = compiled_with_log(code, TARGET, {"num_warps": variant.num_warps})
    return Result(
        registers=int(re.findall(r"Used (\d+) registers", log)[-1]),
        spilled_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log)),
        shared_bytes=compiled.metadata.shared,
        wrong_addresses=wrong_addresses(disassembled(compiled.asm["cubin"])),
        messages=[line for line in log.splitlines() if "(C75" in line],
        seconds=time.perf_counter() - begun,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every variant: some minutes")
    args = parser.parse_args()
    print(f"triton {triton.__version__}, torch {torch.__version__}")
    failed = 0
    for variant in all_variants() if args.all else covering_set():
        result = compile_variant(variant)
        failures = result.failures()
        failed += bool(failures)
        print(
            f"{variant!s:64} {result.registers:4} registers {result.spilled_bytes:4} bytes spilled "
            f"{len(result.messages):2} messages {result.seconds:5.1f} s {'; '.join(failures)}",
            flush=True,
        )
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
