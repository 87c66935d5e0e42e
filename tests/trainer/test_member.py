"""The trainer's end of the control link, against a hand-driven agent."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elaswave_plugin.core.agreement.limits import ANNOUNCED_LIMIT_S
from elaswave_plugin.core.agreement.messages import (
    Ballot,
    Committed,
    Deliver,
    Proposal,
    pack_payload,
)
from elaswave_plugin.core.agreement.view import FailureEvent, MembershipView, first_view, next_view
from elaswave_plugin.core.codec import to_json
from elaswave_plugin.core.layout.worker_facts import WorkerFacts
from elaswave_plugin.errors import AgreementError, ConfigurationError, EpochChanged, JobStopped
from elaswave_plugin.ipc.reactor import is_readable
from elaswave_plugin.ipc.wire import encode, receive_frame, send_frame
from elaswave_plugin.trainer.member import Member
from tests.agent.jobs import environment
from tests.core.over_the_wire import as_json
from tests.core.sealed import sealed
from tests.idle import Deadline
from tests.job_secret import SECRET

LONG_S = 10.0
NO_FRAME = b"\xff" * 4  # a length that no frame has
SHORT_S = 0.05
FACTS = WorkerFacts(address="x")
SEALED = sealed(0, 4)
TWICE = {"epoch": 1, "ranks": [1, 1], "incarnations": [0, 0], "nodes": [0, 0], "reason": ""}
BALLOT = {"term": 0, "leader": 0, "epoch": 1}


def deliver(view: dict[str, Any] | None = None, payload: str = "{}") -> dict[str, Any]:
    """A commit of a view, in JSON."""
    proposal = {"ballot": BALLOT, "view": {**TWICE, "ranks": [0, 1]} if view is None else view}
    committed = {"t": "committed", "proposal": proposal, "payload": payload}
    return {"t": "deliver", "committed": committed, "skipped": []}


class Agent:
    """The other end of a member's control link."""

    def __init__(self) -> None:
        self.within_s = LONG_S
        self.sock, theirs = socket.socketpair()
        self.dialled: list[int] = []
        self._open = [theirs]
        self.member = Member(
            dial=self.dial, secret=SECRET, slot=1, incarnation=0, snapshot_fds=(-1, -1)
        )
        self.heard: list[dict[str, Any]] = []
        self.rings: list[tuple[int, str]] = []
        self.rang = threading.Event()
        self.member.start(self.ring)

    def dial(self, epoch: int) -> socket.socket:
        self.dialled.append(epoch)
        if not self._open:
            raise ConnectionRefusedError("nobody listens")
        return self._open.pop()

    def ring(self, epoch: int, reason: str) -> None:
        self.rings.append((epoch, reason))
        self.rang.set()

    def propose(
        self,
        epoch: int,
        *,
        boundary: bool = False,
        before_step: int | None = None,
        rings: bool = True,
    ) -> None:
        self.rang.clear()
        self.send_proposal(epoch, boundary=boundary, before_step=before_step)
        if rings:
            assert self.rang.wait(LONG_S)
        else:
            # Once the frame that follows it has been taken in, it has been too.
            mark = {"after": epoch, "before_step": before_step}
            detached = {"t": "start_detached", "view": to_json(view_of(9))}
            send_frame(self.sock, {**detached, "job_constants": mark})
            deadline = Deadline(LONG_S)
            while (detached := self.member.join(FACTS, LONG_S)) and detached.job_constants != mark:
                assert deadline.left_s()
                self.hear()  # where nobody reads what it says, it stops at a full buffer

    def send_proposal(
        self, epoch: int, *, boundary: bool = False, before_step: int | None = None
    ) -> None:
        frame = {
            "t": "ring",
            "ballot": {**BALLOT, "epoch": epoch},
            "reason": "r",
            "within_s": self.within_s,
            "boundary": boundary,
            "before_step": before_step,
        }
        send_frame(self.sock, frame)

    def commit(self, *path: MembershipView) -> None:
        send_frame(self.sock, commit_of(*path))

    def copied(self, *, step: int, epoch: int, slot: int) -> None:
        send_frame(self.sock, {"t": "copied", "step": step, "epoch": epoch, "slot": slot})

    def next(self) -> dict[str, Any]:
        return receive_frame(self.sock, LONG_S)

    def hear(self) -> list[dict[str, Any]]:
        """All that it has said since it joined, but for joining."""
        while is_readable(self.sock, 0):
            self.heard.append(self.next())
        return [frame for frame in self.heard if frame["t"] != "join"]

    def silent(self) -> bool:
        """Return whether the member says nothing for as long as it may take to answer."""
        return not is_readable(self.sock, self.within_s)


