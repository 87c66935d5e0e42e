"""The layout: the (stage, replica, tp) coordinate of each worker, and the layers of each stage.

The unit of loss is the TP group: without one of its workers it cannot compute, so its survivors
become free workers, and free workers form whole groups again. So stages may have unequal widths.
A worker is named by its slot, a replica by its number in its stage: 0 to launch width - 1, and
above if the job has a reserve.

>>> layout = launch_layout(tp=2, pp=2, dp=2, num_layers=4).without([1])
>>> print(layout)
TP2 x PP2 x DP2, 4 layers, widths 1 2
stage 0, layers 0-1: r1 w2+w3
stage 1, layers 2-3: r0 w4+w5 | r1 w6+w7
free: w0 (stage 0, tp 0)
>>> print(layout.without([7]).reformed())
TP2 x PP2 x DP2, 4 layers, widths 2 1
stage 0, layers 0-1: r0 w0+w6 | r1 w2+w3
stage 1, layers 2-3: r0 w4+w5
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

from elaswave_plugin.errors import ConfigurationError, JobStopped

NO_STAGE = -1


class TpGroup(NamedTuple):
    """The workers of one replica of one stage, by tp position; a tuple, since there are many."""

    replica: int
    slots: tuple[int, ...]

    def __str__(self) -> str:
        return f"r{self.replica} " + "+".join(f"w{slot}" for slot in self.slots)


class Coordinate(NamedTuple):
    """A worker's place: its stage, the order of its replica in the stage, its tp position."""

    stage: int
    order: int
    tp: int


