"""The command line: what it prints, and how it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshattn import __version__
from meshattn.cli import main
from meshattn.command import progress
from meshattn.plan import Assignment, CallShape, Tile, build, costs, peak_memory, tiles, total_bytes


def out(capsys: pytest.CaptureFixture[str], command: str) -> str:
    assert main(command.split()) == 0
    return capsys.readouterr().out


def test_table_has_a_line_for_every_tile_ring_included(capsys: pytest.CaptureFixture[str]) -> None:
    lines = out(capsys, "schedule --ranks 12").splitlines()
    names = [line.split()[0] for line in lines[1 : 1 + len(tiles(12))]]
    assert [name.rstrip("*") for name in names] == [str(tile) for tile in tiles(12)]
    assert sum(name.endswith("*") for name in names) == 1


def test_json_agrees_with_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    command = "schedule --ranks 6 --tile 2x3 --seq-len 1001 --heads 8 --kv-heads 2 --head-dim 64 --json"
    (row,) = json.loads(out(capsys, command))
    shape = CallShape(1, 167, 8, 2, 64, 64, itemsize=2, reduce_itemsize=4, acc_itemsize=4, causal=True)
    tile = Tile(2, 3)
    assert row["tile"] == "2x3"
    for direction in ("forward", "backward"):
        assert row["sent_bytes"][direction] == total_bytes(direction, tile, shape)
        assert row["peak_bytes"][direction] == peak_memory(direction, tile, shape)
        assert row["num_steps"][direction] == len(build(direction, tile, costs(direction, shape)).steps)
    assert {(q["direction"], q["channels"]) for q in row["quality"]} == {
        (direction, channels) for direction in ("forward", "backward") for channels in ("shared", "per_axis")
    }
    assert all(q["plain"] >= q["tight"] >= 1 for q in row["quality"])


def test_worst_figures_are_the_worst_of_the_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    base = "schedule --ranks 6 --tile 3x2 --json"
    (worst,) = json.loads(out(capsys, base))
    each = json.loads(out(capsys, base + " --ratio 0.05 0.1 0.2 0.35 0.5 0.7 1 1.4 2"))
    assert [row["ratio"] for row in each] == [0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.4, 2]
    for i, figures in enumerate(worst["quality"]):
        assert figures["plain"] == max(row["quality"][i]["plain"] for row in each)


def test_types_and_mask_change_what_they_should(capsys: pytest.CaptureFixture[str]) -> None:
    base = "schedule --ranks 4 --tile 2x2 --ratio 1 --json"
    (plain,) = json.loads(out(capsys, base))
    (narrow,) = json.loads(out(capsys, base + " --reduce-dtype bf16"))
    (wide,) = json.loads(out(capsys, base + " --dtype fp32"))
    for direction in ("forward", "backward"):
        sent = [row["sent_bytes"][direction] for row in (narrow, plain, wide)]
        assert sent == sorted(set(sent))


def test_assignment_shows_matrix_groups_and_all_blocks_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "assignment --ranks 6 --tile 2x3 --rank 3")
    plan = Assignment(Tile(2, 3))
    assert plan.picture() in text
    assert "0 1  2 3  4 5" in text and "0 2 4  1 3 5" in text
    for part in re.split(r"forward, rank 3|backward, rank 3", text)[1:]:
        blocks = re.findall(r"Q(\d+)-KV(\d+)(?! \(part [2-9])", part)
        assert sorted((int(p), int(q)) for p, q in blocks) == [
            (p, q) for p in plan.queries(3) for q in plan.keys(3)
        ]


def test_wide_matrix_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert "too wide" in out(capsys, "assignment --ranks 64 --tile 8x8")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("schedule --ranks 0", "--ranks is 0"),
        ("schedule --ranks -2", "--ranks is -2"),
        ("schedule --ranks 6 --tile 2x2", "2x2 takes 4 ranks, not 6; tiles that fit: 1x6, 2x3, 3x2, 6x1"),
        ("schedule --ranks 6 --tile six", "write it as AxB"),
        ("schedule --ranks 6 --ratio 0", "--ratio 0 is not between"),
        ("schedule --ranks 6 --ratio nan", "--ratio nan is not between"),
        ("schedule --ranks 6 --kv-heads 5", "--kv-heads is 5, but must divide the 32 query heads"),
        ("schedule --ranks 6 --seq-len 0", "--seq-len is 0"),
        ("assignment --ranks 6", "--tile"),
        ("layouts --ranks 6 --window -2 0", "--window is -2 0, but -1 is the least"),
        ("layouts --ranks 6 --window 4 9", "--window is 4 9, but under a causal mask"),
        ("schedule --ranks 6 --head-dim 20", "--head-dim is 20, but must be a multiple of 8"),
        ("schedule --ranks 6 --reduce-dtype fp16", "--reduce-dtype is fp16, but partial results of bf16"),
        ("schedule --ranks 6 --dtype fp64 --reduce-dtype fp32", "of fp64 move as fp64 (the default)\n"),
        ("layouts --ranks 0", "--ranks is 0"),
        ("assignment --ranks 6 --tile 2x3 --rank 6", "--rank is 6, but ranks are 0 to 5"),
        ("", "command"),
        ("draw", "invalid choice"),
        ("schedule --ranks 4096", "would take minutes"),
        ("plan --ranks 6 --topology nowhere", "no such file, nor a preset"),
        ("plan --ranks 6 --topology dgx-h200 --memory 1k", "the memory limit is 1024 bytes"),
        ("plan --ranks 6 --topology dgx-h200 --heads-axis 5", "ranks of the head axis must divide"),
        ("plan --ranks 6 --topology dgx-h200 --heads-axis 0", "ranks of the head axis must divide"),
        ("plan --ranks 6 --topology dgx-h200 --seq-len inf", "is not a whole number"),
        ("plan --ranks 6 --topology dgx-h200 --memory inf", "is not a whole number"),
        ("plan --ranks 6 --topology dgx-h200 --trace nowhere/x.json", "there is no folder nowhere"),
        ("plan --ranks 100003 --topology dgx-h200", "at most 4096"),
        ("assignment --ranks 100000 --tile 1x100000", "at most 4096"),
        ("layouts --ranks 1000000", "at most 4096"),
        ("calibrate --out nowhere/x.json", "there is no folder nowhere"),
        ("calibrate --out x.json --kv-heads 3 2", "--kv-heads has 3 for 8 of --heads, but must divide them"),
        (
            "calibrate --out x.json --kv-heads 4",
            "--kv-heads has 1 numbers, but must have one for each of the 2",
        ),
        ("calibrate --out x.json --rows 1k 32M", "--rows is 33554432, but must be at most 16777216"),
        ("calibrate --out x.json --block 8 5000 1", "--block HEADS is 5000, but must be at most 4096"),
        ("calibrate --out x.json --block 8 4 3", "--block 8 4 3: the 3 key/value heads must divide"),
        ("calibrate --out x.json --heads 5000", "--heads is 5000, but must be at most 4096"),
        ("plan --ranks 4093 --topology dgx-h200", "do not fill nodes of 8"),
        ("plan --ranks 4093 --topology dgx-h200", "give 4088 or 4096, which do, or at most 1024"),
        ("plan --ranks 1025 --topology dgx-h200", "give 1024 or 1032, which do"),
        ("plan --ranks 12 --heads 24 --heads-axis 8 --topology dgx-h200", "give one of 1, 2, 3, 4, 6, 12"),
        ("calibrate --out x.json --head-dim 7", "--head-dim is 7, but must be a multiple of 8"),
        ("plan --ranks 6 --topology dgx-h200 --show 0", "--show is 0"),
        ("plan --ranks 6 --topology dgx-h200 --seq-len 1.5", "is not a whole number"),
        ("plan --ranks 6 --topology dgx-h200 --seq-len many", "is no number such as"),
        (
            "plan --ranks 6 --topology dgx-h200 --seq-len 1e30",
            "--seq-len is 1000000000000000019884624838656, but",
        ),
        ("plan --ranks 6 --topology dgx-h200 --window 4 9", "--window is 4 9, but under a causal mask"),
        ("plan --ranks 6 --topology dgx-h200 --documents 4 0", "--documents has 0, but must be at least 1"),
        ("plan --ranks 512 --topology dgx-h200 --documents 4k", "at most 256 ranks can be planned"),
        ("plan --ranks 6 --topology dgx-h200 --documents 1 --seq-len 1G", "at most 349525 documents can"),
        ("plan --ranks 2 --topology dgx-h200 --trace /", "--trace /: this is a folder"),
        ("layouts --ranks 1025", "--ranks is 1025, but layouts looks at every pair: give at most 1024"),
        ("calibrate --out .", "--out .: this is a folder"),
        ("plan --ranks 2 --topology " + "a" * 5000, "File name too long"),
        ("plan --ranks 6 --topology dgx-h200 --heads 4100", "--heads is 4100, but must be at most 4096"),
    ],
)
def test_wrong_arguments_end_with_code_2(
    capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    with pytest.raises(SystemExit) as error:
        main(command.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["calibrate --out", "plan --ranks 6 --topology dgx-h200 --trace"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(SystemExit) as error:
        main([*command.split(), str(tmp_path / "x.json")])
    assert error.value.code == 2
    assert "x.json: no permission to write here" in capsys.readouterr().err


def test_module_is_the_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "meshattn", "assignment", "--ranks", "2", "--tile", "1x2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0 and "tile 1x2" in result.stdout, result.stderr


def test_windows_ask_for_contiguous_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    """And a plain causal mask for the default; every layout has a line with its figures."""
    for arguments, best in (("--window 1024 0", "contiguous"), ("", "striped"), ("--no-causal", "striped")):
        first, *lines = out(capsys, f"layouts --ranks 8 {arguments}").splitlines()
        assert first.startswith(f"take layout='{best}'")
        assert sorted(line.split()[0] for line in lines) == ["contiguous", "striped", "zigzag"]
        assert lines[0].split()[0] == best and "1.00 times the time" in lines[0]


def test_a_window_to_both_sides_is_one_without_a_causal_mask(capsys: pytest.CaptureFixture[str]) -> None:
    before, both = (
        out(capsys, f"layouts --ranks 8 {w}")
        for w in ("--no-causal --window 64 0", "--no-causal --window 64 512")
    )
    assert before != both


def test_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--version"])
    assert error.value.code == 0 and __version__ in capsys.readouterr().out


PLAN = "plan --ranks 6 --seq-len 12k --heads 4 --kv-heads 2 --topology dgx-h200"


def test_plan_says_what_is_best_and_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    table = out(capsys, f"{PLAN} --show 3 --trace {trace}").splitlines()
    found = json.loads(out(capsys, f"{PLAN} --show 3 --json"))
    names = [each["name"] for each in found["candidates"]]
    assert [line.split("  ")[0] for line in table[1 : 1 + len(names)]] == names
    times = [each["total_us"] for each in found["candidates"]]
    assert (
        times == sorted(times)
        and "1x1x6 (ring)" in names
        and any(line.startswith(found["why"]) for line in table)
    )
    for each in [*found["candidates"], *found["auto"]]:
        parts = [each[name] for name in ("kernels_us", "other_us", "exposed_us")]
        assert sum(parts) == pytest.approx(each["total_us"]) and min(parts) >= -1e-6
    assert any("ma.init_attention_mesh(" in line for line in table)
    assert sorted(found["candidates"][0]["group"]) == list(range(6))
    absent = out(capsys, "plan --ranks 6 --heads 4 --topology dgx-h200")
    assert "Ulysses alone cannot be: 6 ranks cannot share 4 heads" in absent
    assert "Plain ring is left out by the limits given" in out(capsys, f"{PLAN} --heads-axis 2")
    assert json.loads(trace.read_text())["traceEvents"]
    forward = json.loads(out(capsys, f"{PLAN} --forward --json"))["candidates"][0]
    assert forward["total_us"] < times[0] / 2
    only = json.loads(out(capsys, f"{PLAN} --heads-axis 2 --json"))["candidates"]
    assert {each["heads"] for each in only} == {2}


def test_the_guide_shows_the_mesh_that_its_plan_takes(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parent.parent / "docs/planning.md").read_text()
    command = re.search(r"^    meshattn (plan .*)$", guide, re.M)
    shown = re.search(r"For the call above that is\n\n```python[^\n]*\n(.*?)```", guide, re.S)
    assert command and shown and shown[1] in out(capsys, command[1])


def test_the_guide_says_what_a_million_tokens_take(capsys: pytest.CaptureFixture[str]) -> None:
    """As the planner does now; so does the report that it links."""
    command = "plan --ranks 2 --seq-len 1M --heads 32 --kv-heads 8 --topology dgx-h200"
    found = json.loads(out(capsys, f"{command} --json"))["candidates"]
    seconds = {f"{each['heads']}x{each['tile']}": f"{each['total_us'] / 1e6:.1f} s" for each in found}
    ring, tile, heads = (seconds[cut] for cut in ("1x1x2", "1x2x1", "2x1x1"))
    docs = Path(__file__).parent.parent / "docs"
    guide = " ".join((docs / "planning.md").read_text().split())
    assert f"it says {ring} for a ring, {tile} for a tile and {heads} for a head axis" in guide
    (report,) = re.findall(r"\.\./(benchmarks/reports/\S+-million-tokens\.md)", guide)
    beside = " ".join((docs.parent / report).read_text().split())
    assert f"predicts {ring} for ring, {tile} for the tile 2x1 and {heads} for the head axis" in beside


def test_plan_says_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr alone, and only where it takes a while."""
    assert main(PLAN.split()) == 0
    quick = capsys.readouterr()
    assert not quick.err
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert main(PLAN.split()) == 0
    slow = capsys.readouterr()
    assert slow.out == quick.out
    first, *_, last = slow.err.splitlines()
    assert re.fullmatch(r"plan: 0 of at most \d+ candidates are emulated", first) and "auto" in last


