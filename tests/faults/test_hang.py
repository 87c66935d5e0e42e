"""Workers that hang: found, killed by their agents, and the run goes on bit for bit."""

import itertools
import os
from pathlib import Path

import pytest

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.agreement.limits import SAVE_LIMIT_S, STOPPED_LIMIT_S
from elaswave_plugin.errors import EXIT_REQUEUE
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived, hang_of
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# By then three steps have told how long each phase takes.
STEP = 4
WAYS = ("loop", "gil", "stop")
# Every phase meets every slot, and every way to hang meets each of them.
CASES = [
    (slot, phase, WAYS[(slot + index) % len(WAYS)])
    for slot, (index, phase) in itertools.product(
        range(4), enumerate(("data", "forward", "backward"))
    )
]


@proves(Kind.HANG, Promise.EQUAL)
@pytest.mark.parametrize(("slot", "phase", "how"), sampled(CASES))
def test_a_hang_of_any_worker_changes_nothing(
    run: Launch, reference: Reference, slot: int, phase: str, how: str
) -> None:
    spec = JobSpec(kills=(f"{slot}@{STEP}:{phase}:{how}",))
    hung = run(spec)
    check_equal(hung, reference(spec))
    found = hang_of(hung)
    assert (found["slot"], found["phase"], found["step"]) == (slot, phase, STEP)
    assert found["stopped"] == (how == "stop")
    assert set(found["waiting"]) <= set(range(4)) - {slot}


# Before any phase has a median, and where an announced phase may take half an hour.
EVALUATES = ("--eval-interval=2", "--eval-iters=2")
ANYWHERE = [(0, 0, "forward"), (1, 1, "backward"), (2, 4, "evaluation"), (3, 2, "snapshot")]


@proves(Kind.HANG, Promise.EQUAL)
@pytest.mark.parametrize(("slot", "step", "phase"), sampled(ANYWHERE))
def test_a_stopped_worker_is_found_in_any_phase(
    run: Launch, reference: Reference, slot: int, step: int, phase: str
) -> None:
    spec = JobSpec(options=EVALUATES, kills=(f"{slot}@{step}:{phase}:stop",))
    hung = run(spec)
    check_equal(hung, reference(spec))
    (found,) = hung.events("hang_found")
    assert (found["slot"], found["phase"], found["step"]) == (slot, phase, step)
    assert found["stopped"] and found["limit_s"] == STOPPED_LIMIT_S


# A phase of a step that no three steps have measured yet.
START_S = 4.0


@proves(Kind.HANG, Promise.EQUAL)
@pytest.mark.parametrize("how", ["loop", "gil"])
def test_a_hang_in_the_first_steps_is_found(run: Launch, reference: Reference, how: str) -> None:
    spec = JobSpec(
        options=(f"--elaswave-hang-start-timeout-s={START_S:g}",), kills=(f"1@1:forward:{how}",)
    )
    hung = run(spec)
    check_equal(hung, reference(spec))
    found = hang_of(hung)
    assert (found["slot"], found["phase"], found["step"]) == (1, "forward", 1)
    assert found["limit_s"] == START_S


@proves(Kind.HANG, Promise.REQUEUE, victim="0", moment="0:snapshot")
@pytest.mark.parametrize("how", sampled(["loop", "stop"]))
def test_a_hang_before_the_first_seal_ends_the_job(run: Launch, how: str) -> None:
    """Nobody could take its place yet, and all others would wait for ever."""
    options = (f"--elaswave-hang-start-timeout-s={START_S:g}",)
    hung = run(JobSpec(options=options, kills=(f"0@0:snapshot:{how}",)))
    assert hung.returncode == EXIT_REQUEUE
    (found,) = hung.events("hang_found")
    assert (found["slot"], found["phase"]) == (0, "snapshot")
    assert "queue it again" in hung.output, hung.output[-2000:]