def commit_of(*path: MembershipView) -> Deliver:
    payload = pack_payload({0: to_json(FACTS)}, [to_json(SEALED)])
    ballot = Ballot(term=0, leader=0, epoch=path[-1].epoch)
    proposal = Proposal(ballot=ballot, view=path[-1])
    committed = Committed(proposal=proposal, payload=payload)
    return Deliver(committed=committed, skipped=path[:-1])


def view_of(epoch: int) -> MembershipView:
    first = replace(first_view((0, 0, 0)), epoch=epoch - 1)
    gone = FailureEvent(kind="exit", slot=2, detected_at_s=0.0, evidence="e")
    view = next_view(first, [gone], 0.0)
    assert view is not None
    return view


@pytest.fixture
def agent() -> Iterator[Agent]:
    end = Agent()
    yield end
    end.sock.close()


def test_joining_reports_facts_and_returns_the_first_commit(agent: Agent) -> None:
    agent.commit(view_of(1))
    commit = agent.member.join(FACTS, LONG_S)
    assert agent.next() == {"t": "join", "facts": {"address": "x"}, "respawn": 0}
    assert (commit.view, commit.facts) == (view_of(1), {0: FACTS})
    assert (commit.inventory, commit.path) == ([SEALED], (view_of(1),))
    agent.member.check()


def test_joining_gives_up_in_time(agent: Agent) -> None:
    with pytest.raises(AgreementError, match=r"worker 1 did not get the first view, 0.05 s after"):
        agent.member.join(FACTS, SHORT_S)


def test_a_proposal_rings_at_once_and_stays_open_until_its_commit(agent: Agent) -> None:
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    agent.propose(2)
    assert agent.rings == [(2, "r")]
    for _ in range(2):
        with pytest.raises(EpochChanged) as raised:
            agent.member.check()
        assert (raised.value.epoch, raised.value.reason) == (2, "r")
    agent.commit(view_of(2))
    assert agent.member.quiesce(WorkerFacts(address="x", step=3), LONG_S).view == view_of(2)
    agent.member.check()
    assert agent.next()["t"] == "join"
    assert agent.next() == {"t": "quiesced", "epoch": 2, "facts": {"address": "x", "step": 3}}


def test_a_proposal_between_steps_waits_for_the_next_one(agent: Agent) -> None:
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    agent.member.begin_step(4)
    agent.propose(2, boundary=True, rings=False)
    agent.member.check()
    agent.propose(2, boundary=True, before_step=6, rings=False)
    agent.member.begin_step(5)
    with pytest.raises(EpochChanged) as raised:
        agent.member.begin_step(6)
    assert (raised.value.epoch, agent.rings) == (2, [])
    assert agent.hear() == [{"t": "begun", "ballot": {**BALLOT, "epoch": 2}, "step": 4}]
    agent.commit(view_of(2))
    assert agent.member.quiesce(FACTS, LONG_S).view == view_of(2)
    agent.member.begin_step(6)


def test_a_step_does_not_begin_before_it_is_known_where_all_stop(agent: Agent) -> None:
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    agent.member.begin_step(4)
    agent.propose(2, boundary=True, rings=False)
    begun = threading.Event()

    def begin() -> None:
        agent.member.begin_step(5)
        begun.set()

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    assert not begun.wait(SHORT_S)
    agent.propose(2, boundary=True, before_step=6, rings=False)
    assert begun.wait(LONG_S)
    thread.join(LONG_S)


@pytest.mark.parametrize(("begun", "rings"), [(4, False), (5, True)])
def test_who_has_begun_the_step_that_others_stop_before_is_interrupted(
    agent: Agent, begun: int, rings: bool
) -> None:
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    agent.member.begin_step(begun)
    agent.propose(2, boundary=True, rings=False)
    agent.propose(2, boundary=True, before_step=5, rings=rings)
    assert agent.rings == ([(2, "r")] if rings else [])


def test_a_failure_does_not_wait_for_the_next_step(agent: Agent) -> None:
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    agent.member.begin_step(4)
    agent.propose(2, boundary=True, rings=False)
    agent.propose(3)
    with pytest.raises(EpochChanged, match="3"):
        agent.member.check()
    agent.commit(view_of(3))
    agent.member.quiesce(FACTS, LONG_S)
    agent.member.begin_step(4)


