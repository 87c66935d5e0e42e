"""One trainer of a slot as its agent sees it, and what `elaswave status` is told of it.

Its process, control link and page; and why a request about it is refused. Standard library only.
"""

import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from elaswave_plugin.agent.process_states import ProcessorWaits, ProcessStates
from elaswave_plugin.core.agreement.hang import Sample
from elaswave_plugin.core.agreement.life import Life, Process, Stage
from elaswave_plugin.core.agreement.messages import Raised, Ring
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.codec import WireMessage, to_json
from elaswave_plugin.core.layout.layout import why_impossible, why_needed
from elaswave_plugin.errors import EXIT_CONFIGURATION
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.process_tree import WorkWatch, describe_status, dying_by, resident_bytes
from elaswave_plugin.ipc.progress_page import BETWEEN_STEPS, ProgressPage
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.wire import Channel, Encoder, Frame

# Of a script that never imported torch, or does not let torch import us.
_UNKNOWN = (
    "the script imported no torch, or TORCH_DEVICE_BACKEND_AUTOLOAD is 0; have it train with"
    " Megatron-Core or DeepSpeed"
)
# The end of a process that holds much memory, or a device, takes seconds as it is.
DIES_WITHIN_S = 5.0
# Of processes with so much memory the end is looked for, so often; whether they have it, seldom.
LARGE_BYTES = 1 << 30
LOOK_S, SELDOM_S = 0.02, 1.0
_EARLY = (
    "before its work was finished; where a loop over job.train() ends early, write job.finish() "
    "behind it"
)
_UNTRAINED = "before it trained a step; the script's own output says why"
_UNKNOWN_OPTION = (
    "before it attached; where its parser does not know --elaswave, write "
    "elaswave.add_arguments(parser) before parser.parse_args(); a script of DeepSpeed's takes none,"
    " but a section in its JSON and `elaswave run --dir DIR`"
)


