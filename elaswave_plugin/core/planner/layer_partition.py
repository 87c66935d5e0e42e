"""The layers that each stage owns: minimax over contiguous partitions, then few bytes to move.

    cost[p][k, l] = (T[l] - T[k]) load_p / speed_p + T[k] fill_p      infinite where k..l do not fit
    pass 1   F[p + 1][l] = min_k max(F[p][k], cost[p][k, l])             the best time, F[P][L]
    pass 2   G[p + 1][l] = min_k G[p][k] + received_bytes[p][k, l]       over cost <= (1 + slack) F

T: seconds of a sample in front of each cut; load_p: samples of the stage's busiest worker in a
step; fill_p: samples that go through all stages in front of it before it can begin, and back after
it has ended. Both passes are exact; ties go to the earliest cut. The time does not depend on the
number of workers.

>>> from elaswave_plugin.core.planner.costs import uniform_costs
>>> costs = uniform_costs(num_layers=6, forward_s=1.0, backward_s=2.0)
>>> loads = [StageLoad(samples=4, width=2), StageLoad(samples=8, width=1)]
>>> print(*partitions(costs, loads, now=(0, 3, 6), slacks=(0.0,)))
cuts 0 4 6: 48 s, 0 bytes to move
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from elaswave_plugin.core.planner.costs import Amounts, CostModel
from elaswave_plugin.errors import ConfigurationError

SLACKS = (0.0, 0.005, 0.01, 0.02, 0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """The load of a stage, and the workers that carry it.

    ``samples``: those of its busiest worker in a step; ``in_flight``: the most of them at once;
    ``incoming``: workers that come from elsewhere and so need all weights of the stage; ``fill``:
    samples that pass through all stages in front before it has work, and after its last.
    """

    samples: float
    width: int
    speed: float = 1.0
    in_flight: float = 0.0
    incoming: int = 0
    fill: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Cuts, the busiest worker's compute seconds, and the bytes that all workers receive."""

    cuts: tuple[int, ...]
    seconds: float
    moved_bytes: float

    def __str__(self) -> str:
        cuts = " ".join(map(str, self.cuts))
        return f"cuts {cuts}: {self.seconds:g} s, {self.moved_bytes:.4g} bytes to move"


def partitions(
    costs: CostModel,
    loads: Sequence[StageLoad],
    *,
    now: Sequence[int],
    slacks: Sequence[float] = SLACKS,
) -> tuple[Partition, ...]:
    """For each slack, the partition that moves least of those within it of the best time.

    ``now``: the cuts by which the state lies at present. Raises ConfigurationError where no
    partition fits into memory.
    """
    num_stages, num_parts = len(loads), len(costs.bounds) - 1
    if num_parts < num_stages:
        raise ConfigurationError(
            f"{num_parts} layers for {num_stages} stages: every stage needs one; use fewer stages"
        )
    tables = [_stage_seconds(costs, load) for load in loads]
    best_s = _best_seconds(tables)
    if not best_s < float("inf"):
        raise ConfigurationError(_does_not_fit(costs, loads))
    received = [
        _received_bytes(costs, load, owned)
        for load, owned in zip(loads, pairwise(now), strict=True)
    ]
    found: list[Partition] = []
    for slack in slacks:
        # A little above, so that rounding cannot exclude the optimum itself.
        limit_s = best_s * (1 + slack) * (1 + 1e-12)
        cuts, total_bytes = _least_bytes(tables, received, limit_s)
        seconds = max(
            float(table[start, stop])
            for table, (start, stop) in zip(tables, pairwise(cuts), strict=True)
        )
        found.append(Partition(cuts=cuts, seconds=seconds, moved_bytes=total_bytes))
    return tuple(found)


def evaluate(
    costs: CostModel, loads: Sequence[StageLoad], cuts: Sequence[int], *, now: Sequence[int]
) -> Partition:
    """Rate given cuts by the same measure; infinite seconds where they do not fit."""
    seconds = max(
        float(_stage_seconds(costs, load)[start, stop])
        for load, (start, stop) in zip(loads, pairwise(cuts), strict=True)
    )
    return Partition(
        cuts=tuple(cuts), seconds=seconds, moved_bytes=moved_bytes(costs, loads, cuts, now=now)
    )


def moved_bytes(
    costs: CostModel, loads: Sequence[StageLoad], cuts: Sequence[int], *, now: Sequence[int]
) -> float:
    """Bytes that all workers together receive to own ``cuts``."""
    return sum(
        float(_received_bytes(costs, load, owned)[start, stop])
        for load, (start, stop), owned in zip(loads, pairwise(cuts), pairwise(now), strict=True)
    )


def pause_seconds(
    costs: CostModel, loads: Sequence[StageLoad], cuts: Sequence[int], *, now: Sequence[int]
) -> float:
    """Return how long a move stops the job: the most weights that a worker receives, and a rebind.

    0 where nothing moves. Optimizer state follows behind the compute (`follow_seconds`).
    """
    most_bytes = _most_received(costs.totals("weight_bytes"), loads, cuts, now)
    moves = tuple(cuts) != tuple(now) or any(load.incoming for load in loads)
    return most_bytes / costs.transfer_bytes_per_s + costs.rebind_s if moves else 0.0


