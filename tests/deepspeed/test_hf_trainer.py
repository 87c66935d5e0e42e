"""transformers.Trainer: a stock script, whose callbacks, counters and logs see each step once."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from safetensors.torch import load_file

from elaswave_plugin.tracking.state_dump import hash_state
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.test_join import entered
from tests.faults.foreign_launchers import run_under
from tests.faults.harness import Outcome, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled
from tests.supervisor.jobs import LAUNCH

COLD = (sys.executable, "-W", "ignore", "-c", LAUNCH)
TRAINER = str(SCRIPTS / "hf_trainer.py")
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    # The Trainer makes both, as most scripts have it.
    "optimizer": None,
    "scheduler": None,
}
FIRST = ("--evaluate=4", "--evaluate-first")
SAVING = ("--evaluate=2", "--save=2")
# The Trainer writes its log with so many digits.
LOGGED = 1e-4
# Two of the 250 tokens of a step: which one is likeliest may change where two are nearly equal.
TOP = 0.008

# Differences of log probabilities of about 50, with six digits.
REWARDS = 1e-6


def spec_of(*kills: str, stage: int = 2, **changes: Any) -> EngineSpec:
    """A stock script with "auto" values."""
    settings = json.dumps({**AUTO, **changes.pop("settings", {})})
    return EngineSpec(script=TRAINER, stage=stage, kills=kills, settings=settings, **changes)


Tape = list[tuple[str, int, dict[str, float]]]


def tapes(run: Outcome, *, incarnation: int = 0) -> list[Tape]:
    """Return the callbacks' record of each process that came to the end."""
    started = run.events("worker_started")
    pids = [one["pid"] for one in started if one["incarnation"] == incarnation]
    paths = [run.directory / f"tape-{pid}.json" for pid in sorted(pids)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def check_tapes(run: Outcome, reference: Outcome, *, survivors: int, pads: bool = False) -> None:
    """Every survivor's callbacks saw what those of the undisturbed run have seen.

    ``pads``: batches are as long as their longest sample.
    """
    assert isinstance(run.spec, EngineSpec)
    seen = tapes(run)
    assert len(seen) == survivors
    for tape in seen:
        check_tape(tape, tapes(reference)[0], counts_flos=run.spec.stage < 3 and not pads)


def check_tape(tape: Tape, wanted: Tape, *, counts_flos: bool) -> None:
    """Two callbacks saw the same events, with the same numbers.

    The Trainer counts the operations of parameters that ZeRO-3 has gathered just then, and those of
    padding, of which larger shares have more.
    """
    assert [one[:2] for one in tape] == [one[:2] for one in wanted]
    for (event, step, logged), (_, _, expected) in zip(tape, wanted, strict=True):
        if not counts_flos and "total_flos" in logged:
            expected["total_flos"] = logged["total_flos"]
        for key in [key for key in logged if key.endswith("token_accuracy")]:
            assert logged.pop(key) == pytest.approx(expected.pop(key), abs=TOP), (event, step)
        for key in [key for key in logged if key.startswith("rewards/")]:
            assert logged.pop(key) == pytest.approx(expected.pop(key), rel=LOGGED, abs=REWARDS)
        assert logged == pytest.approx(expected, rel=LOGGED), (event, step)


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
            # Some have seen that the step is complete, and it is rolled back.
            (2, "1@3:snapshot"),
            (3, "0@3:snapshot"),
            (3, "3@3:data"),
            (3, "0@0:forward"),
            (3, "2@4:gather"),
        ],
        share=2,
    ),
)
def test_a_kill_is_absorbed_and_each_step_counts_once(
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
        ],
        share=1,
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
    # A share of one worker's own draws differs from that of two.
    if "--dropout=0.1" not in options:
        check_tapes(killed, reference(spec), survivors=3)


LORA = ("--lora", "--save=4")


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "options"),
    sampled(
        [
            (2, "1@2:backward", LORA),
            (2, "0@4:save", LORA),
            (3, "0@3:forward", LORA),
            (3, "2@4:save", LORA),
            (3, "3@2:optimizer", (*LORA, "--evaluate=2")),
        ],
        share=2,
    ),
)
def test_adapters_of_peft_are_all_that_is_sealed(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str, options: tuple[str, ...]
) -> None:
    pytest.importorskip("peft")
    spec = spec_of(kill, stage=stage, options=options)
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    if kill.endswith("save"):
        check_survived(killed)
    else:
        check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=3)
    assert all(".lora_" in name for name, _ in hash_state(killed.directory).by_name)
    (saved,) = adapters(killed)
    (wanted,) = adapters(reference(spec))
    assert saved.keys() == wanted.keys()
    for name, weight in saved.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-4, atol=1e-7)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill"), sampled([(2, "1@2:backward"), (3, "0@3:forward")], share=1)
)
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


