"""A worker with gigabytes of memory: the others go on before the kernel has freed it."""

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived
from tests.proofs import Kind, Promise, proves

# Two GiB in small pages, and time for the agent to see how large it is.
LARGE = """
import mmap, os, time
import numpy as np
if os.environ["RANK"] == "1" and os.environ.get("ELASWAVE_INCARNATION", "0") == "0":
    memory = mmap.mmap(-1, 2 << 30)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    np.frombuffer(memory, dtype=np.uint8)[:] = 1
    time.sleep(1.5)
"""


def check_seen(run: Outcome) -> None:
    """The death was told early; that the process is gone, later."""
    (fired,), (late,) = run.events("fault_fired"), run.events("worker_exited_late")
    (gone,) = [one for one in run.events("worker_exited") if one["pid"] == fired["pid"]]
    assert gone["status"] == "killed by SIGKILL, and its memory is being freed"
    seen_s, freed_s = gone["time_s"] - fired["at_s"], late["time_s"] - gone["time_s"]
    print(f"seen after {1e3 * seen_s:.0f} ms, freed {1e3 * freed_s:.0f} ms later")
    assert seen_s < freed_s


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:backward")
def test_its_death_is_seen_early(run: Launch, reference: Reference) -> None:
    # The job goes on for longer than the kernel frees.
    spec = JobSpec(kills=("1@3:backward",), sabotage=LARGE, steps=60)
    killed = run(spec)
    check_equal(killed, reference(spec))
    check_seen(killed)


@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
def test_another_one_takes_its_place_once_it_is_gone(run: Launch, reference: Reference) -> None:
    spec = JobSpec(kills=("1@2:backward",), sabotage=LARGE, respawn=1, awaits=((6, 1),), steps=8)
    back = run(spec)
    check_survived(back)
    check_seen(back)
    assert [(one["slot"], one["incarnation"]) for one in back.events("entered")] == [(1, 1)]
    assert back.trace() == reference(JobSpec(steps=8)).trace()
