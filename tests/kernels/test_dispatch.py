"""Which kernel runs: properties of the rule over devices, types, head sizes and versions of triton."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from meshattn_kernels import choose_kernel, get_kernel, kernel_names
from meshattn_kernels.dropout import Dropout, with_dropout
from meshattn_kernels.rules import ON_CUDA, RULES, Platform, Request, choose, runs_triton

CPU = torch.device("cpu")
HALF = (torch.bfloat16, torch.float16)
TYPES = (*HALF, torch.float32, torch.float64)
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
TRITONS = (None, (3, 5), (3, 6), (3, 7), (3, 8), (3, 9), (3, 10), (4, 0))
HEAD_DIMS = (8, 16, 24, 48, 64, 72, 128, 136, 192, 256, 264)
UNEQUAL = [(64, 128), (128, 64), (192, 128), (64, 72), (72, 64), (264, 64), (64, 264)]  # D, D_v
PLATFORMS = [
    Platform("cpu"),
    Platform("mps"),
    Platform("cpu", triton=(3, 7), interpreted=True),
    *(
        Platform("cuda", capability, triton, cudnn=peers, fa4=peers)
        for capability, triton, peers in product(CAPABILITIES, TRITONS, (False, True))
    ),
    Platform("cuda", (9, 0), (3, 6), interpreted=True),
]
REQUESTS = [
    Request(platform, dtype, D, D_v, plain_mask, softcap, dropout)
    for platform, dtype, (D, D_v), plain_mask, (softcap, dropout) in product(
        PLATFORMS,
        TYPES,
        [(D, D) for D in HEAD_DIMS] + UNEQUAL,
        (True, False),
        [(False, False), (True, False), (False, True)],
    )
]


def documented(request: Request) -> str | None:
    """The table of the README, said again."""
    platform, sizes = request.platform, (request.head_dim, request.head_dim_v)
    if platform.device == "cpu" or request.dtype == torch.float64:
        return "reference"
    if platform.interpreted:
        return "triton" if max(sizes) <= 256 else None
    if platform.device != "cuda" or platform.triton is None or platform.capability < (8, 0):  # type: ignore[operator]
        return None
    hopper = platform.capability == (9, 0) and request.dtype in HALF
    hopper = hopper and platform.triton in ((3, 6), (3, 7), (3, 9))
    hopper = hopper and not request.softcap and not request.dropout
    if hopper and all(size % 16 == 0 and size <= 128 for size in sizes):
        return "hopper"
    return "triton" if max(sizes) <= 256 else None


def chosen(name: str | None, request: Request) -> str | None:
    try:
        return choose.__wrapped__(name, request)
    except ValueError:
        return None


def test_the_choice_is_the_documented_one() -> None:
    for request in REQUESTS:
        assert chosen(None, request) == documented(request), request


def test_the_choice_serves() -> None:
    for request in REQUESTS:
        name = chosen(None, request)
        assert name is None or RULES[name](request) is None, request


def test_what_is_installed_beside_and_the_mask_change_no_choice() -> None:
    for request in REQUESTS:
        platform = request.platform
        other = replace(platform, cudnn=not platform.cudnn, fa4=not platform.fa4)
        changed = replace(request, platform=other, plain_mask=not request.plain_mask)
        assert chosen(None, changed) == chosen(None, request), request


@pytest.mark.parametrize("name", RULES)
def test_a_named_kernel_is_taken_or_refused(name: str) -> None:
    served = 0
    for request in REQUESTS:
        refused = RULES[name](request)
        assert chosen(name, request) == (name if refused is None else None), request
        served += refused is None
    assert served > 0
    assert name == "reference" or served < len(REQUESTS)


@pytest.mark.parametrize("name", [None, *RULES])
def test_a_refusal_names_what_is_wrong_and_kernels_that_serve(name: str | None) -> None:
    texts = {}
    for request in REQUESTS:
        try:
            choose.__wrapped__(name, request)
        except ValueError as error:
            texts.setdefault(str(error), request)
    assert texts or name == "reference"
    for text, request in texts.items():
        reason, _, way_out = text.partition(". Choose ")
        assert f"kernel {(name or ON_CUDA[-1])!r}" in reason
        about_sizes = re.search(r"head size (\d+)", reason)
        if about_sizes:
            assert int(about_sizes[1]) in (request.head_dim, request.head_dim_v)
        if " is torch." in reason:
            assert f"q is {request.dtype}" in reason
        if "compute capability" in reason and "q is on cuda" in reason:
            major, minor = request.platform.capability or (0, 0)
            assert f"{major}.{minor}" in reason
        offered = re.findall(r"kernel='([\w-]+)'", way_out)
        assert offered[-1] == "reference"
        for other in offered:
            assert RULES[other](request) is None, text


def test_messages() -> None:
    h200, a100 = Platform("cuda", (9, 0), (3, 6)), Platform("cuda", (8, 0), (3, 7))
    bf16 = torch.bfloat16
    cases = {
        ("hopper", Request(a100, bf16, 64, 64)): (
            "q is on cuda with compute capability 8.0; kernel 'hopper' runs on compute capability 9.0 alone. "
            "Choose kernel='triton' or kernel='reference'"
        ),
        ("hopper", Request(h200, bf16, 64, 72)): (
            "v have head size 72; kernel 'hopper' takes multiples of 16 up to 128. "
            "Choose kernel='triton' or kernel='reference'"
        ),
        ("hopper", Request(h200, bf16, 64, 64, softcap=True)): (
            "softcap is not 0; kernel 'hopper' has none. Choose kernel='triton' or kernel='reference'"
        ),
        ("hopper", Request(h200, bf16, 64, 64, dropout=True)): (
            "dropout_p is not 0; kernel 'hopper' has no dropout. Choose kernel='triton' or kernel='reference'"
        ),
        (None, Request(h200, bf16, 264, 64)): (
            "q and k have head size 264; kernel 'triton' takes 1 to 256. "
            "Choose kernel='reference' (which is slow)"
        ),
        (None, Request(Platform("cuda", (7, 5), (3, 7)), torch.float32, 64, 64)): (
            "q is on cuda with compute capability 7.5; kernel 'triton' needs 8.0. "
            "Choose kernel='reference' (which is slow)"
        ),
        ("fa4", Request(h200, bf16, 64, 64)): (
            "flash-attn-4 is not installed; kernel 'fa4' needs it. "
            "Choose kernel='hopper' or kernel='triton' or kernel='reference'"
        ),
    }
    for (name, request), text in cases.items():
        with pytest.raises(ValueError) as info:
            choose(name, request)
        assert str(info.value) == text


def test_unknown_names_are_refused() -> None:
    for refuse in (get_kernel, lambda name: choose_kernel(name, CPU, torch.float32, 8, 8)):
        with pytest.raises(ValueError, match="kernel is 'flash'; choose one of reference, hopper"):
            refuse("flash")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_this_cpu(dtype: torch.dtype) -> None:
    assert choose_kernel(None, CPU, dtype, 40, 8) == "reference"
    assert not runs_triton(CPU, torch.float32)
    with pytest.raises(ValueError, match="q is on cpu; kernel 'hopper' runs on"):
        choose_kernel("hopper", CPU, dtype, 64, 64)


def test_every_rule_has_a_kernel_of_its_name() -> None:
    pytest.importorskip("triton")
    assert kernel_names() == tuple(RULES)
    for name in kernel_names():
        kernel = get_kernel(name)
        assert kernel.name == name
        assert kernel.deterministic is (name not in ("sdpa", "cudnn"))


def test_kernels_have_the_softcap_and_dropout_that_their_rules_allow() -> None:
    pytest.importorskip("triton")
    h200 = Platform("cuda", (9, 0), (3, 6), cudnn=True, fa4=True)
    dropout = Dropout(0.1, seed=1)
    for name, rule in RULES.items():
        if rule(Request(h200, torch.bfloat16, 64, 64, dropout=True)) is None:
            assert with_dropout(get_kernel(name), dropout).dropout == dropout  # type: ignore[attr-defined]
        if rule(Request(h200, torch.bfloat16, 64, 64, softcap=True)) is None:
            assert get_kernel(name, 2.0).softcap == 2.0  # type: ignore[attr-defined]
        else:
            with pytest.raises(ValueError, match=rf"softcap is 2\.0; kernel '{name}' has none"):
                get_kernel(name, 2.0)
