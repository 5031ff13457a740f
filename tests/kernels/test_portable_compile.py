"""The portable kernels compile for every GPU generation, within the limits of ``compile_portable``, without a
GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

compiler = pytest.importorskip("triton.backends.nvidia.compiler")
TARGETS = (80, 86, 89, 90, 100, 120)


def has_ptxas(target: int) -> bool:
    try:
        return Path(compiler.get_ptxas(target).path).exists()
    except RuntimeError:
        return False


def compile_for(targets: list[int], *options: str) -> str:
    """Output of the script, in a process of its own: nothing compiles where triton was imported to
    interpret."""
    script = Path(__file__).with_name("compile_portable.py")
    run = subprocess.run(
        [sys.executable, str(script), "--targets", *map(str, targets), *options],
        env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


@pytest.mark.timeout(600)
def test_covering_set_compiles() -> None:
    targets = [target for target in TARGETS if has_ptxas(target)]
    if not targets:
        pytest.skip("triton has no ptxas here")
    assert f"| sm_{targets[-1]} | d" in compile_for(targets)


@pytest.mark.parametrize(
    "between, low_half_twice",
    [
        ("IMAD.U32 R150, RZ, RZ, UR4", True),
        ("UIADD3 UR5, UR4, 0x1, URZ", False),
        ("ULDC.64 UR4, c[0x0][0x210]", False),
    ],
)
def test_an_address_with_its_low_half_twice_is_found(
    monkeypatch: pytest.MonkeyPatch, between: str, low_half_twice: bool
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # where the scripts beside it find it
    from machine_code import wrong_addresses

    low, high = "UIADD3 UR27, UP0, UR5, 0x20, URZ", "UIADD3.X UR26, {}, -0x3ffffff0, URZ, UP0, !UPT"
    for register in ("UR5", "UR6"):
        lines = low, between, high.format(register)
        code = "\n".join(
            f"        /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(lines)
        )
        assert bool(wrong_addresses(code)) == (low_half_twice and register == "UR5")


@pytest.mark.parametrize("first", ["UMOV UR15, URZ", "UIADD3.64 UR14, UR14, 0x80, URZ", "UMOV UR13, URZ"])
def test_an_address_added_to_before_it_is_set_is_found(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from machine_code import wrong_addresses

    lines = first, "UIADD3 UR14, UP0, UR14, 0x40, URZ", "UIADD3.X UR15, UR15, -0x7fffffe0, URZ, UP0, !UPT"
    code = [f"        /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(lines)]
    assert bool(wrong_addresses("\n".join(code))) == ("UR13" in first)
    assert wrong_addresses("\n".join([code[0], ".L_x_1:", *code[1:]]))


@pytest.mark.parametrize("inside", [True, False])
def test_what_a_loop_stores_again_is_found(monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from machine_code import stored_again

    made = "%k, %q = tt.split %x : tensor<64x64x2xbf16, #blocked>"
    stored = "%q_1 = ttg.local_alloc %q : (tensor<64x64xbf16, #blocked>) -> !ttg.memdesc<64x64xbf16, #shared>"
    code = f"""
  tt.func public @kernel() {{
    {"" if inside else made}
    %acc:2 = scf.for %i = %first to %end step %c1 iter_args(%sum = %q) -> (tensor<64x64xbf16>) {{
      {made if inside else ""}
      %s = scf.if %needed -> (tensor<64x64xbf16, #blocked>) {{
        {stored}
      }}
    }} {{loop}}
    {stored.replace("q_1", "q_2")}
  }}"""
    assert stored_again(code) == ([] if inside else [stored])


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"sm_{target}")
def test_every_variant_compiles(target: int) -> None:
    if not has_ptxas(target):
        pytest.skip(f"triton has no ptxas for sm_{target} here")
    compile_for([target], "--all", "--jobs", str(os.cpu_count() or 1))
