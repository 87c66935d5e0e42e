"""Jobs that lose a worker by a kill and by a hang, and get it back: equal to their reference."""

from collections.abc import Callable, Sequence

from benchmarks.gpu.device import Device
from benchmarks.gpu.jobs import Jobs, equals, prepared
from benchmarks.gpu.notes import Notes
from elaswave_plugin.config import Kill
from elaswave_plugin.demo.jobs import JobFailed
from elaswave_plugin.observer.run import RunFiles

STEPS, LOSS_STEP, RETURN_STEP = 12, 4, 8
VICTIM = 1


def survive(
    device: Device, notes: Notes, gpu_engine: str, framework: str, stages: Sequence[int | None]
) -> None:
    """Run the faults on each ZeRO stage of DeepSpeed, or once ([None]) on Megatron-Core.

    A stand-in runs the last stage only: a processor's cores take minutes for each.
    """
    for stage in stages[-1:] if device.is_stand_in else stages:
        title = framework if stage is None else f"ZeRO {stage}"
        with prepared(device, gpu_engine, framework, steps=STEPS, zero=stage) as jobs:
            _all_faults(jobs, notes, title)


def _all_faults(jobs: Jobs, notes: Notes, title: str) -> None:
    leaves, returns = f"{VICTIM}@{LOSS_STEP}", f"+{VICTIM}@{RETURN_STEP}"
    # A DeepSpeed script's sums change their order with the workers: what is lost has to equal what
    # leaves as planned.
    gone = _reference(jobs, notes, f"{title}-reference", () if jobs.is_exact else (leaves,))
    for how in ("kill", "loop"):
        kill = Kill(slot=VICTIM, step=LOSS_STEP, phase="backward", how=how)
        _one_fault(jobs, notes, f"{title}: {'a kill' if how == 'kill' else 'a hang'}", kill, gone)
    back = gone
    if not jobs.is_exact:
        back = _reference(jobs, notes, f"{title}-returns", (leaves, returns))
    kill = Kill(slot=VICTIM, step=LOSS_STEP, phase="backward")
    _one_fault(jobs, notes, f"{title}: a kill and a return", kill, back, (returns,))


def _reference(jobs: Jobs, notes: Notes, name: str, changes: Sequence[str]) -> RunFiles | None:
    return _tried(notes, name, lambda: jobs.run(_folder(name), changes=changes))


def _one_fault(
    jobs: Jobs,
    notes: Notes,
    title: str,
    kill: Kill,
    reference: RunFiles | None,
    changes: Sequence[str] = (),
) -> None:
    """Run with one fault and check that it fired, what followed, and what it has to equal."""
    run = _tried(notes, title, lambda: jobs.run(_folder(title), kills=[kill], changes=changes))
    if run is None or reference is None:
        return
    summary = jobs.summary(run, reference, [kill])
    notes.check(f"{title}: it happened", summary["kills"][0]["fired"])
    wanted = "undisturbed run" if jobs.is_exact else "planned departure"
    notes.check(f"{title}: the bits of the {wanted}", equals(summary))
    if changes:
        notes.check(f"{title}: it came back", len(summary["joins"]) == 1)
    for recovery in summary["recoveries"]:
        notes.say(f"{title}: the next step was complete after {recovery['mttr_s']:.3f} s")
        notes.figure(title, {key: recovery[key] for key in ("mttr_s", "phases_s")})


def _tried(notes: Notes, title: str, run: Callable[[], RunFiles]) -> RunFiles | None:
    """The files of a run; None, and a failed check, where it has failed: the others go on."""
    try:
        return run()
    except JobFailed as error:
        notes.check(f"{title}: {error}", False)
        return None


def _folder(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title)
