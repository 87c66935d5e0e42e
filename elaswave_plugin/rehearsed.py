"""A rehearsal as the job sees it: its settings, which win over a script's own, and its observer.

Standard library only: agents read them as well.
"""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

REHEARSAL = "ELASWAVE_REHEARSAL"
"""The file in which a rehearsal says what its present run is like (`rehearsal/order.py`)."""


def rehearsed_settings(env: Mapping[str, str]) -> dict[str, Any]:
    """The settings that the rehearsal's present run is made with; none in any other job."""
    path = env.get(REHEARSAL)
    if path is None:
        return {}
    settings: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))["settings"]
    return settings


def observer(env: Mapping[str, str], worker: Any, framework: Any) -> Callable[..., None]:
    """Return what a bound worker tells its steps to, by name: nothing hears it in any other job.

    ``observe(what, ...)`` calls a method of `rehearsal/record.py`.
    """
    path = env.get(REHEARSAL)
    if path is None:
        return unobserved
    observe: Callable[..., None] = import_module("elaswave_plugin.rehearsal.record").observer(
        Path(path), worker, framework
    )
    return observe


def unobserved(what: str, *told: Any) -> None:
    """Hear nothing."""
