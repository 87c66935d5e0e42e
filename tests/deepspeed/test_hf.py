"""HF Accelerate: a stock script, whose loaders, boundaries and schedulers are Accelerate's."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.agent.jobs import LAUNCH
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.test_widths import marked, told
from tests.faults.foreign_launchers import run_under
from tests.faults.harness import ROOT, Outcome, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

EXAMPLE = str(ROOT / "examples" / "train_accelerate.py")
EVALUATING = str(SCRIPTS / "hf_evaluating.py")
OWN_OPTIMIZER = {"optimizer": None, "scheduler": None}
COLD = (sys.executable, "-W", "ignore", "-c", LAUNCH)
SIZES = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}


def spec_of(
    *kills: str, stage: int = 1, options: tuple[str, ...] = (), **changes: Any
) -> EngineSpec:
    """The example, whose optimizer and scheduler are the script's own."""
    settings = json.dumps({**SIZES, **OWN_OPTIMIZER, **changes.pop("settings", {})})
    return EngineSpec(
        script=EXAMPLE, stage=stage, kills=kills, options=options, settings=settings, **changes
    )


def printed(output: str) -> list[tuple[int, float, str]]:
    """Step, loss and learning rate of every line that the main process of the time printed."""
    lines = [line.split("|") for line in output.splitlines() if line.startswith("step")]
    return [(int(step.split()[1]), float(loss.split()[1]), lr) for step, loss, lr in lines]


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill"),
    sampled(
        [
            (0, "3@2:backward"),
            (1, "0@3:backward"),
            (1, "2@1:optimizer"),
            (2, "1@3:forward"),
            (2, "0@2:reduce"),
            # The script has seen that the step is complete, and it is rolled back.
            (1, "1@3:snapshot"),
            (2, "0@3:snapshot"),
            (3, "3@3:data"),
            (3, "0@3:forward"),
            (3, "2@4:gather"),
        ]
    ),
)
def test_a_kill_is_absorbed_and_the_script_counts_each_step_once(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str
) -> None:
    spec = spec_of(kill, stage=stage)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    ours, wanted = printed(killed.output), printed(reference(spec).output)
    step = int(kill.split("@")[1][0])
    # Whoever is rank 0 prints, so that a step may be missing where slot 0 died within it.
    assert [one[0] for one in ours] in (
        list(range(spec.steps)),
        [one for one in range(spec.steps) if one != step],
    )
    rates = {one[0]: one[2] for one in wanted}
    assert all(rates[one[0]] == one[2] for one in ours if one[0] != step)


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="2:backward")
@pytest.mark.parametrize(
    "script", sampled([EXAMPLE, EVALUATING]), ids=["example", "no deepspeed first"]
)
def test_a_kill_is_survived_in_interpreters_that_import_all_anew(
    tmp_path: Path, reference: Launch, script: str
) -> None:
    """Accelerate and Transformers look DeepSpeed up before anybody imports it."""
    spec = spec_of("1@2:backward", nproc=2, accumulation=1, global_batch=2)
    if script == EVALUATING:
        spec = EngineSpec(
            script=script, nproc=2, accumulation=1, global_batch=2, kills=("1@2:backward",)
        )
    command = (*COLD, "--nproc-per-node=2", f"--dir={tmp_path / 'run'}")
    killed = run_under(command, spec, data=tmp_path, directory=tmp_path / "run")
    check_survived(killed)
    assert killed.output.count("worker 1 (node 0) exited: killed by SIGKILL") == 1
    assert max_relative_difference(killed, reference(spec)) <= 1e-6


@proves(Kind.KILLS, Promise.PLANNED, victim="0 3", moment="1:backward 3:forward")
@pytest.mark.slow
def test_two_losses_in_one_run(run: Launch, twin: Twin, reference: Launch) -> None:
    spec = spec_of("0@1:backward", "3@3:forward", stage=2)
    check_recovered(killed := run(spec), twin=twin(killed), reference=reference(spec))


