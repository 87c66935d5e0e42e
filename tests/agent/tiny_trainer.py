"""A trainer without training: joins, seals, answers proposals, and does what the test tells it.

It reports what happens to the test's datagram socket (TINY_FOLDER/test), and takes commands at
TINY_FOLDER/SLOT. Standard library only, so that a job of many starts in a fraction of a second.
"""

import json
import mmap
import multiprocessing
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from elaswave_plugin.core.layout.worker_facts import WorkerFacts
from elaswave_plugin.errors import EpochChanged, JobStopped, SnapshotGapError
from elaswave_plugin.ipc.frames import StartDetached
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET, clear_record, write_record
from elaswave_plugin.snapshot.fetch import Fetcher
from elaswave_plugin.trainer.fatal import end_in_a_sentence
from elaswave_plugin.trainer.member import Commit, Member
from tests.core.sealed import sealed

FOLDER = Path(os.environ["TINY_FOLDER"])
LENGTH = int(os.environ.get("TINY_LENGTH", "65536"))
WAIT_S = 30.0


class Trainer:
    """One tiny trainer."""

    def __init__(self) -> None:
        self.member = Member.from_environment(os.environ)
        self.slot = self.member.slot
        self.post = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        (FOLDER / str(self.slot)).unlink(missing_ok=True)  # that of an earlier one in the slot
        self.orders.bind(str(FOLDER / str(self.slot)))
        self.wake = os.eventfd(0)
        self.deaf = False

    def tell(self, what: str, **more: object) -> None:
        report = {"slot": self.slot, "what": what, "at_s": time.monotonic(), **more}
        self.post.sendto(json.dumps(report).encode(), str(FOLDER / "test"))

    def ring(self, epoch: int, reason: str) -> None:
        thread = threading.current_thread().name
        self.tell("ring", epoch=epoch, reason=reason, thread=thread)
        os.eventfd_write(self.wake, 1)

    def show(self, commit: Commit) -> None:
        self.view = commit.view
        self.tell(
            "commit",
            epoch=commit.view.epoch,
            ranks=commit.view.ranks,
            reason=commit.view.reason,
            path=[view.epoch for view in commit.path],
            facts={slot: facts.address for slot, facts in commit.facts.items()},
            inventory=[asdict(one) for one in commit.inventory],
        )

    def seal(self, step: int, *, zeros: bool = False) -> None:
        buffer = step % 2
        fd = self.member.snapshot_fds[buffer]
        os.ftruncate(fd, BODY_OFFSET + LENGTH)
        record = sealed(self.slot, step, self.view.epoch, buffer=buffer, length=LENGTH)
        with mmap.mmap(fd, BODY_OFFSET + LENGTH) as memory, memoryview(memory) as view:
            clear_record(view)
            if not zeros:
                view[BODY_OFFSET:] = pattern(self.slot, step)
            write_record(view, record)
        rank = self.view.ranks.index(self.slot)
        target = self.view.ranks[(rank + 1) % len(self.view.ranks)]
        targets = [] if target == self.slot else [target]
        self.member.sealed(record, targets)
        self.tell("sealed", step=step)
        started_s = time.monotonic()
        self.member.wait_copied(step, WAIT_S)
        self.tell("copied", step=step, took_s=time.monotonic() - started_s)

    def run(self) -> None:
        facts = WorkerFacts(address=f"address {self.slot}")
        ended = os.eventfd(0)
        outlives = "TINY_OUTLIVES" in os.environ
        if outlives:  # a script that handles it, and joins all the same
            signal.signal(signal.SIGTERM, lambda number, frame: os.eventfd_write(ended, 1))
        self.member.start(self.ring)
        self.tell("started", pid=os.getpid(), parent=os.getppid(), host=self.member.host)
        if outlives:
            os.eventfd_read(ended)
        respawn = int(os.environ.get("TINY_RESPAWN", "0"))
        welcome = self.member.join(facts, WAIT_S, respawn=respawn)
        if isinstance(welcome, StartDetached):
            self.tell("detached", job_constants=welcome.job_constants, env=dict(os.environ))
            # Once one asks to be let in, nobody else comes before the others' next boundary.
            if os.environ.get("TINY_READY") != "told":
                self.member.ready(facts)
        else:
            self.show(welcome)
        while True:
            ready, _, _ = select.select([self.orders.fileno(), self.wake], [], [], WAIT_S)
            if not ready:
                sys.exit("nobody tells this trainer anything")
            try:
                if self.wake in ready:
                    os.eventfd_read(self.wake)
                    if not self.deaf:
                        self.answer(facts)
                if self.orders.fileno() in ready:
                    self.obey(*self.orders.recv(4096).decode().split())
            except EpochChanged:
                os.eventfd_write(self.wake, 1)
            except JobStopped as stopped:
                self.tell("stopped", reason=str(stopped))
                sys.exit(9)

    def answer(self, facts: WorkerFacts) -> None:
        try:
            self.member.check()
        except EpochChanged:
            self.show(self.member.quiesce(facts))

    def obey(self, order: str, *words: str) -> None:
        match order:
            case "seal":
                self.seal(int(words[0]))
            case "bulk":
                self.seal(int(words[0]), zeros=True)
            case "finish":
                self.member.finish()
                sys.exit(int(words[0]) if words else 0)
            case "complete":
                self.member.finish(int(words[0]))
                sys.exit(0)
            case "exit":
                sys.exit(int(words[0]))
            case "raise":
                raise RuntimeError("as told")
            case "deaf":
                self.deaf = True
                self.tell("deaf")
            case "progress":
                self.member.progress("saving")
                self.tell("progress")
            case "answer":
                self.deaf = False
                self.answer(WorkerFacts(address=f"address {self.slot}"))
            case "half":
                # Dies while it writes a control message.
                fd = self.member._link._sock.fileno()
                os.write(fd, struct.pack("!I", 1000) + b'{"t": "sealed"')
                os.kill(os.getpid(), signal.SIGKILL)
            case "layout":
                self.member.describe(json.loads(words[0]))
                self.tell("layout")
            case "leave":
                self.member.leave("as planned")
                os._exit(0)
            case "hang":
                # Finished, and then stuck on the way out.
                self.member.finish()
                while True:
                    signal.pause()
            case "work":
                # Long work, announced or not, that notices no proposal.
                self.tell("works")
                self.member.announce(words[1] if words[1:] else None)
                time.sleep(float(words[0]))
                self.member.announce(None)
            case "wedge":
                self.tell("works")
                self.member.announce("evaluation")
                sum(range(1 << 60))  # never lets another thread run
            case "abandon":
                end_in_a_sentence(SnapshotGapError("shards 3 and 4 are gone"))
            case "fetch":
                address, owner, step, epoch = words[0], *map(int, words[1:])
                into = bytearray(LENGTH)
                view = memoryview(into)
                at = LENGTH // 3
                what = {"owner": owner, "step": step, "epoch": epoch}
                with Fetcher(address, secret=self.member.secret, timeout_s=WAIT_S) as fetcher:
                    for start, end in ((at, LENGTH), (0, at)):
                        into_part = view[start:end]
                        fetcher.fetch(**what, offset=start, into=into_part, timeout_s=WAIT_S)
                self.tell("fetched", equal=into == pattern(owner, step))
            case _:
                self.live(order, *words)

    def live(self, order: str, *words: str) -> None:
        """Carry out orders that matter to workers that come later, or have left."""
        match order:
            case "release":
                self.member.release(self.view.epoch)
            case "step":
                # At the boundary before this step it waits until the view is to change.
                self.member.begin_step(int(words[0]), awaits_arrival=True)
            case "begin":
                self.member.begin_step(int(words[0]))
            case "saves_last":
                self.member.saves_last()
                self.tell("saves_last")
            case "act":
                # By then its time has run out, unless it was lent more.
                time.sleep(float(words[0]))
                self.member.await_lease()
                self.tell("acts")
            case "await_start":
                self.member.wait_started(WAIT_S)
                self.tell("job_started")
            case "print":
                sys.stdout.write(100 * "x" + "\n")
                sys.stderr.write(100 * "y" + "\n")
                self.tell("printed")
            case "start":
                self.tell("start", pid=subprocess.Popen(["sleep", "60"]).pid)
            case "lock_clocks":
                from elaswave_plugin.recovery.clocks import NvmlClocks

                NvmlClocks(words[0], lowest=0.5, highest=1.1)
                self.tell("lock_clocks")
            case "told":
                self.tell("told", to_leave=self.member.told_to_leave)
            case "children":
                fork = multiprocessing.get_context("fork")
                children = [fork.Process(target=time.sleep, args=(60,)) for _ in range(20)]
                for child in children:
                    child.start()
                    child.terminate()
                for child in children:
                    child.join(1)
                self.tell("children", codes=[child.exitcode for child in children])
            case "say":
                self.member._link.send({"t": words[0], **dict(w.split("=") for w in words[1:])})
            case "ready":
                self.member.ready(WorkerFacts(address=f"address {self.slot}"))
            case "remember":
                self.member.remember({words[0]: words[1]})
                self.tell("remember")


def pattern(slot: int, step: int) -> bytes:
    """Bytes that differ by slot, step and place."""
    line = f"slot {slot} step {step} ".encode()
    return b"".join(line + b"%08d" % n for n in range(LENGTH // 16))[:LENGTH]


if __name__ == "__main__":
    Trainer().run()
