"""The options of train.py, and the checks that need nothing but the options and the number of ranks."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshattn.layouts import LayoutKind
from meshattn.mesh_arguments import seconds_of
from meshattn.plan.assignment import Tile, tiles
from model import ModelConfig

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """What a run is: two runs with the same options see the same data and start from the same weights."""

    attention: str
    tile: str
    head_axis: int
    layout: LayoutKind
    transport: str
    window: int
    softcap: float
    dropout: float
    seq_len: int
    documents: int
    batch_size: int
    steps: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    untied: bool
    lr: float
    warmup: int
    weight_decay: float
    clip: float
    dtype: str
    kernel: str | None
    seed: int
    data: tuple[Path, ...]
    log_file: Path | None
    device: str
    timeout: float

    @property
    def model(self) -> ModelConfig:
        """Raises ValueError if the sizes do not fit together."""
        kv_heads = self.kv_heads or self.heads
        return ModelConfig(
            dim=self.dim, layers=self.layers, heads=self.heads, kv_heads=kv_heads, tied=not self.untied
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def autocast(self) -> torch.dtype | None:
        """The type to run in over float32 weights, None to run in the type of the weights."""
        return torch.bfloat16 if self.dtype == "bfloat16" else None


class Parser(argparse.ArgumentParser):
    """Every rank parses the same line: only the first one speaks when it is wrong."""

    def __init__(self, *, speaks: bool) -> None:
        super().__init__(
            prog="train.py",
            description="Train a small decoder on bytes of text, its attention spread over ranks.",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        self.speaks = speaks

    def _print_message(self, message: str, file: object = None) -> None:
        if self.speaks:
            super()._print_message(message, file)  # type: ignore[arg-type]


def parse(arguments: Sequence[str] | None = None, *, speaks: bool = True) -> Options:
    """Options from the command line; exits with code 2 and a message if it is wrong."""
    parser = Parser(speaks=speaks)
    add = parser.add_argument
    add("--attention", choices=("mesh", "ring", "single"), default="mesh", help="ring is the tile 1xP")
    add("--tile", default="auto", help="AxB: A query chunks by B key/value chunks a rank, A*B ranks in all")
    add(
        "--head-axis",
        type=int,
        default=1,
        help="ranks that share out heads, that many for each rank of a tile",
    )
    add(
        "--layout",
        choices=("striped", "zigzag", "contiguous"),
        default="striped",
        help="who holds which token",
    )
    add("--transport", choices=("auto", "symmetric", "p2p"), default="auto", help="what moves the chunks")
    add("--window", type=int, default=-1, help="keys that a token sees before its own; -1 is all of them")
    add("--softcap", type=float, default=0.0, help="bound of the attention scores; 0 is none")
    add("--dropout", type=float, default=0.0, help="probability with which attention drops a pair of tokens")
    add("--seq-len", type=int, default=4096, help="tokens of a sequence, spread over all ranks")
    add(
        "--documents",
        type=int,
        default=0,
        help="pack each sequence of documents that do not see each other, of random lengths with this mean",
    )
    add("--batch-size", type=int, default=1, help="sequences a step")
    add("--steps", type=int, default=100, help="updates of the weights")
    add("--dim", type=int, default=128, help="width of the model")
    add("--layers", type=int, default=2, help="decoder layers")
    add("--heads", type=int, default=4, help="query heads of a layer")
    add("--kv-heads", type=int, default=0, help="key/value heads; 0 is as many as --heads")
    add("--untied", action="store_true", help="give the output head weights of its own")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--warmup", type=int, default=10, help="steps until the learning rate is reached")
    add("--weight-decay", type=float, default=0.1, help="of AdamW, for matrices alone")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="bfloat16 is autocast over float32 weights")
    add(
        "--kernel",
        help="local attention kernel; by default the fastest that serves device, type and head size and "
        "repeats its bits, which sdpa, cudnn and fa4 do not",
    )
    add("--seed", type=int, default=0, help="of the weights and of the batches")
    add(
        "--data",
        type=Path,
        nargs="+",
        default=(),
        help="text files or folders; the default is Python's own sources",
    )
    add("--log-file", type=Path, help="file for one JSON line a step")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: GPUs, if each rank has its own",
    )
    add("--timeout", type=float, default=600.0, help="seconds a rank waits for another")
    values = vars(parser.parse_args(arguments))
    options = Options(**values | {"data": tuple(values["data"])})
    try:
        check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def check(options: Options) -> None:
    """Raises ValueError for values that fit no run."""
    for name in ("head_axis", "seq_len", "batch_size", "steps", "lr", "clip"):
        if not 0 < getattr(options, name) < math.inf:  # NaN is in no order
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be positive")
    for name in ("warmup", "weight_decay", "kv_heads", "documents", "softcap"):
        if not 0 <= getattr(options, name) < math.inf:
            raise ValueError(
                f"--{name.replace('_', '-')} is {getattr(options, name)}; it must not be negative"
            )
    if options.window < -1:
        raise ValueError(f"--window is {options.window}; it must be a number of keys, or -1 for all")
    if not 0 <= options.dropout < 1:
        raise ValueError(f"--dropout is {options.dropout}; it must be a probability below 1")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed is {options.seed}; it must be a number from 0 to 2**63 - 1")
    seconds_of(options.timeout)
    for name in ("seq_len", "documents"):
        if getattr(options, name) == 1:
            raise ValueError(f"--{name.replace('_', '-')} is 1; there is no next token to learn")
    if options.model.head_dim % 8:
        raise ValueError(f"--dim / --heads = {options.model.head_dim}; the head size must be a multiple of 8")


def choose_tile(options: Options, ranks: int) -> str:
    """The tile to build the mesh with, "auto" or AxB. Raises ValueError if it does not fit `ranks`."""
    if options.attention == "single" and ranks != 1:
        raise ValueError(
            f"--attention single runs on one rank, but there are {ranks}; use mesh or ring, or one rank"
        )
    axis = options.head_axis
    if ranks % axis or options.heads % axis:
        raise ValueError(
            f"--head-axis {axis} must divide the {ranks} ranks and the {options.heads} heads of --heads"
        )
    ranks //= axis
    beside = f" for each of the {axis} of --head-axis" if axis > 1 else ""
    ring = Tile(1, ranks)
    if options.tile == "auto":
        return "auto" if options.attention == "mesh" else str(ring)
    tile = Tile.parse(options.tile)
    if options.attention == "ring" and tile != ring:
        raise ValueError(
            f"--attention ring on {ranks} ranks{beside} is the tile {ring}, not {tile}; leave --tile out"
        )
    if tile.ranks != ranks:
        fitting = ", ".join(map(str, tiles(ranks)))
        raise ValueError(
            f"--tile {tile} needs {tile.ranks} ranks, but there are {ranks}{beside}; "
            f"tiles of {ranks}: {fitting}"
        )
    return str(tile)
