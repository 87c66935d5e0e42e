"""Tells the passes of evaluations: a hang in one is found by the length of those before it."""

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from elaswave_plugin.recovery.phases import Phases


def watch_evaluation(module: torch.nn.Module, phases: Phases) -> list[RemovableHandle]:
    """Announce the forward passes of a model that does not train; returns the hooks."""

    def begin(module: torch.nn.Module, inputs: Any) -> None:
        if not module.training:
            phases.begin_pass()

    def end(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not module.training:
            phases.end_pass()

    return [
        module.register_forward_pre_hook(begin),
        module.register_forward_hook(end, always_call=True),
    ]
