"""Softcap and dropout in the portable kernels, against dense attention with an explicit mask.

Where they run: see test_portable.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret and not torch.cuda.is_available():
    pytest.skip("interpreted in a process of its own", allow_module_level=True)

from cases import Inputs, Shape, make_inputs  # noqa: E402
from key_blocks import Block, cut  # noqa: E402
from meshattn_kernels import UNBOUNDED, BandIntervals  # noqa: E402
from meshattn_kernels.dropout import Dropout, Positions  # noqa: E402
from meshattn_kernels.portable.kernel import TritonKernel  # noqa: E402
from meshattn_kernels.portable.launch import INTERPRETED  # noqa: E402
from meshattn_kernels.reference import ReferenceKernel  # noqa: E402
from portable_runs import (  # noqa: E402
    DEVICE,
    KERNELS,
    LARGE,
    SMALL,
    Kernel,
    Run,
    by_name,
    causal,
    check,
    full,
)

pytestmark = [] if INTERPRETED else [pytest.mark.gpu, pytest.mark.timeout(600)]
SEED = 2**63 + 12345
# Of a chunk of several: every third position; two runs with a gap between, whose border lies inside a tile.
STRIPED, ZIGZAG = Positions(2, 3), Positions(40, 1, 17, 1000)
DROPOUT = Dropout(0.3, SEED, STRIPED, ZIGZAG, first_head=5)


CHANGES = [(2.0, None), (0.0, DROPOUT), (20.0, DROPOUT)]
# The interpreter takes seconds for each: softcap alone, and with dropout.
CASES = [
    (*case, *changes)
    for n, case in enumerate(SMALL if INTERPRETED else SMALL + LARGE[::4])
    for m, changes in enumerate(CHANGES)
    if (n, m) in ((1, 0), (0, 2)) or not INTERPRETED
]


def words(x: object) -> str:
    if isinstance(x, Dropout):
        return f"p{x.p}"
    return x.__name__ if callable(x) else str(x)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.parametrize("shape, dtype, rule, softcap, dropout", CASES, ids=words)
def test_equals_dense_attention(
    kernel: Kernel, shape: Shape, dtype: torch.dtype, rule, softcap: float, dropout: Dropout | None
) -> None:
    """In two blocks of keys, so that merging is there too."""
    keys = shape.seq_len_k
    check(
        replace(kernel, softcap=softcap, dropout=dropout),
        make_inputs(shape, dtype),
        cut(rule(shape), sorted({0, keys // 3, keys})),
    )


def test_the_mask_read_from_the_kernels_is_that_of_the_reference() -> None:
    """With q = 0 all probabilities are equal, and with v the identity out shows which are kept."""
    rows, keys = (33, 40) if INTERPRETED else (501, 250)
    inputs = make_inputs(Shape(B=2, S=rows, H=2, H_kv=1, D=16, D_v=keys, S_k=keys), torch.float32)
    eye = torch.eye(keys).expand(2, keys, keys)[:, :, None].contiguous()
    inputs = Inputs(*(x.to(DEVICE) for x in (torch.zeros_like(inputs.q), inputs.k, eye, inputs.do)))
    intervals = BandIntervals(-UNBOUNDED, UNBOUNDED, rows, keys)
    blocks: list[Block] = [(slice(None), intervals)]
    masks = [
        Run(replace(one, dropout=DROPOUT), 0.3).forward(inputs, blocks)["out"] > 0  # type: ignore[type-var]
        for one in (TritonKernel(), ReferenceKernel())
    ]
    expected = DROPOUT.kept(2, 2, (0, rows), (0, keys), DEVICE).transpose(1, 2)
    assert torch.equal(masks[0], expected) and torch.equal(masks[1].view_as(expected), expected)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one program after the other")
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_bits_repeat(kernel: Kernel) -> None:
    """And another seed gives others."""
    shape = Shape(B=2, S=900, H=8, H_kv=2, D=128, S_k=1100)
    inputs, blocks = make_inputs(shape, torch.bfloat16), [(slice(None), causal(shape))]
    one, other = (replace(kernel, softcap=5.0, dropout=replace(DROPOUT, seed=seed)) for seed in (SEED, 3))
    expected = Run(one, 0.1)(inputs, blocks)
    for _ in range(19):
        for ours, same in zip(Run(one, 0.1)(inputs, blocks), expected, strict=True):
            assert torch.equal(ours, same)
    assert not torch.equal(Run(other, 0.1)(inputs, blocks).out, expected.out)


@pytest.mark.parametrize("softcap", [1e-3, 1e4])
def test_extreme_softcaps(softcap: float) -> None:
    """One so small that all scores are equal, and one so large that nothing is bounded."""
    kernel, shape = TritonKernel(), Shape(B=1, S=21, H=2, H_kv=1, D=16)
    inputs, blocks = make_inputs(shape, torch.float32), [(slice(None), full(shape))]
    actual = Run(replace(kernel, softcap=softcap), 0.3)(inputs, blocks)
    assert all(x.isfinite().all() for x in actual)
    plain = Run(kernel, 0.3)(inputs, blocks)
    if softcap > 1:
        torch.testing.assert_close(actual.out, plain.out, rtol=1e-4, atol=1e-5)
    else:
        assert actual.lse.std() < 1e-3 < plain.lse.std()


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_a_softcap_beyond_all_scores_bounds_nothing_in_16_bits(kernel: Kernel) -> None:
    """The tanh of a tiny number, times a large one: errors of the tanh itself would be multiplied too."""
    shape = Shape(B=1, S=21, H=2, H_kv=1, D=16)
    inputs, blocks = make_inputs(shape, torch.float16), [(slice(None), full(shape))]
    plain, actual = (Run(replace(kernel, softcap=cap), 0.3)(inputs, blocks) for cap in (0.0, 1e9))
    torch.testing.assert_close(actual, plain, rtol=2e-3, atol=2e-3)
