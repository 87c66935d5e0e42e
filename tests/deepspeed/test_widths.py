"""Numbers of a script that follow the number of workers: the undisturbed run's, or told."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elaswave_plugin.observer.observer import losses_of
from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.deepspeed.hf_runs import AUTO
from tests.faults.harness import Outcome, check_survived
from tests.proofs import Kind, Promise, proves

WIDTHS = EngineSpec(script=str(SCRIPTS / "widths.py"), nproc=3, global_batch=12, dump="never")
LINES = replace(WIDTHS, options=("--what=lines",))
# The worker of slot 2 dies in the recipe's call, once three steps are made.
DIES_IN_IT = """
import os, signal
import elaswave_plugin.deepspeed as ours
def dying(native):
    def call(engine, *args, **kwargs):
        worker = engine.elaswave._worker
        if engine.global_steps == 3 and worker.slot == 2:
            worker.events.emit("died_in_it", slot=2)
            os.kill(os.getpid(), signal.SIGKILL)
        return native(engine, *args, **kwargs)
    return call
for name in ("mean", "run"):
    if hasattr(ours, name):
        setattr(ours, name, dying(getattr(ours, name)))
"""


def marked(script: str) -> list[str]:
    """The lines that have to be told, as a sentence names them."""
    found = []
    for number, line in enumerate(Path(script).read_text().splitlines(), 1):
        if mark := re.search(r"# told: (\w+)", line):
            found.append(f"{Path(script).name}:{number} ({mark[1]})")
    return found


def told(run: Outcome) -> list[str]:
    """The sentences that name lines of the script."""
    return [line for line in run.output.splitlines() if "the numbers of " in line]


def found(run: Outcome) -> list[list[Any]]:
    """Read the notes of the workers, by rank."""
    return [json.loads(path.read_text()) for path in sorted(run.directory.glob("widths-*"))]


def check_told(run: Outcome) -> None:
    """One sentence names every line that is marked in the script, and no other one."""
    assert isinstance(run.spec, EngineSpec)
    (sentence,) = told(run)
    assert "the job has 2 workers now (3 at the launch) with " in sentence
    named = re.findall(r"[\w.]+:\d+ \(\w+\)", sentence)
    assert sorted(named) == sorted(marked(run.spec.script)), sentence


@proves(Kind.KILL, Promise.NAMED, victim="0", moment="3:backward")
@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_lines_that_follow_the_number_of_workers_are_told_once(
    run: Launch, reference: Launch, stage: int
) -> None:
    spec = replace(LINES, stage=stage, kills=("0@3:backward",))
    killed, whole = run(spec), reference(spec)
    check_survived(killed)
    check_told(killed)
    assert not told(whole)
    for one, undisturbed in zip(found(killed)[0], found(whole)[0], strict=True):
        assert undisturbed["samples"] == spec.global_batch
        if one != undisturbed:
            assert one["samples"] == one["by_engine"] == one["by_ranks"] == 8
            assert one["compiled"] == pytest.approx(one["once"], rel=1e-6)
            assert one["evaluated"] == pytest.approx(undisturbed["evaluated"] * 2 / 3, rel=0.05)
            assert one["once"] == pytest.approx(undisturbed["mean"] * 2 / 3, rel=0.05)
    assert found(killed)[0][:3] == found(whole)[0][:3] and found(killed)[0][3]["samples"] == 8


@proves(Kind.KILL, Promise.CLOSE, victim="2", moment="3:forward")
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_recipe_of_the_page_is_right_where_a_worker_dies_in_it(run: Launch, stage: int) -> None:
    spec = replace(WIDTHS, stage=stage, nproc=3, options=("--what=page",), sabotage=DIES_IN_IT)
    killed = run(spec)
    check_survived(killed)
    assert killed.events("died_in_it")
    losses = losses_of(killed.files)
    noted = found(killed)[0]
    assert [step - 1 for step, _ in noted] == [*losses] == list(range(spec.steps))
    assert [value for _, value in noted] == pytest.approx([*losses.values()], rel=1e-12)


@proves(Kind.KILL, Promise.NAMED, victim="1", moment="2:backward")
def test_the_lines_of_a_trainer_are_told_and_its_means_are_right(
    run: Launch, reference: Launch
) -> None:
    pytest.importorskip("transformers")
    spec = replace(
        WIDTHS,
        script=str(SCRIPTS / "hf_widths.py"),
        stage=2,
        settings=json.dumps(AUTO),
        options=("--per-batch", "--batch-size=2"),
        kills=("1@2:backward",),
    )
    killed, whole = run(spec), reference(spec)
    check_survived(killed)
    check_told(killed)
    assert not told(whole)
    one, undisturbed = found(killed)[0], found(whole)[0]
    assert one["once"] == undisturbed["once"] == undisturbed["each"] == 6 * 12
    assert one["each"] == one["by_state"] == one["by_trainer"] == 2 * 12 + 4 * 8
    # The step that is made again comes again.
    assert dict(means(one)) == pytest.approx(dict(means(undisturbed)), rel=1e-6)


def means(noted: dict[str, Any]) -> list[tuple[int, float]]:
    """The mean of each step, of its last two micro-batches."""
    values: dict[int, list[float]] = {}
    for step, value in noted["by_job"]:
        values.setdefault(step, []).append(value)
    return [(step, sum(both[-2:]) / 2) for step, both in values.items()]