@pytest.mark.parametrize("ranks", [1, 4, 12])
def test_plan_shows_no_line_twice(capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    """What auto takes is named where it stands."""
    text = out(capsys, f"plan --ranks {ranks} --seq-len 3k --heads 4 --topology dgx-h200")
    head, *lines = text.split("\n\n")[0].splitlines()
    at = head.index("taken by")
    assert len({line[:at].rstrip() for line in lines}) == len(lines)
    ways = [way for line in lines for way in line[at:].split("; ") if way]
    assert sorted(ways) == [
        'heads="auto"', 'heads="auto", no topology', 'tile="auto"', 'tile="auto", no topology'
    ]  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        "plan --ranks 0 --topology dgx-h200",
        "plan --ranks 4 --topology no/such/file.json",
        "calibrate --out /no/such/folder/file.json",
        "schedule --ranks 4 --tile 3x2",
        "assignment --ranks 4 --tile 2x2 --rank 9",
        "layouts --ranks 5000",
        "plan --ranks 4 --topology dgx-h200 --tiles 2x2",
        "gantt --tiles 2x2",
    ],
    ids=lambda wrong: str(wrong).split()[0],
)
def test_what_is_wrong_is_said_with_the_usage_of_the_command(
    capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(wrong.split())
    command = f"meshattn {wrong.split()[0]}"
    said = capsys.readouterr().err
    assert (
        ended.value.code == 2 and said.startswith(f"usage: {command} [-h]") and f"\n{command}: error:" in said
    )


def test_a_picture_that_cannot_be_written_is_refused_before_the_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("meshattn.command.plan.plan", None)
    for option in ("--picture", "--timeline"):
        with pytest.raises(SystemExit):
            main([*PLAN.split(), option, str(tmp_path / "name.exe")])
        assert f"{option} {tmp_path / 'name.exe'}: the ending must be one of" in capsys.readouterr().err


def test_plan_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "matrix.png", tmp_path / "timeline.png"]
    out(capsys, f"{PLAN} --picture {pictures[0]} --timeline {pictures[1]}")
    assert all(picture.read_bytes()[1:4] == b"PNG" for picture in pictures)


