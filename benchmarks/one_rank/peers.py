"""The peers, each called by its own interface, in the layout it likes best, with the backward a user of it
pays for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from one_rank.attention_cases import BACKWARD_TOTAL, FORWARD_TOTAL, Case
from one_rank.contenders import Contender, Inputs, Results

PEERS = ("fa4", "fa4-deterministic", "cudnn", "fa2", "fa2-deterministic", "flex")
_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}


def make_peer(name: str, case: Case, inputs: Inputs) -> Contender:
    """A peer with tensors. Raises RuntimeError if it is not on this machine or refuses the case."""
    base, _, suffix = name.partition("-")
    deterministic = suffix == "deterministic"
    if base == "fa4":
        return FlashAttention4(case, inputs, deterministic)
    if base == "flex":
        return Flex(case, inputs)
    return Sdpa(_BACKENDS[base], case, inputs, deterministic)


@lru_cache(maxsize=1)
def why_no_fa4() -> str | None:
    """Why FlashAttention-4 cannot be used here, None if it can."""
    try:
        import flash_attn.cute.interface  # noqa: F401
    except Exception as reason:
        return f"{type(reason).__name__}: {reason}"
    return None


def versions() -> dict[str, str]:
    """Of the peers that are here and are no part of torch."""
    if why_no_fa4():
        return {}
    from importlib.metadata import PackageNotFoundError, version

    try:
        return {"flash-attn-4": version("flash-attn-4")}
    except PackageNotFoundError:
        return {"flash-attn-4": "of unknown version"}


class FlashAttention4:
    """flash_attn.cute: its two functions, below autograd."""

    def __init__(self, case: Case, inputs: Inputs, deterministic: bool) -> None:
        reason = why_no_fa4()
        if reason:
            raise RuntimeError(f"flash_attn.cute cannot be imported ({reason})")
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

        warnings.filterwarnings("ignore", message="Argument aux_data")  # of each compilation
        q, k, v, do = inputs
        mask: dict[str, Any] = {"causal": case.causal}
        if case.window:
            mask |= {"window_size_left": case.window - 1, "window_size_right": 0}
        if case.documents:  # one behind the other, without a dim of the batch
            q, k, v, do = (x[0] for x in inputs)
            borders = case.borders()
            starts = torch.tensor(borders, dtype=torch.int32, device=q.device)
            longest = max(b - a for a, b in pairwise(borders))
            mask |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts)
            mask |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), longest)
        mask["softmax_scale"] = case.head_dim**-0.5
        state: dict[str, Any] = {}

        def forward() -> None:
            state["out"], state["lse"] = _flash_attn_fwd(q, k, v, return_lse=True, **mask)[:2]

        def backward() -> Any:
            return _flash_attn_bwd(
                q, k, v, state["out"], do, state["lse"], deterministic=deterministic, **mask
            )

        self._state = state
        self.passes: Mapping[str, Callable[[], Any]] = {FORWARD_TOTAL: forward, BACKWARD_TOTAL: backward}
        forward()

    def results(self) -> Results:
        self.passes[FORWARD_TOTAL]()
        found = self._state["out"], *self.passes[BACKWARD_TOTAL]()[:3]
        return Results(*(x if x.dim() == 4 else x[None] for x in found))


class _Differentiated:
    """A forward of torch with its backward by autograd, on tensors with heads before rows."""

    def __init__(
        self,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        heads_first: Sequence[Tensor],
        deterministic: bool = False,
    ) -> None:
        q, k, v, self._do = heads_first
        self._attend, self._deterministic = attend, deterministic
        self._leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        self.passes: Mapping[str, Callable[[], object]] = {
            FORWARD_TOTAL: self.forward,
            BACKWARD_TOTAL: self.backward,
        }
        self.forward()

    def forward(self) -> None:
        self.out = self._attend(*self._leaves)

    def backward(self) -> tuple[Tensor, ...]:
        with _deterministic_algorithms() if self._deterministic else nullcontext():
            return torch.autograd.grad(self.out, self._leaves, self._do, retain_graph=True)

    def results(self) -> Results:
        self.forward()
        gradients = self.backward()
        return Results(*(x.detach().transpose(1, 2) for x in (self.out, *gradients)))


class Sdpa(_Differentiated):
    """torch's scaled_dot_product_attention by one backend; rows stay before heads in memory."""

    def __init__(self, backend: SDPBackend, case: Case, inputs: Inputs, deterministic: bool) -> None:
        if case.window or case.documents:
            raise RuntimeError("no mask but a causal one")
        grouped = case.heads != case.kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, enable_gqa=grouped
                )

        super().__init__(attend, [x.detach().transpose(1, 2) for x in inputs], deterministic)


class Flex(_Differentiated):
    """torch's flex_attention, compiled for the case; its backward needs no order, as it adds nothing."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()  # each case has its own code, and a limit on their number
        compiled = torch.compile(flex_attention, dynamic=False)
        mask = None
        if case.causal:
            visible = _visible(case, inputs.q.device)
            mask = create_block_mask(visible, None, None, case.rows, case.num_keys, device=inputs.q.device)
        grouped = case.heads != case.kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = compiled(q, k, v, block_mask=mask, enable_gqa=grouped)
            assert isinstance(out, Tensor)
            return out

        super().__init__(attend, [x.transpose(1, 2).contiguous() for x in inputs])


def _visible(case: Case, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a row of a causal case sees a key, from batch, head, row and key."""
    if case.documents:
        first = torch.tensor(case.first_keys(), device=device)
        return lambda _b, _h, row, key: (row >= key) & (key >= first[row])
    if case.window:
        return lambda _b, _h, row, key: (row >= key) & (row - key < case.window)
    return lambda _b, _h, row, key: row >= key


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    options: Any = torch.utils.deterministic
    filling = options.fill_uninitialized_memory
    options.fill_uninitialized_memory = False  # else new memory is written first
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        options.fill_uninitialized_memory = filling
