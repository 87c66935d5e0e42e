"""The knowledge that a later worker needs for its script's loop to go on like the others'.

Its state comes from the snapshots. Here is what they do not have: what was loaded before the first
step, in which epoch of the data the others are, the events that are not written yet, shapes of
outputs, and tensors that every worker holds alike and no step changes.
"""

import base64
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
import xxhash

from elaswave_plugin.adapters.deepspeed.compat.patches import resume_patches, stage_patches
from elaswave_plugin.adapters.deepspeed.engine.first_pass import Structure
from elaswave_plugin.adapters.deepspeed.engine.framework import COUNTERS, DeepSpeedFramework
from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader
from elaswave_plugin.adapters.deepspeed.engine.monitor import ElasticMonitor
from elaswave_plugin.adapters.deepspeed.engine.placeholder_output import StandIn
from elaswave_plugin.communicator.groups.c10d_tables import imagine_world
from elaswave_plugin.core.layout.reserve import built_among
from elaswave_plugin.errors import ConfigurationError, ElasWaveError
from elaswave_plugin.ipc.environment import INCARNATION, SLOT
from elaswave_plugin.loops.call_log import Knowledge
from elaswave_plugin.recovery.handshake import Handshake
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.step_state.step_state import digest_of
from elaswave_plugin.trainer.fatal import ends_in_a_sentence
from elaswave_plugin.values.plain import decode, encode, told_by

_FROZEN = "what no step changes"


def meet_nobody() -> None:
    """Make a later worker's own WORLD, before its script initializes torch.distributed.

    It has the sizes of the launch, by which a `PipelineModule` finds its stage. The others have met
    long ago. ``deepspeed.initialize`` makes the job's in its place.
    """
    if int(os.environ.get(INCARNATION, "0")) and not dist.is_initialized():
        slot, width = int(os.environ[SLOT]), int(os.environ["WORLD_SIZE"])
        if os.environ["RANK"] == "0" and _is_inside("accelerate.accelerator"):
            # The main process is another one, until this one's script has come to the others'.
            os.environ["RANK"] = "1"
        imagine_world(int(os.environ["RANK"]), width)
        if "transformers.trainer" in sys.modules:
            resume_patches().apply()
        if slot >= width:
            stage_patches(partial(_finds_its_stage, slot, width)).apply()


def _is_inside(module: str) -> bool:
    """Return whether a function of this module is being called, and not a Trainer's arguments."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def _finds_its_stage(slot: int, width: int, native: Callable[..., None]) -> Callable[..., None]:
    """Beyond the launch a slot has its place by the number of stages, first known here."""

    @wraps(native)
    def __init__(
        self: Any,
        layers: Any,
        num_stages: Any = None,
        topology: Any = None,
        *args: Any,
        **more: Any,
    ) -> None:
        stages = num_stages if topology is None else topology.get_dim("pipe")
        dist.destroy_process_group()
        imagine_world(built_among(slot, range(width), pp=stages).index(slot), width)
        native(self, layers, num_stages, topology, *args, **more)

    return __init__


class _JobState(NamedTuple):
    """One worker's knowledge of the job."""

    loader: Any
    shapes: Any
    events: Any
    was_first: bool
    # Of a script that passes over what the others have behind them.
    script: Any


class Script(Knowledge, Protocol):
    """A script that passes over the calls that others have behind them."""

    def of(self, call: str, make: Callable[[], Any]) -> Any:
        """Return what ``make()`` does, or what the call gave to the others' scripts."""
        ...

    def catch_up(self) -> None:
        """Have all of them at the same call, after a recovery."""
        ...


