"""A Trainer that is resumed in any pass over a stream reads what the undisturbed run reads."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from elaswave_plugin.adapters.deepspeed.hf_trainer.resumed import place_of
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.observer import summarize
from tests.deepspeed.conftest import Launch
from tests.deepspeed.hf_runs import LOGGED, Tape, logs, spec_of, tapes
from tests.faults.harness import Outcome
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# Two steps of eight samples in a pass; the checkpoint is behind the first step of the third one.
PASS, SAVED, STEPS = 16, 5, 9


def state_of(folder: Path, epoch: float, *, most: int = 20, stops: bool = False) -> Path:
    """Write what a Trainer writes behind 12 steps."""
    control = {"TrainerControl": {"args": {"should_epoch_stop": stops}, "attributes": {}}}
    state = {"epoch": epoch, "global_step": 12, "max_steps": most, "stateful_callbacks": control}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize(
    ("epoch", "samples", "place"),
    [
        (0.6, 96, (0, 96)),
        (2 + 2 / 20, 96, (2, 16)),
        # The end of a pass, of which the stream says that it is one.
        (1 + 5 / 20, 96, (1, 40)),
        (10_000 + 7 / 20, 96, (10_000, 56)),
        # The steps before had half as many samples.
        (2 + 2 / 20, 48, (2, 8)),
    ],
)
def test_the_place_follows_from_the_state_of_the_trainer(
    tmp_path: Path, epoch: float, samples: int, place: tuple[int, int]
) -> None:
    assert place_of(state_of(tmp_path, epoch), samples=samples, per_update=8) == place


def test_an_epoch_that_a_callback_stopped_is_over(tmp_path: Path) -> None:
    folder = state_of(tmp_path, 1.1, stops=True)
    assert place_of(folder, samples=96, per_update=8) == (2, 0)


def test_a_place_within_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"behind 24 samples of pass 1 .* has 16 samples"):
        place_of(state_of(tmp_path, 1.15), samples=96, per_update=16)


def streaming(*kills: str, options: tuple[str, ...] = (), kind: str = "plain", **more: Any) -> Any:
    given = (f"--stream={kind}", f"--limit={PASS}", f"--save={SAVED}", *options)
    return spec_of(*kills, options=given, **{"steps": STEPS, "dump": "never", **more})


def checkpoint(reference: Launch, spec: Any) -> tuple[Outcome, str]:
    """The undisturbed run, and the option by which another one goes on in its third pass."""
    whole = reference(spec)
    return whole, f"--resume={whole.directory / 'trainer' / f'checkpoint-{SAVED}'}"


def check_losses(run: Outcome, whole: Outcome) -> None:
    assert run.returncode == 0, run.output[-4000:]
    (first, *_) = tapes(run)
    check_losses_of(first, whole)
    assert [step for step, _, _ in logs(run)] == [*range(SAVED + 1, STEPS + 1)]


def check_losses_of(tape: Tape, whole: Outcome) -> None:
    """The losses that the callbacks of one process saw are those of the undisturbed run."""
    wanted = {step: loss for step, _, loss in logs(whole)}
    for _, step, seen in tape:
        if "loss" in seen:
            assert seen["loss"] == pytest.approx(wanted[step], rel=LOGGED), step


def repeated(run: Outcome) -> tuple[int, int]:
    """The samples lost and repeated, as `elaswave report` counts them."""
    found = summarize(run.files, None, steps=len(run.files.steps), global_batch=None)
    return found["samples_lost"], found["samples_repeated"]


@proves(Kind.RESUME, Promise.PLANNED, victim="1", moment="1:backward")
@pytest.mark.parametrize("kind", sampled(["plain", "shuffled"]))
def test_a_stream_is_resumed_in_its_third_pass_and_a_worker_is_lost_and_comes_back(
    run: Launch, reference: Launch, kind: str
) -> None:
    if kind == "shuffled":
        pytest.importorskip("datasets")
    whole, option = checkpoint(reference, streaming(kind=kind))
    spec = streaming("1@0:backward", kind=kind, options=(option,), respawn=5, changes=("+1@2",))
    resumed = run(spec)
    check_losses(resumed, whole)
    assert len(resumed.events("fault_fired")) == 1
    (tape,) = tapes(resumed, incarnation=1)
    # Its first step is the third one of the resumed job.
    assert {step for _, step, seen in tape if "loss" in seen} == {SAVED + 3, STEPS}
    check_losses_of(tape, whole)
    assert repeated(resumed) == (0, 0)
    assert "samples: 0 lost, 0 repeated" in resumed.output


@proves(Kind.RESUME, Promise.SAME)
def test_a_stream_that_draws_on_over_its_passes_is_read_from_the_first_one(
    run: Launch, reference: Launch
) -> None:
    whole, option = checkpoint(reference, streaming(kind="turning"))
    resumed = run(streaming(kind="turning", options=(option,)))
    check_losses(resumed, whole)
    assert repeated(resumed) == (0, 0)


@proves(Kind.RESUME, Promise.SAME)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", None])
def test_who_ignores_the_place_is_told_how_many_samples_are_repeated(
    run: Launch, reference: Launch, kind: str | None
) -> None:
    """A stream begins at the front of its first pass, a dataset at that of the present one."""
    given = (f"--limit={PASS}", f"--save={SAVED}")
    spec = streaming() if kind else spec_of(options=given, steps=STEPS, dump="never")
    whole, option = checkpoint(reference, spec)
    more = (*spec.options, option, "--ignore-data-skip")
    resumed = run(spec_of(options=more, steps=spec.steps, dump="never"))
    assert resumed.returncode == 0, resumed.output[-4000:]
    # All of the four steps that follow; or the first one of its pass.
    assert repeated(resumed) == (0, (STEPS - SAVED) * 8 if kind else 8)
    assert whole.returncode == 0
