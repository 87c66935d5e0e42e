"""One trainer of a slot as its supervisor sees it: process, control link, how far it has come."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from elaswave_plugin.core.agreement_messages import Facts
from elaswave_plugin.core.hang import Sample
from elaswave_plugin.runtime.lifeline import is_stopped
from elaswave_plugin.runtime.member import INCARNATION
from elaswave_plugin.runtime.processor_waits import ProcessorWaits
from elaswave_plugin.runtime.progress import ProgressPage, create_page
from elaswave_plugin.runtime.reactor import Reactor
from elaswave_plugin.runtime.trainer_process import ExecTrainer, Program, ZygoteTrainer
from elaswave_plugin.runtime.wire import Channel, Frame


@dataclass(slots=True, kw_only=True)
class TrainerSession:
    """One incarnation; its `control` channel exists once it is attached.

    `facts`: it has joined, or waits to be let in; `delivered`: a view was delivered to it.
    """

    incarnation: int
    process: ExecTrainer | ZygoteTrainer
    sock: socket.socket
    page: ProgressPage
    control: Channel | None = None
    facts: Facts | None = None
    delivered: bool = False
    finished: bool = False
    left: bool = False
    saves_last: bool = False
    returns: bool = False
    lives: bool = True
    fence_evidence: str | None = None
    waits: ProcessorWaits = field(default_factory=ProcessorWaits)

    @property
    def works(self) -> bool:
        """Whether it may be asked to take part in a view."""
        return self.lives and not self.finished and not self.left

    @property
    def is_replacement(self) -> bool:
        """Whether it was started in the place of one that was lost."""
        return self.incarnation > 0

    def progress(self, slot: int, awake_s: float) -> Sample | None:
        """Where it is, by its page; None where it does not work. See `ProgressPage.sample`."""
        if not self.works:
            return None
        pid = self.process.pid
        waited_s = self.waits.since(self.page.since_s, pid)
        return self.page.sample(
            slot=slot, awake_s=awake_s, waited_s=waited_s, stopped=is_stopped(pid)
        )

    def send(self, frame: Frame) -> None:
        """Tell it something."""
        assert self.control is not None
        self.control.send(frame)

    def attach(
        self,
        reactor: Reactor,
        *,
        on_frame: Callable[[TrainerSession, Frame], None],
        on_start: Callable[[TrainerSession, int], None],
        on_exit: Callable[[TrainerSession, str, int | None], None],
    ) -> None:
        """Have the reactor call these as it speaks, begins and ends."""
        self.control = Channel(
            reactor, self.sock, on_frame=partial(on_frame, self), on_close=_its_end_comes
        )
        self.process.attach(
            reactor, on_start=partial(on_start, self), on_exit=partial(on_exit, self)
        )


def start_session(
    program: Program,
    *,
    incarnation: int,
    env: Mapping[str, str],
    snapshot_fds: Sequence[int],
    zygote: socket.socket | None,
) -> TrainerSession:
    """Start a trainer, from the zygote where there is one."""
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    page_fd = create_page()
    env = {**env, INCARNATION: str(incarnation)}
    process: ExecTrainer | ZygoteTrainer
    if zygote is None:
        process = ExecTrainer(
            program, env=env, control=theirs, snapshot_fds=snapshot_fds, progress_fd=page_fd
        )
    else:
        process = ZygoteTrainer(
            program,
            env=env,
            control=theirs,
            snapshot_fds=snapshot_fds,
            progress_fd=page_fd,
            zygote=zygote,
        )
    theirs.close()
    page = ProgressPage(page_fd)
    os.close(page_fd)
    return TrainerSession(incarnation=incarnation, process=process, sock=own, page=page)


def _its_end_comes(evidence: str) -> None:
    """The trainer closed its end; what matters is how the process ends, and that comes."""
