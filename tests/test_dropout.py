"""Dropout: one mask for every mesh, tile, layout and kernel; its gradients; where its seeds come from."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore
from torch.utils.checkpoint import checkpoint

import meshattn as ma
from cases import Shape, make_inputs
from distributed import assert_same_bits, build_mesh, check_cases, run_cases
from mesh_cases import LAYOUTS, Case
from meshattn import reference
from meshattn.agreement import Agreement
from meshattn.dropout import DropoutSeeds, chunk_affine
from meshattn.layouts import Layout, LayoutKind
from meshattn.masks import chunk_positions
from meshattn.plan.assignment import Tile, tiles
from meshattn.testing import run_ranks
from meshattn_kernels.dropout import Dropout, Positions, philox
from meshattn_kernels.reference import ReferenceKernel

ODD = Shape(B=2, S=29, H=4, H_kv=2, D=8, D_v=16)
SEED = 2**63 + 11


@pytest.mark.parametrize(
    "seed, counter, words",
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_the_generator_gives_its_published_words(
    seed: int, counter: tuple[int, ...], words: tuple[int, ...]
) -> None:
    """The known answers of Random123 for philox4x32-10."""
    assert tuple(int(word) for word in philox(seed, *(torch.tensor(word) for word in counter))) == words


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("seq_len, chunks", [(1, 1), (2, 5), (29, 4), (30, 7), (64, 8)])
def test_rows_of_a_chunk_stand_where_the_layout_puts_them(
    kind: LayoutKind, seq_len: int, chunks: int
) -> None:
    layout = Layout(kind, seq_len, chunks, -(-seq_len // chunks))
    for chunk in range(chunks):
        real = chunk_positions(layout, chunk)
        assert torch.equal(chunk_affine(layout, chunk).of(0, len(real)), real)


def test_positions_beyond_32_bits_wrap() -> None:
    positions = Positions(2**33 + 5, 2**31 + 1, 3, 2**32 - 2)
    assert all(-(2**31) <= word < 2**31 for word in positions.words)
    offset, stride, split, jump = positions.words
    wrapped = [(offset + n * stride + (jump if n >= split else 0)) % 2**32 for n in range(6)]
    assert wrapped == [int(x) % 2**32 for x in positions.of(0, 6)]


def test_a_pair_is_kept_by_integers_alone() -> None:
    """Dropout as its module describes it, in Python's integers, for positions on both sides of 2^32."""
    queries, keys = Positions(2**32 - 5, 3, 2, 7), Positions(2**31 + 9, 2**20 + 1, 3, -40)
    dropout = Dropout(0.3, SEED, queries, keys, first_head=6)
    kept = dropout.kept(2, 3, (0, 4), (0, 6), "cpu")
    for batch, head, row, key in itertools.product(range(2), range(3), range(4), range(6)):
        counter = [int(queries.of(row, row + 1)), 6 + head, batch, 0]
        first, second, *_ = (int(word) for word in philox(SEED, *map(torch.tensor, counter)))
        word = (first + int(keys.of(key, key + 1)) * 0x9E3779B9) % 2**32
        word = (word ^ word >> 16) * 0x7FEB352D % 2**32
        word = (word ^ word >> 15 ^ second) * 0x846CA68B % 2**32
        assert bool(kept[batch, head, row, key]) == (word >= 0.3 * 2**32)


