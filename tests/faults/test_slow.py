"""A worker that gets slow is named, gets less to do, and gets it back; the run is what it was."""

import re
from dataclasses import replace

from elaswave_plugin.core.planner.payback import STEPS_TO_JUDGE
from elaswave_plugin.core.planner.slow import SHORTEST
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.hybrid_matrix import PP2_DP2
from tests.faults.test_clocks import TINY
from tests.faults.test_layer_moves import cuts_after
from tests.proofs import Kind, Promise, proves

SLOW, SLOW_FROM, LEVEL_FROM = 1, 2, 16
# A step's pace is known in the next one.
NAMED_WITHIN = SHORTEST + 1
DP2 = JobSpec(nproc=2, steps=52, options=(*TINY, "--num-layers=1"))
PP2 = replace(
    PP2_DP2, steps=50, global_batch=16, options=(*PP2_DP2.options, *TINY, "--num-layers=6")
)


def emulated(layer_s: float, factor: float, *, until: int = LEVEL_FROM) -> str:
    """Layers take ``layer_s``, those of one worker ``factor`` times as long for some steps.

    They sleep for what is left of it, so that a busy processor is no slow worker.
    """
    return f"""
import os
from benchmarks.emulated_compute import Owed, take
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from megatron.core.transformer.transformer_layer import TransformerLayer
begin_step, forward = GuardedSteps.begin, TransformerLayer.forward
now, owed = [0], Owed()
def note(self):
    begin_step(self)
    now[:] = [self.worker.completed]
def slowly(self, *args, **kwargs):
    is_slow = os.environ["ELASWAVE_SLOT"] == "{SLOW}" and {SLOW_FROM} <= now[0] < {until}
    seconds = {layer_s} * ({factor} if is_slow else 1)
    return take(seconds, owed, forward, self, *args, **kwargs)
GuardedSteps.begin, TransformerLayer.forward = note, slowly
"""


def counts(run: Outcome, slot: int) -> dict[int, int]:
    """Count the micro-batches that a worker ran, by step."""
    mine = (line for line in run.files.steps if line["slot"] == slot)
    return {line["step"]: line["num_microbatches"] for line in mine}


def step_seconds(run: Outcome) -> dict[int, float]:
    """Return the seconds of each step on its slowest worker."""
    found: dict[int, float] = {}
    for line in run.files.steps:
        found[line["step"]] = max(line["step_s"], found.get(line["step"], 0.0))
    return found


def check_less_work_and_back(run: Outcome) -> tuple[int, int]:
    """Named within nine steps, less to do between two steps, and all of it back; both steps."""
    named, over = (run.events(kind) for kind in ("slow_worker", "slow_worker_over"))
    assert {event["slot"] for event in (*named, *over)} == {SLOW}
    assert SLOW_FROM < named[0]["step"] <= SLOW_FROM + NAMED_WITHIN and named[0]["ratio"] > 1.3
    words = r"takes \d+\.\d\dx as long for a layer as worker 0, which has the same ones, in \d+ "
    assert re.match(words, named[0]["evidence"])
    # On a busy machine it may be named anew in between, for another ratio.
    _, less, *_, back = run.events("view_committed")
    assert less["reason"].startswith(f"less work for what is slow: worker {SLOW} (")
    assert back["reason"].startswith("no worker is slow any more")
    begins = {event["epoch"]: event["restored_step"] for event in run.events("recovered")}
    # Nothing was computed twice: every step has one attempt.
    attempts = {(line["step"], line["epoch"]) for line in run.files.ledger}
    assert len(attempts) == run.spec.steps
    assert "dealt again: state of step " in run.output and "recovered: " not in run.output
    return begins[less["epoch"]], begins[back["epoch"]]


def check_shares_and_seconds(run: Outcome, begins: int, ends: int) -> None:
    """Half of the micro-batches each, but for the slow one in between, when steps are shorter."""
    mine, peers, total = counts(run, SLOW), counts(run, 0), run.spec.global_batch
    for step in range(run.spec.steps):
        half = 2 * mine[step] == total
        assert mine[step] + peers[step] == total
        assert half != (begins <= step < ends) and 2 * mine[step] <= total
    seconds = step_seconds(run)
    relieved = min(seconds[step] for step in range(begins + 1, LEVEL_FROM))
    slow = min(seconds[step] for step in range(SLOW_FROM, begins))
    print(f"step while slow {slow:.3f} s, with less to do {relieved:.3f} s")
    assert relieved < 0.8 * slow


