"""Looks into the machine code of a compiled kernel for a mistake of ptxas that no test without a GPU would
notice.

A 64-bit sum of uniform registers is two instructions: the low half leaves its carry in a predicate, the high
half takes it. Where the addend has 32 bits, the high half has to take zero. ptxas 12.8 took the register of
the low half once more in some products of sm_90, whose second operand then lay elsewhere in shared memory:
sums lacked all rows but the first 16.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from pathlib import Path

import triton.backends.nvidia
from triton.backends.nvidia import compiler

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_LOW = re.compile(r"UIADD3 UR\d+, (UP\d), (UR\d+), \S+, URZ")
_HIGH = re.compile(r"UIADD3\.X UR\d+, (UR\d+), \S+, URZ, (UP\d), !UPT")


def ptxas_for(target: int) -> list[str]:
    """The command by which triton assembles for sm_``target``, as far as it matters for registers."""
    arch = compiler.sm_arch_from_capability(target)
    level = ["--regAllocOptLevel=2"] if "--regAllocOptLevel=2" in inspect.getsource(compiler) else []
    return [str(compiler.get_ptxas(target).path), f"-arch={arch}", *level]


def disassembled(cubin: bytes) -> str:
    """The instructions of a kernel for sm_90 or older, as text."""
    nvdisasm = Path(triton.backends.nvidia.__file__).with_name("bin") / "nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([nvdisasm, "-c", path], capture_output=True, text=True, check=True).stdout


def wrong_addresses(code: str) -> list[str]:
    """Pairs of instructions that add one register to both halves of a number, though nothing has written it
    between them."""
    found = []
    low: dict[str, tuple[str, str]] = {}  # by carry: the register that was added, the instruction
    for line in code.splitlines():
        if line.startswith(".L"):
            low.clear()
        instruction = _INSTRUCTION.search(line)
        if not instruction:
            continue
        text = instruction.group(1)
        high = _HIGH.fullmatch(text)
        if high and low.get(high.group(2), ("", ""))[0] == high.group(1):
            found.append(f"{low[high.group(2)][1]}; {text}")
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
