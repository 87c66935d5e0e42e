"""A job whose workers are killed while they write checkpoints, and what is left of these."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.reader import differences, read_checkpoint
from tests.checkpoints.striker import MEGATRON, POINTS, TRACKER, Kind, Striker
from tests.convoys import Convoy
from tests.faults.harness import JobSpec, Outcome, Trace, Zygote, started

Run = Callable[[Any], Outcome]
_FOLDER = MEGATRON.folder
# Of Megatron-LM's arguments, which it saves: who wrote, and where.
_OF_THE_WRITER = {
    f"/common.pt/args/{name}"
    for name in ("save", "rank", "local_rank", "world_size", "elaswave_dir", "elaswave_respawn")
}


def saves_of(run: Outcome) -> Path:
    """The folder that a struck job saves to; its options call it SAVED."""
    return run.directory / "saves"


def struck(
    spec: JobSpec, *, zygote: Zygote, data: Path, directory: Path, kind: Kind = MEGATRON
) -> Outcome:
    """Run a job and carry out its strikes; writers of a save await the one that strikes them."""
    began_s, saves = time.monotonic(), directory / "saves"
    saves.mkdir(parents=True)
    points = {strike.step: POINTS[strike.phase] for strike in spec.strikes}
    spec = replace(spec, options=tuple(one.replace("SAVED", str(saves)) for one in spec.options))
    held = replace(spec, sabotage=spec.sabotage + kind.held(points, directory)) if points else spec
    with started(held, zygote=zygote, data=data, directory=directory) as (launcher,):
        Striker(directory, saves, kind).strike_all(spec.strikes, lambda: launcher.poll() is None)
        code = launcher.wait(120)
    return Outcome(
        spec=spec,
        directory=directory,
        returncode=code,
        output=(directory / "output").read_text(),
        seconds=time.monotonic() - began_s,
    )


def saving(
    launch: Run,
    zygote: Zygote,
    data: Path,
    folders: pytest.TempPathFactory,
    script: Path | None = None,
) -> Run:
    """Launches as `launch` does, but for jobs that save to SAVED: they are struck while they do."""

    def launched(spec: JobSpec) -> Outcome:
        if not any("SAVED" in option for option in spec.options):
            return launch(spec)
        spec = spec if script is None else replace(spec, script=str(script))
        return struck(spec, zygote=zygote, data=data, directory=folders.mktemp("struck"))

    return launched


def check_struck(convoy: Convoy, reference: Outcome) -> None:
    """The own strike of a case changed no loss and no checkpoint of the undisturbed run."""
    run = convoy.run
    convoy.check(
        counted(reference, dict.fromkeys(saved_in(run), "")),
        lambda: check_all(run, reference),
        ours=counted(run, {step: _another(run, reference, step) for step in saved_in(run)}),
        struck=struck_in(run),
    )


def saved_in(run: Outcome) -> range:
    """The numbers of the checkpoints of a run, one behind each step."""
    return range(1, run.spec.steps + 1)


def struck_in(run: Outcome) -> dict[str, int]:
    """By strike, the save from which on all may differ."""
    return {str(strike): strike.step for strike in run.spec.strikes if strike.has_struck}


def counted(run: Outcome, saved: Mapping[int, str]) -> Trace:
    """Loss and checkpoint behind each step, by the number of the checkpoint."""
    return {step: (losses(run).get(step - 1, ""), "", said) for step, said in saved.items()}


def _another(run: Outcome, reference: Outcome, number: int) -> str:
    """Say what is wrong with a checkpoint; empty if nothing is."""
    name = _FOLDER.format(number)
    try:
        ours = read_checkpoint(saves_of(run) / name)
    except Exception as error:  # of whatever kind that which cannot be read has
        return f"{name}: {error!r}"
    found = {*differences(ours, read_checkpoint(saves_of(reference) / name))} - _OF_THE_WRITER
    return f"{name}: {sorted(found)}" if found else ""


def check_all(run: Outcome, reference: Outcome) -> None:
    """All strikes struck, all is saved, and losses and checkpoints are those of the reference."""
    assert run.returncode == 0, run.output[-4000:]
    assert all(strike.has_struck for strike in run.spec.strikes), run.spec.strikes
    check_saves(saves_of(run), saves_of(reference), run.spec.steps)
    assert losses(run) == losses(reference)


def check_saves(saves: Path, reference: Path, last: int, without: Sequence[int] = ()) -> None:
    """Every checkpoint can be read, chunk by chunk, and is that of the undisturbed run."""
    names = [_FOLDER.format(number) for number in range(1, last + 1) if number not in without]
    assert sorted(path.name for path in saves.iterdir()) == [*names, TRACKER]
    assert (saves / TRACKER).read_text() == str(last)
    for name in names:
        ours, theirs = read_checkpoint(saves / name), read_checkpoint(reference / name)
        assert len(theirs) > 20
        assert set(differences(ours, theirs)) <= _OF_THE_WRITER, name


def losses(run: Outcome) -> dict[int, str]:
    """The loss of each step, in hex."""
    return {step: trace[0] for step, trace in run.trace().items()}
