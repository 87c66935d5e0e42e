"""Takes a line out of a function of the product, or puts another in its place: a defect."""

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import streams


def sabotage(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, line: str, instead: str = "pass"
) -> None:
    """Replace the only line of `owner.name` that holds `line`; fails where there is none or two.

    The device takes its time, as what is missing is a wait.
    """
    monkeypatch.setattr(streams, "PAUSE_S", streams.LONG_PAUSE_S)
    function: Callable[..., Any] = inspect.unwrap(vars(owner)[name])
    source = textwrap.dedent(inspect.getsource(function)).splitlines()
    (place,) = (number for number, text in enumerate(source) if line in text)
    indent = source[place][: len(source[place]) - len(source[place].lstrip())]
    source[place] = indent + instead
    names = vars(sys.modules[function.__module__])
    found: dict[str, Any] = {}
    exec(compile("\n".join(source), inspect.getfile(function), "exec"), names, found)
    monkeypatch.setattr(owner, name, found[name])
