"""Says, when it begins to matter, what a loss changes for a script and its model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elaswave_plugin.adapters.batch_layers import batch_layers
from elaswave_plugin.adapters.counting_loops import counting_line
from elaswave_plugin.adapters.deepspeed.compat.patches import width_patches
from elaswave_plugin.adapters.deepspeed.compat.unsupported import refuse_count
from elaswave_plugin.adapters.script_lines import asking_line, bare_collective
from elaswave_plugin.core.step.dataflow import Dataflow, Shares
from elaswave_plugin.ipc.console import say
from elaswave_plugin.recovery.worker import Worker

_PAGE, _MEAN = "docs/deepspeed.md", "elaswave_plugin.deepspeed.mean"


class OwnLoops:
    """One worker's warnings of a loop that the script owns; rank 0 speaks for all."""

    def __init__(
        self,
        worker: Worker,
        model: torch.nn.Module,
        *,
        width: int,
        absorbs: Callable[[], bool] = lambda: False,
    ) -> None:
        """``width``: the workers of the launch; ``absorbs()``: is what runs made again?"""
        self._worker = worker
        self._absorbs = absorbs
        self._model = model
        self._width = width
        self._layers_told = self._rounds_told = self._padding_told = False
        # Lengths of the samples of a batch, and whether batches have had others.
        self._lengths: list[tuple[int, ...]] = []
        self._pads = False
        # Whether batches of samples with different keys are nothing new, or told.
        self._mixes = False
        self._evaluation_told = self._draws_told = self._collator_told = False
        # Lines of the script that ask for the width or for what all workers have, by what first.
        self._lines: dict[str, str] = {}
        self._told: set[str] = set()
        self._bare: set[str] = set()
        self._widths = width_patches("deepspeed", self.asks)
        # Whether shares are others than those of the launch.
        self._changed = False

    def begin(self) -> None:
        """Note from now on what lines of the script ask the groups for."""
        self._widths.apply()
        self._worker.groups.list_ranks()
        self._worker.links.asked = self.asks

    def check_count(self) -> None:
        """Raise ConfigurationError in exact mode, where the loop that asks ends by a count."""
        if self._is_exact and (line := counting_line()) is not None:
            refuse_count(line)

    def end(self) -> None:
        """Note nothing any more."""
        self._worker.links.asked = None
        self._widths.undo()

    def asks(self, call: str | None = None) -> None:
        """Note the line that asks, and warn of it where workers are missing; `asking_line`."""
        if self._worker.links.asked is None:
            return
        if call is None and not self._absorbs():
            self._tell_bare(bare_collective())
        line = asking_line(call)
        if line is not None and (place := line.partition(" ")[0]) not in self._lines:
            self._lines[place] = line
            self._tell()

    def evaluates(self) -> None:
        """Warn of a pass of an evaluation that is not work of `run`, where workers are missing."""
        left = len(self._worker.view.ranks)
        if self._evaluation_told or not self._worker.owns_rank_0 or left >= self._width:
            return
        self._evaluation_told = True
        say(
            f"the script evaluates by itself with {left} of {self._width} workers: the samples of a"
            " lost worker's shard are in no result, unless the loader was made after the loss;"
            " write elaswave_plugin.deepspeed.run(engine, evaluate) and make the loader in evaluate"
            f" ({_PAGE})"
        )

    def loaded(self, *, steps: int, samples: int, batch: int) -> None:
        """Warn where the steps of a checkpoint had another batch than those that follow."""
        if not self._worker.owns_rank_0 or samples == steps * batch:
            return
        say(
            f"the checkpoint has {steps} steps of {samples / steps:g} samples, and a step has"
            f" {batch} from now on: a job of another number of workers keeps its batch where"
            " train_batch_size is set in the configuration"
        )

    def recovered(self) -> None:
        """Warn of the lines that ask, where shares are others than those of the launch."""
        self._changed = self._has_other_shares
        self._tell()
        if self._changed and self._is_exact:
            self._tell_rounds()
        # In pipelines micro-batches stay whole.
        if self._changed and self._sizes() and not self._layers_told:
            self._layers_told = True
            self._tell_layers()

    def _tell_rounds(self) -> None:
        """Say once that a step takes more batches of the script's than at the launch."""
        flow = self._worker.dataflow
        told, self._rounds_told = self._rounds_told, True
        if told or not self._worker.owns_rank_0:
            return
        assert isinstance(flow, Dataflow)
        rounds = max(len(replicas) for _, replicas in flow.placement)
        say(
            f"exact mode: a step takes {rounds} times the batches of the launch from now on, as"
            " workers run the micro-batches of lost ones before their own: a loop of the script's"
            f" that counts batches makes fewer steps; go by engine.global_steps ({_PAGE})"
        )

    def mixes(self, keys: Sequence[str]) -> None:
        """Warn of a batch whose samples have different ``keys``, if none had at the launch."""
        before, self._mixes = self._mixes, True
        # A recovery is told once its step is made again.
        if self._cuts and not before:
            say(
                f"samples of one batch of worker {self._worker.slot} have different keys"
                f" ({' | '.join(keys)}), as in no batch before the loss of workers: its share is of"
                " several micro-batches of the launch; have the collator and the loss take such"
                " batches, or order the data so that all workers have the same keys at once"
                f" ({_PAGE})"
            )

    def reads(self, batch: Mapping[Any, Any]) -> None:
        """Note how long the samples of a batch are, and warn where that follows from its others."""
        one = [tuple(value.shape[1:]) for value in batch.values() if torch.is_tensor(value)]
        before, self._lengths = self._lengths, self._lengths or one
        self._pads = self._pads or before not in ([], one)
        if not (self._pads and self._cuts) or self._padding_told:
            return
        self._padding_told = True
        if self._worker.owns_rank_0:
            say(
                "batches are padded to the longest of their samples, and those of shares to other"
                " lengths than at the launch: the numbers that are drawn for places of a sample, as"
                " in dropout, are others now than in a run without a loss of workers; pad all"
                f' samples to one length, or set "consistency" to "exact" ({_PAGE})'
            )

    def draws_together(self, shape: tuple[int, ...] | None) -> None:
        """Warn once of numbers that are drawn for no sample, or by other kernels than torch's."""
        if self._draws_told or not self._worker.owns_rank_0:
            return
        self._draws_told = True
        how = "by a kernel that is none of torch's own, as a compiled one"
        if shape is not None:
            how = f"of the shape {shape}, in which no dimension is that of the samples"
        say(
            f"a pass draws numbers {how}: after a loss of workers a share is drawn for with those"
            " of its first micro-batch, and the losses differ from those of a run without a loss;"
            f" draw for each sample, by torch's functions ({_PAGE})"
        )

    def collates(self) -> None:
        """Warn once of a collator that draws, and pads batches to lengths of their own."""
        if not self._collator_told and self._worker.owns_rank_0:
            self._collator_told = True
            say(
                "the collator draws numbers, and the batches of shares have other shapes than those"
                " of the launch: it draws for shares now, and the losses differ from those of a run"
                f" without a loss of workers; pad all samples to one length ({_PAGE})"
            )

    def _tell_bare(self, line: str | None) -> None:
        """Name a line once, the first time that it runs, before a loss has met it."""
        if line is None or line in self._bare:
            return
        self._bare.add(line)
        if self._worker.owns_rank_0:
            say(
                f"{line} calls the other workers outside of the engine: if a loss meets it, the job"
                " ends; call it in a function by elaswave_plugin.deepspeed.run(engine, function),"
                f" or take a mean of the step by {_MEAN}(engine, value) ({_PAGE})"
            )

    def _tell(self) -> None:
        lines = [line for line in self._lines.values() if line not in self._told]
        if not (lines and self._changed):
            return
        self._told.update(lines)
        if not self._worker.owns_rank_0:
            return
        sizes = " or ".join(map(str, sorted(self._sizes())))
        shares, mean = f" with {sizes} samples of an iteration each", f"{_MEAN}(engine, value)"
        if not sizes:
            shares = ""
            mean = mean if self._is_exact else "the result of engine.train_batch"
        say(
            f"the job has {len(self._worker.view.ranks)} workers now ({self._width} at the launch)"
            f"{shares}: the numbers of {', '.join(lines)} follow them; take a mean of the step by"
            f" {mean}, divide sums of an evaluation by its samples, and multiply by a width of"
            f" before the loop ({_PAGE})"
        )

    def _tell_layers(self) -> None:
        layers = batch_layers(self._model)
        if not layers or not self._worker.owns_rank_0:
            return
        each = f", as each of {len(layers)} such layers," if layers[1:] else ""
        say(
            f"{layers[0]}{each} normalises a sample by the others of its micro-batch, and"
            " micro-batches are cut in other parts now: the losses differ from those of a run"
            " without a loss of workers; use GroupNorm or LayerNorm, or on GPUs SyncBatchNorm"
            f" ({_PAGE})"
        )

    @property
    def _is_exact(self) -> bool:
        return self._worker.config.consistency == "exact"

    @property
    def _cuts(self) -> bool:
        """True if batches are others than those of the launch."""
        return self._has_other_shares and not self._is_exact

    @property
    def _has_other_shares(self) -> bool:
        return len(self._worker.view.ranks) != self._width or len(self._sizes()) > 1

    def _sizes(self) -> set[int]:
        """The samples that workers have of an iteration; none in a pipeline."""
        shares = self._worker.dataflow
        if not isinstance(shares, Shares):
            return set()
        return {stop - start for _, start, stop in shares.intervals}

    def leaves_first_epoch(self, taken: int, void: int) -> None:
        """Warn where a script leaves its first epoch of the data after void batches."""
        if self._worker.owns_rank_0:
            say(
                f"the script leaves its first epoch of the data after {taken} batches, of which a"
                f" loss had made {void} void: if it counts them, it skips their samples; leave an"
                f" epoch by engine.global_steps ({_PAGE})"
            )
