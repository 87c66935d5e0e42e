"""Iterable datasets of loops on Accelerate without a Trainer: a loss keeps the place in them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from elaswave_plugin.observer.observer import losses_of
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.test_hf import OWN_OPTIMIZER, SIZES, plain, printed
from tests.faults.harness import Outcome
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# Nine iterations of an epoch, of which the last has a sample for two of the four workers only.
LIMIT = 34
RAGGED = (f"--limit={LIMIT}",)
WHOLE = ("--limit=40",)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec(EngineSpec):
    """A job that trains on a stream, of which an epoch has five steps."""

    @property
    def batches(self) -> Sequence[int]:
        """Samples of each step; the last one of a ragged epoch has one iteration of two."""
        is_ragged = self.options[:1] == RAGGED
        return [4 if is_ragged and step % 5 == 4 else 8 for step in range(self.steps)]


def streaming(*kills: str, options: tuple[str, ...] = RAGGED, **more: Any) -> StreamSpec:
    """A launch of the loop."""
    settings = json.dumps({**SIZES, **OWN_OPTIMIZER, **more.pop("settings", {})})
    script, more = str(SCRIPTS / "hf_streaming.py"), {"stage": 2, "steps": 8, **more}
    return StreamSpec(kills=kills, options=options, script=script, settings=settings, **more)


def gathered(folder: Path) -> list[dict[int, list[int]]]:
    """Return what each process has gathered of the samples of the last iteration of each step."""
    paths = sorted(folder.glob("gathered-*.json"))
    return [dict(json.loads(path.read_text())) for path in paths]


def check(run: Outcome, reference: Outcome, kill: str) -> None:
    """Every step was counted once, and had the samples of the undisturbed run."""
    lost, step, phase = int(kill[0]), int(kill[2]), kill[4:]
    steps = [*range(run.spec.steps)]
    # Whoever is rank 0 prints, so that a step may be missing where slot 0 died within it.
    said = [one[0] for one in printed(run.output)]
    assert said in (steps, [one for one in steps if one != step] if lost == 0 else steps)
    seen, wanted = gathered(run.directory), gathered(reference.directory)
    assert len(seen) == 3 and len(wanted) == 4
    for one in seen:
        if phase == "snapshot":
            # It was rolled back after the script had seen it complete, and as it gathered.
            one[step] = wanted[0][step]
        assert one == wanted[0]


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("kill", "options"),
    sampled(
        [
            ("1@2:backward", RAGGED),
            # The last step of the first epoch, which has one iteration.
            ("3@4:forward", RAGGED),
            # The first step of the second epoch, after some have completed the one before.
            ("0@5:forward", RAGGED),
            ("2@4:snapshot", RAGGED),
            ("2@5:data", (*RAGGED, "--no-dispatch")),
            ("0@3:reduce", (*WHOLE, "--stream=shuffled")),
            ("1@3:backward", (*RAGGED, "--stateful=used")),
        ]
    ),
)
def test_a_kill_keeps_the_place(
    run: Launch, twin: Twin, reference: Launch, kill: str, options: tuple[str, ...]
) -> None:
    if "--stream=shuffled" in options:
        pytest.importorskip("datasets")
    if "--stateful=used" in options:
        pytest.importorskip("torchdata")
    spec = streaming(kill, options=options)
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check(killed, reference(spec), kill)


@proves(Kind.RESUME, Promise.SAME)
@pytest.mark.parametrize(
    ("kind", "begins"),
    sampled(
        [
            (("--stream=plain", *RAGGED), "front"),
            (("--stream=plain", *RAGGED), "read"),
            # The same samples in each pass: the first one will do.
            (("--stream=none", *RAGGED), "at the pass"),
            (("--stream=plain", *WHOLE), "read"),
            (("--stream=plain", *WHOLE), "at the pass"),
        ]
    ),
)
def test_one_resumed_in_the_second_pass_goes_on_there_or_is_told(
    run: Launch, kind: tuple[str, ...], begins: str
) -> None:
    """The last step of a ragged pass is shorter, so that steps do not tell the batches."""
    whole = run(streaming(options=(*kind, "--save=7"), steps=12))
    assert whole.returncode == 0, whole.output[-4000:]
    options = (*kind, f"--load={whole.directory / 'saved'}", f"--begins={begins}")
    resumed = run(streaming(options=options, steps=12))
    assert resumed.returncode == 0, resumed.output[-4000:]
    bits = [losses for _, losses in sorted(resumed.trace().items())]
    follows = bits == [losses for step, losses in sorted(whole.trace().items()) if step >= 7]
    assert follows is (begins == "read" or "--stream=none" in kind)
    assert ("samples are trained on again" in resumed.output) is not follows
    assert ("samples: 0 lost, 0 repeated" in resumed.output) is follows


@proves(Kind.KILL, Promise.CLOSE, victim="1", moment="0:backward")
@pytest.mark.parametrize(
    "kind", sampled([(("--stream=none", *WHOLE),), (("--stream=plain", *WHOLE),)])
)
def test_one_that_skips_what_was_trained_on_goes_on_there_through_a_loss(
    run: Launch, kind: tuple[str, ...]
) -> None:
    """In the second pass of a dataset with places, in the first one of a stream."""
    saved = 7 if "--stream=none" in kind else 3
    whole = run(streaming(options=(*kind, f"--save={saved}"), steps=12))
    assert whole.returncode == 0, whole.output[-4000:]
    options = (*kind, f"--load={whole.directory / 'saved'}", "--begins=skip")
    resumed = run(streaming("1@0:backward", options=options, steps=12))
    assert resumed.returncode == 0 and resumed.events("fault_fired"), resumed.output[-4000:]
    losses, wanted = losses_of(resumed.files), losses_of(whole.files)
    assert [*losses.values()] == pytest.approx([*wanted.values()][saved:], rel=1e-6)
    read, whole_read = gathered(resumed.directory)[0], gathered(whole.directory)[0]
    assert [*read.values()] == [*whole_read.values()][saved:]
    assert "samples: 0 lost, 0 repeated" in resumed.output


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.parametrize(
    "options",
    sampled([(RAGGED,), ((*RAGGED, "--no-dispatch"),), ((*WHOLE, "--stream=shuffled"),)]),
    ids=["dispatched", "read by all", "shuffled"],
)
@pytest.mark.slow
def test_without_a_loss_it_is_what_accelerate_does_alone(
    run: Launch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    elastic = run(streaming(options=options))
    assert elastic.returncode == 0, elastic.output[-3000:]
    off = streaming(options=options, settings={"elaswave": {"enabled": False}})
    ours, wanted = printed(elastic.output), printed(plain(off, tmp_path))
    assert [(step, rate) for step, _, rate in ours] == [(step, rate) for step, _, rate in wanted]
    assert [loss for _, loss, _ in ours] == pytest.approx([one[1] for one in wanted], rel=1e-6)
    assert gathered(elastic.directory) == gathered(tmp_path)


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--stream=drawn",), "gave the workers different samples"),
        (("--split-batches", "--batch-size=4"), "split_batches is True in Accelerate"),
        (("--batch-size=2",), "batch_size is 2 and train_micro_batch_size_per_gpu is 1"),
    ],
)
def test_streams_that_workers_cannot_share_are_refused(
    run: Launch, options: tuple[str, ...], words: str
) -> None:
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
    refused = run(streaming(options=(*WHOLE, *options), settings=sizes))
    assert refused.returncode == 2, refused.output[-4000:]
    assert refused.output.count(words) == 1 and "Traceback" not in refused.output


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("stateful", "words"), [("asked", "was asked for its state"), ("given", "was given a state")]
)
def test_the_state_of_a_stateful_loader_is_refused(run: Launch, stateful: str, words: str) -> None:
    pytest.importorskip("torchdata")
    refused = run(streaming(options=(*WHOLE, f"--stateful={stateful}")))
    assert refused.returncode == 2, refused.output[-4000:]
    assert refused.output.count(words) == 1 and "Traceback" not in refused.output