def masks_read_from_out(case: Case) -> Tensor:
    """bool [B, S, H, S]: with q = 0 the probabilities of a row are equal, and with v the identity its out
    shows which are kept."""
    shape = case.shape
    eye = torch.eye(shape.S).double().expand(shape.B, -1, -1)[:, :, None]

    def on_rank(group: Any) -> Tensor:
        seq = build_mesh(group, case).sequence(shape.S, layout=case.layout)
        zeros = torch.zeros(shape.B, seq.rows, shape.H, 8).double()
        out = ma.mesh_attention(
            zeros, zeros, seq.shard(eye.expand(-1, -1, shape.H, -1)), seq, dropout_p=0.4, dropout_seed=SEED
        )
        assert isinstance(out, Tensor)
        return seq.unshard(out)

    whole = run_ranks(case.ranks, on_rank)[-1]
    return whole > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_mask_for_every_mesh_and_tile(layout: LayoutKind) -> None:
    shape = Shape(B=2, S=24, H=3, H_kv=3, D=8)
    expected = Dropout(0.4, SEED).kept(2, 3, (0, 24), (0, 24), "cpu").transpose(1, 2)
    cases = [Case(tile, shape, layout) for tile in [Tile(1, 1), *tiles(4), Tile(2, 3), Tile(1, 5)]]
    cases += [Case(tile, shape, layout, heads=3) for tile in (Tile(1, 1), Tile(2, 1))]
    for case in cases:
        assert torch.equal(masks_read_from_out(case), expected), case


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_dense_attention_with_the_mask(layout: LayoutKind) -> None:
    """Every gradient on every rank; causal, alone and with windows, other keys and softcap."""
    case = Case(Tile(2, 2), ODD, layout, dropout_p=0.3, dropout_seed=SEED)
    other = replace(ODD, S_k=41)
    check_cases(
        [replace(case, tile=tile) for tile in tiles(4)]
        + [replace(case, causal=False, window_size=(7, 3), softcap=2.0)]
        + [replace(case, shape=other, kv_layout="zigzag", dropout_p=0.9)]
    )
    check_cases([replace(case, tile=Tile(1, 1), dropout_seed=3)])


def test_gradients_flow_through_lse_beside_dropout() -> None:
    """Against dense attention; dropout changes out alone, and both give gradients to q and k."""
    shape = Shape(B=1, S=11, H=2, H_kv=1, D=8)
    q, k, v, do = make_inputs(shape)
    weight = torch.randn(1, 2, 11, dtype=torch.float64)

    def grads(attend: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = attend(*leaves)
        return list(torch.autograd.grad((out * do).sum() + (lse * weight).sum(), leaves))

    def on_rank(group: Any) -> list[Tensor]:
        seq = ma.init_attention_mesh(group).sequence(11)
        options = {"causal": True, "dropout_p": 0.3, "dropout_seed": SEED, "return_lse": True}
        return grads(lambda *leaves: ma.mesh_attention(*leaves, seq, **options))

    expected = grads(
        lambda *leaves: reference.attention(*leaves, causal=True, dropout_p=0.3, dropout_seed=SEED)
    )
    for ours, exact in zip(run_ranks(1, on_rank)[0], expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def test_blocks_of_any_size_drop_the_same() -> None:
    """The reference kernel with blocks that divide nothing."""
    case = Case(Tile(1, 1), ODD, dropout_p=0.3, dropout_seed=SEED)
    whole = Dropout(0.3, SEED, Positions(3, 2, 9, 40), Positions(1, 5), first_head=2)
    expected = whole.kept(2, 4, (0, 29), (0, 31), "cpu")
    for r0, r1, t0, t1 in ((0, 29, 0, 31), (5, 12, 30, 31), (8, 11, 1, 7)):
        assert torch.equal(whole.kept(2, 4, (r0, r1), (t0, t1), "cpu"), expected[:, :, r0:r1, t0:t1])
    # Other heads than those of another rank of a head axis.
    later = replace(whole, first_head=3).kept(2, 3, (0, 29), (0, 31), "cpu")
    assert torch.equal(later, expected[:, 1:])
    assert ReferenceKernel(block_q=5, block_k=7, dropout=whole).dropout == whole
    check_cases([case])


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.97])
def test_as_many_are_dropped_as_asked_for(p: float) -> None:
    """Within five standard deviations, over all and in each of the four dims; scaled to a mean of 1."""
    dropout = Dropout(p, SEED)
    kept = dropout.kept(8, 8, (0, 64), (0, 64), "cpu").double()
    assert dropout.keep_scale * (1 - p) == pytest.approx(1.0)
    for dims in [(), (0,), (1,), (2,), (3,)]:
        mean = kept.mean([dim for dim in range(4) if dim not in dims])
        deviation = (p * (1 - p) * mean.numel() / kept.numel()) ** 0.5
        assert (mean - (1 - p)).abs().max() < 5 * deviation


