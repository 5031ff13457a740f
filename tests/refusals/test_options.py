"""Options that attention does not have, or not with such a value."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import meshattn as ma
from distributed import Backend
from meshattn.options import _INSTEAD
from meshattn.testing import run_ranks
from refused_calls import RANKS, ROWS, SEQ_LEN, Calls, attend, check_refused, ones

CALLS: Calls = {
    "scale-0": (
        lambda m: attend(m, softmax_scale=0.0),
        ("softmax_scale is 0.0", "positive and finite", "None for D ** -0.5"),
    ),
    "scale-nan": (
        lambda m: attend(m, softmax_scale=float("nan")),
        ("softmax_scale is nan", "positive and finite"),
    ),
    "reduce-dtype": (
        lambda m: attend(m, reduce_dtype=torch.bfloat16),
        ("reduce_dtype=torch.bfloat16", "torch.float32 (the default)"),
    ),
    "scale-beyond-floats": (
        lambda m: attend(m, softmax_scale=10**400),
        ("softmax_scale is 1000", "positive and finite"),
    ),
    "scale-beyond-accumulators": (
        lambda m: attend(m, softmax_scale=1e39),
        ("softmax_scale is 1e+39", "torch.float32, so give at most 3.4e+38"),
    ),
    **{
        f"softcap-{cap}": (
            lambda m, cap=cap: attend(m, softcap=cap),
            (f"softcap is {cap}", "from 1e-30 to 1e+30, or 0.0"),
        )
        for cap in (5e-324, 1e-46, 1e-39, 3e38, 1e39)
    },
    "softcap-below-scale": (
        lambda m: attend(m, softcap=1e-20, softmax_scale=1e30),
        ("softmax_scale / softcap is", "torch.float32, so give at most 3.4e+38"),
    ),
    "causal": (lambda m: attend(m, causal=1), ("causal is 1", "True or False")),
    "deterministic": (
        lambda m: attend(m, deterministic=None, kernel="sdpa"),
        ("deterministic is None", "True or False"),
    ),
    "return-lse": (lambda m: attend(m, return_lse="yes"), ("return_lse is 'yes'",)),
    "kernel": (lambda m: attend(m, kernel="fast"), ("kernel is 'fast'", "reference")),
    "kernel-of-a-gpu": (
        lambda m: attend(m, kernel="hopper"),
        ("q is on cpu", "kernel 'hopper' runs on compute capability 9.0", "Choose kernel='reference'"),
    ),
    "kernel-without-order": (
        lambda m: attend(m, kernel="sdpa"),
        ("kernel='sdpa' is not bitwise deterministic", "pass deterministic=False"),
    ),
    "kernel-of-equal-head-sizes": (
        lambda m: attend(m, v=ones(2, ROWS, 4, 16), kernel="sdpa", deterministic=False),
        ("q and k have head size 8 and v 16", "kernel 'sdpa' takes equal ones"),
    ),
    "kernel-of-plain-masks": (
        lambda m: ma.mesh_attention(
            *[ones(2, ROWS, 4, 8)] * 3,
            m.sequence(SEQ_LEN, layout="zigzag"),
            kernel="sdpa",
            deterministic=False,
        ),
        ("intervals of their own", "kernel 'sdpa'", "striped and contiguous layouts"),
    ),
    "kernel-for": (
        lambda m: ma.kernel_for("cpu", torch.float32, 8, kernel="fast"),
        ("kernel is 'fast'", "reference"),
    ),
    "kernel-for-integers": (
        lambda m: ma.kernel_for("cpu", torch.int32, 8),
        ("dtype is torch.int32", "float64, float32, bfloat16 or float16"),
    ),
    "kernel-for-odd-head-size": (
        lambda m: ma.kernel_for("cpu", torch.float32, 8, 12),
        ("head_dim_v is 12", "multiple of 8"),
    ),
    "kernel-for-a-great-softcap": (
        lambda m: ma.kernel_for("cpu", torch.float32, 8, softcap=1e300),
        ("softcap is 1e+300", "from 1e-30 to 1e+30"),
    ),
    "kernel-for-no-probability": (
        lambda m: ma.kernel_for("cpu", torch.float32, 8, dropout_p=1.5),
        ("dropout_p is 1.5", "below 1.0"),
    ),
    "kernel-for-a-list": (
        lambda m: ma.kernel_for("cpu", torch.float32, 8, kernel=["sdpa"]),  # type: ignore[arg-type]
        ("kernel is a list", "give its name"),
    ),
    "window": (
        lambda m: attend(m, window_size=(4, -2)),
        ("window_size is (4, -2)", "(left, right)", "-1 for no bound"),
    ),
    "window-of-one": (lambda m: attend(m, window_size=4), ("window_size is 4", "(left, right)")),
    "softcap": (lambda m: attend(m, softcap=-30.0), ("softcap is -30.0", "positive or 0.0")),
    "softcap-of-a-kernel-without": (
        lambda m: attend(m, softcap=30.0, kernel="sdpa"),
        ("softcap is not 0; kernel 'sdpa' has none", "Choose kernel='reference'"),
    ),
    **{
        f"dropout-{p!r}": (
            lambda m, p=p: attend(m, dropout_p=p),
            (f"dropout_p is {p!r}", "from 0.0 for none and below 1.0"),
        )
        for p in (-0.1, 1.0, float("nan"), True, "0.1")
    },
    **{
        f"dropout-seed-{seed!r}": (
            lambda m, seed=seed: attend(m, dropout_p=0.1, dropout_seed=seed),
            (f"dropout_seed is {seed!r}", "from 0 to 2**64 - 1"),
        )
        for seed in (-1, 2**64, 0.5, True)
    },
    "dropout-of-a-kernel-without": (
        lambda m: attend(m, dropout_p=0.1, dropout_seed=0, kernel="sdpa", deterministic=False),
        ("dropout_p is not 0; kernel 'sdpa' has no dropout", "Choose kernel='reference'"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_options(name: str) -> None:
    check_refused(CALLS, name)


def test_ring_attention_refuses_the_same() -> None:
    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group)
        x = torch.ones(2, ROWS, 4, 8)
        with pytest.raises(ValueError, match="softcap"):
            ma.ring_attention(x, x, x, mesh.sequence(SEQ_LEN), softcap=True)
        with pytest.raises(NotImplementedError, match="alibi_slopes is no option of this attention"):
            ma.ring_attention(x, x, x, mesh.sequence(SEQ_LEN), alibi_slopes=x)  # type: ignore[arg-type]

    run_ranks(RANKS, on_rank)


def test_hints_lead_to_options_that_exist() -> None:
    """From names that other attention calls have, and none of ours."""
    options = inspect.signature(ma.mesh_attention).parameters
    for name, hint in _INSTEAD.items():
        assert name not in options
        for named in re.findall(r"the name is (\w+)", hint):
            assert named in options


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("name", ["attn_mask", "windowsize"])
def test_an_unknown_option_of_one_rank_is_everybodys(name: str, backend: Backend) -> None:
    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, timeout=5.0)
        seq = mesh.sequence(SEQ_LEN)
        x = torch.ones(2, seq.rows, 4, 8)
        with pytest.raises(NotImplementedError) as info:
            ma.mesh_attention(x, x, x, seq, **({name: 0.1} if mesh.rank == 1 else {}))
        return str(info.value)

    for rank, text in enumerate(run_ranks(RANKS, on_rank, backend)):
        assert f"{name} is no option" in text and (rank == 1 or text.startswith("rank 1:"))