def follow_seconds(
    costs: CostModel, loads: Sequence[StageLoad], cuts: Sequence[int], *, now: Sequence[int]
) -> float:
    """Return how long optimizer state is on its way: the most of it that a worker receives.

    The workers of a stage each receive their share of it, since shards are interleaved.
    """
    optimizer = costs.totals("optimizer_bytes")
    most_bytes = max(
        _most_received(optimizer, [load], [start, stop], owned) / load.width
        for load, (start, stop), owned in zip(loads, pairwise(cuts), pairwise(now), strict=True)
    )
    return most_bytes / costs.transfer_bytes_per_s


def tail_seconds(*, follow_s: float, step_s: float, slowdown: float) -> float:
    """Return the seconds that a step loses while optimizer state follows it for ``follow_s``.

    Its compute is slower by ``slowdown`` meanwhile; its update waits for what lasts longer.
    """
    return slowdown * min(follow_s, step_s) + max(0.0, follow_s - step_s)


def benefit_seconds(
    *, before_s: float, after_s: float, pause_s: float, tail_s: float, horizon_s: float
) -> float:
    """Return the gain of a move over ``horizon_s``: H g - 2 C - slowdown; a positive one pays.

    g = 1 - after / before. The pause counts twice, since one day everything moves back.
    ``tail_s``: seconds lost behind the compute, see `tail_seconds`.
    """
    return horizon_s * (1 - after_s / before_s) - 2 * pause_s - tail_s


def layers_can_help(*, layers: int, launch_width: int, lost: int) -> bool:
    """Return whether one unit fewer relieves a stage of ``layers`` units without ``lost`` replicas.

    Moving one unit away helps only if the receiver's (layers + 1) / launch_width is below
    layers / (launch_width - lost), which is layers > (launch_width - lost) / lost.
    """
    return lost > 0 and layers * lost > launch_width - lost


def _stage_seconds(costs: CostModel, load: StageLoad) -> Amounts:
    """[k, l]: the busiest worker's seconds with units k..l, infinite where that is impossible."""
    seconds = costs.sample_seconds()
    table = (seconds[None, :] - seconds[:, None]) * (load.samples / load.speed)
    table += seconds[:, None] * load.fill
    kept = (
        costs.totals("resident_bytes")
        + costs.totals("optimizer_bytes") / load.width
        + costs.totals("activation_bytes") * load.in_flight
    )
    layers = np.arange(len(seconds)) * load.in_flight
    for amount, most in ((kept, costs.memory_bytes), (layers, costs.most_held)):
        table[amount[None, :] - amount[:, None] > most * (1 + 1e-12)] = np.inf
    table[np.tril_indices(len(seconds))] = np.inf
    return table


def _received_bytes(costs: CostModel, load: StageLoad, owned: tuple[int, int]) -> Amounts:
    """[k, l]: what the stage's workers receive to own units k..l, owning ``owned`` now."""
    weights, optimizer = costs.totals("weight_bytes"), costs.totals("optimizer_bytes")
    new = weights * load.width + optimizer
    old = weights * load.incoming
    position = np.clip(np.arange(len(weights)), *owned)
    # In front of each cut: what is received of units that the stage owns already, and of others.
    total = (new - new[position]) + old[position]
    return np.asarray(total[None, :] - total[:, None], dtype=np.float64)


def _most_received(
    amount: Amounts, loads: Sequence[StageLoad], cuts: Sequence[int], now: Sequence[int]
) -> float:
    """The most of ``amount`` that a worker lacks of what its stage will own."""
    most = 0.0
    for load, (start, stop), (old_start, old_stop) in zip(
        loads, pairwise(cuts), pairwise(now), strict=True
    ):
        low = min(max(start, old_start), stop)
        held = amount[max(low, min(stop, old_stop))] - amount[low]
        whole = amount[stop] - amount[start]
        most = max(most, float(whole if load.incoming else whole - held))
    return most


def _best_seconds(tables: Sequence[Amounts]) -> float:
    best = tables[0][0]
    for table in tables[1:]:
        best = np.maximum(best[:, None], table).min(axis=0)
    return float(best[-1])


def _least_bytes(
    tables: Sequence[Amounts], received: Sequence[Amounts], limit_s: float
) -> tuple[tuple[int, ...], float]:
    """Cuts of the fewest bytes of all partitions whose stages take at most ``limit_s``."""
    allowed = [
        np.where(table <= limit_s, moved, np.inf)
        for table, moved in zip(tables, received, strict=True)
    ]
    least = allowed[0][0]
    choices = []
    for table in allowed[1:]:
        sums = least[:, None] + table
        choices.append(sums.argmin(axis=0))
        least = sums.min(axis=0)
    cuts = [len(least) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return (0, *reversed(cuts)), float(least[-1])


def _does_not_fit(costs: CostModel, loads: Sequence[StageLoad]) -> str:
    whole = costs.totals("resident_bytes")[-1] + costs.totals("optimizer_bytes")[-1] / max(
        load.width for load in loads
    )
    active = costs.totals("activation_bytes")[-1] * min(load.in_flight for load in loads)
    return (
        f"no partition of {len(costs.bounds) - 1} layers over {len(loads)} stages fits into"
        f" {costs.memory_bytes / 2**30:.3g} GiB a worker: weights, gradients and optimizer of the"
        f" model need at least {whole / 2**30:.3g} GiB and activations {active / 2**30:.3g} GiB,"
        " spread over the stages; raise the memory limit or use more workers"
    )
