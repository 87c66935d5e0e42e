"""The start of a job in a script without a line of ours: by the calls that it makes anyway."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from elaswave_plugin.adapters.megatron.compat.cpu_patches import cpu_patches
from elaswave_plugin.adapters.megatron.compat.patches import elastic_patches
from elaswave_plugin.adapters.megatron.compat.versions import record
from elaswave_plugin.adapters.megatron.compat.whole_saves import WholeSaves
from elaswave_plugin.adapters.megatron.own_loop import OwnLoop
from elaswave_plugin.adapters.megatron.script_run import lose_little
from elaswave_plugin.adapters.megatron.world import name_what_is_missing
from elaswave_plugin.adapters.patching import PatchRecord, PatchSet
from elaswave_plugin.adapters.script_lines import bare_collective
from elaswave_plugin.adapters.unbound import Unbound
from elaswave_plugin.around import around, is_of_a_framework
from elaswave_plugin.command_line import add_arguments, from_namespace
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.loops.calls_before import CallsBefore
from elaswave_plugin.loops.evaluations_before import EvaluationsBefore
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.trainer.fatal import ends_in_a_sentence
from elaswave_plugin.values.set_within import set_within
from elaswave_plugin.words import FLAG, check_options

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
# By which a script asks for its part of the model; None: by others of these.
_PLACE: tuple[tuple[str, Callable[[OwnLoop], int] | None], ...] = (
    ("get_tensor_model_parallel_rank", lambda loop: loop.place[0]),
    ("get_pipeline_model_parallel_rank", lambda loop: loop.place[1]),
    ("get_tensor_model_parallel_world_size", lambda loop: loop.model_parallel[0]),
    ("get_pipeline_model_parallel_world_size", lambda loop: loop.model_parallel[1]),
    ("is_pipeline_first_stage", None),
    ("is_pipeline_last_stage", None),
)


def _is_before_a_load() -> bool:
    """Return whether Megatron-Core makes an optimizer's state, into which a checkpoint is read."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_init_optimizer_states_with_dummy_values":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_whole() -> bool:
    """Return whether a worker alone has all of a stage."""
    return int(parallel_state.get_tensor_model_parallel_world_size()) == 1


def _source() -> tuple[int, int]:
    """Return the stage and the replica of this worker, which reports are of."""
    replica = parallel_state.get_data_parallel_rank()
    return int(parallel_state.get_pipeline_model_parallel_rank()), int(replica)


class ReplicaNumber(int):
    """The number of a replica, by which a script reads; compared with 0, whether it writes."""

    writes = False

    def __eq__(self, other: object) -> bool:
        return self.writes if other == 0 else int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return not self.writes

    __hash__ = int.__hash__


