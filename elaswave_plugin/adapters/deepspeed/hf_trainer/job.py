"""An engine that transformers.Trainer drives: each update is a step that is ours to call again."""

import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, Unpack

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.cut_draws import Part
from elaswave_plugin.adapters.deepspeed.engine.checkpoint import weights_in
from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob
from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader
from elaswave_plugin.adapters.deepspeed.engine.loss_kinds import WHOLE, Kinds, LossKind
from elaswave_plugin.adapters.deepspeed.engine.monitor import Holders
from elaswave_plugin.adapters.deepspeed.engine.resumed import Resumed
from elaswave_plugin.adapters.deepspeed.hf_trainer.pieces import weight
from elaswave_plugin.adapters.deepspeed.hf_trainer.state import TrainerState
from elaswave_plugin.core.step.loss_parts import SAMPLES, SUM, Interval
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.framework import StepReport
from elaswave_plugin.ipc.frames import JobConstants
from elaswave_plugin.loops.called import CalledLoop
from elaswave_plugin.loss_terms import added, weighed_by
from elaswave_plugin.step_state.step_state import Part as StatePart
from elaswave_plugin.values.plain import gathered

Value = TypeVar("Value")


class TrainerJob(EngineJob):
    """One worker's engine in a job whose loop is the Trainer's."""

    _loop: CalledLoop
    _loop_kind = CalledLoop
    # The Trainer logs, evaluates and steps its schedule once, whatever is redone.
    _repeats_bodies = False

    def _own_parts(self) -> Sequence[StatePart]:
        self.trainer_state = TrainerState()
        # By round: share, samples of all and parts of each micro-batch that was read for the step.
        self._reads: list[list[tuple[Interval, int, tuple[Part, ...]]]] = [[]]
        # Of each round: whether its batches are not others' in truth.
        self.counted: list[bool] = []
        # The micro-batch of each of its passes.
        self._passed: list[int] = []
        # Micro-batches that a batch of the loader is cut into.
        self.pieces = 1
        # The micro-batch of the step that is made.
        self._number = 0
        # Whether the step has no batches, and loads weights.
        self._is_loading = False
        return (self.trainer_state,)

    @property
    def called(self) -> CalledLoop:
        """The loop, with the calls that the Trainer's own loop is led to."""
        return self._loop

    @property
    def _absorbs_losses(self) -> bool:
        # A loss function may call the model beside the engine, as DPO's does for its reference.
        return super()._absorbs_losses or self._loop.inside

    # ---- a step ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Be about to begin a step: the first one is preceded by the first seal."""
        self._begin()

    def enter(self) -> tuple[int, int] | None:
        """Have a worker that comes later enter the job, before a step of the others.

        Return the epoch and the iteration of that step; None on the workers of the launch.
        """
        if not self._worker.detached:
            return None
        self.arrive()
        return self.trainer_state.place

    @property
    def has_to_enter(self) -> bool:
        """True on a worker that came later, until it has a part in the steps of the others."""
        return self._worker.detached

    def follow_steps(self, loader: ElasticLoader, *, samples: int, read_again: int) -> None:
        """Number the samples after those of the steps of a checkpoint, for the audit.

        ``read_again``: how many of the last ones come first.
        """
        self._resumed = Resumed(samples, is_placed=True)
        loader.position = replace(loader.position, served=samples - read_again)

    @property
    def own_wandb(self) -> str:
        """The mode of the section's own W&B run."""
        return self._worker.config.wandb

    @property
    def constants(self) -> JobConstants:
        """Constants of the job, as a worker that came later is told them."""
        return self._worker.job_constants

    def remember(self, **what: Unpack[JobConstants]) -> None:
        """Keep constants for workers that come later."""
        self._worker.remember(**what)

    def load_weights(self, folder: Path) -> None:
        """Complete a step without batches, whose update is to have a checkpoint's trained weights.

        Moments, counters and schedule stay. Raises CheckpointUnreadableError on all alike.
        """
        self._announce("data")
        weights = weights_in(self._engine, folder)

        def update() -> StepReport:
            self._worker.state.begin_update()
            # All workers have come here, as in any update.
            dist.barrier()
            self._framework.install(weights)
            rate = self._framework.learning_rate()
            return StepReport(loss=math.nan, grad_norm=math.nan, lr=rate, tokens=0)

        self._is_loading = True
        try:
            self._loop.complete_step(update)
        finally:
            self._is_loading = False

    def _record(self, step: int, report: StepReport, seconds: float) -> None:
        if self._is_loading:
            self._worker.events.emit("weights_loaded", slot=self._worker.slot, step=step)
        else:
            super()._record(step, report, seconds)

    def put_back(self) -> None:
        """Have all state as it was before the step that comes next."""
        self._state.put_back(self._state.before(self._worker.completed))

    def enter_passes(self) -> None:
        """Have all state as the first pass of this step has found it (collective over WORLD)."""
        self._state.enter_passes()

    def read(self, loader: ElasticLoader, *, epoch: int, first: int, count: int) -> list[list[Any]]:
        """Read ``count`` batches of this worker's share, from iteration ``first`` of an epoch.

        By round of the step, of which there is one in fast mode.
        """
        loader.seek(epoch, first)
        place, self._reads, self._passed, self.counted = loader.position, [], [], []
        rounds: list[list[Any]] = []
        for number in self.portions.each():
            self.go(number)
            loader.position = place
            self._reads.append([])
            rounds.append([self._next(loader) for _ in range(count)])
            self.counted.append(not self.portions.is_void)
        self.trainer_state.place = epoch, first + count
        return rounds

    def _next(self, loader: ElasticLoader) -> Any:
        batch = self._loop.next_batch(partial(self._serve, loader))
        self._drawn.append((*self._share, self.draws.parts))
        return batch

    @property
    def _drawn(self) -> list[tuple[Interval, int, tuple[Part, ...]]]:
        return self._reads[self.portions.number]

    def go(self, number: int) -> None:
        """Be in a round of the step."""
        batches = sum(map(len, self._reads[:number]))
        self.portions.go(number, batches=batches, losses=self._losses)
        self._losses, self._passed = [], []

    def items_of(self, counts: Sequence[Any], *, together: bool) -> list[Any]:
        """Return the items of the step for each round, from those of its batches (collective).

        ``together``: those of all replicas; else of the round's own.
        """
        if not together or counts[-1] is None:
            return [*counts]
        mine = sum(int(one) for one, is_mine in zip(counts, self.counted, strict=True) if is_mine)
        total = torch.tensor(mine, device=self._engine.device)
        dist.all_reduce(total)
        return [total / 1 for _ in counts]

    def share_of(self, number: int) -> Interval:
        """Return this worker's share of a micro-batch's samples."""
        return self._drawn[number][0]

    def cut(self, number: int) -> tuple[Interval, list[Interval]]:
        """Return this worker's share of a micro-batch's samples, and those of the launch."""
        mine, num_samples, _ = self._drawn[number]
        return mine, self.portions.launch_intervals(num_samples)

    def of_all(self, mine: Sequence[list[int]]) -> list[list[int]]:
        """Join what the workers have of each micro-batch, in the order of samples (collective)."""
        everyone = self.in_order(gathered([*mine]))
        return [[*chain.from_iterable(one)] for one in zip(*everyone, strict=True)]

    @property
    def declared_loss(self) -> str | None:
        """The rule that the script says of its loss, if it does."""
        return self._worker.config.loss

    @property
    def speaks(self) -> bool:
        """True for the worker whose console is that of all."""
        return self._worker.owns_rank_0

    @property
    def asks(self) -> bool:
        """True if losses are asked for their kind in this step, as long as it is not known."""
        step = self._worker.completed
        if self.portions.keeps_micro_batches:
            return False
        return not self.portions.has_launch_shares or step & (step - 1) == 0

    @property
    def last_call(self) -> bool:
        """True if every worker was told to leave, so that the job saves and ends."""
        return self._worker.last_call

    def saves_last(self) -> None:
        """Tell that all workers save where they have to leave; SIGTERM is for the agents then."""
        self._worker.member.saves_last()
        self._worker.member.signals.take_over(signal.SIGTERM)

    def uncompiled(self) -> AbstractContextManager[None]:
        """Passes in this block are none of the compiled ones."""
        return self._hooks.uncompiled()

    def begin_micro_batch(self, number: int) -> None:
        """Seed the draws of a micro-batch that was read."""
        self._number = number
        is_first = self._worker.completed == number == 0
        self.draws.begin(self._drawn[number][2], watched=is_first)
        self.portions.select(number)

    @contextmanager
    def weighing(
        self, samples: Interval | None, kinds: Kinds, weights: Mapping[str, float]
    ) -> Iterator[None]:
        """Weigh the loss of a pass of the micro-batch, or its terms.

        ``samples``: of the pass among those of all; None where they have none, or count nothing.
        """

        live = self.portions.num_averaged

        def of(term: str) -> float:
            return kinds.get(term, LossKind()).weight(weights, launched=self._width, live=live)

        def weigh(terms: Mapping[str, Any]) -> Any:
            self._weight = 1.0
            return added({name: one * of(name) for name, one in terms.items()})

        self._weight = of(WHOLE)
        self._share_weight = LossKind().weight(weights, launched=self._width, live=live)
        self._passed.append(self._number)
        draws = self.draws.paused() if samples is None else self.draws.narrowed(*samples)
        with weighed_by(weigh), draws:
            yield

    @property
    def _iterates(self) -> bool:
        # A batch of a Trainer that generates its samples is cut, and weighed by what it generates.
        return self._loop.inside and bool(self._drawn) and self.pieces == 1

    def _mean_loss(self) -> tuple[float, int, Holders]:
        if len(self._losses) != len(self._passed):
            raise ConfigurationError(
                f"a step of {len(self._passed)} passes called accelerator.backward"
                f" {len(self._losses)} times, wanted once in each call of training_step"
            )
        if not self.portions.keeps_micro_batches:
            self.losses = self._losses_of_all()
        _, tokens, holders = super()._mean_loss()
        # The Trainer has divided each by the micro-batches, or by all tokens of the step.
        return sum(self.losses), tokens, holders

    def _losses_of_all(self) -> list[float]:
        device = self._engine.device
        losses = torch.zeros(len(self._drawn), dtype=torch.float64, device=device)
        losses.index_add_(0, torch.tensor(self._passed, device=device), torch.stack(self._losses))
        dist.all_reduce(losses)
        return [*(losses / dist.get_world_size()).tolist()]

    # ---- a Trainer that generates its samples ---------------------------------------------------

    @property
    def is_as_launched(self) -> bool:
        """True if the shares, by rank, are those of the launch."""
        ranks = self._worker.view.ranks
        return self.portions.has_launch_shares and [*ranks] == sorted(ranks)

    @property
    def generated(self) -> tuple[int, int]:
        """The interval of this worker's samples among those of a generation."""
        return self.portions.interval(self._width * self._micro_batch_size * self.pieces)

    def weights_of(self, number: int) -> dict[str, float]:
        """Return the weights of a micro-batch of what was generated, by rule."""
        (start, stop), num_samples, _ = self._drawn[number]
        samples = (stop - start) * self._width / num_samples
        piece = weight(number % self.pieces, *self.generated, pieces=self.pieces)
        return {SUM: 1.0, SAMPLES: samples * (piece if self.pieces > 1 else 1.0)}

    @property
    def position(self) -> int:
        """The place of this worker's share among those of all."""
        return sorted(self._worker.view.ranks).index(self._worker.slot)

    def in_order(self, by_rank: Sequence[Value]) -> list[Value]:
        """Return what each worker has, in the order of their shares."""
        pairs = zip(self._worker.view.ranks, by_rank, strict=True)
        return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]

    def announce_reading(self) -> None:
        """Announce work of the script's own in a step, of any length."""
        if self._loop.inside and not self._working:
            self._announce("data")

    @property
    def begins_update(self) -> bool:
        """True in the first micro-batch of an update."""
        return self._number == 0

    def note_tokens(self, count: int) -> None:
        """Count the tokens that this worker has generated, instead of what was read."""
        self._tokens = count + (self._tokens if self._number else 0)

    # ---- after a loss ---------------------------------------------------------------------------

    def _learn_output(self) -> None:
        """Nothing stands in for an output: what is interrupted is called again."""