# A loop in the fifth pass of an evaluation, whose passes have a limit by then.
IN_A_PASS = """
import os
from elaswave_plugin.recovery.phases import Phases
begin, passes = Phases.begin_pass, []
def hang(self):
    begin(self)
    passes.append(self.step)
    if self._slot == 1 and len(passes) == 5:
        self._events.emit(
            "fault_fired", slot=1, step=self.step, phase="evaluation", pid=os.getpid(), at_s=0.0
        )
        while True:
            pass
Phases.begin_pass = hang
"""


@proves(Kind.HANG, Promise.EQUAL)
def test_a_hang_in_a_pass_of_an_evaluation_is_found(run: Launch, reference: Reference) -> None:
    options = ("--eval-interval=3", "--eval-iters=8")
    hung = run(JobSpec(options=options, sabotage=IN_A_PASS))
    assert len(hung.events("fault_fired")) == 1
    check_equal(hung, reference(JobSpec(options=options)))
    (found,) = hung.events("hang_found")
    assert (found["slot"], found["phase"]) == (1, "evaluation")
    assert found["limit_s"] == ElasticConfig().hang_timeout_s


@proves(Kind.HANG, Promise.EQUAL)
@pytest.mark.slow
def test_a_hang_in_a_save_is_found(run: Launch, reference: Reference, tmp_path: Path) -> None:
    """It neither writes nor computes for a minute."""
    options = (f"--save={tmp_path / 'saved'}", "--save-interval=2")
    hung = run(JobSpec(options=options, kills=("1@2:finalize:gil",)))
    check_survived(hung)
    assert hung.trace() == reference(JobSpec()).trace()
    (found,) = hung.events("hang_found")
    assert (found["slot"], found["phase"], found["limit_s"]) == (1, "save", SAVE_LIMIT_S)


@proves(Kind.HANG, Promise.EQUAL)
def test_a_newcomer_that_is_stopped_is_found(run: Launch, reference: Reference) -> None:
    """Nobody waits for it yet; its slot is for the next one."""
    spec = JobSpec(
        steps=14,
        respawn=10,
        dump="last",
        kills=("2@2:forward", "2.1@0:startup:stop"),
        awaits=((6, 1), (12, 1)),
    )
    hung = run(spec)
    check_equal(hung, reference(spec))
    assert len(hung.events("fault_fired")) == 2
    (found,) = hung.events("hang_found")
    assert found["slot"] == 2 and found["stopped"]
    assert [event["incarnation"] for event in hung.events("entered")] == [2]


# One worker sleeps in the kernel, where no signal wakes it, until its child has ended. The child
# has no other thread: if one had asked for the interpreter's lock, it would be awaited for ever.
HELD = """
import ctypes, os, sys, time
from elaswave_plugin.recovery.phases import Phases
fire, held = Phases.fire, []
def hold(self, name):
    if (self._slot, self.step, name) == (1, 4, "forward") and not held:
        held.append(name)
        self._events.emit(
            "fault_fired", slot=1, step=4, phase=name, pid=os.getpid(), at_s=time.time()
        )
        CLONE_VFORK, SIGCHLD, SYS_CLONE = 0x4000, 17, 56
        libc, interval_s = ctypes.PyDLL(None), sys.getswitchinterval()
        sys.setswitchinterval(1000)
        time.sleep(0.02)  # those that wait for the lock by the old interval have it meanwhile
        if libc.syscall(SYS_CLONE, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0) == 0:
            libc.sleep({seconds})
            libc._exit(0)
        sys.setswitchinterval(interval_s)
    fire(self, name)
Phases.fire = hold
"""
only_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")


@only_x86
@proves(Kind.HANG, Promise.NOBODY_LOST)
def test_a_worker_that_the_kernel_holds_is_named_and_stays(run: Launch) -> None:
    held = run(JobSpec(sabotage=HELD.format(seconds=6)))
    check_nobody_was_lost(held)
    assert len(held.events("fault_fired")) == 1
    (named,) = held.events("held_in_kernel")
    assert (named["slot"], named["step"], named["phase"]) == (1, 4, "forward")
    assert held.output.count("no signal ends (state D)") == 1