def test_what_is_to_be_completed_first_has_half_of_the_time(agent: Agent) -> None:
    agent.within_s = 2.0
    agent.member.go_on(True)
    agent.propose(2)
    agent.member.check()
    time.sleep(agent.within_s / 2)
    with pytest.raises(EpochChanged):
        agent.member.check()


def test_a_newer_proposal_ends_the_wait_for_a_commit(agent: Agent) -> None:
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    agent.propose(2)
    raised: list[int] = []

    def wait() -> None:
        try:
            agent.member.quiesce(FACTS, LONG_S)
        except EpochChanged as changed:
            raised.append(changed.epoch)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert [agent.next()["t"] for _ in range(2)] == ["join", "quiesced"]
    agent.propose(3)
    waiting.join(LONG_S)
    assert raised == [3]


def test_quiescing_before_the_proposal_waits_for_it(agent: Agent) -> None:
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    with pytest.raises(AgreementError, match="a proposal of the next view within"):
        agent.member.quiesce(FACTS, SHORT_S)
    agent.propose(2)
    with pytest.raises(AgreementError, match="the commit of view 2 within"):
        agent.member.quiesce(FACTS, SHORT_S)


def test_a_commit_that_was_not_taken_stays_in_the_path(agent: Agent) -> None:
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    agent.propose(2)
    agent.commit(view_of(2))
    agent.propose(3)
    agent.commit(view_of(3), view_of(4))
    agent.propose(5)  # behind the commits on the same link: they have arrived
    commit = agent.member.quiesce(FACTS, LONG_S)
    assert [view.epoch for view in commit.path] == [2, 3, 4]
    assert commit.view.epoch == 4
    with pytest.raises(EpochChanged):
        agent.member.check()


def test_a_commit_that_was_not_taken_yet_ends_its_proposal(agent: Agent) -> None:
    """Or this worker would leave a recovery in which the others, who took it, wait for it."""
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    agent.member.begin_step(4)
    agent.propose(2)
    agent.commit(view_of(2))
    agent.send_proposal(3, boundary=True)
    assert agent.next()["t"] == "join"
    assert agent.next() == {"t": "begun", "ballot": {**BALLOT, "epoch": 3}, "step": 4}
    assert agent.member.quiesce(FACTS, LONG_S).view == view_of(2)
    agent.member.check()
    assert [epoch for epoch, _ in agent.rings] == [2]


def test_waiting_for_copies(agent: Agent) -> None:
    member = agent.member
    agent.commit(view_of(1))
    member.join(FACTS, LONG_S)
    record = sealed(1, 7)
    member.sealed(record, [0, 2])
    agent.next()
    assert agent.next() == {"t": "sealed", "record": as_json(record), "copy_to": [0, 2]}
    agent.copied(step=7, epoch=1, slot=0)
    with pytest.raises(
        AgreementError, match=r"at worker 2: nothing of it moved within transfer_timeout_s \(1 s\)"
    ):
        member.wait_copied(7, 1.0)  # in which the first acknowledgement has arrived
    agent.copied(step=7, epoch=1, slot=2)
    member.wait_copied(7, LONG_S)
    member.sealed(replace(record, step=8), [])
    member.wait_copied(8, LONG_S)
    with pytest.raises(AgreementError, match="no snapshot of step 9"):
        member.wait_copied(9, LONG_S)
    member.sealed(replace(record, step=10), [0])
    agent.propose(2)
    with pytest.raises(EpochChanged):
        member.wait_copied(10, LONG_S)


def test_a_copy_that_moves_is_waited_for(agent: Agent) -> None:
    """However long it takes as a whole; the other one, which moves as well, is there at once."""
    member = agent.member
    agent.commit(view_of(1))
    member.join(FACTS, LONG_S)
    record = sealed(1, 7)
    member.sealed(record, [0, 2])
    agent.copied(step=7, epoch=1, slot=0)
    limit_s, began_s = 1.0, time.monotonic()

    def move() -> None:
        for _ in range(10):
            time.sleep(limit_s / 4)
            send_frame(agent.sock, {"t": "copying", "slot": 2})
        agent.copied(step=7, epoch=1, slot=2)

    mover = threading.Thread(target=move)
    mover.start()
    member.wait_copied(7, limit_s)
    assert time.monotonic() - began_s > 2 * limit_s
    mover.join(LONG_S)
    member.sealed(replace(record, step=8), [0, 2])
    # What the one moved before says nothing of what it is to hold now.
    with pytest.raises(AgreementError, match="copy of step 8 at worker 0: nothing of it moved"):
        member.wait_copied(8, SHORT_S)


