"""Makes a trainer one of a rehearsal: its files are guarded, its saves led, its steps recorded.

`trainer/script_run.py` calls ``begin`` before the script runs. As in `benchmarks/alternate.py`,
methods of the product are replaced in this process: a job that is not rehearsed has none of this.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from elaswave_plugin.config import SAVE_PHASE
from elaswave_plugin.framework import Framework
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.rehearsal.files import FileGuard, switch_off_trackers
from elaswave_plugin.rehearsal.order import RunOrder
from elaswave_plugin.rehearsal.record import Recorder
from elaswave_plugin.rehearsal.saves import LedSaves
from elaswave_plugin.step_state.step_state import StepState

# Adapter of the framework that a job binds -> what records it.
_RECORDED = (
    ("elaswave_plugin.adapters.megatron", "elaswave_plugin.rehearsal.of_megatron"),
    ("elaswave_plugin.adapters.deepspeed", "elaswave_plugin.rehearsal.of_deepspeed"),
)


def begin(path: str) -> None:
    """The script of this process is about to run, in the rehearsal's run that ``path`` orders."""
    order = RunOrder.read(Path(path))
    switch_off_trackers(order.saves)
    FileGuard(order).install()
    _lead_saves(LedSaves(order.saves, free=order.folder))
    _record_when_bound(order)


def _lead_saves(saves: LedSaves) -> None:
    native = GuardedSteps.announced

    def announced(steps: GuardedSteps, work: Callable[[], Any], phase: str) -> Any:
        if phase != SAVE_PHASE:
            return native(steps, work, phase)
        with saves.led():
            return native(steps, work, phase)

    _replace(GuardedSteps, "announced", announced)


def _record_when_bound(order: RunOrder) -> None:
    """The adapter is imported, and its framework built, once it is bound."""
    bind = Worker.bind

    def bind_and_record(worker: Worker, framework: Framework, **kwargs: Any) -> None:
        name = type(framework).__module__
        ours = next(ours for adapter, ours in _RECORDED if name.startswith(f"{adapter}."))
        module = import_module(ours)
        if order.rotates:
            deal, spread = kwargs["deal"], module.may_spread(framework)
            kwargs["deal"] = lambda **over: deal(**over).rotated(spread=spread)
        bind(worker, framework, **kwargs)
        recorder = Recorder(worker, module.carried(worker, framework), order)
        module.watch(recorder)
        _record_steps(worker, recorder)

    _replace(Worker, "bind", bind_and_record)


def _record_steps(worker: Worker, recorder: Recorder) -> None:
    """The state before each attempt of a step, and after the last one; results between them."""
    begin_step, announced, close = StepState.begin, GuardedSteps.announced, Worker.close
    finish_work, recover = GuardedSteps.finish_work, GuardedSteps.recover

    def begin_and_record(state: StepState, step: int) -> None:
        begin_step(state, step)
        if state.repeats_bodies:
            recorder.repeats(step)
        recorder.state(step)

    def announced_again(steps: GuardedSteps, work: Callable[[], Any], phase: str) -> Any:
        recorder.attempt()
        result = announced(steps, work, phase)
        recorder.returned(phase, result)
        return result

    def finish_and_record(steps: GuardedSteps) -> None:
        number = steps.works_done
        finish_work(steps)
        recorder.worked(number)

    def recover_and_forget(steps: GuardedSteps) -> None:
        recorder.interrupted()
        recover(steps)

    def close_and_record(closing: Worker) -> None:
        recorder.state(worker.completed)
        close(closing)

    _replace(StepState, "begin", begin_and_record)
    _replace(GuardedSteps, "announced", announced_again)
    _replace(GuardedSteps, "finish_work", finish_and_record)
    _replace(GuardedSteps, "recover", recover_and_forget)
    _replace(Worker, "close", close_and_record)


def _replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    setattr(owner, name, ours)
