"""Handlers of a script for SIGTERM: where all leave, they are called before the same step."""

import signal
from typing import Any

from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.process_tree import exit_at_once
from elaswave_plugin.recovery.worker import Worker


class OwnSignals:
    """Handlers that a script installs before or after it joins the job, looked for at each step.

    The job's last checkpoint takes its place, where there is one: it is by all workers together.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._told: list[Any] = []
        self._is_called = False

    def begin_step(self) -> None:
        """Take a new one, and call it where all workers have been told to leave."""
        member = self._worker.member
        member.signals.take()
        own = member.signals.of_script
        if own is not None and own not in self._told:
            if not member.has_last_checkpoint:
                member.ends_last()
            self._tell(own, self._of_sigterm(own))
        other = signal.getsignal(signal.SIGUSR1)
        if callable(other) and not member.signals.is_ours(other) and other not in self._told:
            self._tell(
                other,
                f"the script's own handler of SIGUSR1, {_name(other)}, is called in processes that"
                " hear it themselves; the launcher hears it as a request that all workers leave",
            )
        if self._worker.last_call and not (member.has_last_checkpoint or self._is_called):
            self._is_called = True
            self._call()

    def _call(self) -> None:
        try:
            self._worker.member.signals.call()
        except SystemExit as end:
            # All of them end here: nobody waits in a barrier for the others.
            self._worker.close()
            exit_at_once(end.code if isinstance(end.code, int) else int(end.code is not None))

    def _tell(self, action: Any, sentence: str) -> None:
        self._told.append(action)
        if self._worker.owns_rank_0:
            say(sentence)

    def _of_sigterm(self, action: Any) -> str:
        if self._worker.member.has_last_checkpoint:
            return (
                "SIGTERM has all workers write the job's last checkpoint and leave; the script's"
                f" own handler of it, {_name(action)}, is not called"
            )
        return (
            f"the script's own handler of SIGTERM, {_name(action)}, is called where all workers"
            " are told to leave, before the same step in each, if each has one; the job ends"
            " --notice-timeout-s later at the latest"
        )


def _name(action: Any) -> str:
    """Say where a handler is: its name, file and line, as far as it has them."""
    code = getattr(action, "__code__", None)
    if code is None:
        return repr(action)
    return f"{action.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
