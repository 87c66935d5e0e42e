"""Has all scripts on Accelerate be given the same by their calls, whichever of them a loss has met.

Such a script counts its steps by itself and decides by what it has gathered. After a loss, one that
was in an earlier call passes over those that another one has behind it: it is given the losses and
gathered values that the other one had. In a worker that comes later these are all calls from the
script's start, for which it is given batches like theirs. So all make the same call next.
"""

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils import _pytree

from elaswave_plugin.adapters.deepspeed.engine.attached import abandoning
from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob
from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader
from elaswave_plugin.adapters.deepspeed.engine.placeholder_output import numbers_of, with_numbers
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.loops.record_told import RecordTold, check_loaded
from elaswave_plugin.loops.shared_record import SharedRecord

Result = TypeVar("Result")
# Calls that the script of the main process, say, may make alone: they meet nobody.
_FORWARD, _EVALUATION, _CLIPPED = "engine(batch)", "next(evaluation)", "accelerator.clip_grad_norm_"
_OWN = (_FORWARD, _EVALUATION, _CLIPPED)


class ScriptRecord:
    """The calls of one worker's script from its first batch on."""

    def __init__(self, job: EngineJob, *, on_caught_up: Callable[[], object]) -> None:
        """``on_caught_up()``: the script of a later worker makes its first call with the others."""
        self._job = job
        self._on_caught_up = on_caught_up
        self.is_late = False
        """Whether this worker came later, and the others have behind them what its script is at."""
        self._calls = SharedRecord(own=_OWN, when_level=self._level)
        # The checkpoints that the script has loaded at its start.
        self.loads: list[str] = []
        worker = job.loop.worker
        self._told = RecordTold(worker, self._calls, place=())
        self._is_kept = self._has_begun = self._inside = False
        self._loader: ElasticLoader | None = None
        self._batch: Any = None
        # Steps of which the script has seen that they are complete.
        self.seen = worker.completed

    @property
    def is_behind(self) -> bool:
        """True while the script is at what the others have behind them."""
        return self._calls.is_behind

    def keep(self, engine: Any) -> None:
        """Keep a record, of this engine's passes as well."""
        self._is_kept = self._job.loop.meets = True
        self.is_late = self._job.loop.worker.detached
        engine.forward = wraps(engine.forward)(partial(self.forward, engine.forward))
        self._job.news.script = self
        worker = self._job.loop.worker
        if not (worker.config.respawn or worker.reserve):
            self._calls.end("no worker comes later")
        self._job.before_leaving.append(self._check_end)

    @abandoning
    def begin(self, loader: ElasticLoader) -> None:
        """Enter the job, before the first batch of the script's training loader."""
        if self._is_kept:
            if not self._has_begun:
                check_loaded(self._job.loop.worker, self.loads)
            self._loader, self._has_begun = loader, True
            self._job.arrive()

    @abandoning
    def of(self, call: str, make: Callable[[], Result]) -> Result:
        """Return what ``make()`` does, or what the call gave to the others' scripts.

        A call within another one is a part of that. Raises StopIteration where that was given, and
        ConfigurationError for a call that the others have not made.
        """
        if self._inside or not self._has_begun:
            return make()
        if self.is_late and not self.is_behind:
            self.is_late = False
            self._on_caught_up()
        self._inside = True
        try:
            given: Result = self._calls.of(call, make)
        finally:
            self._inside = False
        return given

    def _level(self) -> None:
        self._batch = None
        self._job.loop.set_lagging(False)

    def batches(self, loader: ElasticLoader) -> Iterator[tuple[bool, Any]]:
        """Serve the batches of an epoch, each behind whether it is the last one."""
        batch: Any = None
        place: Any = None

        def read() -> tuple[bool, int]:
            nonlocal batch, place
            batch = next(loader)
            # What the script draws follows from it, up to the next batch.
            place = loader.at_end, torch.initial_seed()
            return place

        while True:
            batch = place = None
            try:
                given = self.of("next(loader)", read)
            except StopIteration:
                return
            if given is not place:
                self._job.loop.pass_over()
                torch.manual_seed(given[1])
                batch = self._alike(loader)
            yield given[0], batch

    def _alike(self, loader: ElasticLoader) -> Any:
        """Return a batch like those of the training data, for a step that is passed over."""
        if self._batch is None:
            self._batch = loader.void_batch(self._job.portions.interval)
        return _pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, self._batch)

    def evaluated(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Serve the ``batches`` of an evaluation; one that is passed over has its first one."""
        batch: Any = None
        place: Any = None
        first: Any = None

        def read() -> tuple[bool, int]:
            nonlocal batch, place
            batch = next(batches)
            place = loader.end_of_dataloader, loader.remainder
            return place

        while True:
            batch = place = None
            try:
                given = self.of(_EVALUATION, read)
            except StopIteration:
                if first is not None:
                    loader.end()
                return
            if given is not place:
                first = next(batches) if first is None else first
                # By which `gather_for_metrics` leaves out what fills up the last one.
                loader.end_of_dataloader, loader.remainder = given
                batch = _pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, first)
            yield batch

    def forward(self, native: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Any:
        """``engine(batch)``: of an output that is passed over, single numbers are the others'."""
        output = numbers = None

        def compute() -> list[torch.Tensor]:
            nonlocal output, numbers
            output = native(*inputs, **kwargs)
            numbers = numbers_of(output)
            return numbers

        given = self.of(_FORWARD, compute)
        if given is numbers:
            return output
        return with_numbers(self._job.placeholder((inputs, kwargs)), given)

    def abandon(self) -> None:
        """Leave without waiting for others, as the script fails."""
        self._job.abandon()

    def _check_end(self) -> None:
        """Raise ConfigurationError where the script ends before it has come to the others."""
        if self.is_behind:
            # It may have ended because the job has.
            self._job.loop.worker.member.check()
            raise ConfigurationError(
                "the script of this worker, which came later, has ended before it came to the step"
                " of the others: a script runs from its start in such a worker, and has to do the"
                " same, whatever files the job has written since; where it goes on from a"
                " checkpoint of this run, set respawn to 0"
            )

    # ---- those who come later -------------------------------------------------------------------

    def tell(self) -> Any:
        """Return how the script began, and where it stands."""
        return self._told.tell(), self._standing

    def follow(self, step: int, told: Any) -> None:
        """Have those who come pass over what the others have behind them."""
        self._told.follow(step, [one and one[0] for one in told])
        if told[dist.get_rank()] is None:
            self._stand(*next(one[1] for one in told if one is not None))

    @property
    def _standing(self) -> tuple[Any, ...]:
        place = self._loader.tell_all() if self._loader is not None else None
        return self.seen, self._job.loop.between, place

    def _stand(self, seen: int, is_between: bool, place: Any) -> None:
        self.seen, self._job.loop.between = seen, is_between
        if self._loader is not None:
            self._loader.follow_all(place)

    @abandoning
    def catch_up(self) -> None:
        """Have all pass over what any has behind it (collective over WORLD, after a recovery)."""
        there = self._calls.catch_up(self._standing)
        if there is not None:
            self._stand(*there)
        self._job.loop.is_lagging = self.is_behind
