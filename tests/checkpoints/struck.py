"""A job whose workers are killed while they write checkpoints, and what is left of these."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.checkpoints.reader import differences, read_checkpoint
from tests.checkpoints.striker import MEGATRON, POINTS, TRACKER, Kind, Strike, Striker
from tests.faults.harness import JobSpec, Outcome, Zygote, started

# Of Megatron-LM's arguments, which it saves: who wrote, and where.
_OF_THE_WRITER = {
    f"/common.pt/args/{name}"
    for name in ("save", "rank", "local_rank", "world_size", "elaswave_dir", "elaswave_respawn")
}


def struck(
    spec: JobSpec,
    strikes: Sequence[Strike],
    saves: Path,
    *,
    zygote: Zygote,
    data: Path,
    directory: Path,
    kind: Kind = MEGATRON,
) -> Outcome:
    """Run a job and carry out the kills; writers of a save await the one that is to strike them."""
    began_s = time.monotonic()
    points = {strike.iteration: POINTS[strike.moment] for strike in strikes}
    held = replace(spec, sabotage=spec.sabotage + kind.held(points, directory)) if points else spec
    with started(held, zygote=zygote, data=data, directory=directory) as (launcher,):
        Striker(directory, saves, kind).strike_all(strikes, lambda: launcher.poll() is None)
        code = launcher.wait(120)
    return Outcome(
        spec=spec,
        directory=directory,
        returncode=code,
        output=(directory / "output").read_text(),
        seconds=time.monotonic() - began_s,
    )


def check_saves(saves: Path, reference: Path, last: int, without: Sequence[int] = ()) -> None:
    """Every checkpoint can be read, chunk by chunk, and is that of the undisturbed run."""
    names = [f"iter_{number:07d}" for number in range(1, last + 1) if number not in without]
    assert sorted(path.name for path in saves.iterdir()) == [*names, TRACKER]
    assert (saves / TRACKER).read_text() == str(last)
    for name in names:
        ours, theirs = read_checkpoint(saves / name), read_checkpoint(reference / name)
        assert len(theirs) > 20
        assert set(differences(ours, theirs)) <= _OF_THE_WRITER, name


def losses(run: Outcome) -> dict[int, str]:
    """The loss of each step, in hex."""
    return {step: trace[0] for step, trace in run.trace().items()}