class ScriptStart:
    """Joins the job where the script makes its world, and binds where it trains first."""

    @ends_in_a_sentence
    def __init__(self) -> None:
        """Join the job; raises ConfigurationError for settings that do not fit."""
        check_options(sys.argv[1:])
        parser = add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
        config = from_namespace(parser.parse_known_args([FLAG, *sys.argv[1:]])[0])
        assert config is not None
        self._config = config
        lose_little()
        self._saves = WholeSaves()
        elastic = elastic_patches(exact=config.consistency == "exact", saves=self._saves)
        on_cpu = [] if torch.cuda.is_available() else cpu_patches().records
        self._patches = PatchSet([*on_cpu, *elastic.records, *self._records()])
        self._patches.check()  # before the others are waited for
        self._worker = Worker(config=config, environ=os.environ)
        if self._worker.reserve:
            raise ConfigurationError(
                "--reserve is given, and the script has no line of ours, so that it reads and"
                " reports as a replica of the launch: leave it out, or use the lines of"
                " docs/megatron_core.md"
            )
        self._saves.comes_later = lambda: self._worker.detached
        name_what_is_missing(self._worker.groups)
        self._patches.apply()
        # Whether the script asks what is answered by more of such questions.
        self._is_asked = False
        self.loop: OwnLoop | None = None
        """The loop of the script; None before it trains."""
        self._evaluations = EvaluationsBefore(self._worker)
        self._before = CallsBefore(self._worker, is_own=lambda: bare_collective() is not None)
        self._unbound = Unbound(
            lambda optimizer: _is_before_a_load(),
            advice="have each step call what get_forward_backward_func() returns, asked for behind"
            " init_process_group, before optimizer.step()",
        )

    @property
    def is_behind(self) -> bool:
        """True while the script of a worker that came later is at what the others have behind."""
        return self._worker.detached if self.loop is None else self.loop.is_behind

    def world(self) -> dict[str, Any]:
        """The arguments of ``init_process_group``."""
        return self._worker.groups.install(self._worker.view.ranks)

    def _records(self) -> list[PatchRecord]:
        names = ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving")
        return [
            *(
                record(
                    f"{_SCHEDULES}:forward_backward_{name}",
                    around(self._schedule),
                    "each loop calls one of them in every step, by a name that is looked up then",
                )
                for name in names
            ),
            *(
                record(
                    f"megatron.core.parallel_state:get_data_parallel_{name}",
                    around(call),
                    "a script reads and counts as a replica of the launch: the global batch stays",
                )
                for name, call in (
                    ("world_size", self._width_of_launch),
                    ("rank", self._replica_of_launch),
                )
            ),
            *(
                record(
                    f"megatron.core.parallel_state:{name}",
                    around(partial(self._place_of_launch, answer)),
                    "a script is told of its own part, also where its worker has none, or another",
                )
                for name, answer in _PLACE
            ),
            record(
                "megatron.core.parallel_state:destroy_model_parallel",
                around(self._kept),
                "a script may meet the others behind it, where a loss takes all back into a step",
            ),
            *(
                record(
                    f"elaswave_plugin.communicator.groups.group_core:GroupCore.{name}",
                    around(partial(self._as_made, of_members=of_members)),
                    "so is a group that a script asks by itself that of its launch",
                )
                for name, of_members in (("size", len), ("rank", self._place_in))
            ),
        ]

    @ends_in_a_sentence
    def _schedule(self, native: Callable[..., Any], **kwargs: Any) -> Any:
        forward_only = kwargs.pop("forward_only", False)
        if self.loop is None and forward_only:
            evaluate = partial(native, forward_only=True, **kwargs)
            return evaluate() if _is_whole() else self._evaluations.of(_source(), evaluate)
        if self.loop is None:
            self._unbound.stop()
            self._before.end()
            self.loop = OwnLoop(
                self._config,
                worker=self._worker,
                patches=self._patches,
                saves=self._saves,
                call=kwargs,
                knows_all=self._evaluations.end(_source()),
            )
        return self.loop.call(native, forward_only=forward_only, **kwargs)

    def _kept(self, native: Callable[[], None]) -> None:
        if self.loop is None:
            native()

    def _place_in(self, members: Sequence[int]) -> int:
        slot = self._worker.slot
        return members.index(slot) if slot in members else -1

    def _as_made(
        self, native: Callable[..., int], group: Any, *, of_members: Callable[[Sequence[int]], int]
    ) -> int:
        if self.loop is None or is_of_a_framework():
            return native(group)
        self.loop.shares.ask_replicas()
        return of_members(self._worker.groups.made_of(group))

    def _width_of_launch(self, native: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        if self.loop is None or is_of_a_framework():
            return native(*args, **kwargs)
        self.loop.shares.ask_replicas()
        return self.loop.width

    def _place_of_launch(
        self,
        answer: Callable[[OwnLoop], int] | None,
        native: Callable[..., Any],
        *args: Any,
        **how: Any,
    ) -> Any:
        """Answer between the calls; inside of them a pass asks for what its worker has now."""
        is_asked = self._is_asked or not is_of_a_framework()
        if self.loop is None or self.loop.is_inside or not is_asked:
            return native(*args, **how)
        if answer is not None:
            return answer(self.loop)
        with set_within(self, "_is_asked", True):
            return native(*args, **how)

    def _replica_of_launch(self, native: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        loop = self.loop
        if is_of_a_framework():
            return native(*args, **kwargs)
        replica = native(*args, **kwargs) if loop is None else loop.replica
        writes = not self.is_behind and (replica == 0 if loop is None else loop.stands_for_first)
        if writes != (replica == 0):
            replica = ReplicaNumber(replica)
            replica.writes = writes
        return replica
