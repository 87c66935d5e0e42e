"""Real worker processes for the communicator's tests: forked, driven through pipes, reaped."""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch

from elaswave_plugin.communicator.links.connection import State
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.process_group import GroupTable
from elaswave_plugin.ipc.reactor import is_readable
from tests.job_secret import SECRET

LIMIT_S = 60.0


def connected(table: LinkTable) -> list[int]:
    """The slots to which a link stands."""
    links = table.connections.links
    return sorted(slot for slot, link in links.items() if link.state is State.OPEN)


class Peer:
    """The child's side: its links, its groups and the two pipes to the parent."""

    def __init__(self, slot: int, commands: Connection, bell: Connection) -> None:
        self.slot = slot
        self.links = LinkTable(slot, secret=SECRET)
        self.groups = GroupTable(self.links)
        self._commands = commands
        threading.Thread(target=self._ring, args=(bell,), daemon=True).start()
        self.tell(self.links.address)

    def _ring(self, bell: Connection) -> None:
        while True:
            try:
                epoch, reason = bell.recv()
            except EOFError:
                return
            self.links.interrupt(epoch, reason)

    def tell(self, message: Any) -> None:
        """Send to the parent."""
        self._commands.send(("said", message))

    def hear(self) -> Any:
        """Wait for a message of the parent."""
        return self._commands.recv()

    def open(self) -> tuple[int, ...]:
        """Open the epoch that the parent commits; returns its slots in rank order."""
        epoch, ranks, addresses = self.hear()
        self.links.open_epoch(epoch, addresses)
        return tuple(ranks)

    def install(self) -> tuple[int, ...]:
        """Open the first epoch and make it torch's default group."""
        ranks = self.open()
        torch.distributed.init_process_group(**self.groups.install(ranks))
        return ranks

    def recover(self) -> tuple[int, ...]:
        """Report quiesced, open the committed epoch, edit every group."""
        before = tuple(self.groups.world.members) if self.groups.world else ()
        self.tell("quiesced")
        ranks = self.open()
        self.groups.edit_all(ranks, set(before) - set(ranks))
        return ranks


Body = Callable[[Peer], Any]


class Workers:
    """The parent's side; leaving the block ends every child that is still there."""

    def __init__(self, count: int, body: Body, limit_s: float = LIMIT_S) -> None:
        """``limit_s``: of a worker's whole life, and of the wait for a word of it."""
        self._limit_s = limit_s
        self.pids: dict[int, int] = {}
        self.commands: dict[int, Connection] = {}
        self.bells: dict[int, Connection] = {}
        self.addresses: dict[int, str] = {}
        self._said: dict[int, list[Any]] = {slot: [] for slot in range(count)}
        for slot in range(count):
            self._fork(slot, body)

    def __enter__(self) -> "Workers":
        self.addresses = {slot: self.hear(slot) for slot in self.pids}
        return self

    def __exit__(self, *_: object) -> None:
        for slot in list(self.pids):
            self.kill(slot)
        for pipe in (*self.commands.values(), *self.bells.values()):
            pipe.close()

    def _fork(self, slot: int, body: Body) -> None:
        ours, theirs = Pipe()
        bell, ear = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for pipe in (ours, bell, *self.commands.values(), *self.bells.values()):
                pipe.close()
            _child(slot, theirs, ear, body, self._limit_s)
        theirs.close()
        ear.close()
        self.pids[slot], self.commands[slot], self.bells[slot] = pid, ours, bell

    def hear(self, slot: int, limit_s: float | None = None) -> Any:
        """The next message of a worker. Fails the test with its traceback if it raised."""
        limit_s = self._limit_s if limit_s is None else limit_s
        limit = time.monotonic() + limit_s
        while not self._said[slot]:
            live = {self.commands[s]: s for s in self.pids}
            ready = wait(list(live), limit - time.monotonic())
            assert ready, f"worker {slot} said nothing for {limit_s} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._listen(live[pipe], slot)
        return self._said[slot].pop(0)

    def _listen(self, slot: int, wanted: int) -> None:
        try:
            kind, message = self.commands[slot].recv()
        except EOFError:
            assert slot != wanted, f"worker {slot} ended without a word"
            os.waitpid(self.pids.pop(slot), 0)
            return
        assert kind == "said", f"worker {slot} raised:\n{message}"
        self._said[slot].append(message)

    def hear_all(self, slots: Iterable[int] | None = None) -> dict[int, Any]:
        """One message of each worker."""
        return {slot: self.hear(slot) for slot in list(self.pids if slots is None else slots)}

    def tell(self, slot: int, message: Any) -> None:
        """Send to a worker."""
        self.commands[slot].send(message)

    def commit(self, epoch: int, ranks: Iterable[int], to: Iterable[int] | None = None) -> None:
        """Commit an epoch of these slots to them, or only to some of them."""
        ranks = tuple(ranks)
        addresses = {slot: self.addresses[slot] for slot in ranks}
        for slot in ranks if to is None else to:
            self.tell(slot, (epoch, ranks, addresses))

    def interrupt(self, epoch: int, slots: Iterable[int], reason: str = "test") -> None:
        """Ring the doorbell of these slots."""
        for slot in slots:
            self.bells[slot].send((epoch, reason))

    def signal(self, slot: int, number: int) -> None:
        """Send a signal to a worker."""
        os.kill(self.pids[slot], number)

    def stop(self, slot: int) -> None:
        """SIGSTOP a worker and wait until it has stopped."""
        self.signal(slot, signal.SIGSTOP)
        os.waitpid(self.pids[slot], os.WUNTRACED)

    def kill(self, slot: int) -> None:
        """SIGKILL a worker and wait until it is gone, as a guardian would with its pidfd."""
        pid = self.pids.pop(slot)
        descriptor = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            assert is_readable(descriptor, LIMIT_S), f"worker {slot} does not die"
        finally:
            os.close(descriptor)
        os.waitpid(pid, 0)

    def join(self) -> None:
        """Wait until every remaining worker has ended well."""
        for slot in list(self.pids):
            assert self.hear(slot) == "done"
            pid = self.pids.pop(slot, 0)
            if pid:
                os.waitpid(pid, 0)


def _child(slot: int, commands: Connection, bell: Connection, body: Body, limit_s: float) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_s, exit=True)
    torch.set_num_threads(1)
    code = 1
    try:
        peer = Peer(slot, commands, bell)
        body(peer)
        peer.links.close()
        peer.tell("done")
        code = 0
    except BaseException:
        commands.send(("raised", traceback.format_exc()))
    finally:
        os._exit(code)


def run(count: int, body: Body, *, limit_s: float = LIMIT_S) -> None:
    """Run `body` in `count` workers in epoch 1, with torch's default group over all of them."""

    def whole(peer: Peer) -> None:
        peer.install()
        body(peer)
        torch.distributed.barrier()

    with Workers(count, whole, limit_s) as workers:
        workers.commit(1, range(count))
        workers.join()