@pytest.mark.parametrize("p", [1e-300, 0.1, 1 - 1.4 * 2**-32, 1 - 2**-33, 1 - 2**-53])
def test_the_mean_is_exact_also_where_p_lies_between_two_steps(p: float) -> None:
    dropout = Dropout(p, SEED)
    part_kept = (2**32 - dropout.threshold) / 2**32
    assert dropout.keep_scale * part_kept == pytest.approx(1.0, rel=1e-15)
    assert part_kept == pytest.approx(max(1 - p, 2**-32), abs=2**-33)


@pytest.mark.parametrize("distance", [1, 2, 8, 61, 2**12])
def test_neighbours_are_independent(distance: int) -> None:
    """Keep masks of neighbouring batches, heads, queries, keys and seeds agree by chance alone, whatever lies
    between two neighbours of a chunk; so do the corners of rectangles of two rows and two keys, whose words
    have much in common."""
    of = Positions(5, distance)
    kept, other = (Dropout(0.5, seed, of, of).kept(2, 2, (0, 128), (0, 128), "cpu") for seed in (SEED, 11))
    sign = kept.double() * 2 - 1
    pairs = [
        (sign[0], sign[1]),
        (sign[:, 0], sign[:, 1]),
        (sign[:, :, 1:], sign[:, :, :-1]),
        (sign[..., 1:], sign[..., :-1]),
        (sign, sign.mT),
        (sign, other.double() * 2 - 1),
        (sign[:, :, 1:, 1:] * sign[:, :, 1:, :-1], sign[:, :, :-1, 1:] * sign[:, :, :-1, :-1]),
    ]
    for x, y in pairs:
        assert abs(float((x * y).mean())) < 5 / x.numel() ** 0.5


def test_runs_of_keys_have_the_spread_of_independent_draws() -> None:
    """Numbers kept among 64 keys that follow one another: the variance is that of a binomial."""
    p, size = 0.1, 64
    kept = Dropout(p, SEED).kept(1, 4, (0, 512), (0, 64 * 16), "cpu").double()
    counts = kept.unflatten(-1, (-1, size)).sum(-1)
    variance = size * p * (1 - p)
    found = float((counts - size * (1 - p)).square().mean() / variance)
    kurtosis = 2 + (1 - 6 * p * (1 - p)) / variance
    assert abs(found - 1) < 5 * (kurtosis / counts.numel()) ** 0.5


def test_nothing_is_dropped_and_drawn_without_dropout() -> None:
    """The same bits and the same state of torch's generator as without the arguments."""
    case = Case(Tile(2, 1), ODD, dtype=torch.float32)
    before = torch.get_rng_state()
    plain, seeded = run_cases([case, replace(case, dropout_seed=5)])
    assert_same_bits(plain, seeded)
    assert torch.equal(torch.get_rng_state(), before)
    dropped, other = run_cases([replace(case, dropout_p=0.2, dropout_seed=seed) for seed in (5, 6)])
    for one, two in ((dropped, plain), (dropped, other)):
        assert not torch.equal(one[0].out, two[0].out) and not torch.equal(one[0].dv, two[0].dv)
        # lse knows nothing of it.
        assert torch.equal(one[0].lse, two[0].lse)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
