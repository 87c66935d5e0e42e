"""A guardian outlives its agents: memory and trainers stay, and another agent goes on."""

import json
import os
import re
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from elaswave_plugin.agent.guarded_trainers import Given, Starter, Watcher, watch_child
from elaswave_plugin.agent.guardian import EXIT_CRASHED, Guardian
from elaswave_plugin.agent.keeper import Keeper
from elaswave_plugin.errors import EXIT_FAILED
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.ipc.process_tree import die_with_parent
from elaswave_plugin.ipc.reactor import Reactor
from tests.agent.jobs import environment
from tests.idle import Clock, Deadline

LONG_S = 20.0
SLEEPS = "import time\ntime.sleep(60)\n"


class Life:
    """An agent, in a process of its own: its guardian, and what it tells the test."""

    def __init__(self, keeper: Keeper, number: int, pipe: int, script: Path) -> None:
        self.keeper = keeper
        self.number = number
        self.reactor = Reactor()
        self._pipe = pipe
        self._script = script

    def tell(self, **what: Any) -> None:
        report = {"life": self.number, "at_s": time.monotonic(), **what}
        os.write(self._pipe, json.dumps(report).encode() + b"\n")

    def take_part(self) -> None:
        """The job has begun: from now on another agent follows one that dies."""
        self.keeper.store(json.dumps({"life": self.number}).encode())

    def start(self, slot: int, place: int = 0) -> None:
        """Have a trainer started."""
        self.keeper.start(
            place=place,
            slot=slot,
            incarnation=0,
            program=Program(script=str(self._script), args=(), module=False),
            env=environment(),
            memory=("secret", f"page {slot}", f"first {slot}", f"second {slot}"),
        )

    def trainers(self) -> dict[int, Mapping[str, Any]]:
        """The facts that the guardian has of trainers, by slot; their descriptors are closed."""
        found = {}
        for facts, fd in self.keeper.trainers():
            found[facts["slot"]] = facts
            if fd >= 0:
                os.close(fd)
        return found

    def await_trainers(self, true: Callable[[dict[int, Mapping[str, Any]]], bool]) -> None:
        deadline = Deadline(LONG_S)
        while not true(self.trainers()):
            assert deadline.left_s(), self.trainers()
            time.sleep(0.005)  # notices would come, which this agent does not read

    def serve(self, seconds: float = LONG_S) -> None:
        """Run as an agent does, and tell the notices."""
        self.keeper.watch(self.reactor, lambda notice, fd: self.tell(notice=notice, has_fd=fd >= 0))
        self.reactor.after(seconds, self.reactor.stop)
        self.reactor.run()

    def die(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it lives")


Script = Callable[[Life], None]


class Node:
    """A guardian in this process, whose agents do what the test says; the last one again."""

    def __init__(self, folder: Path, *lives: Script, starter: Starter | None = None) -> None:
        self.reactor = Reactor()
        self.codes: list[int] = []
        self.reports: list[dict[str, Any]] = []
        self.pids: list[int] = []
        self._script = folder / "trainer.py"
        self._script.write_text(SLEEPS)
        self._lives = lives
        self._pipe, self._their_pipe = os.pipe()
        self._rest = b""
        self.guardian = Guardian(self.reactor, self._begin, [starter], on_end=self._on_end)
        self.reactor.watch(self._pipe, self._read)

    def _begin(self, calls: socket.socket, notices: socket.socket, number: int) -> int:
        parent_pid = os.getpid()
        pid = os.fork()
        if pid:
            self.pids.append(pid)
            return pid
        code = 99
        try:
            die_with_parent(parent_pid)
            life = Life(Keeper(calls, notices), number, self._their_pipe, self._script)
            self._lives[min(number, len(self._lives) - 1)](life)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _read(self) -> None:
        *lines, self._rest = (self._rest + os.read(self._pipe, 1 << 16)).split(b"\n")
        self.reports += map(json.loads, lines)

    def _on_end(self, code: int) -> None:
        self.codes.append(code)
        self.reactor.stop()

    def run(self) -> int:
        """Until the guardian has no agent any more; the code."""
        self.guardian.start()
        self.reactor.after(LONG_S, self.reactor.stop)
        self.reactor.run()
        while select.select([self._pipe], [], [], 0)[0]:
            self._read()
        (code,) = self.codes
        return code

    def told(self, what: str) -> list[Any]:
        return [one[what] for one in self.reports if what in one]

    def close(self) -> None:
        self.guardian.close()
        self.reactor.close()
        for fd in (self._pipe, self._their_pipe):
            os.close(fd)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(*lives: Script, **how: Any) -> Node:
        made.append(Node(tmp_path, *lives, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def has_ended(pid: int) -> bool:
    """Wait until a process has ended, which its parent may not have reaped."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], LONG_S)[0])
    finally:
        os.close(pidfd)


# ---- memory --------------------------------------------------------------------------------------


def test_memory_by_name_outlives_an_agent_that_is_killed(
    node: Callable[..., Node], capfd: pytest.CaptureFixture[str]
) -> None:
    def first(life: Life) -> None:
        for name in ("kept", "dropped"):
            fd = life.keeper.memory(name)
            os.pwrite(fd, name.encode(), 0)
            os.close(fd)
        life.keeper.drop("dropped")
        assert life.keeper.load() is None
        for text in ("long " * 1000, "short", "the last one"):
            life.keeper.store(json.dumps({"text": text}).encode())
        life.tell(died=True)
        life.die()

    def second(life: Life) -> None:
        names = life.keeper.names()
        kept = os.pread(life.keeper.memory("kept"), 100, 0).decode()
        dropped = os.pread(life.keeper.memory("dropped"), 100, 0).decode()
        life.tell(names=names, kept=kept, dropped=dropped, record=life.keeper.load())

    one, clock = node(first, second), Clock()
    assert one.run() == 0
    (died_s,) = (report["at_s"] for report in one.reports if "died" in report)
    (found,) = (report for report in one.reports if "names" in report)
    assert "kept" in found["names"] and "dropped" not in found["names"]
    assert (found["kept"], found["dropped"]) == ("kept", "")
    assert found["record"] == {"text": "the last one"}
    clock.check(found["at_s"] - died_s, 1.0)
    said = f"the agent (pid {one.pids[0]}) ended: killed by SIGKILL; another one goes on"
    assert capfd.readouterr().err.count(said) == 1


def test_a_record_that_was_half_written_is_not_read(node: Callable[..., Node]) -> None:
    """It is killed between the two writes, of which the second one makes it count."""

    def first(life: Life) -> None:
        life.keeper.store(b'{"text": "whole"}')
        write = os.pwrite

        def write_one(fd: int, data: bytes, offset: int) -> NoReturn:
            write(fd, data[: len(data) // 2], offset)
            life.die()

        os.pwrite = write_one  # type: ignore[assignment]
        life.keeper.store(b'{"text": "half of it is written, and it is longer"}')

    one = node(first, lambda life: life.tell(record=life.keeper.load()))
    assert one.run() == 0
    assert one.told("record") == [{"text": "whole"}]


# ---- trainers ------------------------------------------------------------------------------------


def test_the_next_agent_is_told_of_trainers_that_live_and_that_ended_meanwhile(
    node: Callable[..., Node],
) -> None:
    def first(life: Life) -> None:
        life.take_part()
        for slot in (3, 4):
            life.start(slot)
        life.await_trainers(lambda found: all(found[slot]["pid"] for slot in (3, 4)))
        life.tell(pids={slot: one["pid"] for slot, one in life.trainers().items()})
        os.kill(life.trainers()[3]["pid"], signal.SIGKILL)
        # It is told, and this agent dies before it has read it.
        life.await_trainers(lambda found: found[3]["end"] is not None)
        life.die()

    def second(life: Life) -> None:
        known = {one["slot"]: (one, fd) for one, fd in life.keeper.trainers()}
        life.tell(found={slot: one for slot, (one, _) in known.items()})
        life.keeper.seen(3, 0)
        life.tell(left=[*life.trainers()])
        signal.pidfd_send_signal(known[4][1], signal.SIGKILL)
        life.keeper.watch(life.reactor, lambda notice, fd: (life.tell(notice=notice), sys.exit(0)))
        life.reactor.run()

    one = node(first, second)
    assert one.run() == 0
    (pids,), (found,) = one.told("pids"), one.told("found")
    killed = {"status": int(signal.SIGKILL), "why": "", "exit_code": None}
    worker = {"place": 0, "incarnation": 0}
    assert found == {
        "3": {**worker, "slot": 3, "pid": pids["3"], "end": killed},
        "4": {**worker, "slot": 4, "pid": pids["4"], "end": None},
    }
    assert one.told("left") == [[4]]
    # Nothing is told twice.
    assert one.told("notice") == [{"n": "ended", **found["4"], "end": killed}]


class LaterStarter:
    """Starts a trainer when the test says so, as a zygote that still imports does."""

    def __init__(self) -> None:
        self.asked: list[Watcher] = []

    def start(self, program: Program, given: Given, watcher: Watcher) -> None:
        self.asked.append(watcher)

    def close(self) -> None:
        pass


def test_a_trainer_that_is_still_to_be_forked_is_known_to_the_next_agent(
    node: Callable[..., Node],
) -> None:
    def first(life: Life) -> None:
        life.take_part()
        life.start(5)
        life.die()

    def second(life: Life) -> None:
        life.tell(found=life.trainers())
        life.keeper.watch(
            life.reactor, lambda notice, fd: (life.tell(notice=notice, fd=fd), sys.exit(0))
        )
        life.reactor.run()

    starter = LaterStarter()
    one = node(first, second, starter=starter)

    def fork() -> None:
        if not one.told("found"):
            one.reactor.after(0.01, fork)
            return
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        watch_child(one.reactor, pid, starter.asked[0])

    one.reactor.after(0.01, fork)
    assert one.run() == 0
    worker = {"place": 0, "slot": 5, "incarnation": 0, "end": None}
    assert one.told("found") == [{"5": {**worker, "pid": 0}}]
    (notice,) = one.told("notice")
    assert notice["pid"] > 0
    assert notice == {"n": "started", **worker, "pid": notice["pid"]}
    assert one.told("fd")[0] >= 0


class GoneStarter(LaterStarter):
    def start(self, program: Program, given: Given, watcher: Watcher) -> None:
        raise BrokenPipeError("the zygote is gone")


def test_where_nothing_can_fork_it_any_more_a_trainer_is_started_by_exec(
    node: Callable[..., Node],
) -> None:
    def only(life: Life) -> None:
        life.start(0)
        life.await_trainers(lambda found: bool(found[0]["pid"]))
        life.tell(pid=life.trainers()[0]["pid"])

    one = node(only, starter=GoneStarter())
    assert one.run() == 0
    (pid,) = one.told("pid")
    # The job is over, and so are its trainers.
    assert has_ended(pid)


# ---- an agent that stands still ------------------------------------------------------------------


def stops(life: Life) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps(life: Life) -> None:
    time.sleep(LONG_S)


def loops(life: Life) -> None:
    while True:
        pass


@pytest.mark.parametrize("stand_still", [stops, sleeps, loops])
def test_an_agent_that_stands_still_is_ended_within_two_seconds(
    node: Callable[..., Node],
    stand_still: Script,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def first(life: Life) -> None:
        life.take_part()

        def stand() -> None:
            life.tell(stands=True)
            stand_still(life)

        life.reactor.after(0.5, stand)
        life.serve()

    one, clock = node(first, lambda life: life.tell(goes_on=True)), Clock()
    assert one.run() == 0
    (stood, went_on) = one.reports
    assert "stands" in stood and "goes_on" in went_on
    # One that loops waits for a processor too, beside others; those times are not counted.
    if stand_still is not loops:
        assert went_on["at_s"] - stood["at_s"] > 0.5
        clock.check(went_on["at_s"] - stood["at_s"], 2.0)
    said = re.escape(f"the agent (pid {one.pids[0]}) has stood still for")
    (still_s,) = re.findall(rf"{said} ([\d.]+) s: ended", capfd.readouterr().err)
    assert float(still_s) >= 1.0
    clock.check(float(still_s), 2.0)


def test_one_that_works_stays(node: Callable[..., Node]) -> None:
    def only(life: Life) -> None:
        life.take_part()
        life.serve(2.5)

    one = node(only)
    assert one.run() == 0
    assert len(one.pids) == 1


def test_one_whose_whole_node_was_stopped_stays(node: Callable[..., Node]) -> None:
    """The guardian did not run either; it looks again once both do."""

    def only(life: Life) -> None:
        life.take_part()
        life.serve(3.5)

    one = node(only)

    def suspend() -> None:
        os.kill(one.pids[0], signal.SIGSTOP)
        time.sleep(1.6)
        os.kill(one.pids[0], signal.SIGCONT)

    one.reactor.after(0.6, suspend)
    assert one.run() == 0
    assert len(one.pids) == 1


# ---- the end -------------------------------------------------------------------------------------


def test_five_deaths_within_seconds_end_the_node(
    node: Callable[..., Node], capfd: pytest.CaptureFixture[str]
) -> None:
    def every(life: Life) -> None:
        life.take_part()
        if life.number == 0:
            life.start(0)
            life.await_trainers(lambda found: bool(found[0]["pid"]))
            life.tell(pid=life.trainers()[0]["pid"])
        life.die()

    one = node(every)
    assert one.run() == EXIT_FAILED
    assert len(one.pids) == 5
    (trainer_pid,) = one.told("pid")
    assert has_ended(trainer_pid)
    said = capfd.readouterr().err
    assert said.count("; another one goes on") == 4
    assert f"(pid {one.pids[4]}) ended: killed by SIGKILL, as 5 have within seconds" in said


@pytest.mark.parametrize("code", [0, 3, 75])
def test_an_agent_that_ends_by_itself_has_none_after_it(
    node: Callable[..., Node], code: int
) -> None:
    def only(life: Life) -> None:
        life.take_part()
        sys.exit(code)

    one = node(only)
    assert one.run() == code
    assert len(one.pids) == 1


def test_an_agent_that_crashed_has_one_after_it(node: Callable[..., Node]) -> None:
    def first(life: Life) -> None:
        life.take_part()
        sys.exit(EXIT_CRASHED)

    one = node(first, lambda life: sys.exit(4))
    assert one.run() == 4


def test_before_there_is_a_job_no_other_agent_follows(node: Callable[..., Node]) -> None:
    one = node(Life.die)
    assert one.run() == -signal.SIGKILL
    assert not one.guardian.has_met


@pytest.mark.parametrize("has_met", [True, False])
def test_a_signal_is_told_to_an_agent_that_has_met_the_others_and_ends_another_one(
    node: Callable[..., Node], has_met: bool
) -> None:
    def only(life: Life) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if has_met:
            life.take_part()
        life.tell(ready=True)
        life.keeper.watch(life.reactor, lambda notice, fd: (life.tell(notice=notice), sys.exit(5)))
        life.reactor.run()

    one = node(only)

    def send() -> None:
        if one.told("ready"):
            one.guardian.send_signal(signal.SIGTERM, 2)
        else:
            one.reactor.after(0.01, send)

    one.reactor.after(0.01, send)
    assert one.run() == (5 if has_met else -signal.SIGTERM)
    told = [{"n": "signal", "number": int(signal.SIGTERM), "place": 2}]
    assert one.told("notice") == (told if has_met else [])


def test_what_an_agent_does_not_read_is_sent_once_it_does(node: Callable[..., Node]) -> None:
    """More than the connection holds, in order."""
    count = 3000

    def only(life: Life) -> None:
        life.take_part()
        life.tell(ready=True)
        time.sleep(0.5)  # it is busy
        found: list[int] = []

        def take(notice: Mapping[str, Any], fd: int) -> None:
            found.append(notice["number"])
            if len(found) == count:
                life.tell(in_order=found == [*range(count)])
                sys.exit(0)

        life.keeper.watch(life.reactor, take)
        life.reactor.run()

    one = node(only)

    def send() -> None:
        if one.told("ready"):
            for number in range(count):
                one.guardian.tell({"n": "test", "number": number, "text": 200 * "x"})
        else:
            one.reactor.after(0.01, send)

    one.reactor.after(0.01, send)
    assert one.run() == 0
    assert one.told("in_order") == [True]
