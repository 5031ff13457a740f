"""Compiles a kernel, with what ptxas says of it, and looks into its code for mistakes of compilers that no
test without a GPU would notice.

A 64-bit sum of uniform registers is two instructions: the low half leaves its carry in a predicate, the high
half takes it. Where the addend has 32 bits, the high half has to take zero. ptxas 12.8 took the register of
the low half once more in some products of sm_90, whose second operand then lay elsewhere in shared memory:
sums lacked all rows but the first 16.

The address of such an operand has constants in its high half, which are added to zero. In loops of kernels
whose tiles lie in shared memory in two patterns, ptxas 12.8 added them in place to registers that it set only
at the end of the loop: the first round read elsewhere, or beyond all shared memory.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton import knobs
from triton.backends.compiler import GPUTarget

from meshattn_kernels.bound import FUSED

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_LOW = re.compile(r"UIADD3 UR\d+, (UP\d), (UR\d+), \S+, URZ")
_HIGH = re.compile(r"UIADD3\.X UR\d+, (UR\d+), \S+, URZ, (UP\d), !UPT")
_NAME = re.compile(r"%[\w-]+")
_BOUND = re.compile(r"(%[\w-]+) = ")
_STORED = re.compile(r"ttg\.local_alloc (%[\w-]+)")
_IN_PLACE = re.compile(r"UIADD3\.X (UR\d+), \1, (-?0x[0-9a-f]+), URZ, UP\d, !UPT")


def compiled_with_log(source: Any, target: GPUTarget, options: dict[str, Any]) -> tuple[Any, str]:
    """The kernel and the log of ptxas, from the one compilation that a launch would do: a second one by hand
    would take as long again, and have other options. A kernel from the cache would come without."""
    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options | FUSED)
    return compiled, log.getvalue()


def disassembled(cubin: bytes) -> str:
    """The instructions of a kernel for sm_90 or older, as text."""
    nvdisasm = Path(triton.backends.nvidia.__file__).with_name("bin") / "nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([nvdisasm, "-c", path], capture_output=True, text=True, check=True).stdout


def stored_again(code: str) -> list[str]:
    """Tensors that every round of a loop of Triton's GPU code writes to shared memory, though they are made
    before it: triton 3.9 leaves q there, or k and v, where it may not move what does not change out of a
    loop."""
    found = []
    loops: list[tuple[int, set[str]]] = []  # indentation, names made inside
    for line in code.splitlines():
        indentation = len(line) - len(line.lstrip())
        if loops and line.lstrip().startswith("}") and indentation == loops[-1][0]:
            loops.pop()
        if loops:
            stored = _STORED.search(line)
            if stored and stored.group(1) not in loops[-1][1]:
                found.append(line.strip())
            loops[-1][1].update(_NAME.findall(line.split(" = ")[0]))
        if " scf.for " in line:
            loops.append((indentation, set(_BOUND.findall(line.split(" scf.for ")[1]))))
    return found


def wrong_addresses(code: str) -> list[str]:
    """Pairs of instructions that add one register to both halves of a number, though nothing has written it
    between them; and those that add constants of an address in place to what nothing has written in the same
    round."""
    found = []
    low: dict[str, tuple[str, str]] = {}  # by carry: the register that was added, the instruction
    written: set[str] = set()
    for line in code.splitlines():
        if line.startswith(".L"):
            low.clear()
            written.clear()
        instruction = _INSTRUCTION.search(line)
        if not instruction:
            continue
        text = instruction.group(1)
        high = _HIGH.fullmatch(text)
        if high and low.get(high.group(2), ("", ""))[0] == high.group(1):
            found.append(f"{low[high.group(2)][1]}; {text}")
        in_place = _IN_PLACE.fullmatch(text)
        if in_place and abs(int(in_place.group(2), 16)) > 2**29 and in_place.group(1) not in written:
            found.append(text)
        written |= _written(text)
        low = {carry: pair for carry, pair in low.items() if pair[0] not in _written(text)}
        start = _LOW.fullmatch(text)
        if start:
            low[start.group(1)] = start.group(2), text
    return found


def _written(instruction: str) -> set[str]:
    """Uniform registers that an instruction may write: its first operand, and the next if it has 64 bits."""
    operation, _, operands = instruction.partition(" ")
    first = re.match(r"UR(\d+)\b", operands)
    if not first:
        return set()
    number = int(first.group(1))
    wide = "64" in operation or "WIDE" in operation
    return {f"UR{number}", f"UR{number + 1}"} if wide else {f"UR{number}"}