class News:
    """The handshake after every recovery: workers that were there tell later ones."""

    def __init__(
        self,
        worker: Worker,
        framework: DeepSpeedFramework,
        *,
        monitor: ElasticMonitor,
        stand_in: StandIn,
    ) -> None:
        self._worker = worker
        self._framework = framework
        self._monitor = monitor
        self._stand_in = stand_in
        self._handshake = Handshake(
            worker.notes, knows=not worker.detached, tell=self._tell, follow=self._follow
        )
        self.script: Script | None = None
        worker.notes.add(_FROZEN, lambda step: self._frozen_digest())
        self._known_epoch = worker.job_constants.get("data_epoch", 0)

    def exchange(self) -> None:
        """Tell, and be told (collective over WORLD).

        Raises ElasWaveError where none is left that knows, ConfigurationError on a worker that
        comes with another model than the others'.
        """
        (somebody_holds,) = self._handshake.exchange(self._monitor.holds)
        self._monitor.recovered(somebody_holds=somebody_holds)

    def _tell(self) -> tuple[Any, ...]:
        loader, monitor = self._framework.loader, self._monitor
        assert loader is not None
        shapes = self._stand_in.tell()
        script = self.script.tell() if self.script is not None else None
        return tuple(_JobState(loader.tell(), shapes, monitor.tell(), monitor.was_first, script))

    def _follow(self, everyone: Sequence[tuple[Any, ...] | None]) -> None:
        loader = self._framework.loader
        assert loader is not None
        state = {rank: _JobState(*one) for rank, one in enumerate(everyone) if one is not None}
        comes, told_by_notes = dist.get_rank() not in state, min(state) == dist.get_world_size()
        first = next((rank for rank, one in state.items() if one.was_first), min(state))
        if told_by_notes and self._frozen_digest() != self._worker.notes.read(_FROZEN):
            raise ElasWaveError(
                "all workers that held the frozen parameters of the job were lost"
                " before this one joined, whose script has built others; restart from the last"
                " checkpoint"
            )
        # All that have come have built the same.
        source = 0 if told_by_notes else first
        structure = Structure.of(told_by(source, self._framework.structure.told()))
        if comes:
            self._framework.fit(structure)
        for tensor in self._framework.unsealed(structure):
            dist.broadcast(tensor, src=source)
        if comes:
            loader.follow(state[first].loader)
            self._stand_in.shapes = {}
            self._stand_in.follow(state[first].shapes)
            self._monitor.events = state[first].events
            # Where it does not get there, the next one need not begin before.
            self.remember_epoch(loader.epoch_of_others)
        if self.script is not None:
            scripts = [one and _JobState(*one).script for one in everyone]
            self.script.follow(self._worker.completed, scripts)

    def _frozen_digest(self) -> int:
        """Digest what no step changes; buffers come back with the step, or with its first pass."""
        digest = xxhash.xxh3_64()
        for tensor in self._framework.unsealed(Structure((), (), ())):
            digest.update(digest_of(tensor).to_bytes(8, "little"))
        return digest.intdigest() >> 1

    # ---- what only the own agent keeps -----------------------------------------------------

    def expect(self, loader: ElasticLoader) -> None:
        """Go through the epochs that were complete when the lost worker was still there."""
        loader.expect(self._known_epoch)

    def remember_epoch(self, epoch: int) -> None:
        """A step was completed in this epoch of the data."""
        if epoch != self._known_epoch:
            self._known_epoch = epoch
            self._worker.remember(data_epoch=epoch)


class _NothingLoaded(dict[str, Any]):
    """The client state that DeepSpeed returns beside the path where there is no checkpoint."""

    @ends_in_a_sentence
    def __missing__(self, key: str) -> Any:
        raise ConfigurationError(
            f"the script takes {key!r} out of a checkpoint that was not there when the job began,"
            " and this worker came to that job later: take it where engine.load_checkpoint returns"
            " a path, not where a file exists; or set respawn to 0 and leave --reserve out"
        )


_RESULT = "what engine.load_checkpoint returns"


class Loads:
    """The results of the script's loads of checkpoints at the start of the job."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loads = list(worker.job_constants.get("loads", ()))

    def load(self, engine: Any, native: Callable[[], Any]) -> Any:
        """Return what ``native()`` does, or on a later worker what it returned at the start.

        Raises ConfigurationError for a result that is not plain: where the job itself starts
        workers again, else on a worker that joins, which is the first to need it.
        """
        if not self._worker.detached:
            loaded = native(), {name: getattr(engine, name) for name in COUNTERS}
            self._loads.append(base64.b64encode(self._told(loaded)).decode())
            self._worker.remember(loads=self._loads)
            return loaded[0]
        if not self._loads:
            # A checkpoint of this job: there was none when it began, and the others began without.
            return None, _NothingLoaded()
        loaded, refusal = decode(base64.b64decode(self._loads.pop(0)), _RESULT)
        if refusal is not None:
            raise ConfigurationError(refusal)
        result, values = loaded
        for name, value in values.items():
            setattr(engine, name, value)
        return result

    def _told(self, loaded: Any) -> bytes:
        try:
            return encode((loaded, None), _RESULT)
        except ConfigurationError as error:
            if self._worker.config.respawn or self._worker.reserve:
                raise
            return encode((None, str(error)), _RESULT)


def check_together(worker: Worker, mine: tuple[int, int], sums: tuple[float, float]) -> None:
    """Check that all workers have read the same epoch and iteration of the data, before an update.

    ``mine``: this worker's; ``sums``: those of all. Raises ConfigurationError on a worker that came
    later, whose script may count what it has not seen; ElasWaveError where that is not the cause.
    """
    width = dist.get_world_size()
    if sums == (width * mine[0], width * mine[1]):
        return
    epoch, iteration = mine
    where = f"this worker has read iteration {iteration} of epoch {epoch}, and others have not"
    if worker.member.incarnation:
        raise ConfigurationError(
            f"{where}: the script counts its batches itself, and this worker, which came later, "
            "has not seen them all; count by engine.global_steps, or set respawn to 0 and leave "
            "--reserve out"
        )
    # Where one that came later is the odd one out, it leaves now, which interrupts this.
    dist.barrier()
    raise ElasWaveError(f"{where}: their scripts iterate over the data in different ways")
