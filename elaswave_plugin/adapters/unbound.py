"""An optimizer that steps in a job and is none of the job's, refused at its first step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.trainer.fatal import ends_in_a_sentence


class Unbound:
    """Looks at each step of an optimizer in this process, before it is made."""

    def __init__(
        self,
        is_bound: Callable[[torch.optim.Optimizer], bool],
        *,
        advice: str,
        before_refusal: Callable[[], object] = lambda: None,
    ) -> None:
        """``is_bound(optimizer)``: whether the job guards its steps; ``advice``: what to do."""
        self._is_bound = is_bound
        self._advice = advice
        self._before_refusal = before_refusal
        self._in_bound_step = False
        self._hook = register_optimizer_step_pre_hook(self._steps)

    @contextmanager
    def bound_step(self) -> Iterator[None]:
        """Inside, a step of the job is made, of which those of other optimizers are parts."""
        self._in_bound_step = True
        try:
            yield
        finally:
            self._in_bound_step = False

    def stop(self) -> None:
        """The job is over: any optimizer may step."""
        self._hook.remove()

    @ends_in_a_sentence
    def _steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._in_bound_step or self._is_bound(optimizer):
            return
        self._before_refusal()
        raise ConfigurationError(
            f"an optimizer that is not bound ({type(optimizer).__name__}) steps in this job: after "
            "a loss its step would be made a second time, on weights that no recovery restores; "
            f"{self._advice}"
        )
