"""Accelerate's own trackers, which stay with the main process that has opened them."""

from collections.abc import Callable
from typing import Any

from elaswave_plugin.ipc.console import say


class LostTrackers:
    """Says once that what a later main process logs by ``accelerator.log`` goes nowhere.

    ``init_trackers`` opens them on the main process only, and scripts call it there only, so that
    no other worker knows what it was given.
    """

    def __init__(self, *, was_main: bool) -> None:
        """``was_main``: this worker was the main process at the launch."""
        self._is_told = was_main

    def log(self, native: Callable[..., None], accelerator: Any, *args: Any, **given: Any) -> None:
        """``Accelerator.log``."""
        is_lost = accelerator.log_with and not accelerator.trackers
        if not self._is_told and is_lost and accelerator.is_main_process:
            self._is_told = True
            names = ", ".join(str(one) for one in accelerator.log_with)
            say(
                f"accelerator.log goes nowhere from here on: the trackers ({names}) were opened by"
                " the main process that is lost; log by the section's own wandb or tensorboard,"
                " which go on with whichever worker is left"
            )
        native(accelerator, *args, **given)
