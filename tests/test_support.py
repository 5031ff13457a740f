"""The table of what is honoured and what is refused, made from the code; the README must hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import meshattn as ma
from meshattn.documents import Documents
from meshattn.layouts import Layout, LayoutKind
from meshattn.masks import BlockMasks, MaskRule
from meshattn.testing import run_ranks
from meshattn_kernels.rules import RULES, WITHOUT_LSE_GRADIENT, Platform, Request

README = Path(__file__).resolve().parents[1] / "README.md"
H100 = Platform("cuda", (9, 0), (3, 6), cudnn=True, fa4=True)
PACKED = Documents((0, 5, 24), (0, 5, 24))
# What a user writes -> layouts of queries and keys, and the rule.
MASKS: dict[str, tuple[tuple[LayoutKind, ...], int, MaskRule]] = {
    "no mask or `causal`, striped or contiguous": (("striped", "contiguous"), 24, MaskRule(right=0)),
    "`window_size=(-1, right)`, striped or contiguous": (("striped", "contiguous"), 24, MaskRule(right=3)),
    "`window_size=(left, right)`": (("striped", "zigzag", "contiguous"), 24, MaskRule(4, 0)),
    '`layout="zigzag"`': (("zigzag",), 24, MaskRule(right=0)),
    "`cu_seqlens`, `document_lengths`": (get_args(LayoutKind), 24, MaskRule(right=0, documents=PACKED)),
    "`kv_seq` of another length, striped or contiguous": (("striped", "contiguous"), 31, MaskRule(right=0)),
}
# What is computed outside of the kernels, and tested with each of them or with any.
OUTSIDE_KERNELS = ("`sinks`, and its gradient",)
# An argument that no kernel honours -> what happens.
REFUSED: dict[str, dict[str, Any]] = {
    "ALiBi, bias, arbitrary masks": {"attn_mask": torch.ones(4, 4)},
}


def served(kernel: str, kinds: tuple[LayoutKind, ...], keys: int, rule: MaskRule) -> bool:
    """The same for all of these layouts."""
    answers = set()
    for kind in kinds:
        layouts = [Layout(kind, seq_len, 4, -(-seq_len // 4)) for seq_len in (24, keys)]
        plain = BlockMasks(rule, *layouts).gives_plain_blocks
        answers.add(RULES[kernel](Request(H100, torch.bfloat16, 128, 128, plain)) is None)
    (answer,) = answers
    return answer


def matrix() -> list[str]:
    """A column for all kernels that answer alike."""
    columns: dict[tuple[bool, ...], list[str]] = {}
    for kernel in RULES:
        capped, dropping = (
            RULES[kernel](Request(H100, torch.bfloat16, 128, 128, **{option: True})) is None
            for option in ("softcap", "dropout")
        )
        through_lse = kernel not in WITHOUT_LSE_GRADIENT
        answers = (*(served(kernel, *mask) for mask in MASKS.values()), capped, dropping, through_lse)
        columns.setdefault(answers, []).append(f"`{kernel}`")
    names = ["", *(", ".join(kernels) for kernels in columns.values())]
    lines = [names, ["---"] * len(names)]
    for number, mask in enumerate((*MASKS, "`softcap`", "`dropout_p`", "gradients through `lse`")):
        lines.append([mask, *("yes" if answers[number] else "refused" for answers in columns)])
    lines += [[option, *["yes"] * len(columns)] for option in OUTSIDE_KERNELS]
    lines += [[option, *["refused"] * len(columns)] for option in REFUSED]
    return ["| " + " | ".join(line) + " |" for line in lines]


def test_the_readme_holds_the_matrix() -> None:
    expected = "\n".join(matrix()).replace("|  |", "| |").replace(" --- ", "---")
    assert expected in README.read_text(), expected


@pytest.mark.parametrize("option", REFUSED)
def test_what_nothing_honours_is_refused_before_any_transfer(option: str) -> None:
    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group)
        seq = mesh.sequence(8)
        x = torch.ones(1, seq.rows, 2, 8)
        with pytest.raises(NotImplementedError, match=next(iter(REFUSED[option]))):
            ma.mesh_attention(x, x, x, seq, **REFUSED[option])
        assert mesh.traffic() == ()

    run_ranks(2, on_rank)
