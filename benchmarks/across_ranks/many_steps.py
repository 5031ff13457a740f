"""What `many_gpus.py` runs: programs, options and limits, by the GPUs that there are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from across_ranks.rank_check import CHECKED_LENGTH
from across_ranks.rank_cuts import cut_of, name_of
from meshattn.plan import CallShape, Tile, tiles
from meshattn.plan.placement import Cut
from meshattn.plan.planner import choose
from meshattn.plan.topology import load_topology
from virtual_cluster import KERNEL_OF_SHARED_GPUS

HERE = Path(__file__).resolve().parents[1]  # where the programs are
TRAIN = HERE.parent / "launch" / "train.py"
Block = tuple[int, int, int, int]
"""Rows, query heads, key/value heads and head size."""
TOPOLOGY, SOCKETS = "topology.json", "nccl.json"  # of "auto" and of "p2p"
PRESET = "dgx-h200"


@dataclass(frozen=True)
class Scale:
    """Sizes of all steps, as options of their programs, by what the ranks run on."""

    name: str  # behind that of the report
    device: str
    model: str
    lengths: str
    million: int
    slow: str
    rate: float  # MB/s of slowed links
    train: str
    blocks: str
    links: str
    """Blocks for the links of another transport, with which others of the same kernels are needless."""
    transports: str
    timed: str = "--rounds 2 --turn-ms 60"
    beside: str = ""
    lead: str = ""
    kernel: str = ""
    warmed: Mapping[str, Sequence[Block]] = field(default_factory=dict)
    """By step, blocks whose kernels are compiled ahead: of its model, and of the short sequence on which it
    is checked. Longer blocks have the same kernels. Those of shared GPUs, which are portable, are other ones
    for every number of heads, and for blocks of shared keys so short that a group of heads is cut."""

    @property
    def real(self) -> bool:
        """Whether every rank has a GPU of its own."""
        return self.name == ""


def scale_of(ranks: int, gpus: int) -> Scale:
    """That of so many ranks on so many GPUs."""
    short = -(-CHECKED_LENGTH // ranks)
    if gpus >= ranks:
        # Two would take longer for the lengths of more than all steps have.
        lengths, million = ((32768, 131072), 2**20) if ranks > 2 else ((65536,), 2**18)
        return Scale(
            name="",
            device="cuda",
            model="--heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16",
            lengths=" ".join(map(str, lengths)),
            million=million,
            slow="--seq-len 16384 --heads 16 --head-dim 64 --dtype bfloat16",
            rate=1000,
            # At 3e-4 the losses of the first steps rise to twice their height.
            train=f"--layers 10 --dim 3072 --heads 24 --kv-heads 8 --seq-len {32_768 * ranks} "
            "--dtype bfloat16 --lr 2e-5",
            blocks="--heads 32 16 8 --kv-heads 8 4 2 --rows 4k 16k 32k --head-dim 128",
            links="--heads 32 --kv-heads 8 --rows 4k --head-dim 128",
            transports="symmetric p2p",
            timed=f"--rounds {3 if ranks > 2 else 2} --turn-ms 150",
            beside="--one-gpu --torch cudnn",
            warmed={
                "self-test": [(short, 32, 8, 128), (short, 32, 32, 128)],
                "calibrate": [(32768, 32, 8, 128)],
                "tables": [(short, 32, 8, 128), *((length // ranks, 32, 8, 128) for length in lengths)],
                "slow-links": [(short, 16, 16, 64), (16384 // ranks, 16, 16, 64)],
                "million": [(lengths[-1] // ranks, 32, 8, 128)],
                "train-mesh": [(32768, 24, 8, 128)],
            },
        )
    if gpus:

        def inner(rows: int, kv_heads: int, widths: Iterable[int]) -> list[Block]:
            """What head axes of these widths leave of a rank's rows with 32 heads."""
            return [(rows * w, 32 // w, max(1, kv_heads // w), 128) for w in widths]

        widths = sorted({cut_of(cut).heads for cut in long_cuts(ranks)})  # the first is 1, the ring's
        every = [w for w in range(1, ranks + 1) if ranks % w == 0 and 32 % w == 0]
        checked = inner(short, 8, widths)
        return Scale(
            name="-virtual",
            device="cuda",
            model="--heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16",
            lengths="8192",
            million=2**16,
            slow="--seq-len 4096 --heads 16 --head-dim 64 --dtype bfloat16",
            rate=250,
            train="--layers 4 --dim 512 --heads 4 --kv-heads 2 --seq-len 16384 --dtype bfloat16 --lr 1e-4",
            blocks="--heads 32 8 --kv-heads 8 2 --rows 1k 2k --head-dim 128",
            links="--heads 32 --kv-heads 8 --rows 1k --head-dim 128",
            transports="symmetric p2p",
            lead="--lead-seconds 0.2",  # each rank's
            kernel=KERNEL_OF_SHARED_GPUS,  # the blocks of others wait for each other
            warmed={
                "self-test": inner(short, 8, every) + inner(short, 32, every),
                "calibrate": [(1024, 32, 8, 128), (1024, 8, 2, 128)],
                "tables": checked + inner(8192 // ranks, 8, widths),
                "slow-links": [(short, 16, 16, 64)],
                "million": checked + inner(2**16 // ranks, 8, widths),
                "train-mesh": [(16384 // ranks, 4, 2, 128)],
            },
        )
    return Scale(
        name="-cpu",
        device="cpu",
        model="--heads 8 --kv-heads 8 --head-dim 16 --dtype float32",
        lengths="256",
        million=2048,
        slow="--seq-len 256 --heads 4 --head-dim 32",
        rate=20,
        train="--layers 1 --dim 32 --heads 4 --seq-len 512 --lr 2e-3",
        blocks="--heads 8 --rows 32 64 --head-dim 16 --messages 16k 256k",
        links="--heads 8 --rows 32 --head-dim 16 --messages 16k 256k",
        transports="p2p",
        kernel="reference",
    )


@dataclass(frozen=True)
class Step:
    """One program on all ranks.

    Args:
        name: also of its folder below that of the report.
        program: with its options; what it writes goes to its folder.
        limit: seconds after which it is ended, if those before it took all of theirs.
        rate: MB/s of a rank's link to the others where it stands for a node; None on one host.
        alone: whether it starts processes of its own, and no ranks.
    """

    name: str
    program: tuple[str, ...]
    limit: float
    rate: float | None = None
    alone: bool = False


def steps(
    ranks: int, scale: Scale, out: Path, only: Collection[str] = (), commit: str | None = None
) -> list[Step]:
    """What is run, in order: less than eight minutes by all limits together. ``only`` some, by name; if none
    are named all. ``commit`` is the name of the code for the reports, where it is no git checkout."""
    distributed, million = str(HERE / "distributed.py"), str(HERE / "million_tokens.py")
    self_test, train = str(HERE / "self_test.py"), str(TRAIN)
    moved, timed = f"--transport {scale.transports}", f"{scale.timed} --timeout 60"
    long = long_cuts(ranks)
    half = ranks // 2
    every = [
        *(Cut(1, tile) for tile in tiles(ranks)),
        Cut(2, Tile(1, half)),
        Cut(2, squarest(half)),
        Cut(ranks, Tile(1, 1)),
    ]
    named = " ".join(dict.fromkeys(map(name_of, every)) if scale.real else long)
    tested = "" if scale.device == "cuda" else "--dtype float32 --heads 8 --kv-heads 2 --head-dim 16"
    trained = f"{scale.train} --device {scale.device} --warmup 4 --timeout 60"
    mine, nccl = out / TOPOLOGY, out / SOCKETS
    best, *others = scale.transports.split()
    # The most wanted first: the report is written behind every run, and the last ones may be cut off.
    runs = [(cut, kind) for kind in (best, *others) for cut in long[:2]] + [(cut, best) for cut in long[2:]]
    long_runs = f"--cut {' '.join(cut for cut, _ in runs)} --transport {' '.join(kind for _, kind in runs)}"
    # By name: program, options, and limits in seconds on two GPUs of their own, on more, and in a trial. The
    # most wanted first: a machine may be taken away before all are done.
    found = [
        ("self-test", self_test, f"{moved} {tested}", 24, 55, 60),
        (
            "tables",
            distributed,
            f"--seq-len {scale.lengths} {scale.model} --tile {named} {moved} {scale.beside} {timed}",
            54,
            97,
            60,
        ),
        (
            "million",
            million,
            f"--seq-len {scale.million} {scale.model} {long_runs} {scale.lead} --timeout 100",
            52,
            75,
            75,
        ),
        ("train-mesh", train, f"--attention mesh {trained} --steps 8", 46, 75, 40),
        ("train-ring", train, f"--attention ring {trained} --steps 3", 37, 46, 40),
        ("slow-links", distributed, f"{scale.slow} --no-bare --rounds 2", 17, 38, 40),
        ("calibrate", "-m", f"meshattn calibrate --out {mine} {scale.blocks}", 31, 31, 40),
        (
            "calibrate-nccl",
            "-m",
            f"meshattn calibrate --out {nccl} {scale.links} --transport p2p",
            19,
            19,
            40,
        ),
    ]
    kernel = ["--kernel", scale.kernel] if scale.kernel else []
    made = [
        Step(
            name,
            (program, *options.split(), *kernel, *_written(program, out / name, commit)),
            (two if ranks == 2 else more) if scale.real else trial,
            scale.rate if name == "slow-links" else None,
        )
        for name, program, options, two, more, trial in found
    ]
    if scale.warmed:
        warm = 29 if scale.real else 45
        made.insert(
            0, Step("warm", (str(HERE / "warm.py"), *_warming(scale, only), *kernel), warm, alone=True)
        )
    return [step for step in made if not only or step.name in only]


def _warming(scale: Scale, only: Collection[str]) -> Iterator[str]:
    """The blocks of all steps that are run, each once; full ones too where they are calibrated."""
    chosen = {name.removesuffix("-nccl") for name in only}  # which has the kernels of the other
    wanted = {name: blocks for name, blocks in scale.warmed.items() if not only or name in chosen}
    wanted = wanted or dict(scale.warmed)
    for block in dict.fromkeys(block for blocks in wanted.values() for block in blocks):
        yield from ("--block", *map(str, block))
    for block in wanted.get("calibrate", ()):
        yield from ("--full-block", *map(str, block))


def long_cuts(ranks: int) -> list[str]:
    """For a million tokens: the ring, what the planner takes on GPUs like those of the preset, the squarest
    tile."""
    shape = CallShape(
        batch=1, rows=2**20 // ranks, heads=32, kv_heads=8, head_dim=128, head_dim_v=128, itemsize=2,
        reduce_itemsize=4, acc_itemsize=4, causal=True,
    )  # fmt: skip
    best = choose(ranks, shape, heads=None, topology=load_topology(PRESET))
    return list(dict.fromkeys(map(name_of, (Cut(1, Tile(1, ranks)), best, Cut(1, squarest(ranks))))))


def squarest(ranks: int) -> Tile:
    """The tile of these ranks whose sides differ least, no taller than wide."""
    return max((tile for tile in tiles(ranks) if tile.a <= tile.b), key=lambda tile: tile.a)


def _written(program: str, folder: Path, commit: str | None) -> list[str]:
    """The options that say where a program writes, and what code wrote it."""
    if program == "-m":
        return []
    if program == str(TRAIN):
        return ["--log-file", str(folder / "log.jsonl")]
    return ["--out", str(folder), *(["--commit", commit] if commit else [])]
