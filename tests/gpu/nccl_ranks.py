"""One rank of the NCCL tests, which test_nccl.py starts. A failed check ends it with an error."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import meshattn as ma
from cases import Results, Shape
from distributed import assert_equals_oracle, assert_same_bits, build_mesh, run_case
from head_cases import formula
from mesh_cases import LAYOUTS, Case
from meshattn.plan import Tile, tiles
from test_skipped_hops import expected_counts
from test_traffic import counted

SHAPES = (Shape(B=2, S=157, H=6, H_kv=3, D=64), Shape(B=1, S=89, H=4, H_kv=1, D=32, D_v=16))


def main() -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60), device_id=torch.device("cuda", local)
    )
    ranks = dist.get_world_size()
    if dist.get_rank() == 1:  # a device bound to the default group must not make this a matter of all ranks
        alone = ma.init_attention_mesh([1], tile=(1, 1), timeout=60)
        case = Case(Tile(1, 1), SHAPES[0], dtype=torch.float32)
        assert_equals_oracle(case, [run_case(alone, case, device="cuda")])
    meshes = {tile: ma.init_attention_mesh(tile=tile, transport="p2p", timeout=60) for tile in tiles(ranks)}
    for number, shape in enumerate(SHAPES):
        for tile, mesh in meshes.items():
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                layout = LAYOUTS[(number + tile.a) % len(LAYOUTS)]
                check(mesh, Case(tile, shape, layout=layout, dtype=dtype))
    check_reduce_dtype(meshes[tiles(ranks)[-1]], Case(tiles(ranks)[-1], SHAPES[0], dtype=torch.bfloat16))
    for heads in (w for w in range(2, ranks + 1) if ranks % w == 0):
        check_heads(heads, ranks)
    dist.barrier()
    dist.destroy_process_group()


def check_heads(heads: int, ranks: int) -> None:
    """A head axis and a ring, key/value heads in groups and copied: oracle and bytes, and the same bits from
    NCCL and from what the mesh takes by itself."""
    for kv_heads, groups in ((2 * heads, 2), (1, 1)):
        shape = Shape(B=2, S=157, H=2 * heads, H_kv=kv_heads, D=64)
        tile = Tile(1, ranks // heads)
        case = Case(tile, shape, dtype=torch.bfloat16, heads=heads, head_groups=groups)
        found = []
        for transport in ("p2p", "auto"):
            mesh = build_mesh(None, case, transport=transport, timeout=60)
            found.append(run_case(mesh, case, device="cuda"))
            assert counted(mesh.traffic()) == formula(case), f"{case}: {mesh.traffic()}"
            mesh.close()
        assert_same_bits(found[:1], found[1:])
        gathered: list[Results | None] = [None] * ranks
        dist.all_gather_object(gathered, found[0])
        assert_equals_oracle(case, gathered)


def check(mesh: ma.AttentionMesh, case: Case) -> None:
    """Oracle, bits of a second run, of the ring where the tile is one, and bytes by the formula, which leaves
    out what the causal mask of this layout does."""
    mesh.reset_traffic()
    first = run_case(mesh, case, device="cuda")
    sent = {(r.phase, r.axis, r.flow): (r.messages, r.sent_bytes) for r in mesh.traffic() if r.messages}
    assert sent == expected_counts(case, dist.get_rank()), f"{case}: {sent}"
    again = [run_case(mesh, case, device="cuda")]
    if case.tile.a == 1:
        again.append(run_case(mesh, replace(case, ring=True), device="cuda"))
    for other in again:
        assert_same_bits([first], [other])
    gathered: list[Results | None] = [None] * case.ranks
    dist.all_gather_object(gathered, first)
    assert_equals_oracle(case, gathered)


def check_reduce_dtype(mesh: ma.AttentionMesh, case: Case) -> None:
    """Partial results in the input type move half the bytes of those in float32."""
    mesh.reset_traffic()
    run_case(mesh, case, device="cuda")
    wide = sum(record.sent_bytes for record in mesh.traffic() if record.flow == "outward")
    mesh.reset_traffic()
    run_case(mesh, replace(case, reduce_dtype=case.dtype), device="cuda")
    narrow = sum(record.sent_bytes for record in mesh.traffic() if record.flow == "outward")
    assert wide / 2 <= narrow < wide * 0.6, f"{narrow} bytes instead of {wide}"  # lse stays in float32


if __name__ == "__main__":
    main()