@pytest.mark.parametrize(
    ("options", "said", "measured"),
    [
        ("", "", ""),
        ("--head-dim 80", "size 80 (the table has 64, 128)", "bf16 --head-dim 80 --block 1024 4 4 --block"),
        ("--dtype fp32", "fp32 (the table has bf16)", "--dtype fp32 --head-dim 128 --block 1024 4 4 --block"),
        ("--heads 36 --kv-heads 36", "36 heads (the table has 1 to 32)", "--block 2048 36 36"),
        ("--seq-len 5M", "rows of 4 heads (the table has 128 to", "--block 436907 4 4 --block 873814 4 4"),
    ],
    ids=["measured", "head-size", "type", "heads", "rows"],
)  # fmt: skip
def test_plan_says_what_it_extrapolates_and_what_measures_it(
    capsys: pytest.CaptureFixture[str], options: str, said: str, measured: str
) -> None:
    """Also in JSON; and the command given is one that calibrate takes."""
    command = f"plan --ranks 6 --seq-len 12k --heads 4 --topology dgx-h200 --heads-axis 1 {options}"
    text, found = out(capsys, command), json.loads(out(capsys, f"{command} --json"))
    assert ("Extrapolated from the kernel times (hopper, bf16, 1 x NVIDIA H200" in text) == bool(said)
    assert said in " ".join(found["extrapolated"]) and bool(found["extrapolated"]) == bool(said)
    assert measured in found["to_measure"] and found["to_measure"] in text
    if said:
        with pytest.raises(SystemExit):
            main(found["to_measure"].split(" -m meshattn ")[1].split())
        assert "calibrate measures ranks that torchrun starts" in capsys.readouterr().err


