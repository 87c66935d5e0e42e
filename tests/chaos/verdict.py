"""Judges what a scenario led to: each event happened, and what is promised about them all held."""

import re

from elaswave_plugin.errors import EXIT_CONFIGURATION, EXIT_REQUEUE
from elaswave_plugin.observer.observer import audit_samples, disagreeing_steps, losses_of
from elaswave_plugin.observer.observer import survivor_pids_unchanged as pids_unchanged
from elaswave_plugin.observer.run import counted_steps
from elaswave_plugin.tracking.events import STEPS_FILE
from tests.chaos.draws import HANGS
from tests.chaos.runs import Played
from tests.chaos.strikes import DEADLY
from tests.deepspeed.harness import FP32_BOUND, EngineSpec, rates
from tests.faults.harness import Outcome, check_written, max_relative_difference

# A stopped worker is found within 3 s: 2 s of standing still, and this.
SLACK_S = 1.0
STOPPED = re.compile(
    r"state was lost with all its copies|which is no majority|left for \d+ stages"
    r"|no node with the training's state|has no worker left"
)


def judge(played: Played, reference: Outcome) -> None:
    """Raise AssertionError, which says what did not hold."""
    run = played.outcome
    assert None not in played.codes, "it did not end in time"
    assert not run.orphans, f"processes are left: {run.orphans}"
    assert not played.shared_memory_left, f"left in /dev/shm: {played.shared_memory_left}"
    told = run.directory / STEPS_FILE
    assert told.is_file(), f"it did not begin: {run.output[-2000:]}"
    fired = {event["number"]: event for event in run.events("fault_fired")}
    missing = [str(e) for e in played.scenario.events if e.number not in fired]
    assert not missing, f"did not happen: {missing}; exit codes {played.codes}"
    check_written(run)
    assert "Traceback" not in run.output, run.output[run.output.index("Traceback") :][:2000]
    if any(event["how"] == "ruin" for event in fired.values()):
        _check_ruined(played, reference)
    else:
        _check_survived(played, reference)


def judge_by_twin(played: Played, twin: Outcome | None) -> None:
    """In fast mode it equals its twin bit for bit, where it has one; raises AssertionError."""
    if twin is not None:
        ours, theirs = played.outcome.trace(), twin.trace()
        differ = [step for step in theirs if ours[step] != theirs[step]]
        assert not differ, f"not bit-equal to {twin.spec.changes} in steps {differ}"


def _check_survived(played: Played, reference: Outcome) -> None:
    run = played.outcome
    gone = _lost_nodes(played) | _came_too_late(played)
    codes = [code for number, code in enumerate(played.codes) if number not in gone]
    assert not any(codes), f"exit codes {played.codes}: {run.output[-2000:]}"
    _check_losses(run)
    _check_detections(run)
    assert not disagreeing_steps(run.files), disagreeing_steps(run.files)
    views = [set(event["ranks"]) for event in run.events("view_committed")]
    assert not set.intersection(*views) or pids_unchanged(run.files), "a survivor's pid changed"
    lost_and_repeated = audit_samples(run.files, batches=run.spec.batches)
    assert lost_and_repeated == (0, 0), f"samples lost and repeated: {lost_and_repeated}"
    assert len(run.trace()) == run.spec.steps
    if isinstance(run.spec, EngineSpec):
        difference = max_relative_difference(run, reference)
        assert difference <= FP32_BOUND, f"losses differ by {difference:.2e}"
        assert rates(run) == rates(reference)
    else:
        ours, theirs = run.trace(), reference.trace()
        differ = [step for step in theirs if ours[step] != theirs[step]]
        assert not differ, f"not bit-equal in steps {differ}"


def _check_losses(run: Outcome) -> None:
    """Check that the lost workers were struck: none failed by itself, none was given up alive."""
    struck = {e["pid"] for e in run.events("fault_fired") if e["how"] in DEADLY}
    exits = run.events("worker_exited")
    failed = [e for e in exits if e["pid"] not in struck and e["status"] != "exit code 0"]
    # What a killed node's workers ended of, nobody has told.
    assert not failed, f"lost without a fault: {failed}"
    ended = {e["pid"] for e in exits}
    alive = {e["pid"] for e in run.events("fault_fired") if e["how"] in DEADLY[:1]} - ended
    assert not alive, f"struck, and nobody saw it end: {alive}"


def _check_detections(run: Outcome) -> None:
    """Check that each hang was found within its limit, and what else the machine took besides."""
    found = run.events("hang_found")
    for hang in (e for e in run.events("fault_fired") if e["how"] in HANGS):
        after_s = [(e["time_s"] - hang["at_s"], e) for e in found if e["slot"] == hang["slot"]]
        seen = [(took_s, e) for took_s, e in after_s if took_s > 0]
        assert seen, f"nobody saw it hang: {hang}"
        took_s, first = min(seen, key=lambda one: one[0])
        limit_s = first["limit_s"] + first["waited_s"] + SLACK_S
        assert took_s <= limit_s, f"found after {took_s:.1f} s, limit {limit_s:.1f} s: {hang}"


def _lost_nodes(played: Played) -> set[int]:
    """Launchers that were killed, by their numbers: those of the nodes first, then joiners."""
    run = played.outcome
    # Launchers that start at once write in any order.
    begun = sorted(run.events("job_started"), key=lambda one: int(one["node"]))
    begun += run.events("node_joins")
    numbers = {one["launcher_pid"]: number for number, one in enumerate(begun)}
    by_pid = {one["pid"]: one["node"] for one in run.events("worker_started")}
    homes = {one["node"]: one["guardian_pid"] for one in run.events("agent_started")}
    struck = [e for e in run.events("fault_fired") if e["how"] == "node"]
    return {numbers[homes[by_pid[e["pid"]]]] for e in struck}


def _came_too_late(played: Played) -> set[int]:
    """Joiners that were sent away in words: a standby or another joiner has taken their place."""
    run = played.outcome
    joiners = range(run.spec.nodes, len(played.codes))
    found: list[int] = []
    for code, said in (
        (EXIT_REQUEUE, r"does not join: others have taken the free slots"),
        (EXIT_CONFIGURATION, r"and 0 of the job's \d+ slots are free"),
    ):
        sent_away = [number for number in joiners if played.codes[number] == code]
        found += sent_away[: len(re.findall(said, run.output))]
    return set(found[: len(run.events("node_admitted"))])


def _check_ruined(played: Played, reference: Outcome) -> None:
    """All but one node are gone: it ends in words, and what was done until then is right.

    Unless that one holds the memory of the others since an earlier view: then the job goes on.
    """
    run = played.outcome
    # A node that was drained before has ended well, whatever became of the job.
    if STOPPED.search(run.output):
        assert 1 in played.codes, f"exit codes {played.codes}"
    else:
        assert 0 in played.codes, f"exit codes {played.codes}: {run.output[-2000:]}"
        assert len(counted_steps(run.files)) == run.spec.steps
    assert counted_steps(run.files)
    ours, theirs = losses_of(run.files), losses_of(reference.files)
    bound = FP32_BOUND if isinstance(run.spec, EngineSpec) else 0.0
    differ = [step for step in ours if abs(ours[step] - theirs[step]) > bound * abs(theirs[step])]
    assert not differ, f"losses differ in steps {differ}"
