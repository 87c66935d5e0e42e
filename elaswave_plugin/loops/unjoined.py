"""Tells the agent that its trainer trains, or has ended, without having joined the job.

A script in which nothing attaches trains as well as any other, and is protected against nothing.
"""

import atexit
import contextlib
import os
import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from elaswave_plugin.ipc.progress_page import page_fd, page_of
from elaswave_plugin.trainer.control_link import AgentContact

# What is missing, as an adapter knows it: a variable of the framework's module.
_MARK = "__elaswave__"


def watch() -> None:
    """Look out for the first optimizer step of this process, and for its end.

    Does nothing in a process that no guardian has started itself, such as a child of a trainer.
    """
    if page_fd(os.environ) is not None:
        _Watch()


class _Watch:
    """The look-out of one process, which tells its agent once."""

    def __init__(self) -> None:
        self._pid: int | None = os.getpid()
        self._environ = dict(os.environ)  # the script may change its own
        atexit.register(self._ended)
        # It stays, and does nothing any more: torch goes through its hooks while it calls one.
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # A step that is compiled is not seen: it would be cut in two.
        if self._pid is not None and not torch.compiler.is_compiling():
            self._tell(trains=True)

    def _ended(self) -> None:
        self._tell(trains=False)

    def _tell(self, *, trains: bool) -> None:
        """Tell the agent, unless this process has joined, or is a fork of the trainer."""
        pid, self._pid = self._pid, None
        if pid != os.getpid():
            return
        page = page_of(self._environ)
        if page is not None:
            page.close()
            return
        # Where no agent is there, this process is about to be killed.
        with contextlib.suppress(OSError):
            contact = AgentContact.from_environment(self._environ)
            contact.say_detached(trains=trains, missing=_missing())


def _missing() -> str:
    """Return what a script of this kind is wanted to do, by the modules that it has imported."""
    known = sys.modules
    told = getattr(known.get("deepspeed"), _MARK, None)
    if told is not None:
        return str(told)
    if "megatron.core" in known:
        if "--elaswave" not in sys.argv and os.environ.get("ELASWAVE") != "1":
            return (
                "--elaswave is not among the script's arguments; add it behind the script, or set"
                " ELASWAVE=1"
            )
        return (
            "--elaswave or ELASWAVE=1 is given, and the script called neither torch.distributed's"
            " init_process_group, by its name there, behind the import of megatron.core, nor"
            " Megatron-LM's pretrain; call one of them"
        )
    if known.keys() & {"deepspeed", "accelerate"}:
        return (
            "deepspeed.initialize was not called; have the script train with DeepSpeed (with HF: a"
            " DeepSpeed configuration, and no use_cpu)"
        )
    return (
        "the script uses neither Megatron-Core nor DeepSpeed; use one of them, with --elaswave or"
        ' the section "elaswave"'
    )
