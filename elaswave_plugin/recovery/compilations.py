"""Announces when torch.compile compiles, which may take minutes in whichever step."""

import sys
from typing import Any

from elaswave_plugin.ipc.progress_page import ProgressPage


class Compilations:
    """The compilations of one trainer, on its progress page."""

    def __init__(self, page: ProgressPage) -> None:
        self._page = page

    def watch(self) -> None:
        """Have torch tell of them from now on, if its compiler is imported, which takes a second.

        Again and again, since `torch._dynamo.reset()` forgets who is told. Source: torch,
        torch/_dynamo/callback.py, which serialises the calls and makes them for the outermost
        compilation only.
        """
        callbacks: Any = sys.modules.get("torch._dynamo.callback")
        told = getattr(callbacks, "callback_handler", None)
        if told is not None and self._begin not in told.start_callbacks:
            told.register_start_callback(self._begin)
            told.register_end_callback(self._end)

    def _begin(self, *args: Any) -> None:
        self._page.set_compiles(True)

    def _end(self, *args: Any) -> None:
        self._page.set_compiles(False)
