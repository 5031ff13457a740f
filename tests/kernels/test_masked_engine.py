"""The portable kernels through the engine, with documents, windows and other keys: a small sample.

Interpreted, as test_portable.py is; tests/gpu/test_cuda.py has the large one.
"""

from __future__ import annotations

import pytest
import torch

import meshattn as ma
from cases import Shape, make_inputs
from distributed import check_cases
from mesh_cases import Case, Packed

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("interpreted in a process of its own", allow_module_level=True)

from meshattn.plan.assignment import Tile  # noqa: E402
from meshattn.testing import run_ranks  # noqa: E402

SHAPE = Shape(B=1, S=43, H=2, H_kv=1, D=16)
CASES = [
    Case(Tile(1, 2), SHAPE, dtype=torch.float32, documents=Packed((0, 1, 1, 20, 38))),
    Case(Tile(2, 2), SHAPE, "zigzag", dtype=torch.bfloat16, documents=Packed((0, 9, 30, 43), (9, 12, 13))),
    Case(Tile(3, 1), SHAPE, "contiguous", dtype=torch.float32, window_size=(11, 0)),
    Case(Tile(2, 1), SHAPE, "zigzag", causal=False, dtype=torch.float32, window_size=(5, 9)),
    Case(Tile(1, 2), Shape(B=1, S=1, H=2, H_kv=1, D=16, S_k=37), dtype=torch.float32, kv_layout="striped"),
    Case(
        Tile(2, 2),
        Shape(B=1, S=37, H=2, H_kv=2, D=16, S_k=25),
        "contiguous",
        dtype=torch.bfloat16,
        documents=Packed((0, 20, 21, 37)),
        kv_layout="striped",
        kv_documents=Packed((0, 7, 20, 25)),
    ),
    Case(Tile(2, 1), SHAPE, "zigzag", dtype=torch.float32, softcap=2.0, dropout_p=0.3, dropout_seed=2**63),
]


@pytest.mark.parametrize("kernel", ["triton", "triton-dash"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_masks(case: Case, kernel: str) -> None:
    check_cases([case], kernel=kernel)


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_a_view_that_is_negated_when_read(name: str) -> None:
    """A kernel reads memory, where such a view has the other sign."""
    inputs = make_inputs(Shape(B=1, S=11, H=2, H_kv=1, D=16), torch.float32)
    negated = torch._neg_view(-getattr(inputs, name))

    def on_rank(group: object) -> list[list[torch.Tensor]]:
        seq, answers = ma.init_attention_mesh(group).sequence(11), []
        for q, k, v, do in (inputs, inputs._replace(**{name: negated})):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = ma.mesh_attention(*leaves, seq, causal=True, kernel="triton")
            assert isinstance(out, torch.Tensor)
            answers.append([out, *torch.autograd.grad(out, leaves, do)])
        return answers

    ((plain, same),) = run_ranks(1, on_rank)
    assert all(torch.equal(x, y) for x, y in zip(plain, same, strict=True))
