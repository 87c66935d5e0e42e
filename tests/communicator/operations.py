"""The operations of a group as calls, for a comparison of two groups."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.communicator.samples import FOLDS, WORLD, sample


def options(kind: Any, **fields: Any) -> Any:
    options = kind()
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def either(owner: Any, now: str, before: str) -> Any:
    """The call by its present name, or by the one that it has in torch 2.11."""
    return getattr(owner, now, None) or getattr(owner, before)


@dataclass(frozen=True)
class Inputs:
    """Tensors that one worker hands to a call, and those to compare afterwards."""

    rank: int
    numel: int
    dtype: torch.dtype

    def mine(self, count: int | None = None) -> torch.Tensor:
        """Answer this worker's own numbers, `count` of them."""
        count = self.numel if count is None else count
        return sample(self.rank, count, self.dtype, self.numel)

    def in_place(self, call: Callable[[Any, torch.Tensor], Any], pg: Any) -> list[torch.Tensor]:
        """Run a call that writes over its input."""
        data = self.mine()
        call(pg, data).wait()
        return [data]

    def out_of(
        self, call: Callable[[Any, list[torch.Tensor]], Any], outs: int, count: int, pg: Any
    ) -> list[torch.Tensor]:
        """Run a call that fills `outs` tensors of `count` elements."""
        outputs = [torch.zeros(count, dtype=self.dtype) for _ in range(outs)]
        call(pg, outputs).wait()
        return outputs


def operations(rank: int, numel: int, dtype: torch.dtype) -> dict[str, Callable[[Any], Any]]:
    """Answer calls by name, each of which answers the tensors to compare; each makes its inputs."""
    inputs = Inputs(rank, numel, dtype)
    calls: dict[str, Callable[[Any], Any]] = {
        f"all_reduce {name}": partial(
            inputs.in_place,
            lambda pg, x, op=op: pg.allreduce([x], options(dist.AllreduceOptions, reduceOp=op)),
        )
        for name, (op, _) in FOLDS.items()
    }
    calls["broadcast"] = partial(
        inputs.in_place, lambda pg, x: pg.broadcast([x], options(dist.BroadcastOptions, rootRank=1))
    )
    return calls | _with_outputs(inputs)


def _with_outputs(inputs: Inputs) -> dict[str, Callable[[Any], Any]]:
    total = inputs.numel * WORLD
    return {
        "allgather": partial(
            inputs.out_of, lambda pg, o: pg.allgather([o], [inputs.mine()]), WORLD, inputs.numel
        ),
        "all_gather_single": partial(
            inputs.out_of,
            lambda pg, o: either(pg, "all_gather_single", "_allgather_base")(o[0], inputs.mine()),
            1,
            total,
        ),
        "all_gather_single_coalesced": partial(
            inputs.out_of,
            lambda pg, o: either(
                pg, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
            )(o, [inputs.mine(), inputs.mine()]),
            2,
            total,
        ),
        "reduce_scatter": partial(
            inputs.out_of,
            lambda pg, o: pg.reduce_scatter(o, [[*inputs.mine(total).chunk(WORLD)]]),
            1,
            inputs.numel,
        ),
        "reduce_scatter_single": partial(
            inputs.out_of,
            lambda pg, o: either(pg, "reduce_scatter_single", "_reduce_scatter_base")(
                o[0], inputs.mine(total)
            ),
            1,
            inputs.numel,
        ),
        "all_to_all_single": partial(
            inputs.out_of,
            lambda pg, o: either(pg, "all_to_all_single", "alltoall_base")(
                o[0], inputs.mine(total), [], []
            ),
            1,
            total,
        ),
        "gather": partial(
            inputs.out_of,
            lambda pg, o: pg.gather(
                [o] if inputs.rank == 3 else [],
                [inputs.mine()],
                options(dist.GatherOptions, rootRank=3),
            ),
            WORLD,
            inputs.numel,
        ),
        "scatter": partial(
            inputs.out_of,
            lambda pg, o: pg.scatter(
                o,
                [[sample(r, inputs.numel, inputs.dtype) for r in range(WORLD)]]
                if inputs.rank == 0
                else [],
                options(dist.ScatterOptions, rootRank=0),
            ),
            1,
            inputs.numel,
        ),
    }