@only_x86
@proves(Kind.HANG, Promise.EQUAL)
def test_a_worker_that_the_kernel_holds_goes_after_the_users_limit(
    run: Launch, reference: Reference
) -> None:
    options = ("--elaswave-uninterruptible-timeout-s=4",)
    held = run(JobSpec(options=options, sabotage=HELD.format(seconds=300)))
    assert len(held.events("fault_fired")) == 1
    check_equal(held, reference(JobSpec(options=options)))
    (found,) = held.events("hang_found")
    assert (found["slot"], found["step"]) == (1, 4)
    assert found["limit_s"] == 4.0


@proves(Kind.HANG_IN_RECOVERY, Promise.EQUAL)
def test_a_hang_in_a_recovery_is_found(run: Launch, reference: Reference) -> None:
    """One worker dies, and another one hangs while it takes part in the recovery."""
    options = ("--elaswave-transfer-timeout-s=3",)
    spec = JobSpec(options=options, kills=(f"2@{STEP}:backward", f"1@{STEP}:rebind:gil"))
    hung = run(spec)
    check_equal(hung, reference(spec))
    (found,) = hung.events("hang_found")
    assert (found["slot"], found["phase"], found["limit_s"]) == (1, "rebind", 3.0)


@proves(Kind.HANG, Promise.EQUAL)
@pytest.mark.slow
def test_two_workers_that_hang_at_once(run: Launch, reference: Reference) -> None:
    spec = JobSpec(kills=(f"0@{STEP}:forward:loop", f"3@{STEP}:forward:gil"))
    hung = run(spec)
    check_equal(hung, reference(spec))
    assert sorted(event["slot"] for event in hung.events("hang_found")) == [0, 3]


@proves(Kind.RETURN, Promise.EQUAL, victim="2.1", moment="10:forward")
def test_a_worker_that_hung_comes_back(run: Launch, reference: Reference) -> None:
    """Its next trainer has a page of its own, and may hang as well."""
    spec = JobSpec(
        steps=14,
        respawn=10,
        dump="last",
        kills=(f"2@{STEP}:backward:gil", "2.1@10:forward:stop"),
        awaits=((6, 1), (12, 2)),
    )
    hung = run(spec)
    check_equal(hung, reference(spec))
    assert [(e["slot"], e["step"]) for e in hung.events("hang_found")] == [(2, STEP), (2, 10)]
    assert [event["incarnation"] for event in hung.events("entered")] == [1, 2]
    assert sorted(hung.events("view_committed")[-1]["ranks"]) == [0, 1, 2, 3]


# Workers 1 and 2 call two collectives in different orders: each waits for the other.
DEADLOCK = """
import torch, torch.distributed as dist
from elaswave_plugin.recovery.phases import Phases
enter, groups = Phases.enter, []
def mixed_up(self, phase):
    if not groups and dist.is_initialized():
        groups.extend(dist.new_group([1, 2]) for _ in range(2))
    if (self.step, phase) == (4, "optimizer") and self._slot in (1, 2) and not self.replaying:
        self._events.emit("fault_fired", slot=self._slot, step=4, phase=phase, pid=0, at_s=0.0)
        first, second = groups if self._slot == 1 else groups[::-1]
        one, other = torch.ones(1), torch.ones(1)
        if self._slot == 2:
            dist.barrier(group=dist.group.WORLD)
        dist.all_reduce(one, group=first)
        dist.all_reduce(other, group=second)
    enter(self, phase)
Phases.enter = mixed_up
"""


@proves(Kind.HANG, Promise.CLOSE)
def test_of_a_deadlock_one_worker_has_to_go(run: Launch, reference: Reference) -> None:
    spec = JobSpec(sabotage=DEADLOCK)
    hung = run(spec)
    check_survived(hung)
    assert {event["slot"] for event in hung.events("fault_fired")} == {1, 2}
    (found,) = hung.events("hang_found")
    assert found["in_circle"]
    assert found["slot"] in (1, 2)
    assert hung.trace() == reference(JobSpec()).trace()


def check_nobody_was_lost(outcome: Outcome) -> None:
    check_survived(outcome)
    assert not outcome.events("hang_found")
    assert len(outcome.events("view_committed")) == 1


