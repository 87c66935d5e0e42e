"""The progress page: what a trainer writes is what a agent reads, and it costs little."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elaswave_plugin import phase
from elaswave_plugin.agent.trainer_session import TrainerSession
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.links.operation import Group, Operation, Steps
from elaswave_plugin.core.agreement.hang import COMMIT, NOBODY, Sample
from elaswave_plugin.core.agreement.life import Life
from elaswave_plugin.core.agreement.limits import ANNOUNCED_LIMIT_S, UNKNOWN_LIMIT_S
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.progress_page import (
    PROGRESS_FD,
    ProgressPage,
    create_page,
    lease_clock_s,
    page_of,
)
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.wire import Encoder
from tests.idle import Clock, Deadline
from tests.job_secret import SECRET


@pytest.fixture
def fd() -> Iterator[int]:
    """A page as the agent makes it."""
    number = create_page()
    yield number
    os.close(number)


@pytest.fixture
def pages(fd: int) -> Iterator[tuple[ProgressPage, ProgressPage]]:
    """The trainer's and the agent's mapping of a page."""
    both = ProgressPage(fd), ProgressPage(fd)
    yield both
    for page in both:
        page.close()


def read(page: ProgressPage) -> Sample:
    sample = page.sample(slot=3)
    assert sample is not None
    return sample


def test_a_page_says_nothing_before_its_trainer_began(
    pages: tuple[ProgressPage, ProgressPage],
) -> None:
    trainer, agent = pages
    assert agent.sample(slot=3) is None
    trainer.begin(incarnation=2)
    sample = read(agent)
    assert (sample.slot, sample.incarnation, sample.waits_for) == (3, 2, NOBODY)
    assert sample.limit_s == UNKNOWN_LIMIT_S


def test_what_is_written_is_read(pages: tuple[ProgressPage, ProgressPage]) -> None:
    trainer, agent = pages
    trainer.begin(incarnation=0)
    trainer.set_place(epoch=4, step=17)
    trainer.count_operation()
    trainer.enter("forward", 2.5)
    with trainer.waiting(COMMIT):
        sample = read(agent)
        assert (sample.epoch, sample.step, sample.operations) == (4, 17, 1)
        assert (sample.phase, sample.limit_s, sample.waits_for) == ("forward", 2.5, COMMIT)
    assert read(agent).waits_for == NOBODY


class Preempted:
    """The words of a page, whose reader stands still before its n-th look while ``go_on`` runs."""

    def __init__(self, words: memoryview, looks: int, go_on: Callable[[], None]) -> None:
        self._words, self._looks, self._go_on = words, looks, go_on

    def __getitem__(self, index: int) -> int:
        self._looks -= 1
        if self._looks == 0:
            self._go_on()
        return self._words[index]


@pytest.mark.parametrize("looks", range(1, 11))
@pytest.mark.parametrize("what", ["announced", "waiting", "between steps"])
def test_a_worker_that_goes_on_while_it_is_looked_at_is_not_late(
    pages: tuple[ProgressPage, ProgressPage], what: str, looks: int
) -> None:
    """After a long wait: the time of one moment is not judged by what was written in the next."""
    trainer, agent = pages
    trainer.begin(incarnation=0)
    long_ago = time.monotonic_ns() - 60 * 10**9
    words = agent._words

    def go_on() -> None:
        if what == "announced":
            trainer.end_announced()
        elif what == "waiting":
            trainer.waits_for(NOBODY)
        else:
            trainer.enter("forward", 2.0)

    if what != "between steps":
        trainer.enter("forward", 2.0)
    if what == "announced":
        trainer.announce("a slow batch")
    if what == "waiting":
        trainer.waits_for(5)
    words[0] = long_ago
    seen: Any = agent
    seen._words = Preempted(words, looks, go_on)
    try:
        sample = read(agent)
    finally:
        seen._words = words
    assert not sample.is_late or sample.waits_for == 5


def test_a_standstill_is_counted_from_the_last_change(
    pages: tuple[ProgressPage, ProgressPage],
) -> None:
    trainer, agent = pages
    trainer.begin(incarnation=0)
    began = Clock()
    time.sleep(0.2)
    stalled_s = read(agent).stalled_s
    assert stalled_s >= 0.2
    began.check(stalled_s, 5.0)
    clock = Clock()
    trainer.touch()
    clock.check(read(agent).stalled_s, 0.2)


def test_what_a_reader_missed_does_not_count(pages: tuple[ProgressPage, ProgressPage]) -> None:
    trainer, agent = pages
    trainer.begin(incarnation=0)
    time.sleep(0.2)
    clock = Clock()
    sample = agent.sample(slot=0, awake_s=time.monotonic())
    assert sample is not None
    clock.check(sample.stalled_s, 0.1)


def test_announced_phases_are_nested(pages: tuple[ProgressPage, ProgressPage]) -> None:
    trainer, agent = pages
    trainer.begin(incarnation=0)
    trainer.enter("data", 2.0)
    names = [f"phase {number}" for number in range(9)]
    for name in names:
        trainer.announce(name)
    assert read(agent).phase == names[-1]
    assert read(agent).limit_s == ANNOUNCED_LIMIT_S
    for _ in names[1:]:
        trainer.end_announced()
    assert agent.announced == names[0]
    trainer.end_announced()
    trainer.end_announced()
    assert (read(agent).phase, read(agent).limit_s) == ("data", 2.0)


def test_a_script_announces_its_phases(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROGRESS_FD, str(fd))
    page = ProgressPage(fd)
    with phase("too early"):
        assert page.announced is None
    page.begin(incarnation=0)
    with phase("evaluate"), phase("inner"):
        assert page.announced == "inner"
    assert page.announced is None
    with pytest.raises(ZeroDivisionError), phase("evaluate"):
        _ = 1 // 0
    assert page.announced is None
    with pytest.raises(ConfigurationError, match="wanted a name of 1 to 63 bytes"), phase("x" * 64):
        pass
    page.close()


def test_phase_does_nothing_where_there_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROGRESS_FD, raising=False)
    with phase("evaluate"):
        pass
    with open(os.devnull) as other:  # a child of a trainer has the variable, and not the page
        monkeypatch.setenv(PROGRESS_FD, str(other.fileno()))
        with phase("evaluate"):
            pass


def test_a_forked_child_of_a_trainer_is_not_the_trainer(fd: int) -> None:
    ProgressPage(fd).begin(incarnation=0)
    assert page_of({PROGRESS_FD: str(fd)}) is not None
    pid = os.fork()
    if pid == 0:
        os._exit(0 if page_of({PROGRESS_FD: str(fd)}) is None else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_the_page_needs_no_torch() -> None:
    code = (
        "import elaswave_plugin; elaswave_plugin.phase; import sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def barrier(table: LinkTable, rank: int) -> Operation:
    group = Group(number=1, label="pair", members=(0, 1), rank=rank)
    operation = Operation(table, group, "barrier", timeout_s=20.0)

    def steps(op: Operation) -> Steps:
        op.send(1 - rank, memoryview(b"x"))
        yield op.receive(1 - rank, memoryview(bytearray(1)))

    table.run(operation, steps)
    return operation


def test_a_link_table_says_for_whom_it_waits(pages: tuple[ProgressPage, ProgressPage]) -> None:
    trainer, agent = pages
    trainer.begin(incarnation=0)
    left, right = LinkTable(0, progress=trainer, secret=SECRET), LinkTable(1, secret=SECRET)
    for table in (left, right):
        table.open_epoch(1, {0: left.address, 1: right.address})
    operation = barrier(left, 0)
    assert (read(agent).operations, read(agent).waits_for) == (1, NOBODY)
    waiter = threading.Thread(target=left.wait, args=(operation,))
    waiter.start()
    deadline = Deadline(10.0)
    while read(agent).waits_for != 1:
        assert deadline.left_s()
    right.wait(barrier(right, 1))
    waiter.join(10.0)
    assert operation.done
    assert read(agent).waits_for == NOBODY
    left.close()
    right.close()


def test_one_that_seals_nothing_is_known_to_have_come_further() -> None:
    """Deaths of a worker without a place, at different steps, are none at one and the same."""
    page = ProgressPage()
    session = TrainerSession(
        slot=0,
        life=Life(incarnation=1),
        page=page,
        reactor=Reactor(),
        on_frame=lambda trainer, frame: None,
        on_gone=lambda status: None,
        encode=Encoder(),
    )
    assert session.reached(4) == 4
    page.begin(1)
    page.set_place(step=9)
    page.enter("data", 2.0)
    assert session.reached(4) == 9
    assert session.reached(11) == 11


def test_a_trainer_may_not_act_before_its_agent_has_lent_it_time(
    pages: tuple[ProgressPage, ProgressPage],
) -> None:
    trainer, agent = pages
    trainer.begin(0)
    assert not trainer.may_act
    agent.lend(lease_clock_s() + 60.0)
    assert trainer.may_act
    agent.lend(0.0)
    assert not trainer.may_act
    assert ProgressPage().may_act, "no agent gives it up"