def test_plan_shows_what_auto_takes_and_why_it_differs(capsys: pytest.CaptureFixture[str]) -> None:
    """Exactly what a mesh of these arguments takes, with the topology and without."""
    from meshattn.mesh_arguments import auto_heads
    from meshattn.plan.cost import NOMINAL
    from meshattn.plan.planner import Question, choose
    from meshattn.plan.topology import load_topology

    command = "plan --ranks 24 --seq-len 24k --heads 24 --kv-heads 6 --topology a3-high"
    shape = CallShape(1, 1024, 24, 6, 128, 128, itemsize=2, reduce_itemsize=4, acc_itemsize=4, causal=True)
    found, text = json.loads(out(capsys, f"{command} --json"))["auto"], out(capsys, command)
    wanted = {}
    for topology, end in ((load_topology("a3-high"), ""), (None, ", no topology")):
        heads = auto_heads("auto", (24, 6), 24 * 1024 if topology else None, "auto", 24, topology)
        for name, number in (("tile", 1), ("heads", int(heads))):
            cut = choose(24, shape, heads=number, topology=topology)
            wanted[f'{name}="auto"{end}'] = (cut.heads, str(cut.tile))
            pace = NOMINAL if topology is None else None
            told = Question(24, shape, load_topology("a3-high")).predict(cut, cut.orders(8)[0], pace=pace)
            (one,) = (each for each in found if each["taken_by"] == f'{name}="auto"{end}')
            assert one["total_us"] == pytest.approx(told.total_us)
    assert {each["taken_by"]: (each["heads"], each["tile"]) for each in found} == wanted
    assert all(any(line.endswith(f"  {name}") for line in text.splitlines()) for name in wanted)
    assert wanted['tile="auto"'] != wanted['tile="auto", no topology'], "else the test says nothing"
    tile = wanted['tile="auto", no topology'][1]
    assert f"it counts what a rank sends and knows neither links nor kernels: 1x{tile} with" in text
    with_axis = json.loads(out(capsys, f"{command} --json --heads-axis 2"))["auto"]
    assert [(each["taken_by"], each["heads"]) for each in with_axis] == [
        ('tile="auto"', 2), ('tile="auto", no topology', 2)
    ]  # fmt: skip