def test_a_step_that_is_sealed_again_waits_for_its_own_copies(agent: Agent) -> None:
    """After a roll-back, the acknowledgements of an older epoch say nothing about the new bytes."""
    member = agent.member
    agent.commit(view_of(1))
    member.join(FACTS, LONG_S)
    older = sealed(1, 7)
    member.sealed(older, [0, 2])
    member.sealed(replace(older, step=8), [0, 2])
    for step in (7, 8):
        agent.copied(step=step, epoch=1, slot=0)
    agent.copied(step=7, epoch=1, slot=2)
    member.wait_copied(7, LONG_S)
    member.sealed(replace(older, epoch=2), [0])
    with pytest.raises(AgreementError, match="copy of step 7 at worker 0"):
        member.wait_copied(7, SHORT_S)
    with pytest.raises(AgreementError, match="no snapshot of step 8"):
        member.wait_copied(8, SHORT_S)
    agent.copied(step=7, epoch=1, slot=0)  # late
    with pytest.raises(AgreementError, match="copy of step 7 at worker 0"):
        member.wait_copied(7, SHORT_S)
    agent.copied(step=7, epoch=2, slot=0)
    member.wait_copied(7, LONG_S)


def test_an_announced_phase_keeps_the_time_to_answer_alive(agent: Agent) -> None:
    member, agent.within_s = agent.member, 0.2
    agent.commit(view_of(1))
    member.join(FACTS, LONG_S)
    assert agent.next()["t"] == "join"
    member.announce("evaluation")
    assert agent.silent()  # no proposal is open
    agent.propose(2)
    for _ in range(6):
        assert agent.next() == {"t": "progress", "text": "evaluation"}
    member.announce(None)
    agent.commit(view_of(2))
    member.quiesce(FACTS, LONG_S)
    while agent.next()["t"] != "quiesced":
        pass
    member.announce("save")
    assert agent.silent()  # it is answered
    agent.propose(3)
    assert agent.next() == {"t": "progress", "text": "save"}