@pytest.mark.timeout(120)
def test_drawn_seeds_are_drawn_again_under_checkpointing(use_reentrant: bool) -> None:
    """Two layers in two processes that seeded torch alike, with dropout of the ordinary kind between them."""

    def on_rank(group: Any) -> list[list[Tensor]]:
        mesh = ma.init_attention_mesh(None, tile="1x2", timeout=60)
        seq = mesh.sequence(13)
        x = torch.randn(3, 1, 13, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = ma.mesh_attention(q, k, v, seq, causal=True, dropout_p=0.3)
            assert isinstance(out, Tensor)
            return torch.dropout(out, 0.3, train=True)

        def run(checkpointed: bool) -> list[Tensor]:
            torch.manual_seed(5)
            q, k, v = (seq.shard(y).requires_grad_() for y in x)
            out = q * 1
            for _ in range(2):
                args = out, k, v
                out = checkpoint(layer, *args, use_reentrant=use_reentrant) if checkpointed else layer(*args)
            out.square().sum().backward()
            return [out.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]

        return [run(False), run(True), run(False)]

    for plain, checkpointed, again in run_ranks(2, on_rank, "gloo"):
        for x, *same in zip(plain, checkpointed, again, strict=True):
            assert all(torch.equal(x, y) for y in same)


@pytest.mark.parametrize("given", [True, False], ids=["given", "drawn"])
def test_ranks_with_other_seeds_raise(given: bool) -> None:
    """Two at the first call; ranks that part later, at a later comparison. Both before any transfer of it."""

    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, timeout=20)
        seq = mesh.sequence(12)
        x = torch.ones(1, seq.rows, 2, 8)
        call = 0
        with pytest.raises(ma.RankMismatchError, match=r"dropout_seed is \d+ on rank") as info:
            for call in range(5):
                seed = 7 + (mesh.rank == 1 and call >= 2) if given else None
                ma.mesh_attention(x, x, x, seq, dropout_p=0.1, dropout_seed=seed)
        assert call == (3 if given else 0)
        return str(info.value)

    # Threads share one generator, so that each draws another seed.
    for text in run_ranks(3, on_rank):
        assert ("torch.manual_seed" in text) != given


def test_ranks_that_part_between_comparisons_raise_at_the_next() -> None:
    """Though their seeds are the same again by then, as if all were seeded anew in every step."""

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, timeout=20)
        seq = mesh.sequence(12)
        x = torch.ones(1, seq.rows, 2, 8)
        largest = 2**64 - 1
        for call in range(1, 8):
            seed = largest - (mesh.rank == 1 and call == 6)
            ma.mesh_attention(x, x, x, seq, dropout_p=0.1, dropout_seed=seed)
        what = r"dropout, call 8: .* dropout_seed of calls 5 to 7 is a list with digest \w+ on rank 1, but"
        with pytest.raises(ma.RankMismatchError, match=what):
            ma.mesh_attention(x, x, x, seq, dropout_p=0.1, dropout_seed=largest)

    run_ranks(3, on_rank)


def test_a_rank_that_draws_where_others_give_raises_at_once() -> None:
    """At the third call, whose seeds are not compared."""

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, timeout=20)
        seq = mesh.sequence(12)
        x = torch.ones(1, seq.rows, 2, 8)
        for _ in range(2):
            ma.mesh_attention(x, x, x, seq, dropout_p=0.1, dropout_seed=7)
        with pytest.raises(
            ma.RankMismatchError, match="dropout_seed is not given on rank 1, but given on ranks"
        ):
            ma.mesh_attention(x, x, x, seq, dropout_p=0.1, dropout_seed=None if mesh.rank == 1 else 7)

    run_ranks(3, on_rank)


def test_seeds_are_compared_ever_more_rarely_and_never_no_more() -> None:
    agreement = Agreement(HashStore(), 0, [0], 5.0)
    seeds, found = DropoutSeeds(agreement), list[int]()
    for number in range(1, 3 * 1024 + 1):
        before = agreement.compared
        assert seeds.next(number, torch.device("cpu")) == number
        if agreement.compared > before:
            found.append(number)
    assert found == [*(2**n for n in range(12)), 3 * 1024]
