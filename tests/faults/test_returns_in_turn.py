"""Lost workers come back one after the other, each while others are still missing."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal, failed_by_themselves
from tests.faults.hybrid_matrix import PP2_DP2, PP2_VPP2_DP2, TP2_PP2_DP2
from tests.faults.test_join import IN_TURN, entered, last_ranks
from tests.proofs import Kind, Promise, proves

# The evaluation after so many steps waits until a newcomer asks to be let in.
IN_EVALUATION = """
import json, os, time
from elaswave_plugin.recovery.phases import Phases
fire_now = Phases.fire
def fire_and_wait(self, phase):
    if phase == "evaluation" and self.step == {step} and os.environ["ELASWAVE_INCARNATION"] == "0":
        self._events.emit("replacement_awaited", number=1)
        deadline_s = time.monotonic() + 60
        while not any('"worker_ready"' in line for line in open(self._events.path)):
            self._check()
            assert time.monotonic() < deadline_s, "no replacement came"
            time.sleep(0.02)
    fire_now(self, phase)
Phases.fire = fire_and_wait
"""


def in_turn(spec: JobSpec, order: tuple[int, ...]) -> JobSpec:
    """The job that loses these workers in its fourth step, and gets them back in this order."""
    return replace(
        spec,
        steps=6 + len(order),
        dump="last",
        respawn=10,
        kills=tuple(f"{slot}@3:backward" for slot in order),
        awaits=tuple((4 + number, number) for number in range(1, 1 + len(order))),
        sabotage=IN_TURN.format(order=list(order)),
    )


@proves(Kind.RETURN, Promise.EQUAL, victim="6 0 4", moment="3:backward")
def test_who_enters_without_a_place_may_keep_what_its_first_step_asks(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """In its place it runs the schedule of the job, and as many micro-batches as it has to."""
    check_in_turn(run, reference, TP2_PP2_DP2, (6, 0, 4), tmp_path)


@proves(Kind.RETURN, Promise.EQUAL, moment="3:backward")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "order"),
    [
        (TP2_PP2_DP2, (3, 7, 1)),
        (TP2_PP2_DP2, (0, 1, 2)),
        (JobSpec(), (2, 0, 1)),
        (PP2_DP2, (3, 0)),
        (PP2_VPP2_DP2, (1, 2)),
    ],
    ids=["of one tp position", "of one stage", "data parallel", "pipeline", "interleaved"],
)
def test_in_any_layout(
    run: Launch, reference: Reference, tmp_path: Path, base: JobSpec, order: tuple[int, ...]
) -> None:
    check_in_turn(run, reference, base, order, tmp_path)


def check_in_turn(
    run: Launch, reference: Reference, base: JobSpec, order: tuple[int, ...], folder: Path
) -> None:
    """Every worker is in again, with another life, and nobody else was lost."""
    script = own_scripts.write(folder, *own_scripts.KEEPS_WHAT_IT_ASKED)
    spec = in_turn(replace(base, script=script), order)
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert not failed_by_themselves(survived)
    assert entered(survived) == [(slot, 1) for slot in order]
    assert sorted(last_ranks(survived)) == list(range(spec.nproc))
