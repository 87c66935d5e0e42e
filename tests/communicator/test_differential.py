"""Random programs of collectives, on our groups and on native gloo: equal results.

Copies and integer sums have to be equal bit for bit. Sums of floats have an order: ours is that of
the ranks, which a single process repeats; gloo's is its own and is compared up to rounding.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from elaswave_plugin.communicator.groups.group_calls import ElasticProcessGroup
from tests.communicator.forked import Peer, run
from tests.communicator.test_process_group import WORLD, native_gloo, same_bits, sample

DTYPES = (
    torch.float64,
    torch.float32,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
OPS = {"SUM": dist.ReduceOp.SUM, "MAX": dist.ReduceOp.MAX, "MIN": dist.ReduceOp.MIN}
KINDS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "gather",
    "scatter",
    "ring",
)

steps = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "shape": st.lists(st.integers(0, 7), min_size=1, max_size=3),
        "large": st.booleans(),
        "dtype": st.sampled_from(DTYPES),
        "op": st.sampled_from(sorted(OPS)),
        "root": st.integers(0, WORLD - 1),
        "strided": st.booleans(),
        "splits": st.lists(st.integers(0, 3), min_size=WORLD * WORLD, max_size=WORLD * WORLD),
        "async_op": st.booleans(),
    }
)
programs = st.lists(steps, min_size=1, max_size=8)


def made(step: dict[str, Any], rank: int, salt: int, rows: int = 1) -> torch.Tensor:
    """The input of a rank: `rows` times the step's shape, strided where the step says so."""
    shape = [rows * step["shape"][0] * (700 if step["large"] else 1), *step["shape"][1:]]
    numel = 1
    for size in shape:
        numel *= size
    flat = sample(rank, numel, step["dtype"], salt)
    if not step["strided"]:
        return flat.reshape(shape)
    wide = torch.zeros([*shape, 2], dtype=step["dtype"])
    wide[..., 0] = flat.reshape(shape)
    return wide[..., 0]


def perform(step: dict[str, Any], group: Any, rank: int, salt: int) -> list[torch.Tensor]:
    """Run one step on a group; its results."""
    if not isinstance(group, ElasticProcessGroup):
        # Gloo takes the memory of a strided tensor for that of a dense one.
        step = {**step, "strided": False}
    kind, root, op = step["kind"], step["root"], OPS[step["op"]]
    mine = made(step, rank, salt)
    contiguous = mine.contiguous()
    how = {"group": group, "async_op": step["async_op"]}
    results: list[torch.Tensor]
    work: Any = None
    if kind == "all_reduce":
        results = [mine]
        work = dist.all_reduce(mine, op, **how)
    elif kind == "reduce":
        results = [mine] if rank == root else []
        work = dist.reduce(mine, group_dst=root, op=op, **how)
    elif kind == "broadcast":
        results = [mine]
        work = dist.broadcast(mine, group_src=root, **how)
    elif kind == "all_gather":
        results = [torch.zeros_like(contiguous) for _ in range(WORLD)]
        work = dist.all_gather(results, contiguous, **how)
    elif kind == "all_gather_into_tensor":
        results = [torch.cat([torch.zeros_like(contiguous)] * WORLD)]
        work = dist.all_gather_into_tensor(results[0], contiguous, **how)
    elif kind == "reduce_scatter_tensor":
        results = [torch.zeros_like(contiguous)]
        whole = made(step, rank, salt, WORLD).contiguous()
        work = dist.reduce_scatter_tensor(results[0], whole, op, **how)
    elif kind == "all_to_all_single":
        return [_all_to_all(step, rank, salt, how)]
    elif kind == "gather":
        results = [torch.zeros_like(contiguous) for _ in range(WORLD)] if rank == root else []
        work = dist.gather(contiguous, results or None, group_dst=root, **how)
    elif kind == "scatter":
        results = [torch.zeros_like(contiguous)]
        parts = [made(step, to, salt).contiguous() for to in range(WORLD)]
        work = dist.scatter(results[0], parts if rank == root else None, group_src=root, **how)
    else:
        results = [torch.zeros_like(contiguous)]
        points = [
            dist.P2POp(dist.isend, contiguous, group=group, group_peer=(rank + 1) % WORLD),
            dist.P2POp(dist.irecv, results[0], group=group, group_peer=(rank - 1) % WORLD),
        ]
        for one in dist.batch_isend_irecv(points):
            one.wait()
    if work is not None:
        work.wait()
    return results


def _all_to_all(step: dict[str, Any], rank: int, salt: int, how: dict[str, Any]) -> torch.Tensor:
    """With uneven splits: rank r sends splits[r][j] rows to rank j."""
    splits = [step["splits"][r * WORLD : (r + 1) * WORLD] for r in range(WORLD)]
    sent, received = splits[rank], [row[rank] for row in splits]
    rows = sample(rank, 3 * sum(sent), step["dtype"], salt).reshape(-1, 3)
    result = torch.zeros(sum(received), 3, dtype=step["dtype"])
    work = dist.all_to_all_single(result, rows, received, sent, **how)
    if work is not None:
        work.wait()
    return result


def _run_programs(path: Path, peer: Peer) -> None:
    ours: Any = dist.group.WORLD
    gloo = native_gloo(path, peer.slot)
    tables: Any = dist.distributed_c10d._world
    tables.pg_map[gloo] = ("gloo", None)
    tables.pg_names[gloo] = "native"
    tables.pg_group_ranks[gloo] = {rank: rank for rank in range(WORLD)}
    counted = 0

    @seed(20_000)
    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        # The workers have to draw the same programs, so that nobody may shrink on its own.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def compare(program: list[dict[str, Any]]) -> None:
        nonlocal counted
        for number, step in enumerate(program):
            counted += 1
            got = perform(step, ours, peer.slot, number)
            wanted = perform(step, gloo, peer.slot, number)
            for one, other in zip(got, wanted, strict=True):
                if step["dtype"].is_floating_point and "reduce" in step["kind"]:
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-2, msg=str(step))
                else:
                    assert same_bits(one, other), step

    compare()
    assert counted > 100


@pytest.mark.timeout(180)
def test_random_programs_agree_with_native_gloo(tmp_path: Path) -> None:
    # Hundreds of collectives of three processes: 15 s alone on two cores, 40 s beside others.
    run(WORLD, partial(_run_programs, tmp_path / "store"), limit_s=150.0)