@dataclass(slots=True, kw_only=True)
class TrainerSession:
    """One incarnation; `control` is there once it has called, and again where it calls again.

    `on_frame(frame)`: it speaks; `on_gone(status)`: its process counts as gone, and is still there.
    `encode`: the same for all trainers of the node.
    `missing`: what its script lacks to join, where it has not; `layout`, `slow`: as it has told;
    `late_in`: the line in which it was seen when it was late.
    """

    slot: int
    life: Life
    page: ProgressPage
    reactor: Reactor
    on_frame: "Callable[[TrainerSession, Frame], None]"
    on_gone: Callable[[str], None]
    encode: Encoder
    pid: int = 0
    pidfd: int = -1
    control: Channel | None = None
    fence_evidence: str | None = None
    missing: str = _UNKNOWN
    layout: dict[str, Any] | None = None
    slow: tuple[tuple[int, str], ...] = ()
    late_in: str | None = None
    waits: ProcessorWaits = field(default_factory=ProcessorWaits)
    work: WorkWatch = field(default_factory=WorkWatch)
    states: ProcessStates = field(default_factory=ProcessStates)
    _is_large: bool = field(init=False, default=False)
    _signal: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._look_for_its_end()

    def progress(self, awake_s: float) -> Sample | None:
        """Return how far it is, by its page; None where it does not work.

        See `ProgressPage.sample`.
        """
        if not self.life.works:
            return None
        pid, since_s = self.pid, self.page.since_s
        self.states.look(pid, progress_s=since_s, awake_s=awake_s)
        last_s = since_s
        if not self.page.awaits_another:
            last_s = self.work.last_s(pid, since_s, any_work=self.page.is_save)
        return self.page.sample(
            slot=self.slot,
            awake_s=awake_s,
            waited_s=self.waits.since(since_s, pid),
            worked_s=last_s - since_s,
            held_s=self.states.held_s,
            stopped_s=self.states.stopped_s,
            in_kernel_s=self.states.in_kernel_s,
        )

    def reached(self, sealed: int) -> int:
        """The step that it has come to; one without a place in the layout seals nothing of it."""
        sample = self.page.sample(slot=0)
        return sealed if sample is None else max(sealed, sample.step)

    def when(self, sealed: int) -> str:
        """Say where in the training it is, as "in step 3"; `sealed`: steps of its snapshot."""
        sample = self.page.sample(slot=0)
        if sample is None or sample.phase == BETWEEN_STEPS:
            return behind(sealed if sample else 0)
        return f"in step {sample.step}"

    def take_raised(self, raised: Raised, *, sealed: int) -> None:
        """It tells what ended its script."""
        self.life.raised = replace(raised, when=self.when(sealed))
        if self.life.stage is Stage.FINISHED:  # no loss any more, of which the leader would tell
            whose = f"a worker (process {self.pid})"
            say(f"{whose} failed after its last step:\n{raised.traceback.rstrip()}")

    def end_of(
        self, status: str, exit_code: int | None, *, sealed: int, args: Sequence[str]
    ) -> str:
        """Say what was seen of its end, before its work was finished, as it is told to the others.

        `sealed`: steps that its snapshot has; `args`: of its script.
        """
        if exit_code == 0:
            why = _UNTRAINED if sealed < 0 else _EARLY
            when = self.when(sealed)
            self.life.raised = Raised(error=status, message=why, where="", when=when)
            return f"{status} before its work was finished"
        is_ours = any(one.startswith("--elaswave") for one in args)
        if exit_code == EXIT_CONFIGURATION and not self.life.has_come and is_ours:
            return f"{status} {_UNKNOWN_OPTION}"
        return status if self.life.raised is None else f"{status}, {self.life.raised}"

    def send(self, message: WireMessage) -> None:
        """Tell it something; one without a link is told all that counts when it calls."""
        if self.control is not None:
            self.control.send_encoded(self.encode(message))

    def started(self, pid: int, pidfd: int) -> None:
        """It runs."""
        self.pid, self.pidfd = pid, pidfd
        if self._signal:
            self.send_signal(self._signal)

    def called(self, sock: socket.socket) -> None:
        """It has opened a control link, the first one or in the place of one that broke."""
        if self.control is not None:
            self.control.close()
        self.control = Channel(
            self.reactor, sock, on_frame=partial(self.on_frame, self), on_close=_its_end_comes
        )

    def send_signal(self, number: int) -> None:
        """Signal it if it still runs, or as soon as it does."""
        if self.pidfd < 0:
            self._signal = number
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def ask_to_end(self, number: int) -> None:
        """End it by this signal, unless its script handles that."""
        self.page.tell_to_end()
        self.send_signal(number)

    def kill(self) -> None:
        """End it by SIGKILL; one that does not die of that counts as gone after a while.

        A thread that is stuck in the kernel (a file system, a driver) may stay there for ever. No
        thread of it returns to its program, so that it is as good as dead: only the call that is
        under way may still finish. Snapshots do not suffer: what is sealed has checksums. A file
        that it was writing may. And what it holds, such as a device, is not free before it ends.
        """
        self.send_signal(signal.SIGKILL)
        self.reactor.after(DIES_WITHIN_S, self._give_up)

    def fence(self, evidence: str) -> None:
        """Kill it; its exit is reported with this evidence."""
        self.fence_evidence = evidence
        self.kill()

    def _look_for_its_end(self) -> None:
        """See a large process end before its memory is freed: it does nothing more by then."""
        pid = self.pid
        if not self.life.lives:
            return
        if pid and not self._is_large:
            self._is_large = resident_bytes(pid) >= LARGE_BYTES
        if self._is_large and (number := dying_by(pid)):
            self.life.process = Process.ENDS
            self.on_gone(f"{describe_status(number)[0]}, and its memory is being freed")
        else:
            self.reactor.after(LOOK_S if self._is_large else SELDOM_S, self._look_for_its_end)

    def _give_up(self) -> None:
        if self.life.lives:
            self.life.process = Process.STUCK
            status = f"SIGKILL has not ended it within {DIES_WITHIN_S:g} s"
            if self.fence_evidence is not None:
                self.fence_evidence += f"; {status}"
            self.on_gone(status)

    def hear_the_rest(self) -> None:
        """Its process is gone: take in what it said last."""
        if self.control is not None:
            self.control.drain()
            self.control.close()

    def close(self) -> None:
        """Let go of its descriptors."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def behind(sealed: int) -> str:
    """Say where in the training a worker is that is in no step; `sealed`: steps of its snapshot."""
    return f"after step {sealed - 1}" if sealed > 0 else "before the first step"


def _its_end_comes(evidence: str) -> None:
    """The trainer closed its end; what matters is how the process ends, and that comes."""


RECENT_VIEWS = 20


class StatusBoard:
    """Notes what a worker is asked and told; used by the control thread only.

    Moments are seconds since 1970, since people of several machines compare them.
    """

    def __init__(self) -> None:
        self._proposal: dict[str, Any] | None = None
        self._views: deque[dict[str, Any]] = deque(maxlen=RECENT_VIEWS)

    def proposed(self, ring: Ring, now_s: float) -> None:
        """A proposal is open, or has become urgent; before that it may wait for a step's end."""
        self._proposal = {
            "epoch": ring.ballot.epoch,
            "reason": ring.reason,
            "since_s": now_s,
            "late": ring.is_urgent,
        }

    def answered(self) -> None:
        """The open proposal was answered."""
        if self._proposal is not None:
            self._proposal["late"] = False

    def committed(self, path: Sequence[MembershipView], now_s: float) -> None:
        """The trainer is told these views, the last of which holds from now on."""
        self._proposal = None
        self._views += [describe_change(view, now_s) for view in path]

    @property
    def is_changing(self) -> bool:
        """True if a proposal of another view is open here."""
        return self._proposal is not None

    def report(self, trainer: TrainerSession, progress: Sample | None, *, now_s: float) -> Frame:
        """The answer of an agent about this worker, for `elaswave_plugin.cli.status`."""
        life, proposal = trainer.life, self._proposal
        return {
            "slot": trainer.slot,
            "trainer_pid": trainer.pid if life.lives else 0,
            "incarnation": life.incarnation,
            "phase": life.phase,
            "progress": progress and to_json(progress),
            "views": list(self._views),
            "proposal": proposal and {**proposal, "open_s": now_s - proposal["since_s"]},
            "layout": trainer.layout,
            "slow": trainer.slow,
            "late_in": None if life.has_come else trainer.late_in,
            "exited": life.end and life.end[0],
        }


def describe_change(view: MembershipView, now_s: float) -> dict[str, Any]:
    return {
        "time_s": now_s,
        "epoch": view.epoch,
        "workers": len(view.ranks),
        "reason": view.reason,
    }


def why_it_stays(trainer: TrainerSession, ranks: Sequence[int], slot: int) -> str | None:
    """Say why the worker of ``slot`` may not leave a job of these ``ranks``; None where it may."""
    if not trainer.life.is_member:
        return "its trainer has no part in the training now"
    if len(ranks) == 1:
        return "it is the last one; end the job instead"
    needed = None if trainer.layout is None else why_needed(trainer.layout, {*ranks} - {slot})
    if needed is not None:
        return f"without it {needed}; end the job instead, or wait until others have joined"
    return None


def why_layers_stay(trainer: TrainerSession, board: StatusBoard, cuts: Sequence[int]) -> str | None:
    """Say why layers cannot move to these cuts between stages; None where they can."""
    layout = trainer.layout
    if layout is None or not trainer.life.is_member:
        return "its trainer has no stages, or no part in the training now"
    if board.is_changing:
        return "the members are changing just now; ask again when they have"
    return layout["why_layers_stay"] or why_impossible(layout, cuts)
