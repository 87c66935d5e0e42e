"""An evaluation between steps, by all workers together: a loss in it makes them evaluate again."""

import csv
import json
import math
from pathlib import Path

import pytest

from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.faults.harness import Outcome, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

SAVING = str(SCRIPTS / "saving.py")
EVALUATING = str(SCRIPTS / "evaluating.py")
# The kill that is announced for an evaluation fires after its first collective.
MIDDLE = """
import torch.distributed as dist
from elaswave_plugin.recovery.phases import Phases
fire, reduce, armed = Phases.fire, dist.all_reduce, []
def keep(self, phase):
    if phase == "evaluation":
        armed.append(self)
    else:
        fire(self, phase)
def all_reduce(*args, **kwargs):
    reduce(*args, **kwargs)
    if armed:
        fire(armed.pop(), "evaluation")
Phases.fire, dist.all_reduce = keep, all_reduce
"""
# An evaluation that the script calls by itself announces nothing: fires between two of its layers.
UNANNOUNCED = """
from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob
check = EngineJob._check
def fire(self, module):
    self._engine.module.training or self._worker.phases.fire("evaluation")
    check(self, module)
EngineJob._check = fire
"""


def spec_of(folder: Path, stage: int, **more: str | tuple[str, ...]) -> EngineSpec:
    section = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    settings = json.dumps({"csv_monitor": section})
    return EngineSpec(script=EVALUATING, stage=stage, settings=settings, **more)  # type: ignore[arg-type]


def results(run: Outcome) -> list[list[tuple[int, float]]]:
    """Read what the calls returned, by worker."""
    files = sorted(run.directory.glob("evaluations-*.json"))
    return [[(step, mean) for step, mean in json.loads(file.read_text())] for file in files]


def monitored(folder: Path) -> list[tuple[int, float]]:
    with (folder / "job" / "Eval_loss.csv").open(newline="") as file:
        return [(int(step), float(mean)) for step, mean in [*csv.reader(file)][1:]]


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "sabotage"),
    sampled(
        [
            (1, "1@4:evaluation", ""),
            (1, "0@2:evaluation", MIDDLE),
            (2, "0@4:evaluation", MIDDLE),
            (3, "2@4:evaluation", MIDDLE),
            (3, "0@2:evaluation", ""),
            (3, "1@3:snapshot", ""),
        ]
    ),
)
def test_an_evaluation_is_made_again_with_the_same_result(
    run: Launch, tmp_path: Path, stage: int, kill: str, sabotage: str
) -> None:
    # With dropout a step that is redone draws anew, and an evaluation shows in which mode it was.
    dropout = ("--dropout=0.1",) if sabotage else ()
    reference = run(spec_of(tmp_path / "reference", stage, options=dropout))
    spec = spec_of(tmp_path / "run", stage, options=dropout, kills=(kill,), sabotage=sabotage)
    killed = run(spec)
    check_survived(reference)
    check_survived(killed)
    wanted, *others = results(reference)
    assert [step for step, _ in wanted] == [2, 4, 6] and others == [wanted] * 3
    assert monitored(tmp_path / "reference") == wanted
    found, *others = results(killed)
    assert others == [found] * 2
    assert [step for step, _ in found] == [2, 4, 6]
    assert monitored(tmp_path / "run") == found
    if not sabotage:
        assert max_relative_difference(killed, reference) <= 1e-6
        assert dict(found) == pytest.approx(dict(wanted), rel=1e-5)
        return
    # Everyone had sealed the step: the same weights, and a sum over three parts or over four.
    again = int(kill[2])
    assert dict(found)[again] == pytest.approx(dict(wanted)[again], rel=1e-6)
    ours, theirs = killed.trace(), reference.trace()
    assert [ours[step] for step in range(again)] == [theirs[step] for step in range(again)]


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="3:backward")
def test_a_loader_made_in_the_evaluation_has_the_shards_of_who_is_left(
    run: Launch, tmp_path: Path
) -> None:
    killed = run(spec_of(tmp_path / "run", 1, options=("--loader",), kills=("1@3:backward",)))
    check_survived(killed)
    sliced = run(spec_of(tmp_path / "sliced", 1, kills=("1@3:backward",)))
    found, *others = results(killed)
    assert others == [found] * 2 and [step for step, _ in found] == [2, 4, 6]
    assert dict(found) == pytest.approx(dict(results(sliced)[0]), rel=1e-6)
    assert "evaluates by itself" not in killed.output


@proves(Kind.KILL, Promise.NAMED, victim="2", moment="4:evaluation")
@pytest.mark.parametrize("stage", sampled([2, 3]))
def test_an_evaluation_by_the_script_itself_is_never_a_wrong_number(
    run: Launch, tmp_path: Path, stage: int
) -> None:
    """A worker with the whole model computes it alone; in ZeRO-3, where none can, it is NaN."""
    # Every layer gathers its own parameters when it begins.
    sizes = ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters")
    zero = {"stage": stage, **{f"stage3_{size}": 0 for size in sizes}}
    spec = EngineSpec(
        script=SAVING,
        stage=stage,
        options=(f"--save={tmp_path}",),
        kills=("2@4:evaluation",),
        sabotage=UNANNOUNCED,
        settings=json.dumps({"zero_optimization": zero}),
    )
    killed = run(spec)
    check_survived(killed)
    files = sorted(tmp_path.glob("evaluations-*.json"))
    values = [json.loads(file.read_text())["4"] for file in files]
    assert len(values) == 3
    wanted = "elaswave: the script evaluates by itself with 3 of 4 workers: "
    said = [line for line in killed.output.splitlines() if line.startswith(wanted)]
    assert len(said) == 1 and "elaswave_plugin.deepspeed.run(engine, evaluate)" in said[0]
    if stage == 3:
        assert all(math.isnan(value) for value in values)
    else:
        assert len(set(values)) == 1 and not math.isnan(values[0])
