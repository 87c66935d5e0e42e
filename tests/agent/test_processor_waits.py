"""A process that waits for a processor, beside one that sleeps."""

import itertools
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from elaswave_plugin.agent import process_states
from elaswave_plugin.agent.process_states import ProcessorWaits

WATCHED_S = 1.0
BEGUN = "print(flush=True)\n"
COMPUTE = f"import os; os.sched_setaffinity(0, {{0}})\n{BEGUN}while True: sum(range(10000))"
SLEEP = f"import time\n{BEGUN}time.sleep(60)"


def begun(*scripts: str) -> list[subprocess.Popen[str]]:
    """Start processes; returns once each of them does what it is for."""
    command, pipe = [sys.executable, "-c"], subprocess.PIPE
    found = [subprocess.Popen([*command, one], stdout=pipe, text=True) for one in scripts]
    for process in found:
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline()
    return found


def test_who_waits_for_a_processor_is_told_from_who_sleeps() -> None:
    processor = min(os.sched_getaffinity(0))
    compute = COMPUTE.replace("{0}", f"{{{processor}}}")
    processes = begun(compute, compute, compute, compute, SLEEP)
    try:
        begun_s, waits, looked_s = time.monotonic() - WATCHED_S, {}, {}
        for process in processes:
            waits[process.pid], looked_s[process.pid] = ProcessorWaits(), time.monotonic()
            waits[process.pid].since(begun_s, process.pid)
        while time.monotonic() - begun_s < 2 * WATCHED_S:
            # As often as an agent looks, or more: a wait that lasts counts from look to look.
            time.sleep(0.02)
            *computing, asleep = (waits[p.pid].since(begun_s, p.pid) for p in processes)
        # The machine may be busy: each was looked at for longer than that.
        watched_s = [time.monotonic() - looked_s[process.pid] for process in processes]
        since_s = time.monotonic() - begun_s
    finally:
        for process in processes:
            process.kill()
            process.wait()
    # Each of the four runs or waits, and one runs at a time, in no fair turns within a second.
    # A wait in which it was looked at first counts as a whole.
    assert all(0 < one < since_s for one in computing), computing
    assert sum(computing) > 0.9 * (sum(watched_s[:4]) - max(watched_s)), computing
    assert asleep < 0.1
    assert waits[processes[0].pid].since(begun_s, processes[0].pid) == 0.0  # it has ended


def test_a_wait_that_lasts_is_counted_before_it_is_over() -> None:
    """Linux counts it afterwards; beside eight of the highest priority one of the lowest stays."""
    processor = min(os.sched_getaffinity(0))
    compute = COMPUTE.replace("{0}", f"{{{processor}}}")
    starved = compute.replace("; os.sched", "; os.nice(19); os.sched")
    processes = begun(starved, *[compute] * 8)
    waits, pid = ProcessorWaits(), processes[0].pid
    try:
        begun_s = time.monotonic() - WATCHED_S
        found, until_s = [waits.since(begun_s, pid)], time.monotonic() + 2 * WATCHED_S
        while time.monotonic() < until_s:
            time.sleep(0.1)
            found.append(waits.since(begun_s, pid))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    steps = [after - before for before, after in itertools.pairwise(found)]
    # At each look most of the time since the one before, also while it has had no turn.
    assert sum(step > 0.05 for step in steps) > 0.8 * len(steps), found


def test_threads_that_wait_in_turn_wait_as_long_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Python's threads the one that has the lock waits, and the others sleep until it had it."""
    now_s, waited_s = 100.0, {1: 5.0, 2: 0.0}
    monkeypatch.setattr(process_states, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(process_states, "state_of", lambda tid: "S")
    monkeypatch.setattr(
        process_states,
        "_scheduled",
        lambda pid: {
            tid: process_states._Scheduled(0, int(one * 1e9), 0) for tid, one in waited_s.items()
        },
    )
    waits = ProcessorWaits()
    assert waits.since(99.0, 7) == 0.0
    for tid in (1, 2, 1, 2):
        now_s += 0.2
        waited_s[tid] += 0.15
        waited_s[3 - tid] += 0.05
        waits.since(99.0, 7)
    assert waits.since(99.0, 7) == pytest.approx(0.6)
    # From its next progress on, nothing has been waited for.
    assert waits.since(99.8, 7) == 0.0
