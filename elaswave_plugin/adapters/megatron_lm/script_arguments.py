"""The arguments of a Megatron-LM script as its job takes them: refused at once, or adjusted."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elaswave_plugin.adapters.answers import UNSET, Answer, refuse, replies
from elaswave_plugin.adapters.megatron_lm_settings import settings

_OPTIMIZER = "use_distributed_optimizer"


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigurationError naming every argument that a job cannot carry."""
    said = replies(settings(), vars(args))
    refuse(reply.sentence for reply in said if reply.answer is Answer.REFUSED)


def adjust(args: argparse.Namespace) -> "ScriptArguments":
    """Assign what the job switches on or off; returns what the script had."""
    said = [r for r in replies(settings(), vars(args)) if r.answer is not Answer.REFUSED]
    given = {r.setting.name: r.seen for r in said if r.setting.becomes is not UNSET}
    for reply in said:
        if reply.setting.becomes is not UNSET:
            setattr(args, reply.setting.name, reply.setting.becomes)
    return ScriptArguments(given, tuple(reply.sentence for reply in said))


class ScriptArguments:
    """What a script had given of the arguments that its job has adjusted, and what was said."""

    def __init__(self, given: dict[str, Any], said: tuple[str, ...]) -> None:
        self.given = given
        self.said = said

    @contextmanager
    def as_given(self, args: argparse.Namespace) -> Iterator[None]:
        """Inside, the optimizer is the one that the script named: checkpoints are its own."""
        kept = args.use_distributed_optimizer
        args.use_distributed_optimizer = self.given.get(_OPTIMIZER, kept)
        try:
            yield
        finally:
            args.use_distributed_optimizer = kept
