"""Exact mode: the numbers after losses of workers have the bits of the undisturbed run."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from elaswave_plugin.config import STEP_PHASES
from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec, rates
from tests.deepspeed.hf_runs import AUTO
from tests.deepspeed.test_sample_draws import KINDS, LOOPS, spec_of, whole
from tests.faults.harness import Outcome, check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

STAGES = range(3)
EXACT: dict[str, Any] = {"consistency": "exact"}
_SUMS = "from elaswave_plugin.adapters.deepspeed.zero import replica_sums;"
# By what is taken away.
SABOTAGES = {
    "the order of replicas": _SUMS
    + """
replica_sums.in_order = lambda hosts: sorted(range(len(hosts)), key=lambda one: (hosts[one], one))
""",
    "the norm of integers": """
from elaswave_plugin.adapters.deepspeed import attach
from elaswave_plugin.adapters.patching import PatchSet
attach.exact_patches = lambda: PatchSet([])
""",
    "zeros behind a partition": _SUMS + "replica_sums.PaddedUpdates = lambda inner: None",
}


def check_equal(killed: Outcome, undisturbed: Outcome) -> None:
    """Losses, norms, rates and the hash of the whole state."""
    for one in (killed, undisturbed):
        check_survived(one)
    assert killed.trace() == undisturbed.trace()
    assert rates(killed) == rates(undisturbed)


def cover() -> list[tuple[int, str, str, tuple[str, ...]]]:
    """Every pair of stage, loop, kind and phase."""
    cases = []
    for stage, (number, kind) in itertools.product(STAGES, enumerate(KINDS)):
        first = 2 * stage + number
        phases = tuple(STEP_PHASES[(first + at) % len(STEP_PHASES)] for at in range(3))
        cases.append((stage, LOOPS[(stage + number) % len(LOOPS)], kind, phases))
    return cases


def test_the_cover_has_every_pair() -> None:
    each = [(*case[:3], phase) for case in cover() for phase in case[3]]
    axes = (STAGES, LOOPS, KINDS, STEP_PHASES)
    for (one, some), (other, others) in itertools.combinations(enumerate(axes), 2):
        assert {(case[one], case[other]) for case in each} == {*itertools.product(some, others)}


@proves(Kind.KILLS, Promise.EQUAL)
@pytest.mark.parametrize(("stage", "loop", "kind", "phases"), [*sampled(cover()), *whole(STAGES)])
def test_four_workers_become_one_and_no_bit_changes(
    run: Launch, reference: Launch, stage: int, loop: str, kind: str, phases: tuple[str, ...]
) -> None:
    spec = replace(spec_of(stage, loop, kind, *phases), **EXACT)
    killed = run(spec)
    check_equal(killed, reference(spec))
    assert killed.output.count("exact mode: a step takes 2 times the batches") == 1


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("stage", "changes"),
    sampled(
        [
            (1, {"bf16": True}),
            (0, {"bf16": True}),
            (2, {"bf16": True}),
            (1, {"nproc": 3, "global_batch": 12}),
            (1, {"accumulation": 1}),
            (2, {"nproc": 3, "global_batch": 12}),
            (2, {"options": ("--loss=items", "--padded")}),
            (1, {"options": ("--loss=items", "--padded", "--grouped", "--limit=20")}),
            (1, {"options": ("--loss=labels", "--padded")}),
        ]
    ),
)
def test_a_loss_changes_no_bit(
    run: Launch, reference: Launch, stage: int, changes: dict[str, Any]
) -> None:
    if "options" in changes:
        script = {"script": str(SCRIPTS / "hf_losses.py"), "settings": json.dumps(AUTO)}
        changes = {**changes, **script, "global_batch": 16}
    spec = EngineSpec(stage=stage, kills=("0@2:backward",), **EXACT, **changes)
    check_equal(run(spec), reference(spec))


@proves(Kind.RETURN, Promise.EQUAL, victim="2", moment="2:backward")
@pytest.mark.parametrize(("stage", "loop"), sampled([*zip((1, 2, 0), LOOPS, strict=True)]))
def test_a_lost_worker_comes_back_and_no_bit_changes(
    run: Launch, reference: Launch, stage: int, loop: str
) -> None:
    back = {"respawn": 1, "changes": ("+2@5",), "steps": 8, "kills": ("2@2:backward",)}
    spec = replace(spec_of(stage, loop, "sdpa"), **EXACT, **back)
    returned = run(spec)
    check_equal(returned, reference(spec))
    assert len(returned.events("view_committed")[-1]["ranks"]) == 4


@proves(Kind.KILLS, Promise.EQUAL)
@pytest.mark.parametrize("stage", sampled([1, 0]))
def test_micro_batches_that_are_complete_are_not_passed_backward_again(
    run: Launch, reference: Launch, stage: int
) -> None:
    size = {"accumulation": 4, "global_batch": 16}
    spec = EngineSpec(stage=stage, kills=("2@2:backward", "0@4:reduce"), **size, **EXACT)
    killed = run(spec)
    check_equal(killed, reference(spec))
    kept = {(one["step"], one["slot"]): one["microbatches"] for one in killed.events("sums_kept")}
    # Behind their last pass, and of the replicas that they have then.
    assert [kept[4, slot] for slot in (1, 3)] == [[1, 5, 9, 13], [3, 7, 11, 15]]
    # All have completed the pass that they were in.
    assert all(kept[2, slot] for slot in (0, 1, 3))


@proves(Kind.SABOTAGE, Promise.SEEN, victim="3", moment="1:backward")
@pytest.mark.parametrize("what", sampled([*SABOTAGES]))
def test_what_exactness_rests_on_is_seen(run: Launch, reference: Launch, what: str) -> None:
    """Negative control."""
    kills = ("3@1:backward",)
    spec = replace(spec_of(1, "trainer", "sdpa"), kills=kills, **EXACT)
    killed = run(replace(spec, sabotage=SABOTAGES[what]))
    check_survived(killed)
    assert killed.trace() != reference(spec).trace()


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("stage", "settings", "words"),
    sampled(
        [
            (
                3,
                {},
                "zero_optimization.stage is 3, and elaswave_plugin carries 0 or 1 or 2: in exact"
                " mode, where a lost worker's micro-batches are passed while other workers pass",
            ),
            (1, {"prescale_gradients": True}, "prescale_gradients is True"),
            (
                2,
                {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
                "zero_optimization.offload_optimizer.device is 'cpu'",
            ),
            (
                1,
                {"elaswave": {"enabled": True, "consistency": "exact", "slow_workers": "act"}},
                "elaswave.slow_workers is 'act', and elaswave_plugin carries 'name': in exact mode",
            ),
        ]
    ),
)
def test_what_exact_mode_does_not_carry_is_one_sentence(
    run: Launch, stage: int, settings: dict[str, Any], words: str
) -> None:
    refused = run(EngineSpec(stage=stage, settings=json.dumps(settings), **EXACT))
    assert refused.returncode == 2, refused.output
    assert words in refused.output and "Traceback" not in refused.output


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_loop_that_ends_by_a_count_of_its_batches_is_refused(run: Launch) -> None:
    """Before its first step; in fast mode it is carried."""
    script = SCRIPTS / "own_count.py"
    refused = run(EngineSpec(script=str(script), options=("--count=10",), **EXACT))
    assert refused.returncode == 2, refused.output
    lines = enumerate(script.read_text().splitlines(), 1)
    (line,) = (number for number, text in lines if text.strip() == "break")
    words = f"ends by a count of its batches (own_count.py:{line}), and in exact mode"
    assert words in refused.output and "Traceback" not in refused.output
    assert not refused.files.steps
