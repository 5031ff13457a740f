"""All that four or eight GPUs of one host should show, in one command of at most eight minutes.

    python benchmarks/many_gpus.py --ranks 8

Self-test, links and kernels, tables, slowed links, a million tokens, training: each in processes of its own
with a limit of its own, so that one that fails or hangs costs nothing but its figures. With fewer GPUs than
ranks the ranks share them (see virtual_cluster.py) and the sizes are small: that tries the script, and its
times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import REPORTS, Machine, Record, table, write
from meshattn.plan import Tile, tiles
from meshattn.plan.placement import Cut
from virtual_cluster import KERNEL_OF_SHARED_GPUS, find_gpus

HERE = Path(__file__).resolve().parent
TRAIN = HERE.parent / "launch" / "train.py"
TOPOLOGY = "topology.json"
_SPARE = 15.0  # seconds beyond its limit for a program that keeps it itself, and says more


@dataclass(frozen=True)
class Step:
    """One program on all ranks.

    Args:
        name: also of its folder below that of the report.
        program: with its options; what it writes goes to its folder.
        limit: seconds after which it is ended.
        rate: MB/s of a rank's link to the others where it stands for a node; None on one host.
    """

    name: str
    program: tuple[str, ...]
    limit: float
    rate: float | None = None


def steps(ranks: int, *, real: bool, out: Path) -> list[Step]:
    """What is run, in order; of real GPUs the limits add up to less than eight minutes."""
    distributed, square = str(HERE / "distributed.py"), squarest(ranks)
    model = "--heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16"
    both, timed = "--transport symmetric p2p", "--rounds 3 --turn-ms 150 --timeout 60"
    lengths, long, beside = ("32768 131072", 1_048_576, "--one-gpu --torch cudnn flash")
    slow_length, rate = 32_768, 1000
    sizes = f"--layers 16 --dim 2048 --heads 16 --kv-heads 4 --seq-len {32_768 * ranks}"
    if not real:
        lengths, long, beside, slow_length, rate = "8192", 65_536, "", 8192, 250
        sizes = "--layers 4 --dim 512 --heads 4 --kv-heads 2 --seq-len 16384"
    # The blocks of other kernels wait for each other, which can go wrong where ranks share a GPU.
    chosen = ["--kernel", KERNEL_OF_SHARED_GPUS] if not real else []
    half = ranks // 2
    cuts = [*tiles(ranks), Cut(2, Tile(1, half)), Cut(2, squarest(half)), Cut(ranks, Tile(1, 1))]
    named = " ".join(dict.fromkeys(str(cut) for cut in cuts))
    train = f"{sizes} --dtype bfloat16 --device cuda --lr 3e-4 --warmup 4 --timeout 60"
    found = [
        ("self-test", str(HERE / "self_test.py"), both, 45, None),
        ("calibrate", "-m", f"meshattn calibrate --out {out / TOPOLOGY} --head-dim 128 --group 4", 35, None),
        (
            "tables",
            distributed,
            f"--seq-len {lengths} {model} --tile {named} {both} {beside} {timed}",
            130,
            None,
        ),
        (
            "slow-links",
            distributed,
            f"--seq-len {slow_length} --heads 16 --head-dim 64 --dtype bfloat16 --no-bare --rounds 3",
            50,
            rate,
        ),
        (
            "million",
            distributed,
            f"--seq-len {long} {model} --tile auto {square} --topology dgx-h200 --transport symmetric "
            "--no-bare --rounds 1 --turn-ms 1 --timeout 100",
            110,
            None,
        ),
        ("train-mesh", str(TRAIN), f"--attention mesh {train} --steps 10", 70, None),
        ("train-ring", str(TRAIN), f"--attention ring {train} --steps 4", 40, None),
    ]
    return [
        Step(name, (program, *options.split(), *chosen, *_written(program, out / name)), limit, rate)
        for name, program, options, limit, rate in found
        if real or program != "-m"  # it times the library's own kernel
    ]


def squarest(ranks: int) -> Tile:
    """The tile of these ranks whose sides differ least, no taller than wide."""
    return max((tile for tile in tiles(ranks) if tile.a <= tile.b), key=lambda tile: tile.a)


def _written(program: str, folder: Path) -> list[str]:
    """The option that says where a program writes."""
    if program == "-m":
        return []
    return ["--log-file", str(folder / "log.jsonl")] if program == str(TRAIN) else ["--out", str(folder)]


def command(step: Step, ranks: int, *, real: bool) -> list[str]:
    """How a step is started: one rank a GPU of one host, or as nodes, or as ranks that share GPUs."""
    if real and step.rate is None:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return [sys.executable, *start, *step.program]
    network = ["--no-network"] if step.rate is None else ["--rate", f"{step.rate:g}"]
    limit = ["--timeout", f"{step.limit:g}"]
    cluster = [str(HERE / "virtual_cluster.py"), "--ranks", str(ranks), "--device", "cuda", *network, *limit]
    return [sys.executable, *cluster, "--", *step.program]


@dataclass(frozen=True)
class Outcome:
    """How a step ended."""

    step: Step
    code: int  # 0 if all is well, 124 past its limit
    seconds: float
    said: str


def run(step: Step, ranks: int, *, real: bool, out: Path) -> Outcome:
    """Run a step to its end or its limit; what it says goes to a file of its folder, too."""
    folder = out / step.name
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.txt"
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command(step, ranks, real=real), stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(step.limit + _SPARE)
        except BaseException as stopped:
            _end(process)
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
            code = 124
    return Outcome(step, code, time.monotonic() - began, log.read_text(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let it end its ranks, and make sure of it."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def training(out: Path) -> tuple[str, list[Record]]:
    """Tokens a second of both runs, and how far their losses are apart."""
    runs = {}
    for kind in ("mesh", "ring"):
        log = out / f"train-{kind}" / "log.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        runs[kind] = [json.loads(line) for line in lines]
    records, said = [], []
    for kind, run in runs.items():
        if len(run) > 1:
            pace = statistics.median(one["tokens"] / one["seconds"] for one in run[1:])
            records.append(Record("many-gpus", f"train-{kind}", "tokens/s", pace))
            said.append(f"{kind}: {pace:,.0f} tokens/s, loss {run[0]['loss']:.4f} to {run[-1]['loss']:.4f}")
    apart = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(*runs.values(), strict=False)]
    if apart:
        records.append(Record("many-gpus", "train", "largest loss difference", max(apart), "ring"))
        said.append(f"The losses of their {len(apart)} first steps differ by {max(apart):.1e} at most.")
    return "\n".join(said), records


def predictions(out: Path) -> str:
    """What the emulator says of the tables, on the topology that was measured beside them."""
    records = [str(path) for path in sorted((out / "tables").glob("*.jsonl"))]
    topology = out / TOPOLOGY
    if not records or not topology.exists():
        return ""
    command = [sys.executable, str(HERE / "grounding.py"), *records, "--topology", str(topology)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr.strip()


def report(outcomes: Sequence[Outcome], ranks: int, *, real: bool, out: Path) -> Path:
    """How every step ended and what it said; the figures lie in the folders of the steps."""
    machine = Machine.here()
    rows = [
        [x.step.name, "good" if x.code == 0 else f"code {x.code}", f"{x.seconds:.0f}", f"{x.step.limit:.0f}"]
        for x in outcomes
    ]
    trained, records = training(out)
    where = f"{ranks} GPUs" if real else f"{ranks} ranks that share GPUs: a trial, its times mean nothing"
    parts = [f"# {where}", machine.describe(), table(["step", "ended", "seconds", "limit"], rows)]
    parts += [f"## Training\n\n{trained}"] if trained else []
    predicted = predictions(out)
    parts += [f"## Predicted and measured\n\n{predicted}"] if predicted else []
    for outcome in outcomes:
        records.append(Record("many-gpus", outcome.step.name, "seconds", outcome.seconds))
        records.append(Record("many-gpus", outcome.step.name, "code", outcome.code))
        tail = "\n".join(outcome.said.strip().splitlines()[-60:])
        parts.append(f"## {outcome.step.name}\n\n`{' '.join(outcome.step.program[1:])}`\n\n{tail}")
    name = f"many-gpus-{ranks}" + ("" if real else "-virtual")
    return write(name, [(machine, records)], "\n\n".join([*parts, ""]), out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="default: one a GPU")
    parser.add_argument("--only", nargs="+", help="names of steps")
    parser.add_argument("--out", type=Path, default=REPORTS / "many-gpus", help="folder of the reports")
    options = parser.parse_args(arguments)
    gpus = len(find_gpus())
    ranks = options.ranks or gpus
    if ranks < 2 or gpus == 0:
        parser.error(
            f"{ranks} ranks on {gpus} GPUs; this needs a GPU, and 4 or 8 ranks to show what it should"
        )
    real = gpus >= ranks
    chosen = steps(ranks, real=real, out=options.out)
    unknown = set(options.only or ()) - {step.name for step in chosen}
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: steps are {' '.join(step.name for step in chosen)}")
    outcomes = []
    try:
        for step in chosen:
            if options.only is None or step.name in options.only:
                outcomes.append(run(step, ranks, real=real, out=options.out))
                print(f"{step.name}: code {outcomes[-1].code}, {outcomes[-1].seconds:.0f} s", flush=True)
    finally:
        print(f"written to {report(outcomes, ranks, real=real, out=options.out)}")
    return int(not outcomes or any(outcome.code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
