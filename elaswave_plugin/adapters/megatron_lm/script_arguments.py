"""The arguments of a Megatron-LM script as its job takes them: refused at once, or adjusted."""

import argparse
import os
from contextlib import AbstractContextManager
from typing import Any

from elaswave_plugin.adapters.answers import UNSET, Answer, refuse, replies
from elaswave_plugin.adapters.growth import without_newcomers
from elaswave_plugin.adapters.megatron_lm_settings import settings
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.set_within import set_within

_OPTIMIZER = "use_distributed_optimizer"


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigurationError naming every argument that a job cannot carry."""
    said = replies(settings(), vars(args))
    refuse(reply.sentence for reply in said if reply.answer is Answer.REFUSED)


def settings_for(args: argparse.Namespace, config: ElasticConfig, *, reserve: int) -> ElasticConfig:
    """Return our settings as these arguments leave them; raises ConfigurationError.

    ``reserve``: the workers that may join beyond the launch.
    """
    if args.dataloader_type == "external":
        why = "with --dataloader-type external nobody else can read what a worker reads to begin"
        config = without_newcomers(config, reserve, why, rank=int(os.environ.get("RANK", "0")))
    has_stages = args.pipeline_model_parallel_size > 1
    if has_stages and args.save and args.ckpt_format == "torch":
        if config.move_layers == "always":
            raise ConfigurationError(
                "move_layers is always and --ckpt-format is torch, whose files are those of the "
                "launch's stages; set move_layers to never, or use --ckpt-format torch_dist"
            )
        config = config.model_copy(update={"move_layers": "never"})
    return config


def adjust(args: argparse.Namespace) -> "ScriptArguments":
    """Assign what the job switches on or off; returns what the script had."""
    said = [r for r in replies(settings(), vars(args)) if r.answer is not Answer.REFUSED]
    given = {r.setting.name: r.seen for r in said if r.setting.becomes is not UNSET}
    for reply in said:
        if reply.setting.becomes is not UNSET:
            setattr(args, reply.setting.name, reply.setting.becomes)
    return ScriptArguments(given, tuple(reply.sentence for reply in said))


class ScriptArguments:
    """A script's own values of the arguments that its job has adjusted, and the lines said."""

    def __init__(self, given: dict[str, Any], said: tuple[str, ...]) -> None:
        self.given = given
        self.said = said

    @property
    def names_distributed_optimizer(self) -> bool:
        """Return whether the script itself has switched it on."""
        return bool(self.given.get(_OPTIMIZER, True))

    def as_given(self, args: argparse.Namespace) -> AbstractContextManager[None]:
        """Inside, the optimizer is the one that the script named: checkpoints are its own."""
        return set_within(args, _OPTIMIZER, self.given.get(_OPTIMIZER, vars(args)[_OPTIMIZER]))
