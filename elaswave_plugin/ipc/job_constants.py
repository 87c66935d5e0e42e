"""The constants of a job, fixed at its start, as agents keep them for the workers to come.

A worker that builds alone cannot ask the others. The trainer tells the constants piece by piece,
and they are passed on as JSON.
"""

from typing import Any, TypedDict


class JobConstants(TypedDict, total=False):
    """The constants, alike on all workers, so that a newcomer gets those of any of them.

    ``started_s``: when the job began, by the wall clock; ``run_id``: its name in every tracker;
    ``launch_id``: of no other launch; ``given``: version and settings;
    ``devices``: slot and device of each worker of the launch; ``seed``: of the random draws;
    ``stages``: the fields of each pipeline stage; ``loads``: what the script's loads of checkpoints
    gave, as values/plain.py writes it; ``data_epoch``: of the last completed step; ``begins``: the
    first step, and the global batch that it reads; ``inexact``: the first step, run twice, gave
    other bits, and the job goes on in fast mode; ``sampler``: seed and generator of HF Accelerate's
    training loader; ``stream``: where the workers lately were in an iterable one, as `Told` of
    adapters/deepspeed/accelerate/stream.py has it; ``trackers``: the runs of a Trainer's trackers,
    as adapters/deepspeed/hf_trainer/trackers.py names them, or that of a script's own loop;
    ``loaded``: the checkpoints that it had loaded when its loop began;
    ``called``: what the script's own collectives gave before it trained, as loops/calls_before.py
    writes it; ``evaluated``: what its evaluations did then, as loops/evaluations_before.py has it.
    """

    started_s: float
    run_id: str
    launch_id: str
    given: dict[str, Any]
    devices: list[tuple[int, str]]
    seed: int
    stages: list[list[Any]]
    loads: list[str]
    data_epoch: int
    begins: list[int]
    inexact: bool
    sampler: str
    stream: tuple[int, int, int, str]
    trackers: dict[str, Any]
    loaded: list[str]
    called: str
    evaluated: str
