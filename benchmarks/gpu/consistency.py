"""Exact over fast mode: the median step of both, healthy and after a loss, in alternating jobs."""

from statistics import median

from benchmarks.gpu.device import Device
from benchmarks.gpu.jobs import Jobs, prepared
from benchmarks.gpu.notes import Notes
from elaswave_plugin.config import Kill
from elaswave_plugin.observer.run import RunFiles, counted_steps

STEPS, SMALL_STEPS = 40, 10
REPEATS, SMALL_REPEATS = 2, 1
LOSS_STEP, WARM_UP_STEPS = 3, 3
MODES = ("exact", "fast")


def measure(device: Device, notes: Notes) -> None:
    """Run jobs of both modes in turn; who is lost stays lost, so that steps after it are many."""
    steps, repeats = (SMALL_STEPS, SMALL_REPEATS) if device.is_stand_in else (STEPS, REPEATS)
    with prepared(device, "host", "megatron", steps=steps) as jobs:
        for state, kills in (
            ("healthy", []),
            ("after a loss", [Kill(slot=1, step=LOSS_STEP, phase="backward")]),
        ):
            times: dict[str, list[float]] = {mode: [] for mode in MODES}
            for repeat in range(repeats):
                for mode in MODES:
                    run = _one_job(jobs, f"{state}-{mode}-{repeat}", mode, kills)
                    times[mode] += _steps_s(run)
            _tell(notes, state, times, repeats * (steps - LOSS_STEP - WARM_UP_STEPS - 1))


def _one_job(jobs: Jobs, name: str, mode: str, kills: list[Kill]) -> RunFiles:
    folder = name.replace(" ", "-")
    return jobs.run(folder, kills=kills, settings={"consistency": mode, "respawn": 0})


def _steps_s(run: RunFiles) -> list[float]:
    """Seconds of every step after the loss and the first ones, those of the slowest worker."""
    return [
        max(float(record["step_s"]) for record in records)
        for step, records in counted_steps(run).items()
        if step > LOSS_STEP + WARM_UP_STEPS
    ]


def _tell(notes: Notes, state: str, times: dict[str, list[float]], wanted: int) -> None:
    """Say both medians and their ratio; `wanted`: steps that each mode has to have counted."""
    medians = {mode: median(values) for mode, values in times.items()}
    ratio = medians["exact"] / medians["fast"]
    notes.figure(state, {"median_step_s": medians, "exact_over_fast": ratio})
    notes.say(
        f"{state}: exact {1e3 * medians['exact']:.1f} ms, fast {1e3 * medians['fast']:.1f} ms a"
        f" step, ratio {ratio:.3f} ({len(times['exact'])} and {len(times['fast'])} steps)"
    )
    counted = all(len(values) == wanted for values in times.values())
    notes.check(f"{state}: {wanted} steps of each were counted", counted)