@proves(Kind.SLOW, Promise.EQUAL)
def test_a_slow_worker_gets_less_to_do_and_gets_it_back(run: Launch, reference: Reference) -> None:
    slowed = run(replace(DP2, slow_workers="act", sabotage=emulated(0.016, 3.0)))
    check_equal(slowed, reference(DP2))
    check_shares_and_seconds(slowed, *check_less_work_and_back(slowed))


# Whoever runs what another one gave away makes the step longer than it was.
COSTLY = """
import time
complete_step = GuardedSteps.complete
def complete(self, report):
    if not self.worker.dataflow.is_healthy:
        time.sleep(0.5)
    complete_step(self, report)
GuardedSteps.complete = complete
"""


@proves(Kind.SLOW, Promise.EQUAL)
def test_work_that_made_steps_longer_is_taken_back(run: Launch, reference: Reference) -> None:
    steps = 40
    costly = emulated(0.016, 3.0, until=steps) + COSTLY
    slowed = run(replace(DP2, steps=steps, slow_workers="act", sabotage=costly))
    check_equal(slowed, reference(replace(DP2, steps=steps)))
    # It stays slow, and is said to be.
    assert slowed.events("slow_worker") and not slowed.events("slow_worker_over")
    _, less, back = slowed.events("view_committed")
    assert less["reason"].startswith(f"less work for what is slow: worker {SLOW} (")
    said = r"less work for what is slow did not pay: steps take (\S+) s instead of (\S+) s"
    told = re.match(said, back["reason"])
    assert told is not None and float(told[1]) > float(told[2])
    begins = {event["epoch"]: event["restored_step"] for event in slowed.events("recovered")}
    relieved = range(begins[less["epoch"]], begins[back["epoch"]])
    assert len(relieved) >= STEPS_TO_JUDGE
    mine, half = counts(slowed, SLOW), DP2.global_batch // 2
    assert {step for step, count in mine.items() if count != half} == set(relieved)


@proves(Kind.SLOW, Promise.EQUAL)
def test_the_stage_of_a_slow_worker_has_fewer_layers(run: Launch, reference: Reference) -> None:
    slowed = run(replace(PP2, slow_workers="act", sabotage=emulated(0.01, 5.0)))
    check_equal(slowed, reference(PP2))
    check_shares_and_seconds(slowed, *check_less_work_and_back(slowed))
    moved, *_, back = cuts_after(slowed)
    assert moved == [0, 2, 6] and back == [0, 3, 6]
    # The other stage has nobody that is slow.
    assert {*counts(slowed, 2).values(), *counts(slowed, 3).values()} == {PP2.global_batch // 2}


@proves(Kind.SLOW, Promise.EQUAL)
def test_a_slow_worker_is_only_named_where_that_was_asked_for(
    run: Launch, reference: Reference
) -> None:
    spec = replace(DP2, steps=14)
    slowed = run(replace(spec, sabotage=emulated(0.016, 3.0)))
    check_equal(slowed, reference(spec))
    (named,) = slowed.events("slow_worker")
    assert named["slot"] == SLOW and SLOW_FROM < named["step"] <= SLOW_FROM + NAMED_WITHIN
    assert len(slowed.events("view_committed")) == 1
    assert set(counts(slowed, SLOW).values()) == {4}


@proves(Kind.RETURN, Promise.EQUAL, victim="2", moment="18:backward")
def test_who_comes_back_learns_who_is_slow(run: Launch, reference: Reference) -> None:
    spec = JobSpec(nproc=3, steps=32, global_batch=12, options=(*TINY, "--num-layers=1"))
    slow = {"slow_workers": "act", "sabotage": emulated(0.016, 3.0, until=spec.steps)}
    back = {"respawn": 1, "kills": ("2@18:backward",), "awaits": ((24, 1),)}
    slowed = run(replace(spec, **slow, **back))
    check_equal(slowed, reference(spec))
    assert {event["slot"] for event in slowed.events("slow_worker")} == {SLOW}
    assert not slowed.events("slow_worker_over")
    reasons = [event["reason"] for event in slowed.events("view_committed")]
    assert "less work for what is slow" in reasons[1]
    assert any("worker 2 (node 0) joins as 2.1" in reason for reason in reasons)
    mine, peers = counts(slowed, SLOW), counts(slowed, 0)
    assert {mine[step] for step in range(spec.steps)} >= {4}
    # Also without worker 2, and with it again.
    assert all(mine[step] < peers[step] for step in range(18, spec.steps))
