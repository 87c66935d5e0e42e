"""One zygote for the session, and each reference run and twin once."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from elaswave_plugin.config import parse_kill
from tests.convoys import convoy as convoy
from tests.convoys import played as played
from tests.deepspeed.harness import PRELOAD, EngineSpec, as_it_counted
from tests.faults.growth import grow, without_reserve
from tests.faults.harness import Outcome, Zygote, launch

Launch = Callable[[EngineSpec], Outcome]
Twin = Callable[[EngineSpec | Outcome], Outcome]


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A process that has imported DeepSpeed."""
    running = Zygote(tmp_path_factory.mktemp("zygote"), PRELOAD)
    yield running
    running.close()


@pytest.fixture(scope="session")
def run(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Launch a specification in a directory of its own."""

    def launched(spec: EngineSpec) -> Outcome:
        folder = tmp_path_factory.mktemp("run")
        where = {"zygote": zygote, "data": folder, "directory": folder}
        return grow(spec, joiners=spec.joiners, **where) if spec.joiners else launch(spec, **where)

    return launched


@pytest.fixture(scope="session")
def once(run: Launch) -> Launch:
    """Launch each specification once."""
    made: dict[EngineSpec, Outcome] = {}

    def remembered(spec: EngineSpec) -> Outcome:
        if spec not in made:
            made[spec] = run(spec)
            assert made[spec].returncode == 0, made[spec].output[-4000:]
        return made[spec]

    return remembered


@pytest.fixture(scope="session")
def reference(once: Launch) -> Launch:
    """The run of a specification that nothing disturbs, and that nobody joins."""
    return lambda spec: once(without_reserve(replace(spec, kills=(), changes=(), joiners=0)))


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