def plain(spec: EngineSpec, folder: Path) -> str:
    """Return what the same script prints under torchrun, on gloo, with the section not enabled."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "4", str(SCRIPTS / "no_compiler.py"), spec.script),
        *spec.arguments(folder, folder),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "examples")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# With five iterations an epoch and two a step, Accelerate ends the last step of each epoch early.
@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.parametrize(
    "options", sampled([((),), (("--limit=20",),)]), ids=["whole", "early-boundaries"]
)
@pytest.mark.slow
def test_without_a_loss_it_is_what_accelerate_does_alone(
    run: Launch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    spec = spec_of(options=options, stage=2)
    elastic = run(spec)
    assert elastic.returncode == 0, elastic.output[-3000:]
    off = spec_of(options=options, stage=2, settings={"elaswave": {"enabled": False}})
    ours, wanted = printed(elastic.output), printed(plain(off, tmp_path))
    assert [(step, rate) for step, _, rate in ours] == [(step, rate) for step, _, rate in wanted]
    assert [loss for _, loss, _ in ours] == pytest.approx([one[1] for one in wanted], rel=1e-6)


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="2:backward")
@pytest.mark.slow
def test_boundaries_that_accelerate_sets_early_survive_a_kill(
    run: Launch, twin: Twin, reference: Launch
) -> None:
    """The third step of each epoch has one iteration; its only one is interrupted."""
    spec = spec_of("1@2:backward", options=("--limit=20",))
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-3000:]
    assert killed.trace() == twin(killed).trace()
    assert max_relative_difference(killed, reference(spec)) <= 1e-6
    counts = {(line["step"], line["k"]) for line in killed.files.ledger if line["epoch"] > 1}
    assert (2, 0) in counts and (2, 1) not in counts and (3, 1) in counts


def evaluations(run: Outcome) -> list[list[tuple[int, int, float]]]:
    return [json.loads(path.read_text()) for path in run.directory.glob("evaluations-*")]


@proves(Kind.KILL, Promise.PLANNED, victim="0", moment="2:backward")
@pytest.mark.parametrize("stage", sampled([1, 3]))
def test_who_is_left_evaluates_everything(run: Launch, reference: Launch, stage: int) -> None:
    spec = EngineSpec(
        script=EVALUATING,
        stage=stage,
        accumulation=1,
        global_batch=4,
        kills=("0@2:backward",),
    )
    killed, detached = run(spec), reference(spec)
    check = {step: (count, loss) for step, count, loss in evaluations(detached)[0]}
    assert all(count == 21 for count, _ in check.values()) and len(check) == spec.steps
    assert max_relative_difference(killed, detached) <= 1e-6
    assert killed.returncode == 0 and len(evaluations(killed)) == 3
    assert "evaluates by itself" not in killed.output, "its loader was cut anew"
    named = [one for line in told(killed) for one in re.findall(r"\S+ \(__len__\)", line)]
    assert named == marked(EVALUATING) and not told(detached)
    for seen in evaluations(killed):
        # The body of the interrupted step ran to its end, and evaluated the step before again.
        assert len(seen) == spec.steps + 1
        for step, count, loss in seen[:2] + seen[3:]:
            assert (count, loss) == (21, pytest.approx(check[step][1], rel=1e-5))


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--split-batches",), "split_batches is True in Accelerate"),
        (("--dispatch-batches",), "dispatch_batches is True in Accelerate"),
        (("--sampler=subset",), "the training loader draws from a SubsetRandomSampler"),
    ],
)
def test_loaders_that_nobody_could_read_again_are_refused(
    run: Launch, options: tuple[str, ...], words: str
) -> None:
    refused = run(EngineSpec(script=EVALUATING, accumulation=1, global_batch=4, options=options))
    assert refused.returncode == 2
    assert refused.output.count(words) == 1 and "Traceback" not in refused.output
    assert not refused.orphans


# The process of slot 2 ends in the middle of its second evaluation.
IN_EVALUATION = """
from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob
check = EngineJob._check
def fire(self, module):
    self._engine.module.training or self._worker.phases.fire("evaluation")
    check(self, module)
EngineJob._check = fire
"""


@proves(Kind.KILL, Promise.NAMED, victim="2", moment="2:evaluation")
def test_an_evaluation_that_a_loss_meets_is_said_to_miss_samples(run: Launch) -> None:
    spec = EngineSpec(script=EVALUATING, stage=3, accumulation=1, global_batch=4)
    killed = run(replace(spec, kills=("2@2:evaluation",), sabotage=IN_EVALUATION))
    assert killed.returncode == 0 and len(evaluations(killed)) == 3
    assert len(killed.events("fault_fired")) == 1
    assert (
        killed.output.count("elaswave: the script evaluates by itself with 3 of 4 workers: ") == 1
    )
