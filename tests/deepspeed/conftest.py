"""The zygote of the session that has imported DeepSpeed, and planned twins."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from elaswave_plugin.config import parse_kill
from tests.deepspeed.harness import PRELOAD, EngineSpec, as_it_counted
from tests.faults.harness import Outcome, Zygote
from tests.session import Zygotes

Launch = Callable[[EngineSpec], Outcome]
Twin = Callable[[EngineSpec | Outcome], Outcome]


@pytest.fixture(scope="session")
def zygote(zygotes: Zygotes) -> Zygote:
    """A process that has imported DeepSpeed."""
    return zygotes(PRELOAD)


@pytest.fixture(scope="session")
def twin(once: Launch) -> Twin:
    """The run in which the workers leave as planned, before the steps in which they are killed.

    They come back before the same steps. Given a run, before the steps to which it rolled back.
    """

    def planned(of: EngineSpec | Outcome) -> Outcome:
        spec = of if isinstance(of, EngineSpec) else as_it_counted(of)
        kills = [parse_kill(kill) for kill in spec.kills]
        leaving = (f"{kill.slot}@{kill.step}" for kill in kills if not kill.incarnation)
        return once(replace(spec, kills=(), changes=(*leaving, *spec.changes)))

    return planned