# One worker saves, evaluates and loads for longer than a hang may take, and says so.
ANNOUNCED = """
import time
from elaswave_plugin import phase
from elaswave_plugin.recovery.phases import Phases
fire, places = Phases.fire, [(4, "data"), (5, "forward")]  # of one micro-batch each
def slowly(self, name):
    if self._slot == 1 and (self.step, name) in places:
        places.remove((self.step, name))
        with phase("download"):
            self._events.emit("slow", slot=1, step=self.step)
            time.sleep(3)
    fire(self, name)
Phases.fire = slowly
"""


@proves(Kind.NOISE, Promise.NOBODY_LOST)
def test_an_announced_phase_is_waited_for_by_all(run: Launch) -> None:
    slow = run(JobSpec(steps=7, sabotage=ANNOUNCED))
    check_nobody_was_lost(slow)
    assert {event["step"] for event in slow.events("slow")} == {4, 5}


# The same without a word, for longer than any limit. A negative control.
SILENT = (
    ANNOUNCED.replace('phase("download")', "contextlib.nullcontext()")
    .replace("import time", "import contextlib, time")
    .replace("sleep(3)", "sleep(300)")
)


@proves(Kind.HANG, Promise.GOES_ON)
def test_the_same_without_a_word_is_a_hang(run: Launch, reference: Reference) -> None:
    hung = run(JobSpec(steps=7, sabotage=SILENT))
    check_survived(hung)
    (found,) = hung.events("hang_found")
    assert (found["slot"], found["step"], found["phase"]) == (1, 4, "data")
    assert hung.trace() == reference(JobSpec(steps=7)).trace()


# The script's own work between two steps, on one worker: nobody knows how long that takes.
BETWEEN = """
import time
from elaswave_plugin.loops.guarded_steps import GuardedSteps
complete = GuardedSteps.complete
def slowly(self, report):
    complete(self, report)
    if self.worker.slot == 0 and self.worker.completed == 4:
        self.worker.events.emit("slow", slot=0)
        time.sleep(4)
GuardedSteps.complete = slowly
"""


@proves(Kind.NOISE, Promise.NOBODY_LOST)
def test_a_script_may_be_busy_between_two_steps(run: Launch) -> None:
    slow = run(JobSpec(sabotage=BETWEEN))
    check_nobody_was_lost(slow)
    assert len(slow.events("slow")) == 1


# The first steps are slow on one worker, as where it compiles.
COMPILING = """
import time
from elaswave_plugin.recovery.phases import Phases
fire = Phases.fire
def slowly(self, name):
    if self._slot == 2 and name == "forward" and self.step in (0, 2):
        self._events.emit("slow", slot=2, step=self.step)
        time.sleep(3)
    fire(self, name)
Phases.fire = slowly
"""


@proves(Kind.NOISE, Promise.NOBODY_LOST)
@pytest.mark.slow
def test_the_first_steps_may_be_slow(run: Launch) -> None:
    slow = run(JobSpec(sabotage=COMPILING))
    check_nobody_was_lost(slow)
    assert {event["step"] for event in slow.events("slow")} == {0, 2}


# One worker compiles in step 4, for longer than a hang may take, and nobody has announced it.
COMPILER = """
import time, torch
from elaswave_plugin.recovery.phases import Phases
fire, places = Phases.fire, [(4, "forward")]
def compile_slowly(module, inputs):
    time.sleep(6)
    return module.forward
def slowly(self, name):
    if self._slot == 1 and (self.step, name) in places:
        places.remove((self.step, name))
        self._events.emit("slow", slot=1, step=self.step)
        torch.compile(lambda x: x + 1, backend=compile_slowly)(torch.ones(1))
    fire(self, name)
Phases.fire = slowly
"""


@proves(Kind.NOISE, Promise.NOBODY_LOST)
def test_a_compilation_in_any_step_is_waited_for(run: Launch) -> None:
    slow = run(JobSpec(sabotage=COMPILER))
    check_nobody_was_lost(slow)
    assert len(slow.events("slow")) == 1
