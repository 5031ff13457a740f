"""What a call is given, and what is wrong with its tensors, checked before anything moves."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from meshattn.options import Options, is_seed
from meshattn.packing import as_written
from meshattn.plan.cost import HEAD_DIM_STEP
from meshattn.sequence import ShardedSequence, check_dense

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Arguments(NamedTuple):
    """A call as this rank makes it; nothing in it is checked."""

    name: str  # of the public function
    q: Tensor
    k: Tensor
    v: Tensor
    seq: ShardedSequence
    kv_seq: ShardedSequence | None
    sinks: Tensor | None
    dropout_seed: int | None
    options: Options

    @property
    def keys(self) -> ShardedSequence:
        """The sequence of k and v."""
        return self.seq if self.kv_seq is None else self.kv_seq

    def wants_gradients(self) -> bool:
        """Whether a backward pass may come."""
        given = (self.q, self.k, self.v, *(() if self.sinks is None else (self.sinks,)))
        return torch.is_grad_enabled() and any(x.requires_grad for x in given)

    def looks(self) -> object:
        """What a call on a sequence is checked for and planned from. A new object if it cannot be right."""
        name, q, k, v, seq, keys, sinks, seed, options = self
        if _is_transformed() or forward_ad._current_level >= 0 or _is_faked():
            return object()
        given = (q, k, v) if sinks is None else (q, k, v, sinks)
        if not all(isinstance(x, Tensor) and not x.is_nested for x in given) or any(map(_is_freed, given)):
            return object()
        if not (keys is None or isinstance(keys, ShardedSequence)) or not is_seed(seed):
            return object()
        tensors = [
            (type(x), x.shape, x.dtype, x.device, x.layout, x.requires_grad, x.is_inference()) for x in given
        ]
        modes = torch.is_grad_enabled(), autocast_type(q.device.type), seed is None
        causal, scale, window, *others = options
        # 1 equals 1.0 and True, but not every option takes all of them; a list has no hash.
        types = tuple(map(type, options))
        other_keys = None if keys is seq else keys  # the sequence, which keeps this, would keep itself alive
        return name, *tensors, *modes, other_keys, types, causal, scale, repr(window), *others

    def sequences(self) -> dict[str, str]:
        """What must be the same on all ranks, of what may change while a call looks the same."""
        if self.keys is self.seq:
            return {"sequence": self.seq.stated}
        keys = self.keys.stated if isinstance(self.keys, ShardedSequence) else f"a {type(self.keys).__name__}"
        return {"sequence": self.seq.stated, "kv_seq": keys}

    def statement(self) -> dict[str, str]:
        """What else must be the same on all ranks."""
        tensors = {"q": words_of(self.q), "k": words_of(self.k), "v": words_of(self.v)}
        if self.sinks is not None:
            tensors["sinks"] = words_of(self.sinks)
        seed = "not given" if self.dropout_seed is None else "given"
        return tensors | self.options.words() | {"dropout_seed": seed}


def _is_freed(tensor: Tensor) -> bool:
    """Whether its memory was given back, as FSDP does with parameters."""
    # What wraps another tensor, and what is sparse, need not have any.
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and tensor.numel() > 0 and tensor.data_ptr() == 0


def _is_faked() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _is_transformed() -> bool:
    """By torch.func, or traced by torch.jit."""
    return torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None


def check_transforms(**given: object) -> None:
    """Behind the checks PyTorch would refuse them, on this rank alone."""
    if _is_faked():
        raise ValueError(
            "this call is inside FakeTensorMode, whose tensors hold no numbers, which exchanges and kernels "
            "need: make it outside of the mode, with real tensors"
        )
    if torch._C._get_tracing_state() is not None:
        raise ValueError(
            "this call is inside torch.jit.trace, which cannot follow exchanges between ranks: call "
            "attention outside of it"
        )
    if torch._C._are_functorch_transforms_active():
        raise ValueError(
            "this call is inside a transform of torch.func (vmap, grad, jvp, ...), which cannot follow "
            "exchanges between ranks: call attention outside of it, and backward() for gradients"
        )
    if forward_ad._current_level < 0:
        return
    unpack: Any = forward_ad.unpack_dual
    for name, tensor in given.items():
        if isinstance(tensor, Tensor) and unpack(tensor).tangent is not None:
            raise ValueError(
                f"{name} has a tangent of forward-mode AD (torch.autograd.forward_ad), which attention does "
                "not carry on: use backward() for gradients"
            )


def check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}: it must be a tensor")
        if tensor.dtype not in _FLOATS:
            raise ValueError(
                f"{name} is {tensor.dtype}: attention takes float64, float32, bfloat16 or float16"
            )
        check_dense(name, tensor)


def check_memory(name: str, tensor: Tensor) -> None:
    """Kernels and transports read memory, which tensors that only describe or wrap others have not."""
    try:
        missing = isinstance(tensor, FakeTensor) or (
            tensor.numel() > 0 and as_written(tensor).data_ptr() == 0
        )
    except RuntimeError:  # those of torch.func
        missing = True
    if missing:
        raise ValueError(
            f"{name} is a {type(tensor).__name__} on {tensor.device} without memory of its own: pass a plain "
            "tensor that holds the numbers, outside of torch.func's transforms and not batched "
            "(is_grads_batched, vectorize=True)"
        )


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast all three get its type, as PyTorch's own attention does."""
    exact = torch.float64 in (q.dtype, k.dtype, v.dtype)  # which autocast leaves alone
    kind = autocast_type(q.device.type)
    if exact or kind is None:
        return q, k, v
    return q.to(kind), k.to(kind), v.to(kind)


