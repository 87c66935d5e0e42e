"""transformers.Trainer: what its fault matrix (test_trainer_matrix.py) has not."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


from elaswave_plugin.tracking.state_dump import hash_state
from tests.agent.jobs import LAUNCH
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, check_recovered
from tests.deepspeed.hf_runs import (
    LOGGED,
    SAVING,
    check_newcomer,
    check_tapes,
    logs,
    spec_of,
    tapes,
)
from tests.deepspeed.test_join import entered
from tests.faults.foreign_launchers import run_under
from tests.faults.harness import check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

COLD = (sys.executable, "-W", "ignore", "-c", LAUNCH)
FIRST = ("--evaluate=4", "--evaluate-first")


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill"),
    sampled(
        [
            (0, "3@0:backward"),
            (2, "1@0:optimizer"),
            (3, "0@0:forward"),
        ]
    ),
)
def test_a_kill_in_the_first_step_counts_it_once(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str
) -> None:
    spec = spec_of(kill, stage=stage)
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=3)
    assert "trained 6 steps" in killed.output


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    "options",
    sampled(
        [
            # The Trainer's losses are means of batches, which the shares weigh; draws are keyed.
            (("--per-batch", "--dropout=0.1"),),
            # Epochs of five iterations: their last update has one micro-batch of two.
            (("--limit=20", "--logging-steps=2"),),
        ]
    ),
    ids=["means", "epochs"],
)
def test_weights_draws_and_epochs_follow_the_job(
    run: Launch, twin: Twin, reference: Launch, options: tuple[str, ...]
) -> None:
    spec = spec_of("1@2:backward", stage=2, options=options)
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    assert killed.trace() == twin(killed).trace()
    check_tapes(killed, reference(spec), survivors=3)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "kill"), sampled([(2, "1@2:backward"), (3, "0@3:forward")]))
def test_quantized_weights_stay_where_they_are(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str
) -> None:
    pytest.importorskip("bitsandbytes")
    spec = spec_of(kill, stage=stage, options=("--lora", "--quantized"))
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=3)
    assert all(".lora_" in name for name, _ in hash_state(killed.directory).by_name)


@proves(Kind.KILLS, Promise.PLANNED, victim="1 2 3", moment="1:backward 2:forward 3:backward")
def test_one_that_is_left_alone_evaluates_the_batches_of_all(
    run: Launch, twin: Twin, reference: Launch
) -> None:
    """The last of 21 samples is in a batch of two, the other one of which is the first again."""
    kills = ("1@1:backward", "2@2:forward", "3@3:backward")
    spec = spec_of(*kills, stage=1, options=("--evaluate=2",))
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=1)


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "back", "options"),
    sampled(
        [
            # Epochs of three updates: it enters in the second one, at its begin or within.
            (2, "1@1:backward", 4, ("--limit=24",)),
            (2, "3@2:backward", 6, ("--limit=24",)),
            (1, "2@2:backward", 5, FIRST),
            (3, "1@1:forward", 4, FIRST),
        ]
    ),
)
def test_a_lost_worker_comes_back(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str, back: int, options: Any
) -> None:
    slot = int(kill[0])
    more = {"steps": 8, "respawn": 5, "changes": (f"+{slot}@{back}",)}
    spec = spec_of(kill, stage=stage, options=options, **more)
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert entered(killed) == [(slot, 1, back)]
    check_tapes(killed, reference(spec), survivors=3)
    check_newcomer(killed, reference(spec), first=back)


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.parametrize(
    ("kill", "options"),
    sampled([("2@1:backward", ()), ("1@1:forward", ("--lora",))]),
)
def test_a_lost_worker_loads_its_model_alone(
    run: Launch, twin: Twin, reference: Launch, kill: str, options: tuple[str, ...]
) -> None:
    """As `from_pretrained` cuts it under ZeRO-3, before there is an engine."""
    more = {"steps": 8, "respawn": 5, "changes": (f"+{kill[0]}@4",)}
    spec = spec_of(kill, stage=3, options=("--reload", *options), **more)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert entered(killed) == [(int(kill[0]), 1, 4)]
    check_newcomer(killed, reference(spec), first=4)
    assert killed.output.count("cut: True") == 5


@proves(Kind.JOIN, Promise.CLOSE)
def test_a_worker_joins_beyond_the_launch(run: Launch, reference: Launch) -> None:
    spec = spec_of(
        stage=2,
        steps=8,
        global_batch=16,
        options=("--batch-size=2",),
        launcher=("--reserve=1",),
        joiners=1,
        changes=("+4@4",),
    )
    grown = run(spec)
    check_survived(grown)
    assert entered(grown) == [(4, 1, 4)]
    assert max_relative_difference(grown, reference(spec)) <= FP32_BOUND
    check_tapes(grown, reference(spec), survivors=4)
    check_newcomer(grown, reference(spec), first=4)


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="2:backward")
@pytest.mark.parametrize("loss", sampled(["mean", "sum", "function"]))
def test_a_loss_of_its_own_weighs_as_at_the_launch(
    run: Launch, twin: Twin, reference: Launch, loss: str
) -> None:
    """One that ignores the items of the step, or forgets the processes."""
    spec = spec_of("1@2:backward", stage=2, options=(f"--loss={loss}",))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=3)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("options", sampled([((),), (("--use-cpu",),)]), ids=["", "cpu"])
def test_a_kill_is_survived_in_interpreters_that_import_all_anew(
    tmp_path: Path, reference: Launch, options: tuple[str, ...]
) -> None:
    """With use_cpu, too, by which Accelerate leaves DeepSpeed out."""
    spec = spec_of("1@2:backward", nproc=2, global_batch=4, options=options)
    command = (*COLD, "--nproc-per-node=2", f"--dir={tmp_path / 'run'}")
    killed = run_under(command, spec, data=tmp_path, directory=tmp_path / "run")
    check_survived(killed)
    assert max_relative_difference(killed, reference(spec_of(nproc=2, global_batch=4))) <= 1e-6
    assert len(tapes(killed)) == 1


@proves(Kind.KILL, Promise.LOGGED)
@pytest.mark.parametrize(
    ("stage", "kill", "options"),
    sampled(
        [
            (0, "1@3:backward", ()),
            (1, "3@4:forward", ()),
            (2, "2@3:reduce", ("--lora",)),
            (3, "0@3:forward", ()),
            (3, "2@5:optimizer", ("--lora",)),
            # In the load, which is the step behind the last one, and in the evaluation after it.
            (2, "1@6:data", ()),
            (3, "3@6:snapshot", ()),
            (1, "0@7:evaluation", ()),
            (3, "1@7:evaluation", ()),
        ]
    ),
)
def test_the_best_model_is_loaded_by_those_that_are_left(
    run: Launch, reference: Launch, stage: int, kill: str, options: tuple[str, ...]
) -> None:
    """It is that of step 2, written by all four, and is evaluated as it was then."""
    spec = spec_of(kill, stage=stage, options=(*SAVING, "--best", *options))
    killed, whole = run(spec), reference(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    check_survived(killed)
    # The callbacks' last event comes before the second evaluation of all weights.
    check_tapes(killed, whole, survivors=4 if kill.endswith("7:evaluation") else 3)
    for one in (killed, whole):
        then = [seen["eval_loss"] for event, _, seen in tapes(one)[0] if event == "on_evaluate"]
        assert then[0] > then[1] > then[2]
        said = {float(loss) for loss in re.findall(r"best: ([\d.]+)", one.output)}
        assert said and all(loss == pytest.approx(then[0], rel=1e-5) for loss in said)
        assert one.events("weights_loaded")


@proves(Kind.KILL, Promise.LOGGED)
@pytest.mark.parametrize(
    ("stage", "kill"),
    sampled([(2, "1@3:backward"), (2, "0@4:evaluation"), (3, "2@3:forward")]),
)
def test_a_trainer_of_sequences_generates_in_its_evaluation(
    run: Launch, reference: Launch, stage: int, kill: str
) -> None:
    """T5's loss ignores the items of the step, so that the Trainer would count it once a worker."""
    spec = spec_of(kill, stage=stage, options=("--seq2seq", "--evaluate=2", "--per-batch"))
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    check_survived(killed)
    check_tapes(killed, reference(spec), survivors=3)


@proves(Kind.RESUME, Promise.PLANNED)
def test_a_checkpoint_of_the_trainer_is_resumed_in_the_middle_of_an_epoch(
    run: Launch, reference: Launch
) -> None:
    options = ("--save=3", "--limit=20")
    whole = reference(spec_of(options=options))
    folder = whole.directory / "trainer" / "checkpoint-3"
    resumed = run(spec_of("2@1:backward", options=(*options, f"--resume={folder}")))
    assert resumed.returncode == 0 and len(resumed.events("fault_fired")) == 1
    wanted = {step: loss for step, _, loss in logs(whole) if step > 3}
    assert {step: loss for step, _, loss in logs(resumed)} == pytest.approx(wanted, rel=LOGGED)


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
def test_an_evaluation_before_the_training_is_refused_where_it_is_cut(run: Launch) -> None:
    refused = run(spec_of(stage=3, options=("--evaluate-before",)))
    assert refused.returncode == 2, refused.output[-4000:]
    assert refused.output.count("as evaluate() before train() has it") == 1
    assert "Traceback" not in refused.output