def test_an_announced_phase_that_never_ends_is_stuck(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elaswave_plugin.trainer.member.ANNOUNCED_LIMIT_S", 1.0)
    agent.within_s = 1.6
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    assert agent.next()["t"] == "join"
    agent.member.announce("save")
    agent.propose(2)
    signs = 0
    while not agent.silent():
        assert agent.next() == {"t": "progress", "text": "save"}
        signs += 1
        assert signs <= 2
    assert signs


def test_a_phase_announced_while_a_proposal_is_open(agent: Agent) -> None:
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    assert agent.next()["t"] == "join"
    agent.propose(2)
    agent.member.announce("save")
    assert agent.next() == {"t": "progress", "text": "save"}


def test_without_an_announced_phase_nothing_keeps_the_time_alive(agent: Agent) -> None:
    agent.within_s = 0.2
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    assert agent.next()["t"] == "join"
    agent.propose(2)
    assert agent.silent()


def test_the_wait_for_a_commit_outlasts_an_announced_phase(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    agent.within_s = 30.0
    agent.propose(2)
    waits_s: list[float] = []

    def wait(deadline_s: float, what: str) -> None:
        waits_s.append(deadline_s - time.monotonic())
        raise AgreementError(what)

    monkeypatch.setattr(agent.member, "_wait", wait)
    monkeypatch.setattr(agent.member, "_receive_next", wait)
    with pytest.raises(AgreementError):
        agent.member.quiesce(FACTS)
    assert ANNOUNCED_LIMIT_S + 30.0 < waits_s[0] < 2 * ANNOUNCED_LIMIT_S


def test_being_told_to_stop_unwinds_everything(agent: Agent) -> None:
    send_frame(agent.sock, {"t": "stop", "reason": "no majority", "exit_code": 1})
    assert agent.rang.wait(LONG_S)
    for call in (agent.member.check, lambda: agent.member.quiesce(FACTS, LONG_S)):
        with pytest.raises(JobStopped, match="no majority"):
            call()


def test_an_agent_that_is_gone_stops_the_job(agent: Agent) -> None:
    agent.sock.sendall(encode(commit_of(view_of(1)))[:7])
    agent.sock.close()
    with pytest.raises(JobStopped, match="agent"):
        agent.member.join(FACTS, LONG_S)


def test_a_doorbell_that_fails_is_heard(agent: Agent) -> None:
    """A waiting thread is told at once, and not after the time that it may wait for a proposal."""
    agent.sock.sendall(NO_FRAME)
    with pytest.raises(JobStopped, match="its doorbell failed: ValueError"):
        agent.member.quiesce(FACTS, LONG_S)


def test_an_agent_that_is_gone_interrupts_the_links_too(agent: Agent) -> None:
    """A thread that waits for another worker does not wait in the member."""
    agent.propose(2)
    agent.rang.clear()
    agent.sock.close()
    assert agent.rang.wait(LONG_S)
    assert agent.rings[-1] == (3, "the agent of this worker's node is gone: nobody listens")


def test_a_doorbell_that_fails_interrupts_the_links_too(agent: Agent) -> None:
    agent.propose(2)
    agent.rang.clear()
    agent.sock.sendall(NO_FRAME)
    assert agent.rang.wait(LONG_S)
    assert agent.rings[-1][0] == 3
    assert "its doorbell failed: ValueError('frame of " in agent.rings[-1][1]


def test_a_message_of_another_version_ends_the_worker(agent: Agent) -> None:
    send_frame(agent.sock, {"t": "sing"})
    said = "the agent of worker 1 said 'sing', unknown here: have all run the same version"
    with pytest.raises(JobStopped, match=said):
        agent.member.quiesce(FACTS, LONG_S)
    assert agent.rang.wait(LONG_S)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        ({"t": "deliver"}, "said 'deliver' without 'committed'"),
        (deliver(view={}), "said 'committed' without 'epoch'"),
        (deliver(view=TWICE), "said 'committed' with something else in it .view 1"),
        ({**deliver(), "skipped": {}}, "said 'deliver' with skipped {}"),
        (deliver(payload="{"), "said 'deliver' with a payload: Expecting"),
        (deliver(), "said 'deliver' with a payload: .* without 'slots'"),
        ({**deliver(), "why": ""}, "said 'deliver' with 'why', unknown here"),
        ({"t": "copied", "step": "x", "epoch": 1, "slot": 0}, "said 'copied' with step 'x'"),
        ({"t": "ring"}, "said 'ring' without 'ballot'"),
    ],
)
def test_a_message_with_a_flaw_ends_the_worker(
    agent: Agent, frame: dict[str, Any], said: str
) -> None:
    send_frame(agent.sock, frame)
    with pytest.raises(JobStopped, match=f"the agent of worker 1 {said}.*: have all run the"):
        agent.member.quiesce(FACTS, LONG_S)


def test_a_message_of_another_version_ends_who_waits_for_the_commit(
    agent: Agent,
) -> None:
    """There it is not the doorbell's thread that hears it."""
    agent.propose(2)
    send_frame(agent.sock, {"t": "sing"})
    with pytest.raises(JobStopped, match="said 'sing', unknown here"):
        agent.member.quiesce(FACTS, LONG_S)


def test_the_doorbell_does_not_wait_for_a_frame_that_another_thread_took(
    agent: Agent,
) -> None:
    """It was woken by one; whoever waited for a commit took it; it has to keep the time alive."""
    taken = threading.Thread(target=agent.member._link._take_in, daemon=True)
    taken.start()
    taken.join(LONG_S)
    assert not taken.is_alive()


def test_an_agent_that_goes_while_a_commit_is_awaited(agent: Agent) -> None:
    agent.commit(view_of(1))
    agent.member.join(FACTS, LONG_S)
    agent.propose(2)
    assert agent.rang.wait(LONG_S)
    answered = threading.Event()

    def go() -> None:
        while agent.next()["t"] != "quiesced":
            pass
        answered.set()
        agent.sock.close()

    thread = threading.Thread(target=go)
    thread.start()
    with pytest.raises(JobStopped, match="the agent of this worker's node is gone"):
        agent.member.quiesce(FACTS, LONG_S)
    thread.join()
    assert answered.is_set()
    with pytest.raises(JobStopped, match="is gone"):
        agent.member.quiesce(FACTS, LONG_S)


def test_a_process_without_agent_is_told_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="start the script with `elaswave run`"):
        Member.from_environment({})


def test_the_trainers_side_needs_only_the_standard_library() -> None:
    code = (
        "import sys, elaswave_plugin.trainer.member, elaswave_plugin.snapshot.fetch;"
        "print(sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "['__main__', 'elaswave_plugin']"
