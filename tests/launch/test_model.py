"""The decoder: positions, grouped heads, what may see what, weights from a seed."""

import math

import pytest
import torch
from torch import Tensor

from model import Decoder, ModelConfig, Rotary


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


SMALL = ModelConfig(dim=48, layers=2, heads=6, kv_heads=2)


def ids_of(length: int) -> Tensor:
    return torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("tied", [True, False])
def test_shapes_reach_attention_and_logits(kv_heads: int, tied: bool) -> None:
    seen: list[tuple[torch.Size, ...]] = []

    def watching(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q.shape, k.shape, v.shape))
        return attention(q, k, v)

    config = ModelConfig(dim=48, layers=3, heads=6, kv_heads=kv_heads, tied=tied)
    model = Decoder(config)
    assert model(ids_of(13), torch.arange(13), watching).shape == (2, 13, 256)
    assert seen == [((2, 13, 6, 8), (2, 13, kv_heads, 8), (2, 13, kv_heads, 8))] * 3
    assert (model.head.weight is model.embedding.weight) == tied


def test_a_token_sees_only_the_past() -> None:
    model, ids = Decoder(SMALL), ids_of(13)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = (model(x, torch.arange(13), attention) for x in (ids, changed))
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).flatten(2).any(-1).all()


def test_rotary_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def score(at: int, to: int) -> float:
        turned = (Rotary.at(torch.tensor([p]), 16, 10_000.0)(x) for p, x in ((at, q), (to, k)))
        return float((next(turned) * next(turned)).sum())

    assert score(105, 98) == pytest.approx(score(7, 0), rel=1e-12)
    assert score(1_000_007, 1_000_000) == pytest.approx(score(7, 0), rel=1e-8)
    assert abs(score(8, 0) - score(7, 0)) > 1e-3


def test_rows_are_told_apart_by_position_alone() -> None:
    """Rows in any order with their global positions give what the rows in order give."""
    order = torch.randperm(13, generator=torch.Generator().manual_seed(2))
    back = order.argsort()

    def permuted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q[:, back], k[:, back], v[:, back])[:, order]

    model, ids = Decoder(SMALL), ids_of(13)
    want = model(ids, torch.arange(13), attention)
    got = model(ids[:, order], order, permuted)
    torch.testing.assert_close(got, want[:, order])


def test_weights_come_from_the_seed_alone() -> None:
    first = Decoder(SMALL, seed=3).state_dict()
    torch.randn(5)
    again, other = Decoder(SMALL, seed=3).state_dict(), Decoder(SMALL, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_an_untrained_model_knows_nothing() -> None:
    ids = ids_of(65)
    logits = Decoder(ModelConfig())(ids, torch.arange(65), attention).detach()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(loss) == pytest.approx(math.log(256), rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 50, "heads": 4}, "dim 50 is not a multiple of heads 4"),
        ({"dim": 12, "heads": 4}, "head size dim / heads = 3 is odd"),
        ({"heads": 4, "kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"layers": 0}, "layers is 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**sizes)