def autocast_type(device: str) -> torch.dtype | None:
    """None where autocast is off, or unknown to this kind of device."""
    if not _knows_autocast(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


_knows_autocast = lru_cache(torch.amp.is_autocast_available)


def check_keys(seq: ShardedSequence, keys: ShardedSequence) -> None:
    if not isinstance(keys, ShardedSequence):
        raise ValueError(f"kv_seq is a {type(keys).__name__}: pass what mesh.sequence(seq_len) returns")
    if keys.mesh is not seq.mesh:
        raise ValueError("kv_seq belongs to another mesh than seq: make both with the same mesh")


def check_kind(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    """What `check_types` and `check_tensors` demand of tensors, where there are none."""
    if dtype not in _FLOATS:
        raise ValueError(f"dtype is {dtype}: attention takes float64, float32, bfloat16 or float16")
    for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if type(size) is not int or size < 1 or size % HEAD_DIM_STEP:
            raise ValueError(f"{name} is {size!r}: a head size must be a multiple of {HEAD_DIM_STEP}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, q_seq: ShardedSequence, kv_seq: ShardedSequence) -> None:
    for name, tensor, seq in (("q", q, q_seq), ("k", k, kv_seq), ("v", v, kv_seq)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} is {list(tensor.shape)}: it must have 4 dims [batch, rows, heads, head size]"
            )
        if tensor.shape[1] != seq.rows:
            hint = ""
            if tensor.shape[1] == seq.seq_len:
                hint = ": this is the whole sequence; pass seq.shard(tensor, dim=1)"
            elif tensor.shape[2] == seq.rows:
                hint = ": heads come after rows here; transpose dims 1 and 2"
            raise ValueError(
                f"{name} is {list(tensor.shape)}: dim 1 must have the {seq.rows} rows of a shard of "
                f"{seq!r}{hint}"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device} but q is {q.dtype} on {q.device}: "
                "all three must agree"
            )
        check_memory(name, tensor)
        if tensor.shape[3] % HEAD_DIM_STEP or tensor.shape[3] == 0:
            raise ValueError(
                f"{name} is {list(tensor.shape)}: the head size {tensor.shape[3]} must be a multiple of "
                f"{HEAD_DIM_STEP}; pad it with zeros and pass softmax_scale"
            )
    batch, _, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if batch == 0 or heads == 0:
        raise ValueError(f"q is {list(q.shape)}: batch and heads must be at least 1")
    if k.shape[0] != batch or v.shape[0] != batch:
        raise ValueError(f"batch sizes differ: q {batch}, k {k.shape[0]}, v {v.shape[0]}")
    if k.shape[3] != head_dim:
        raise ValueError(
            f"q has head size {head_dim} but k {k.shape[3]}: they are multiplied, so they must agree"
        )
    if v.shape[2] != kv_heads:
        raise ValueError(f"k has {kv_heads} heads but v {v.shape[2]}: every key head has its own value head")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"q has {heads} heads and k {kv_heads}: the query heads must be a multiple of the key/value heads"
        )


def check_kept(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """What a backward pass keeps must not come from inference mode, where PyTorch follows no changes."""
    given = {"q": q, "k": k, "v": v} if sinks is None else {"q": q, "k": k, "v": v, "sinks": sinks}
    wanted = [name for name, tensor in given.items() if tensor.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return
    for name, tensor in given.items():
        if tensor.is_inference():
            raise ValueError(
                f"{name} was made in torch.inference_mode() and {wanted[0]} requires grad: a backward pass "
                f"cannot keep {name}; pass {name}.clone()"
            )


def words_of(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    if tensor.is_nested:
        return "a nested tensor"
    grad = " with grad" if tensor.requires_grad and torch.is_grad_enabled() else ""
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device.type}{grad}"


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """One number a query head, on the device of q."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise ValueError(f"sinks is a {type(sinks).__name__}: it must be a tensor, or None")
    check_dense("sinks", sinks)
    heads = q.shape[2]
    if sinks.shape != (heads,) or sinks.dtype not in _FLOATS:
        raise ValueError(
            f"sinks is {list(sinks.shape)} {sinks.dtype}: it must be a float tensor [{heads}], a logit for "
            "each query head"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device} but q on {q.device}: they must agree")
    check_memory("sinks", sinks)