def adapters(run: Outcome) -> list[dict[str, torch.Tensor]]:
    """Return the adapters of each checkpoint that the run has written."""
    files = sorted((run.directory / "trainer").glob("checkpoint-4/adapter_model.safetensors"))
    return [load_file(file) for file in files]


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "back", "options"),
    sampled(
        [
            (0, "2@1:backward", 4, SAVING),
            (1, "1@1:forward", 3, ("--evaluate=2",)),
            # Epochs of three updates: it enters in the second one, at its begin or within.
            (2, "1@1:backward", 4, ("--limit=24",)),
            (2, "3@2:backward", 6, ("--limit=24",)),
            (3, "0@1:gather", 4, ()),
            (1, "2@2:backward", 5, FIRST),
            (3, "1@1:forward", 4, FIRST),
        ],
        share=2,
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


def check_newcomer(run: Outcome, reference: Outcome, *, first: int, pads: bool = False) -> None:
    """The callbacks of the only one that came later saw all from its first step on."""
    assert isinstance(run.spec, EngineSpec)
    (tape,) = tapes(run, incarnation=1)
    wanted = tapes(reference)[0]
    place = [one[:2] for one in wanted].index(["on_step_begin", first])
    counts_flos = run.spec.stage < 3 and not pads
    check_tape(tape[place - len(wanted) :], wanted[place:], counts_flos=counts_flos)


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="2:backward")
@pytest.mark.parametrize("loss", sampled(["mean", "sum", "function"], share=1))
def test_a_loss_of_its_own_weighs_as_at_the_launch(
    run: Launch, twin: Twin, reference: Launch, loss: str
) -> None:
    """One that ignores the items of the step, or forgets the processes."""
    spec = spec_of("1@2:backward", stage=2, options=(f"--loss={loss}",))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=3)


@proves(Kind.KILLS, Promise.PLANNED)
@pytest.mark.slow
def test_two_losses_in_one_run(run: Launch, twin: Twin, reference: Launch) -> None:
    spec = spec_of("0@1:backward", "3@3:forward", stage=2)
    check_recovered(killed := run(spec), twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=2)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("options", sampled([((),), (("--use-cpu",),)], share=1), ids=["", "cpu"])
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


def checkpoints(run: Outcome) -> dict[str, dict[str, Any]]:
    """Return the state that each checkpoint of the Trainer has, by its folder."""
    folders = sorted((run.directory / "trainer").glob("checkpoint-*"))
    assert all((one / "latest").is_file() for one in folders)
    return {one.name: json.loads((one / "trainer_state.json").read_text()) for one in folders}


@proves(Kind.KILL, Promise.LOGGED)
@pytest.mark.parametrize(
    ("stage", "kill"),
    sampled(
        [
            (2, "0@4:evaluation"),
            (3, "2@4:evaluation"),
            (2, "1@4:save"),
            (3, "0@4:save"),
            (1, "3@3:snapshot"),
        ],
        share=1,
    ),
)
def test_evaluations_and_saves_are_made_as_without_the_loss(
    run: Launch, reference: Launch, stage: int, kill: str
) -> None:
    spec = spec_of(kill, stage=stage, options=SAVING)
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    check_survived(killed)
    check_tapes(killed, reference(spec), survivors=3)
    ours, wanted = checkpoints(killed), checkpoints(reference(spec))
    # The last two of three.
    assert list(ours) == list(wanted) == ["checkpoint-4", "checkpoint-6"]
    for name, state in ours.items():
        assert state["global_step"] == wanted[name]["global_step"]
        assert len(state["log_history"]) == len(wanted[name]["log_history"])


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
        ],
        share=2,
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
    sampled([(2, "1@3:backward"), (2, "0@4:evaluation"), (3, "2@3:forward")], share=1),
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


def logs(run: Outcome) -> list[tuple[int, str, float]]:
    """Return step, event and loss of the logged steps of one process."""
    return [(step, event, seen["loss"]) for event, step, seen in tapes(run)[0] if "loss" in seen]
