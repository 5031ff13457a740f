"""`make demo`: one small model trained on one rank, on a ring and on a mesh of four, and what each sent.

Runs train.py three times with the same seed and text, prints one table, and writes it, the figures behind it
and two pictures into runs/demo. It ends with an error if what was measured is not what the formulas say.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import meshattn as ma
from meshattn.plan.assignment import Assignment, Tile
from meshattn.plan.cost import CallShape, choose_tile, total_bytes
from meshattn.plan.schedule import Direction
from meshattn.testing import run_ranks
from meshattn_kernels import accumulator_dtype
from model import Decoder
from options import Options, parse
from pictures import draw_assignments, draw_losses
from steps import compute_gradients, make_attention

LAUNCH = Path(__file__).resolve().parent
RANKS = 4
RING, MESH = Tile(1, RANKS), Tile(2, 2)
# Rounding alone parts the runs: every step's loss must agree with that of one rank to this.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Run:
    """One run of train.py: what it ran on, losses of its steps, bytes a rank sends a step, and how many the
    formulas give."""

    tile: Tile
    dtype: str
    kernel: str
    loss: tuple[float, ...]
    bytes_forward: int
    bytes_backward: int
    bytes_forward_formula: int
    bytes_backward_formula: int
    steps_per_s: float

    def summary(self) -> dict[str, object]:
        return {**vars(self), "tile": str(self.tile)}


def formula(direction: Direction, tile: Tile, options: Options) -> int:
    """Bytes that a rank sends in a step, padding included."""
    return options.model.layers * total_bytes(direction, tile, call_shape(tile.ranks, options))


def call_shape(ranks: int, options: Options) -> CallShape:
    model, exact = options.model, accumulator_dtype(options.torch_dtype).itemsize
    return CallShape(
        batch=options.batch_size,
        rows=-(-options.seq_len // ranks),
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        head_dim_v=model.head_dim,
        itemsize=options.torch_dtype.itemsize,
        reduce_itemsize=exact,
        acc_itemsize=exact,
        causal=True,
    )


def run(kind: str, tile: Tile, arguments: list[str]) -> Run:
    """Train on the ranks of `tile` and read the log. Raises SystemExit if the run fails."""
    print(f"\n== {kind}, tile {tile}, {tile.ranks} rank{'s' if tile.ranks > 1 else ''}", flush=True)
    arguments = ["--attention", kind, "--tile", str(tile), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        command = ["bash", str(LAUNCH / "local.sh"), str(tile.ranks), *arguments, "--log-file", str(log)]
        code = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}).returncode
        if code:
            raise SystemExit(f"demo: the {kind} run ended with code {code}")
        records = [json.loads(line) for line in log.read_text().splitlines()]
    (sent,) = {(record["bytes_forward"], record["bytes_backward"]) for record in records}
    (kernel,) = {record["kernel"] for record in records}
    options = parse(arguments)
    # The first step pays for buffers and connections, so it is left out of the pace if there are others.
    pace = statistics.median(record["seconds"] for record in records[1:] or records)
    return Run(
        tile=tile,
        dtype=options.dtype,
        kernel=kernel,
        loss=tuple(record["loss"] for record in records),
        bytes_forward=sent[0],
        bytes_backward=sent[1],
        bytes_forward_formula=formula("forward", tile, options),
        bytes_backward_formula=formula("backward", tile, options),
        steps_per_s=1 / pace,
    )


def loss_differences(run: Run, single: Run) -> list[float]:
    """Relative, step by step."""
    return [abs(ours - theirs) / theirs for ours, theirs in zip(run.loss, single.loss, strict=True)]


def table(runs: dict[str, Run]) -> str:
    """What the runs learned, sent and took, a column each."""
    single, ring = runs["single"], runs["ring"]
    rows = {
        "kernel": [run.kernel for run in runs.values()],
        "type": [run.dtype for run in runs.values()],
        "loss at the first step": [f"{run.loss[0]:.4f}" for run in runs.values()],
        "loss at the last step": [f"{run.loss[-1]:.4f}" for run in runs.values()],
        "largest loss difference": [f"{max(loss_differences(run, single)):.1e}" for run in runs.values()],
    }
    for way in ("forward", "backward"):
        base = getattr(ring, f"bytes_{way}")
        sent = [getattr(run, f"bytes_{way}") for run in runs.values()]
        rows[f"bytes {way}, measured"] = [f"{amount:,}" for amount in sent]
        rows[f"bytes {way}, formula"] = [f"{getattr(run, f'bytes_{way}_formula'):,}" for run in runs.values()]
        rows[f"bytes {way}, of ring"] = [f"{amount / base:.3f}" for amount in sent]
    rows["steps/s"] = [f"{run.steps_per_s:.2f}" for run in runs.values()]
    head = [f"{name} {run.tile}" for name, run in runs.items()]
    lines = [("", head), *rows.items()]
    return "\n".join(f"{name:<26}" + "".join(f"{cell:>16}" for cell in cells) for name, cells in lines)


def bytes_of_one_step(kind: str, tile: Tile, options: Options) -> int:
    """Bytes that one rank sends in one step of an untrained model, forward and backward; collective."""
    mesh = ma.init_attention_mesh(tile=tile)
    seq = mesh.sequence(options.seq_len)
    ids = torch.zeros(options.batch_size, options.seq_len, dtype=torch.int64)
    compute_gradients(Decoder(options.model), ids, seq, make_attention(kind, seq), options.autocast)
    return sum(record.sent_bytes for record in mesh.traffic())


def grouped_line(options: Options) -> str:
    """What ring and mesh send where few key/value heads serve many query heads, and who sends less."""

    def measure(_: object) -> tuple[int, int]:
        return bytes_of_one_step("ring", RING, options), bytes_of_one_step("mesh", MESH, options)

    ring, mesh = run_ranks(RANKS, measure, backend="gloo")[0]
    least = choose_tile(RANKS, call_shape(RANKS, options))
    model = options.model
    g = model.heads // model.kv_heads
    verdict = "The ring wins here" if ring < mesh else "The mesh wins here"
    return (
        f"With {model.heads} query heads and {model.kv_heads} key/value head (g = {g}, one step, "
        f"untrained) a rank sends {ring:,} bytes on the ring\nand {mesh:,} on the mesh. {verdict}: "
        f"keys and values are small beside queries. The tile that auto takes is {least}."
    )


def problems(runs: dict[str, Run]) -> list[str]:
    """What was promised and did not come true."""
    found = []
    for name, run in runs.items():
        for way in ("forward", "backward"):
            measured, expected = getattr(run, f"bytes_{way}"), getattr(run, f"bytes_{way}_formula")
            if measured != expected:
                found.append(f"{name}: {measured} bytes sent {way}, but the formula gives {expected}")
        furthest, allowed = max(loss_differences(run, runs["single"])), LOSS_TOLERANCE[run.dtype]
        if furthest > allowed:
            found.append(
                f"{name}: a loss differs from single by {furthest:.1e} of it, more than {allowed:.0e}"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare one rank, a ring and a mesh on the same training run."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the results")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=3)
    chosen = parser.parse_args()
    began = time.perf_counter()
    try:
        chosen.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {chosen.out}: {error.strerror}")
    # One kind of device for all runs: their losses are to be compared.
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= RANKS
    # The fast kernels of a GPU work in 16 bits; on the CPU float32 shows how little the runs differ.
    device, dtype = ("cuda", "bfloat16") if on_gpus else ("cpu", "float32")
    shape = ["--dim", "96", "--layers", "2", "--heads", "2", "--lr", "5e-3", "--warmup", "4", "--seed", "1"]
    where = ["--device", device, "--dtype", dtype]
    sizes = ["--seq-len", str(chosen.seq_len), "--batch-size", str(chosen.batch_size), *where]
    trained = [*shape, *sizes, "--steps", str(chosen.steps)]

    for name, tile in (("ring", RING), ("mesh", MESH)):
        print(f"{name}, tile {tile}: {Assignment(tile).picture()}\n", flush=True)
    tiles = {"single": Tile(1, 1), "ring": RING, "mesh": MESH}
    runs = {name: run(name, tile, trained) for name, tile in tiles.items()}
    grouped = grouped_line(parse([*shape, *sizes, "--heads", "4", "--kv-heads", "1"]))

    text = f"{table(runs)}\n\nBytes are those that one rank sends in a step.\n{grouped}\n"
    print(f"\n{text}")
    (chosen.out / "table.txt").write_text(text)
    summary = {name: run.summary() for name, run in runs.items()}
    (chosen.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw_assignments({"ring": RING, "mesh": MESH}, chosen.out / "assignment.png")
    differences = {name: loss_differences(runs[name], runs["single"]) for name in ("ring", "mesh")}
    draw_losses({name: run.loss for name, run in runs.items()}, differences, chosen.out / "loss.png")
    print(f"{time.perf_counter() - began:.0f} s; results in {chosen.out}")
    wrong = problems(runs)
    if wrong:
        raise SystemExit("demo: " + "\ndemo: ".join(wrong))


if __name__ == "__main__":
    main()