class FreeWorker(NamedTuple):
    """A worker without work: a newcomer (``stage`` NO_STAGE), or a survivor of a broken group.

    A survivor still holds the weights of its former ``stage`` and ``tp`` position.
    """

    slot: int
    stage: int = NO_STAGE
    tp: int = 0

    def __str__(self) -> str:
        origin = "joined" if self.stage == NO_STAGE else f"stage {self.stage}, tp {self.tp}"
        return f"w{self.slot} ({origin})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """A possibly ragged TP x PP x DP layout.

    ``dp``: width of every stage at launch; ``reserve``: replicas that a stage may have beyond it.
    ``cuts`` [num_stages * vpp + 1]: virtual stage v owns layers [cuts[v], cuts[v + 1]) and belongs
    to stage v mod num_stages. ``stages``: the TP groups by stage, in the order of their replicas.
    Raises ConfigurationError for cuts that give a stage no layer.
    """

    tp: int
    dp: int
    cuts: tuple[int, ...]
    stages: tuple[tuple[TpGroup, ...], ...]
    free: tuple[FreeWorker, ...] = ()
    vpp: int = 1
    reserve: int = 0

    def __post_init__(self) -> None:
        check_cuts(self.cuts, num_parts=len(self.stages) * self.vpp, num_layers=self.cuts[-1])

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.cuts[-1]

    @property
    def max_width(self) -> int:
        """The most replicas that a stage may have."""
        return self.dp + self.reserve

    @property
    def widths(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(map(len, self.stages))

    @property
    def is_rectangular(self) -> bool:
        """True if every stage has the launch width: then the framework's own schedule runs."""
        return all(width == self.dp for width in self.widths)

    @property
    def keeps_layers(self) -> bool:
        """True if every stage has as many layers as any other, as at launch."""
        return len({after - before for before, after in pairwise(self.cuts)}) == 1

    @property
    def keeps_stages(self) -> bool:
        """True if every busy worker is at its launch stage, if slots go by stage."""
        width = self.dp * self.tp
        return all(
            slot // width == stage
            for stage, groups in enumerate(self.stages)
            for group in groups
            for slot in group.slots
        )

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers, free ones included, by slot."""
        busy = (slot for stage in self.stages for group in stage for slot in group.slots)
        return tuple(sorted([*busy, *(worker.slot for worker in self.free)]))

    def layers(self, stage: int) -> tuple[tuple[int, int], ...]:
        """Half-open layer ranges of a stage, one for each of its model chunks."""
        step = len(self.stages)
        return tuple(
            (self.cuts[part], self.cuts[part + 1]) for part in range(stage, step * self.vpp, step)
        )

    def without(self, dead: Collection[int]) -> "ParallelLayout":
        """Return the layout after the loss of ``dead``: survivors of broken groups become free.

        A stage may be left without any replica. Raises ConfigurationError for an unknown worker.
        """
        gone = frozenset(dead)
        stages, freed, found = [], [], 0
        for stage, groups in enumerate(self.stages):
            whole = tuple(group for group in groups if gone.isdisjoint(group.slots))
            if len(whole) < len(groups):
                broken = [group for group in groups if not gone.isdisjoint(group.slots)]
                freed += [
                    FreeWorker(slot, stage, tp)
                    for group in broken
                    for tp, slot in enumerate(group.slots)
                    if slot not in gone
                ]
                found += sum(slot in gone for group in broken for slot in group.slots)
            stages.append(whole)
        kept = [worker for worker in self.free if worker.slot not in gone]
        found += len(self.free) - len(kept)
        if found != len(gone):
            known = set(self.workers)
            unknown = ", ".join(str(slot) for slot in sorted(gone - known))
            raise ConfigurationError(
                f"worker {unknown} is not in the layout, wanted one of {_ranges(sorted(known))}"
            )
        return replace(self, stages=tuple(stages), free=tuple(sorted([*kept, *freed])))

    def returned(self, workers: Iterable[FreeWorker]) -> "ParallelLayout":
        """Return the layout with more free workers, which have the modules of their ``stage``.

        Raises ConfigurationError for a worker that is in the layout already.
        """
        new = sorted(workers)
        slots = {worker.slot for worker in new}
        twice = sorted(slots.intersection(self.workers)) if new else []
        if twice or len(slots) < len(new):
            raise ConfigurationError(
                f"worker {twice[0] if twice else new[0].slot} joins although it is in the layout;"
                " every worker has one slot"
            )
        return replace(self, free=tuple(sorted([*self.free, *new]))) if new else self

    def reformed(self, stages: Collection[int] | None = None) -> "ParallelLayout":
        """Make replicas of whole groups of free workers, always in the narrowest stage.

        ``stages``: those to which weights can be brought (None: all). Survivors of the same stage
        and tp position are preferred, since nothing has to be sent to them.
        """
        pool = _Pool(self.free)
        vacant = [_vacant(groups, self.max_width) for groups in self.stages]
        filled = [list(groups) for groups in self.stages]
        allowed = range(len(self.stages)) if stages is None else sorted(set(stages))
        narrow = [(len(filled[stage]), stage) for stage in allowed if vacant[stage]]
        heapify(narrow)
        while len(pool) >= self.tp and narrow:
            width, stage = heappop(narrow)
            filled[stage].append(TpGroup(vacant[stage].pop(), pool.crew(stage, self.tp)))
            if vacant[stage]:
                heappush(narrow, (width + 1, stage))
        return replace(
            self,
            stages=tuple(
                old if len(old) == len(new) else tuple(sorted(new))
                for old, new in zip(self.stages, filled, strict=True)
            ),
            free=pool.left(),
        )

    def reformed_in_place(self) -> "ParallelLayout":
        """Make replicas of free workers in the stage that they come from.

        They hold its modules; only the weights of a changed tp position have to be sent.
        """
        layout = self
        for stage in range(len(self.stages)):
            home = tuple(worker for worker in layout.free if worker.stage == stage)
            away = tuple(worker for worker in layout.free if worker.stage != stage)
            reformed = replace(layout, free=home).reformed([stage])
            layout = replace(reformed, free=tuple(sorted([*away, *reformed.free])))
        return layout

    def moved(self, *, source: int, target: int) -> "ParallelLayout":
        """Move the last replica of stage ``source`` to stage ``target``.

        Raises ConfigurationError if there is no such stage, no replica or no room for one more.
        """
        for stage in (source, target):
            if not 0 <= stage < len(self.stages):
                raise ConfigurationError(
                    f"stage {stage} does not exist, wanted 0 to {len(self.stages) - 1}"
                )
        is_full = len(self.stages[target]) >= self.max_width
        if source == target or not self.stages[source] or is_full:
            raise ConfigurationError(
                f"no replica can move from stage {source} ({len(self.stages[source])} replicas) to"
                f" stage {target} ({len(self.stages[target])} of at most {self.max_width})"
            )
        stages = list(self.stages)
        new = TpGroup(_vacant(stages[target], self.max_width)[-1], stages[source][-1].slots)
        stages[source] = stages[source][:-1]
        stages[target] = tuple(sorted([*stages[target], new]))
        return replace(self, stages=tuple(stages))

    def recut(self, cuts: Sequence[int]) -> "ParallelLayout":
        """Return the same workers with other layers; ConfigurationError for impossible cuts."""
        check_cuts(cuts, num_parts=len(self.cuts) - 1, num_layers=self.num_layers)
        return replace(self, cuts=tuple(cuts))

    def with_layers_at(self, first: int, last: int, stage: int) -> "ParallelLayout":
        """Return the same workers, with the layers ``first`` to ``last`` at ``stage``.

        Raises ConfigurationError if a stage would have none, or layers that are not contiguous.
        """
        num_stages = len(self.stages)
        if self.vpp > 1:
            raise ConfigurationError("layers of interleaved stages cannot change their stage")
        if not 0 <= stage < num_stages:
            raise ConfigurationError(
                f"there is no stage {stage}, wanted one of 0 to {num_stages - 1}"
            )
        if not 0 <= first <= last < self.num_layers:
            raise ConfigurationError(
                f"layers are {first}-{last}, wanted some of 0-{self.num_layers - 1}"
            )
        owners = [
            stage if first <= layer <= last else owner
            for owner, (start, stop) in enumerate(pairwise(self.cuts))
            for layer in range(start, stop)
        ]
        if owners != sorted(owners) or len(set(owners)) < num_stages:
            held = ", ".join(f"stage {s}: {self._layers_text(s)}" for s in range(num_stages))
            raise ConfigurationError(
                f"layers {first}-{last} at stage {stage} would leave a stage without layers, or"
                f" with layers that are not contiguous ({held}); move layers between neighbours"
            )
        return self.recut([*(owners.index(s) for s in range(num_stages)), self.num_layers])

    def staffed(self) -> "ParallelLayout":
        """Return the layout with a replica in every stage: an empty one takes from the widest.

        Raises JobStopped if fewer whole TP groups are left than stages.
        """
        layout = self
        while not all(layout.widths):
            widest = max(range(len(layout.stages)), key=lambda stage: layout.widths[stage])
            if layout.widths[widest] < 2:
                raise JobStopped(
                    f"{self.groups_text(sum(self.widths))} left for {len(self.stages)} stages; the"
                    " job needs one for each stage: add workers, or start from the last checkpoint"
                    " with fewer stages"
                )
            layout = layout.moved(source=widest, target=layout.widths.index(0))
        return layout

    def summary(self) -> str:
        """Return one line a stage without the single workers, for large layouts."""
        rows = [
            f"stage {stage}, layers {self._layers_text(stage)}: {self._count_text(len(groups))}"
            for stage, groups in enumerate(self.stages)
        ]
        return "\n".join([self._title(), *rows, f"free: {len(self.free)} workers"])

    def __str__(self) -> str:
        rows = [
            f"stage {stage}, layers {self._layers_text(stage)}: "
            + (" | ".join(map(str, groups)) or "no worker")
            for stage, groups in enumerate(self.stages)
        ]
        free = ["free: " + " | ".join(map(str, self.free))] if self.free else []
        return "\n".join([self._title(), *rows, *free])

    def to_json(self) -> dict[str, Any]:
        """A dict that JSON can carry."""
        return {
            "tp": self.tp,
            "dp": self.dp,
            "vpp": self.vpp,
            "reserve": self.reserve,
            "cuts": list(self.cuts),
            "stages": [
                [[group.replica, list(group.slots)] for group in stage] for stage in self.stages
            ],
            "free": [list(worker) for worker in self.free],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "ParallelLayout":
        """The layout that `to_json` described."""
        return cls(
            tp=record["tp"],
            dp=record["dp"],
            vpp=record["vpp"],
            reserve=record["reserve"],
            cuts=tuple(record["cuts"]),
            stages=tuple(
                tuple(TpGroup(replica, tuple(slots)) for replica, slots in stage)
                for stage in record["stages"]
            ),
            free=tuple(FreeWorker(*worker) for worker in record["free"]),
        )

    def _title(self) -> str:
        vpp = f" x VPP{self.vpp}" if self.vpp > 1 else ""
        widths = "" if self.is_rectangular else f", widths {' '.join(map(str, self.widths))}"
        sizes = f"TP{self.tp} x PP{len(self.stages)} x DP{self.dp}{vpp}"
        return f"{sizes}, {self.num_layers} layers{widths}"

    def groups_text(self, count: int) -> str:
        """Return a count of TP groups in words: of workers, where each is a group by itself."""
        one = "worker" if self.tp == 1 else "whole TP group"
        each = "" if self.tp == 1 else f" of {self.tp}"
        return f"{count or 'no'} {one}{'s' * (count > 1)}{each}"

    def _count_text(self, count: int) -> str:
        beyond = f"{count} replicas, {self.dp} at launch"
        return f"{count} of {self.dp} replicas" if count <= self.dp else beyond

    def _layers_text(self, stage: int) -> str:
        return " ".join(_span(start, stop - 1) for start, stop in self.layers(stage))


def launch_layout(
    *, tp: int, pp: int, dp: int, num_layers: int, vpp: int = 1, reserve: int = 0
) -> ParallelLayout:
    """Return the rectangular launch layout in Megatron order: slot = tp + TP (replica + DP stage).

    ``reserve``: replicas that every stage may have beyond.
    Raises ConfigurationError for sizes under 1 and layers that the stages do not divide.
    """
    for name, size in (("tp", tp), ("pp", pp), ("dp", dp), ("vpp", vpp)):
        if size < 1:
            raise ConfigurationError(f"{name} is {size}, wanted 1 or more")
    parts = pp * vpp
    if num_layers < parts:
        raise ConfigurationError(
            f"{num_layers} layers for {parts} stages{' (pp x vpp)' if vpp > 1 else ''}: every stage"
            f" needs a layer; wanted at least {parts} layers or fewer stages"
        )
    if num_layers % parts:
        raise ConfigurationError(
            f"{num_layers} layers do not divide by {parts} stages{' (pp x vpp)' if vpp > 1 else ''}"
            f"; wanted a multiple of {parts}"
        )
    return ParallelLayout(
        tp=tp,
        dp=dp,
        vpp=vpp,
        reserve=reserve,
        cuts=tuple(range(0, num_layers + 1, num_layers // parts)),
        stages=tuple(
            tuple(
                TpGroup(replica, tuple(range(tp * place, tp * place + tp)))
                for replica in range(dp)
                for place in (replica + dp * stage,)
            )
            for stage in range(pp)
        ),
    )


def sizes_of(num_workers: int, *, tp: int, pp: int) -> int:
    """The data-parallel width that ``num_workers`` factor into; raises ConfigurationError."""
    if tp < 1 or pp < 1 or num_workers < 1 or num_workers % (tp * pp):
        raise ConfigurationError(
            f"{num_workers} workers do not factor into tp {tp} x pp {pp} x dp; wanted a positive"
            f" multiple of {max(tp, 1) * max(pp, 1)}"
        )
    return num_workers // (tp * pp)


def check_cuts(cuts: Sequence[int], *, num_parts: int, num_layers: int) -> None:
    """Raise ConfigurationError unless the cuts give each of ``num_parts`` at least one layer."""
    rising = all(before < after for before, after in pairwise(cuts))
    if len(cuts) != num_parts + 1 or cuts[0] != 0 or cuts[-1] != num_layers or not rising:
        raise ConfigurationError(
            f"cuts are {' '.join(map(str, cuts))}, wanted {num_parts + 1} rising numbers from 0 to"
            f" {num_layers}, so that each of {num_parts} stages has a layer"
        )


def why_impossible(layout: Mapping[str, Any], cuts: Sequence[int]) -> str | None:
    """Say why a layout (as JSON) cannot have these cuts; None if it can."""
    try:
        ParallelLayout.from_json(layout).recut(cuts)
    except ConfigurationError as error:
        return str(error)
    return None


def why_needed(layout: Mapping[str, Any], slots: Collection[int]) -> str | None:
    """Say why the job of a layout (as JSON) would end with these workers only; None: it goes on."""
    whole_layout = ParallelLayout.from_json(layout)
    gone = [slot for slot in whole_layout.workers if slot not in slots]
    rest = whole_layout.without(gone).reformed_in_place()
    stays = layout["why_workers_stay"]
    if stays is None:
        rest = rest.reformed()
    whole, needed = sum(rest.widths), len(rest.stages)
    if whole < needed:
        return f"{rest.groups_text(whole)} would be left for {needed} stages"
    if stays is not None and not all(rest.widths):
        empty = rest.widths.index(0)
        return f"stage {empty} would have no worker, and workers keep theirs: {stays}"
    return None


class _Pool:
    """Free workers, to be taken by former place or in the order of their slots."""

    def __init__(self, free: Sequence[FreeWorker]) -> None:
        self.order = deque(free)
        self.taken: set[FreeWorker] = set()
        self.by_place: dict[tuple[int, int], deque[FreeWorker]] = {}
        for worker in free:
            self.by_place.setdefault((worker.stage, worker.tp), deque()).append(worker)
        self.count = len(free)

    def __len__(self) -> int:
        return self.count

    def crew(self, stage: int, tp: int) -> tuple[int, ...]:
        """Take the slots of a new group of ``stage``: first those that have its weights."""
        chosen = {
            position: self._first(self.by_place.get((stage, position))) for position in range(tp)
        }
        slots = []
        for position in range(tp):
            worker = chosen[position] or self._first(self.order)
            assert worker is not None
            slots.append(worker.slot)
        self.count -= tp
        return tuple(slots)

    def left(self) -> tuple[FreeWorker, ...]:
        """Return the workers that were not taken."""
        return tuple(worker for worker in self.order if worker not in self.taken)

    def _first(self, workers: deque[FreeWorker] | None) -> FreeWorker | None:
        while workers:
            worker = workers.popleft()
            if worker not in self.taken:
                self.taken.add(worker)
                return worker
        return None


def _vacant(groups: Sequence[TpGroup], max_width: int) -> list[int]:
    """List the numbers that no replica of a stage has, the lowest one last."""
    taken = {group.replica for group in groups}
    return [replica for replica in reversed(range(max_width)) if replica not in taken]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as text: 0-3 5 7-8."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return " ".join(_span(first, last) for first, last in spans)