def test_gantt_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    picture = out(capsys, "gantt --schedule descending --kv-tiles 3 --heads 1")
    assert (
        len([line for line in picture.splitlines() if "|" in line]) == 3 and "descending: makespan" in picture
    )


@pytest.mark.parametrize(
    "options, way_out",
    [
        ("--schedule none", "choose from"),
        ("--kv-tiles 0", "--kv-tiles: 0 is less than 1"),
        ("--workers 0", "--workers: 0 is less than 1"),
        ("--workers 1000000000", "--workers: 1000000000 is more than 4096"),
        ("--width 1000000000", "--width: 1000000000 is more than 10000"),
        ("--heads 3 --kv-heads 2", "--kv-heads is 2, but must divide the 3 query heads"),
        ("--schedule shift", "gantt: error: a shift needs every key/value tile"),
        ("--width 0", "--width: 0 is less than 1"),
        ("--jitter 1.5", "--jitter: 1.5 is more than 1"),
        ("--compute -1", "--compute: -1 is no time"),
        ("--latency 1e308", "--latency: 1e308 is no time"),
        ("--heads 100000", "more than 1,048,576 blocks: draw fewer"),
        ("--window 3", "--mask window belong together"),
        ("--mask window", "--mask window belong together"),
        ("--wave 2", "name a --schedule"),
        ("--output /no/folder/here.png", "there is no folder"),
        ("--output schedule.xyz", "must end in one of .png"),
    ],
)
def test_gantt_refuses_before_it_draws(
    options: str, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["gantt", *options.split()])
    captured = capsys.readouterr()
    assert "usage: meshattn gantt" in captured.err and way_out in captured.err and not captured.out


def test_plan_prices_windows_documents_and_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    """What contiguous chunks do not see is neither computed nor sent; striped ones see some of everything."""
    base = "plan --ranks 8 --seq-len 64k --heads 8 --kv-heads 2 --topology dgx-h200 --heads-axis 1"

    def ring(options: str) -> dict[str, Any]:
        found = json.loads(out(capsys, f"{base} --show 99 --json {options}"))["candidates"]
        (one,) = (each for each in found if each["name"] == "1x1x8 (ring)")
        return one  # type: ignore[no-any-return]

    plain, narrow, near = ring(""), ring("--window 2047 0"), ring("--window 2047 0 --layout contiguous")
    packed, same = ring("--documents 8k --layout contiguous"), ring("--documents 64k")
    assert plain["sent_bytes"] == narrow["sent_bytes"]
    assert packed["sent_bytes"]["rank"] == 0 < near["sent_bytes"]["rank"] < plain["sent_bytes"]["rank"]
    assert max(narrow["kernels_us"], near["kernels_us"], packed["kernels_us"]) < plain["kernels_us"] / 3
    assert same["total_us"] == pytest.approx(plain["total_us"], rel=0.02)
