"""An optimizer that steps in a job without being bound to it, refused at its first step."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.runtime.refusal import ends_in_a_sentence


class Unbound:
    """Looks at each step of an optimizer in this process, before it is made."""

    def __init__(self, bound: torch.optim.Optimizer, *, is_updating: Callable[[], bool]) -> None:
        """``is_updating()``: whether the bound one updates, which others may be a part of."""
        self._bound = bound
        self._is_updating = is_updating
        self._hook = register_optimizer_step_pre_hook(self._steps)

    def stop(self) -> None:
        """The job is over: any optimizer may step."""
        self._hook.remove()

    @ends_in_a_sentence
    def _steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is self._bound or self._is_updating():
            return
        raise ConfigurationError(
            f"an optimizer that is not bound ({type(optimizer).__name__}) steps in this job, which "
            "has one model and its optimizer: after a loss its step would be made a second time, "
            "on weights that nobody brings back; put both models (of a GAN, actor and critic) into "
            "one that Megatron-Core wraps, with one optimizer"
        )
