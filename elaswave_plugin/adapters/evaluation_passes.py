"""Tells the passes of evaluations: a hang in one is found by the length of those before it."""

import torch
from torch.utils.hooks import RemovableHandle

from elaswave_plugin.adapters.pass_hooks import After, Before
from elaswave_plugin.recovery.phases import Phases


def watch_evaluation(module: torch.nn.Module, phases: Phases) -> list[RemovableHandle]:
    """Announce the forward passes of a model that does not train; returns the hooks."""
    begin, end = evaluation_hooks(module, phases)
    return [
        module.register_forward_pre_hook(lambda module, inputs: begin(module)),
        module.register_forward_hook(lambda *_: end(None), always_call=True),
    ]


def evaluation_hooks(module: torch.nn.Module, phases: Phases) -> tuple[Before, After]:
    """Return what to call before and after each pass of the module, also one that fails."""

    def begin(module: torch.nn.Module) -> None:
        if not module.training:
            phases.begin_pass()

    def end(output: object) -> None:
        if not module.training:
            phases.end_pass()

    return begin, end
