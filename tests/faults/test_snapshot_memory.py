"""The memory of snapshots that a job prints at its start is what /proc shows, through a loss."""

import re
from dataclasses import replace

from elaswave_plugin.recovery.state_keeper import CAPSULE_ROOM_BYTES
from tests.faults.conftest import Launch
from tests.faults.harness import JobSpec, Outcome, check_survived
from tests.proofs import Kind, Promise, proves

MIB = 2**20
SEEN = "snapshot_memory_seen"
LOSS = 4
# Whenever all copies of a step are where they have to be, each worker looks at all agents.
LOOK = f"""
import json, os
from elaswave_plugin.recovery.state_keeper import StateKeeper
wait = StateKeeper.await_copies
def memory_of(pid, *kinds):
    found = {{}}
    for number in os.listdir(f"/proc/{{pid}}/fd"):
        path = f"/proc/{{pid}}/fd/{{number}}"
        try:
            name, state = os.readlink(path), os.stat(path)
        except FileNotFoundError:
            continue  # closed meanwhile
        if name.startswith(tuple(f"/memfd:elaswave {{kind}} " for kind in kinds)):
            found[state.st_ino] = 512 * state.st_blocks
    return sum(found.values())
def look(self):
    wait(self)
    events = self._phases._events
    started = [json.loads(one) for one in open(events.path) if '"agent_started"' in one]
    for one in started:
        taken, lost = memory_of(one["pid"], "slot", "copy"), memory_of(one["pid"], "slot 3")
        sizes = {{"taken_bytes": taken, "of_the_lost_bytes": lost}}
        events.emit({SEEN!r}, node=one["node"], step=self._phases.step, **sizes)
StateKeeper.await_copies = look
"""
# A capsule beyond its room in all of them.
LARGE = f"""{LOOK}
from elaswave_plugin.adapters.megatron.framework import MegatronFramework
capsule = MegatronFramework.read_capsule
MegatronFramework.read_capsule = lambda self: capsule(self) + bytes({3 * CAPSULE_ROOM_BYTES})
"""
SPEC = JobSpec(
    nodes=2,
    steps=8,
    dump="last",
    options=("--hidden-size", "256", "--num-layers", "4"),
    kills=(f"3@{LOSS}:backward",),
    sabotage=LOOK,
)


def said(run: Outcome) -> tuple[float, float]:
    """The bytes of a worker, in use and at most, as printed."""
    found = re.search(r"snapshots use ([\d.]+) MiB .* at most ([\d.]+) MiB of host", run.output)
    assert found is not None, run.output
    return float(found[1]) * MIB, float(found[2]) * MIB


def seen_before_a_loss(run: Outcome) -> float:
    """The most that a node had for each worker, once both buffers of all were written to."""
    return max(one["taken_bytes"] for one in run.events(SEEN) if 1 < one["step"] < LOSS) / 2


@proves(Kind.KILL, Promise.GOES_ON, victim="3", moment="4:backward")
def test_what_is_printed_is_what_is_used(run: Launch) -> None:
    survived = run(SPEC)
    check_survived(survived)
    in_use, at_most = said(survived)
    # Two buffers of the own shard, two of the one that is held; a capsule in each.
    before = seen_before_a_loss(survived)
    assert in_use - 0.1 * MIB <= before <= in_use + 4 * CAPSULE_ROOM_BYTES
    # One on the second node is left, and holds the copies of both of the first.
    seen = [(e["taken_bytes"] - e["of_the_lost_bytes"], e["node"]) for e in survived.events(SEEN)]
    most, node = max(seen)
    assert node == 1
    assert most > 1.5 * before
    # Of its six buffers, each has room for a larger capsule, and for a larger record.
    assert at_most - 6 * (CAPSULE_ROOM_BYTES + 2**16) - 0.1 * MIB <= most <= at_most + 0.1 * MIB


@proves(Kind.SABOTAGE, Promise.SEEN)
def test_control_what_is_not_counted_is_seen(run: Launch) -> None:
    larger = run(replace(SPEC, kills=(), steps=LOSS, sabotage=LARGE))
    assert larger.returncode == 0, larger.output[-4000:]
    assert seen_before_a_loss(larger) > said(larger)[0] + 4 * CAPSULE_ROOM_BYTES
