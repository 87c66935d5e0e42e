"""The results that a script's loads of checkpoints give a worker that comes later."""

from types import SimpleNamespace
from typing import Any

import pytest

from elaswave_plugin.adapters.deepspeed.engine.framework import COUNTERS
from elaswave_plugin.adapters.deepspeed.engine.newcomer import Loads
from elaswave_plugin.errors import ConfigurationError


class Progress:
    """A class of a script."""


def worker(*, respawn: int, loads: list[str] | None) -> Any:
    """A worker of the launch; one that comes later where ``loads`` are given."""
    constants = {} if loads is None else {"loads": loads}
    found = SimpleNamespace(detached=loads is not None, job_constants=constants, reserve=0)
    found.config = SimpleNamespace(respawn=respawn)
    found.remember = constants.update
    return found


def engine(value: int) -> Any:
    return SimpleNamespace(**dict.fromkeys(COUNTERS, value))


def never() -> Any:
    raise AssertionError("a later worker loads nothing itself")


@pytest.mark.parametrize("respawn", [0, 10])
def test_a_later_worker_is_given_what_the_others_loaded(respawn: int) -> None:
    first = worker(respawn=respawn, loads=None)
    loaded = "a path", {"epoch": 3}
    assert Loads(first).load(engine(7), lambda: loaded) == loaded
    later = engine(0)
    loads = Loads(worker(respawn=respawn, loads=first.job_constants["loads"]))
    assert loads.load(later, never) == loaded and later == engine(7)
    # The script loads once more than the others did: there was nothing then.
    path, state = loads.load(later, never)
    assert path is None and not state


def test_a_result_that_does_not_travel_is_refused_where_workers_are_started_again() -> None:
    with pytest.raises(ConfigurationError, match=r"load_checkpoint returns.*Progress"):
        Loads(worker(respawn=10, loads=None)).load(engine(7), lambda: ("a path", Progress()))


def test_without_that_it_is_refused_on_who_joins_all_the_same() -> None:
    first, loaded = worker(respawn=0, loads=None), ("a path", {"at": Progress()})
    assert Loads(first).load(engine(7), lambda: loaded) is loaded
    loads = Loads(worker(respawn=0, loads=first.job_constants["loads"]))
    with pytest.raises(ConfigurationError, match=r"load_checkpoint returns.*Progress"):
        loads.load(engine(0), never)
