"""A Trainer's trackers, which go on with their run on whichever worker is the main process.

transformers calls every callback on every worker, and ``state.log_history`` is alike on all: a
worker that becomes the main process has each tracker's own set-up open the run again, asks it how
many lines it has, and logs the rest of the history with the next line.
"""

import copy
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from transformers.integrations.integration_utils import WandbCallback
from transformers.trainer_callback import TrainerCallback

from elaswave_plugin.adapters.deepspeed.hf_trainer.job import TrainerJob
from elaswave_plugin.adapters.deepspeed.hf_trainer.tracker_kinds import TrackerKind, kind_of
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.progress_page import phase
from elaswave_plugin.tracking.only_said import only_said
from elaswave_plugin.tracking.sinks import FLUSH_INTERVAL_S
from elaswave_plugin.values.plain import gathered

_INTEGRATIONS = "transformers.integrations"


class Trackers:
    """The callbacks of one worker's Trainer that report to the outside."""

    def __init__(self, job: TrainerJob) -> None:
        self._job = job
        self._trainer: Any = None
        # The number of lines in the history before this launch.
        self._first = 0
        # What names each run, by the name of its callback, with the lines that it had before.
        self._runs: dict[str, dict[str, Any]] = {}
        # The line of the history that each tracker is to be given next, once they went on here.
        self._next: dict[str, int] = {}
        # What the others need to go on, where the main process moved away from here.
        self._told: dict[str, Any] | None = None

    @property
    def _callbacks(self) -> list[Any]:
        return self._trainer.callback_handler.callbacks

    # ---- the launch -----------------------------------------------------------------------------

    def begin(self, native: Callable[..., Any], called: Any, *args: Any, **given: Any) -> Any:
        """``CallbackHandler.on_train_begin``, in which trackers open their runs.

        A worker that comes later is no main process before it has entered.
        """
        state = args[1]
        if self._trainer is None:
            self._check(called.callbacks)
            self._first = len(state.log_history)
            if self._job.has_to_enter:
                state.is_world_process_zero = state.is_local_process_zero = False
            os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", str(FLUSH_INTERVAL_S))
        control = native(called, *args, **given)
        if self._trainer is None and state.is_world_process_zero:
            for callback, kind in _trackers(called.callbacks):
                if run := kind.run_of(callback):
                    before = kind.lines(callback, run) or 0
                    self._runs[_name(callback)] = {**run, "before": before}
        return control

    def _check(self, callbacks: Sequence[Any]) -> None:
        if self._job.own_wandb != "off" and any(
            isinstance(one, WandbCallback) for one in callbacks
        ):
            raise ConfigurationError(
                f"the Trainer reports to wandb, which is {self._job.own_wandb!r} in the section"
                ' elaswave as well, and a process has one W&B run; set wandb to "off" in the'
                " section, or leave it out of report_to in the TrainingArguments"
            )

    def take(self, trainer: Any) -> None:
        """Have all workers know the runs that the first main process has opened."""
        self._trainer = trainer
        if self._job.has_to_enter:
            told = self._job.constants["trackers"]
        else:
            told = gathered({"first": self._first, "runs": self._runs}, "runs of trackers")[0]
            self._job.remember(trackers=told)
        self._first, self._runs = told["first"], told["runs"]

    # ---- after a change of the workers ----------------------------------------------------------

    def follow(self) -> None:
        """Have the main process be where rank 0 is now (collective over WORLD)."""
        trainer = self._trainer
        state, was_main = trainer.state, trainer.state.is_world_process_zero
        is_main = trainer.is_world_process_zero()
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = is_main
        if was_main and not is_main:
            self._give_up()
        told = [one for one in gathered(self._told, "the place of trackers") if one is not None]
        self._told = None
        if is_main and not was_main:
            with phase("trackers"):
                self._take_over(told[0] if told else None)

    def _give_up(self) -> None:
        """Close what is open here: it is opened where the main process is now."""
        lines = len(self._trainer.state.log_history)
        self._told = {}
        for callback, kind in _trackers(self._callbacks):
            if run := only_said(kind.run_of, callback, what=_name(callback)):
                only_said(kind.close, callback, what=_name(callback))
                self._told[_name(callback)] = self._next.pop(_name(callback), lines), run

    def _take_over(self, told: dict[str, Any] | None) -> None:
        """Be the main process; ``told`` by the one before, where that lives."""
        for callback in [*self._callbacks]:
            kind, module = kind_of(callback), type(callback).__module__
            if kind is not None:
                self._guarded(callback, self._go_on, kind, told or {}, callback)
            elif module.startswith(_INTEGRATIONS):
                self._guarded(callback, _cannot_go_on)
            elif module.startswith("transformers."):
                self._set_up(callback)
            else:
                _forgive(callback)

    def _go_on(self, kind: TrackerKind, told: dict[str, Any], callback: Any) -> None:
        """Open the run of a tracker here, behind the lines that it has."""
        name, history = _name(callback), len(self._trainer.state.log_history)
        # None of one that was off where the Trainer began.
        run = self._runs.get(name)
        handed, here = told.get(name, (None, {}))
        changes = {} if run is None else kind.take_up(callback, run | here)
        # As transformers' own callbacks have it; others look for their run.
        callback._initialized = False
        self._set_up(callback, **changes)
        if run is None:
            handed = history
        elif handed is None:
            lines = kind.lines(callback, run)
            handed = history if lines is None else self._first + lines - run["before"]
        self._next[name] = handed
        if run is not None:
            kind.opened(callback, run, handed - self._first)
        for event in _events():
            native = getattr(type(callback), event).__get__(callback)
            call = partial(self._log, name, native) if event == "on_log" else native
            setattr(callback, event, partial(self._guarded, callback, call))

    def _set_up(self, callback: Any, **changes: Any) -> None:
        """Call ``on_train_begin`` of a callback, with some arguments changed."""
        trainer = self._trainer
        args = copy.copy(trainer.args)
        vars(args).update(changes)
        type(callback).on_train_begin(
            callback,
            args,
            trainer.state,
            trainer.control,
            model=trainer.model,
            processing_class=trainer.processing_class,
        )

    def _log(
        self,
        name: str,
        native: Callable[..., Any],
        args: Any,
        state: Any,
        control: Any,
        **given: Any,
    ) -> None:
        """``on_log``: also of the lines that the main process before this had not written."""
        history, first = state.log_history, self._next.get(name, 0)
        self._next[name] = len(history)
        if not state.is_world_process_zero:
            return
        for line in history[first:]:
            then = copy.copy(state)
            then.global_step = line["step"]
            logs = {key: value for key, value in line.items() if key != "step"}
            native(args, then, control, **(given | {"logs": logs}))

    def _guarded(self, callback: Any, call: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """Call a tracker, which says one sentence where it fails, and is called no more."""
        what = f"{_name(callback)} of the Trainer is silent from here on"
        return only_said(call, *args, what=what, otherwise=partial(self._drop, callback), **given)

    def _drop(self, callback: Any) -> None:
        called = self._trainer.callback_handler
        called.callbacks = [one for one in called.callbacks if one is not callback]

    # ---- the end --------------------------------------------------------------------------------

    def end(self) -> None:
        """Name the runs, where they are, and how they are uploaded."""
        if self._trainer is None or not self._job.speaks:
            return
        for callback, kind in _trackers(self._callbacks):
            run = self._runs.get(_name(callback))
            for text in () if run is None else kind.whereabouts(run):
                say(text)


def _events() -> list[str]:
    return [name for name in dir(TrainerCallback) if name.startswith("on_")]


def _forgive(callback: Any) -> None:
    """Have a callback of the script's own say where it lacks what it opened in ``on_train_begin``.

    It opened that on the first main process alone. The event that fails is called no more.
    """
    for event in _events():
        what = f"{event} of {_name(callback)} is silent from here on: it is the script's own"
        drop = partial(setattr, callback, event, lambda *args, **given: None)
        call = partial(only_said, getattr(callback, event), what=what, otherwise=drop)
        setattr(callback, event, partial(call, ends=_is_raised_on_purpose))


def _is_raised_on_purpose(error: Exception) -> bool:
    """Return whether it is none of those that a missing object makes, or a tracker's library."""
    is_of_a_library = type(error).__module__.partition(".")[0] not in ("builtins", "__main__")
    return not (is_of_a_library or isinstance(error, AttributeError | NameError | TypeError))


def _cannot_go_on() -> NoReturn:
    raise NotImplementedError("elaswave_plugin does not know how its run is opened again")


def _trackers(callbacks: Sequence[Any]) -> list[tuple[Any, TrackerKind]]:
    return [(one, kind) for one in callbacks if (kind := kind_of(one)) is not None]


def _name(callback: Any) -> str:
    return type(callback).__name__
