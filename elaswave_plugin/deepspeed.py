"""DeepSpeed: what a training script may call; a script with the section needs none of it.

engine, optimizer, loader, scheduler = elaswave_plugin.deepspeed.initialize(model=..., config=...)
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["initialize", "install", "loader", "mean", "run"]

_MARK = "__elaswave__"
_JOBS = "__elaswave_jobs__"
_BESIDE = "__elaswave_beside__"
# Set for the workers of a job (ipc/environment.py, AGENT).
_SUPERVISED = "ELASWAVE_AGENT"
_ADAPTER = "elaswave_plugin.adapters.deepspeed"


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """End the process in one sentence where a call gives a name that ``function`` has not."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        work = function
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            work = import_module("elaswave_plugin.trainer.fatal").ends_in_a_sentence(function)
        return work(*args, **kwargs)

    return called


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize`` with the same arguments; elastic where the configuration says so.

    Source: deepspeed/__init__.py, ``initialize``. Bad input ends the process with one sentence and
    exit code 2.
    """
    return _elastic(import_module("deepspeed").initialize)(*args, **kwargs)


def install() -> None:
    """Let ``deepspeed.initialize`` itself obey the section "elaswave", for scripts that call it."""
    names = import_module("deepspeed").__dict__
    names["initialize"] = _elastic(names["initialize"])
    # HF Accelerate takes it from the package that defines it.
    for place in (names, names["comm"].__dict__):
        place["init_distributed"] = _without_compiler(place["init_distributed"])


def loader(engine: Any, data: Any, **options: Any) -> Any:
    """A training loader whose batches can be served again after a loss.

    ``data`` is a map-style dataset, or a torch DataLoader with one of torch's plain samplers, which
    says itself how it shuffles; options: ``collate_fn``, ``shuffle``, ``seed``, ``drop_last`` as
    torch's DistributedSampler and DataLoader have them. Without the section it is DeepSpeed's own
    loader, which takes ``drop_last`` from the configuration. Bad input ends the process with one
    sentence and exit code 2.
    """
    return import_module(f"{_ADAPTER}.attach").loader_of(engine, data, **options)


@_named
def mean(engine: Any, value: Any) -> Any:
    """The mean over all samples of the iteration, a float64 tensor of the shape of ``value``.

    ``value``: a number or tensor, the mean over this worker's samples. Each worker calls it between
    ``engine(batch)`` and ``engine.step()``, so that a loss has it made again with the step; in a
    batch that the loss made void it returns ``value``. Without the section all weigh the same. A
    call elsewhere ends the process with one sentence and exit code 2.
    """
    return import_module(f"{_ADAPTER}.attach").mean_of(engine, value)


@_named
def run(engine: Any, work: Callable[[], Any], *, phase: str = "evaluation") -> Any:
    """Call ``work()`` on every worker between two steps; a loss makes all call it again.

    Make its loader in it: torch's DistributedSampler and ``engine.deepspeed_io`` keep the shards
    that there were when they were made, and what a lost worker's shard held is then not evaluated.
    Returns its result; None where the loss rolled a step back, which the loop then redoes first.
    Without the section it is just called.
    """
    return import_module(f"{_ADAPTER}.attach").run_in(engine, work, phase=phase)


def _elastic(native: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(native, _MARK):
        return native

    @functools.wraps(native)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        reading = import_module(f"{_ADAPTER}.configuration")
        arguments = reading.arguments_of(native, args, kwargs)
        config = reading.configuration_of(arguments)
        reading.check_section_name(config)
        names = import_module("deepspeed").__dict__
        names[_MARK] = missing = reading.missing_in(config)
        # Of each engine of the process: its job, None where it has joined none.
        jobs = names.setdefault(_JOBS, [])
        # The models that were whole on each worker in place of being cut, as ZeRO-3 has it.
        beside = names.setdefault(_BESIDE, [])
        if reading.SECTION in config and not any(jobs) and reading.only_answers(config, arguments):
            attach = import_module(f"{_ADAPTER}.attach")
            return attach.initialize_beside(native, config, arguments, beside)
        if jobs and (any(jobs) or missing is None):
            import_module(f"{_ADAPTER}.attach").refuse_second(jobs)
        if reading.SECTION in config:
            attach = import_module(f"{_ADAPTER}.attach")
            made = attach.initialize(native, config, arguments, beside)
        else:
            made = native(*args, **kwargs)
        # An engine has its job in an attribute of the section's name.
        jobs.append(vars(made[0]).get(reading.SECTION))
        return made

    initialize.__dict__[_MARK] = True
    return initialize


def _without_compiler(native: Callable[..., Any]) -> Callable[..., Any]:
    """Scripts call this before the configuration is known: DeepSpeed compiles in it on a CPU."""
    if hasattr(native, _MARK):
        return native

    @functools.wraps(native)
    def init_distributed(*args: Any, **kwargs: Any) -> Any:
        if _SUPERVISED not in os.environ:
            return native(*args, **kwargs)
        import_module(f"{_ADAPTER}.compat.patches").launch_patches().apply()
        import_module(f"{_ADAPTER}.engine.newcomer").meet_nobody()
        made = native(*args, **kwargs)
        if "accelerate" in sys.modules:
            import_module(f"{_ADAPTER}.accelerate.cpu").count_processes()
        return made

    init_distributed.__dict__[_MARK] = True
    return init_distributed
