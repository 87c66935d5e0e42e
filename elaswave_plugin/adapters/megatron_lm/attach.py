"""Megatron-LM's ``pretrain`` with --elaswave: patched before, undone after."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from elaswave_plugin.adapters.megatron.compat.cpu_patches import cpu_patches
from elaswave_plugin.adapters.megatron.compat.patches import elastic_patches
from elaswave_plugin.adapters.megatron.world import leave_start_to_script
from elaswave_plugin.adapters.megatron_lm.hooks import Hooks
from elaswave_plugin.adapters.megatron_lm.own_means import without_averages
from elaswave_plugin.adapters.megatron_lm.patches import lm_patches
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.trainer.fatal import ends_in_a_sentence


@ends_in_a_sentence
def run(train: Callable[[], Any]) -> Any:
    """Call ``train()``, a bound ``pretrain``, as one worker of an elastic job.

    Bad input ends the process with one sentence and exit code 2.
    """
    leave_start_to_script()
    with ExitStack() as stack:

        def apply(patches: PatchSet) -> None:
            stack.callback(patches.undo)
            patches.apply()
            hooks.places += patches.places

        def joining(config: ElasticConfig) -> None:
            apply(elastic_patches(exact=config.consistency == "exact", saves=hooks.saves))

        hooks = Hooks(joining)
        if not torch.cuda.is_available():
            apply(cpu_patches(scripts=True))
        apply(lm_patches(hooks))
        stack.enter_context(without_averages())
        try:
            result = train()
        except SystemExit:
            # Megatron-LM leaves its loop so, alike on all workers, where it was asked to end.
            _leave(hooks)
            raise
        _leave(hooks)
        return result


def _leave(hooks: Hooks) -> None:
    if hooks.job is not None and hooks.job.trains:
        hooks.job.finish()
