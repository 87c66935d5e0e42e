"""Runs of a stock script of transformers.Trainer, and the record that its callbacks leave."""

import json
from typing import Any

import pytest

from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.faults.harness import Outcome

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


def check_newcomer(run: Outcome, reference: Outcome, *, first: int, pads: bool = False) -> None:
    """The callbacks of the only one that came later saw all from its first step on."""
    assert isinstance(run.spec, EngineSpec)
    (tape,) = tapes(run, incarnation=1)
    wanted = tapes(reference)[0]
    place = [one[:2] for one in wanted].index(["on_step_begin", first])
    counts_flos = run.spec.stage < 3 and not pads
    check_tape(tape[place - len(wanted) :], wanted[place:], counts_flos=counts_flos)


def checkpoints(run: Outcome) -> dict[str, dict[str, Any]]:
    """Return the state that each checkpoint of the Trainer has, by its folder."""
    folders = sorted((run.directory / "trainer").glob("checkpoint-*"))
    assert all((one / "latest").is_file() for one in folders)
    return {one.name: json.loads((one / "trainer_state.json").read_text()) for one in folders}


def logs(run: Outcome) -> list[tuple[int, str, float]]:
    """Return step, event and loss of the logged steps of one process."""
    return [(step, event, seen["loss"]) for event, step, seen in tapes(run)[0] if "loss" in seen]
