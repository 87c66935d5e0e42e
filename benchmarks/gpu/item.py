"""An item of the kit and its outcome: plain values, as they stand in the JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """The outcome of an item in a word."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A piece of the kit that runs in a process of its own and ends within its budget.

    ``place``: "module:function" of its program; ``gpus``: the least number of devices that it needs
    where no stand-in takes their place; ``arguments`` go to the program after the device.
    """

    name: str
    title: str
    budget_s: float
    place: str
    gpus: int = 0
    arguments: Sequence[Any] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict on an item, with what it found until its end.

    ``device``: "cuda", "stand-in" where the CPU has taken a GPU's place, "" where it was not run.
    """

    name: str
    title: str
    status: Status
    seconds: float
    budget_s: float
    device: str = ""
    reason: str = ""
    lines: Sequence[str] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    log_tail: Sequence[str] = ()
