"""All Python in the README and the docs runs as it stands there, and gives on two ranks what it gives on one.

The blocks of a page run one behind the other, on gloo ranks, with the names that the page takes for granted.
A block that is fenced as ``python ranks=N`` shows N ranks and runs on a simulated group.
"""

from __future__ import annotations

import copy
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import meshattn as ma
from meshattn.plan.topology import load_topology
from meshattn.testing import run_ranks

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
S, H, H_KV, D = 27, 4, 2, 16
WHOLE = ("total", "tokens", "full", "decoded")  # what blocks compute that every rank has whole
FENCE = re.compile(r"^```python(?: ranks=(\d+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    ranks: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, names: dict[str, Any]) -> None:
        """With its own lines in tracebacks."""
        exec(compile("\n" * (self.line - 1) + self.text, self.page, "exec"), names)

    @property
    def starts_ranks(self) -> bool:
        return "run_ranks" in self.text


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(page, line, int(match[1]) if match[1] else None, match[2]))
    return found


PAGES = {
    page: blocks_of(page) for page in ("README.md", "docs/training.md", "docs/usage.md", "docs/planning.md")
}


ALL = [block for blocks in PAGES.values() for block in blocks]


def taken_for_granted() -> dict[str, Any]:
    """Data and sizes, the same on all ranks."""
    torch.manual_seed(1)
    tokens = torch.randint(256, (8, S))
    q, k, v = (torch.randn(1, S, heads, D) for heads in (H, H_KV, H_KV))
    return {
        "torch": torch,
        "dist": dist,
        "F": F,
        "ma": ma,
        "device": torch.device("cpu"),
        "input_ids": tokens[:2],
        "micro_batches": tokens.split(2),
        "eval_ids": tokens[:3, :11],
        "documents": [tokens[0, :5], tokens[1, :1], tokens[2]],
        "padded": tokens[:3],
        "lengths": [9, S, 1],
        "data": 1,
        "context": dist.get_world_size() if dist.is_initialized() else 1,
        "q": q,
        "k": k,
        "v": v,
        "whole_q": q,
        "whole_k": k,
        "whole_v": v,
        "seq_len": S,
        "cu_seqlens": [0, 5, S],
        "target_len": 7,
        "source_len": 20,
        "model": torch.nn.Identity(),
        "kv_heads": H_KV,
        "head_dim": D,
        "longest": S,
        "prompt_len": 20,
    }


def outcome(names: dict[str, Any]) -> dict[str, Tensor]:
    """What is to be the same for every number of ranks."""
    found = {name: names[name].detach() for name in WHOLE if isinstance(names.get(name), Tensor)}
    for name, weight in getattr(names.get("model"), "named_parameters", lambda: ())():
        found[name] = weight.detach().full_tensor() if hasattr(weight, "full_tensor") else weight.detach()
    return {name: value.double() for name, value in found.items()}


def run_page(page: str, names: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The blocks in turn; what each left behind."""
    outcomes = []
    for block in PAGES[page]:
        if block.starts_ranks or block.ranks is not None:
            continue
        if "fully_shard(" in block.text:  # the page goes on with the model as it was
            sharded = {**names, "model": copy.deepcopy(names["model"])}
            block.run(sharded)
            outcomes.append(outcome(sharded))
        else:
            block.run(names)
            outcomes.append(outcome(names))
    return outcomes


@pytest.mark.parametrize("page", ["docs/training.md", "docs/usage.md", "docs/planning.md"])
def test_two_ranks_do_what_one_does(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.optim.AdamW([torch.zeros(1)])  # loads much of torch, here once for all ranks
    # Its steps hardly show how large gradients are.
    monkeypatch.setattr(torch.optim, "AdamW", partial(torch.optim.SGD, lr=0.5))

    def on_rank(_: Any) -> list[dict[str, Tensor]]:
        return run_page(page, taken_for_granted())

    (alone,) = run_ranks(1, on_rank, "gloo", timeout=60)
    for together in run_ranks(RANKS, on_rank, "gloo", timeout=60):
        for number, (expected, got) in enumerate(zip(alone, together, strict=True)):
            assert expected.keys() == got.keys()
            for name in expected:
                close = torch.allclose(got[name], expected[name], rtol=1e-3, atol=2e-5)
                assert close, f"{name} behind block {number}: {got[name]} and {expected[name]}"
    assert page != "docs/training.md" or {"decoded", "total", "head.weight"} <= alone[-1].keys()


@pytest.mark.parametrize("block", [block for block in ALL if block.starts_ranks], ids=str)
def test_ranks_in_one_call(block: Block) -> None:
    names = taken_for_granted()
    block.run(names)
    assert all(torch.equal(result, names["results"][0]) for result in names["results"])


@pytest.mark.parametrize("block", [block for block in ALL if block.ranks], ids=str)
def test_meshes_of_more_ranks(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.json").write_text(load_topology("dgx-h200").text())

    def on_rank(group: Any) -> None:
        build = ma.init_attention_mesh

        def simulated(ranks: Any = None, **options: Any) -> ma.AttentionMesh:
            assert ranks is None or sorted(ranks) == list(range(block.ranks or 0))
            return build(group, **options)

        known = {name: getattr(ma, name) for name in ma.__all__} | {"init_attention_mesh": simulated}
        names = {"ma": SimpleNamespace(**known)}
        block.run(names)
        assert names["mesh"].size == block.ranks

    assert block.ranks is not None
    run_ranks(block.ranks, on_rank)


def test_a_topology_in_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/planning.md").read_text(), re.M | re.S)
    (tmp_path / "cluster.yaml").write_text(text)
    assert load_topology(tmp_path / "cluster.yaml").name == "two racks"


def test_the_example_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts it, but on ranks that are joined already; then the start of a training step."""
    example, step = PAGES["README.md"]
    leave = dist.destroy_process_group

    def on_rank(_: Any) -> str:
        monkeypatch.setattr(dist, "init_process_group", lambda backend: None)  # in this process alone
        monkeypatch.setattr(dist, "destroy_process_group", lambda group=None: group and leave(group))
        with redirect_stdout(StringIO()) as printed:
            example.run({})
        names = taken_for_granted() | {"seq": ma.init_attention_mesh().sequence(S)}
        step.run(names)
        return printed.getvalue()

    first, *others = run_ranks(RANKS, on_rank, "gloo")
    assert "torch.Size([1, 1001, 8, 64])" in first and not any(others)


@pytest.mark.parametrize("root", ["meshattn", "kernels/meshattn_kernels", "launch", "benchmarks"])
def test_the_map_of_the_code(root: str) -> None:
    """docs/architecture.md has every module, or the folder that it is in; nothing in it is gone."""
    text = (ROOT / "docs/architecture.md").read_text()
    (section,) = re.findall(rf"^{root}/ .*\n((?:  .*\n)*)", text, re.MULTILINE)
    named = set(re.findall(r"\w+\.py|\w+/", section))
    modules = [path for path in (ROOT / root).rglob("*.py") if not path.name.startswith("__")]
    there = {path.name for path in modules} | {f"{path.name}/" for path in (ROOT / root).rglob("*/")}
    assert named <= there, named - there
    named -= {"plan/", "transport/"}  # whose modules are listed one by one
    missing = [path for path in modules if not {path.name, f"{path.parent.name}/"} & named]
    assert not missing


def test_links_of_the_docs_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/reports/*.md")]
    for page in pages:
        for link in re.findall(r"\]\(\s*([^)#\s]+)(?:#[\w-]+)?\s*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
