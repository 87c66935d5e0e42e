"""One zygote, one dataset and one reference run per specification for the whole session."""

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from tests.convoys import convoy as convoy
from tests.convoys import played as played
from tests.faults.growth import grow, without_reserve
from tests.faults.harness import JobSpec, Outcome, Zygote, check_equal, launch

Launch = Callable[[JobSpec], Outcome]
Reference = Callable[[JobSpec], Outcome]


class Grown(Protocol):
    """Grows a job by so many workers; ``like``: the job that it has to equal, without growth."""

    def __call__(
        self, spec: JobSpec, *, joiners: int = 1, like: JobSpec | None = None
    ) -> Outcome: ...


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A process that has imported the frameworks."""
    running = Zygote(tmp_path_factory.mktemp("zygote"))
    yield running
    running.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An indexed dataset made of a part of the machine's own standard library."""
    from elaswave_plugin.demo.text import find_text, write_dataset

    folder = tmp_path_factory.mktemp("data")
    write_dataset(find_text(Path(sysconfig.get_path("stdlib")) / "json"), folder / "text")
    return folder


@pytest.fixture(scope="session")
def run(zygote: Zygote, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Launch a specification in a directory of its own."""

    def launched(spec: JobSpec) -> Outcome:
        return launch(spec, zygote=zygote, data=data, directory=tmp_path_factory.mktemp("run"))

    return launched


@pytest.fixture(scope="session")
def reference(run: Launch) -> Reference:
    """The undisturbed run of a specification, made once."""
    made: dict[JobSpec, Outcome] = {}

    def undisturbed(spec: JobSpec) -> Outcome:
        spec = replace(spec, kills=(), changes=(), lost_trainers=(), lost_nodes=())
        if spec.awaits:
            spec = replace(spec, awaits=(), sabotage="", respawn=0)
        if spec not in made:
            made[spec] = run(spec)
            assert made[spec].returncode == 0, made[spec].output[-4000:]
        return made[spec]

    return undisturbed


@pytest.fixture
def grown(zygote: Zygote, data: Path, tmp_path: Path, reference: Reference) -> Grown:
    """A run that workers join, bit for bit as the undisturbed one of a job that cannot grow."""

    def equal(spec: JobSpec, *, joiners: int = 1, like: JobSpec | None = None) -> Outcome:
        run = grow(spec, joiners=joiners, zygote=zygote, data=data, directory=tmp_path)
        check_equal(run, reference(without_reserve(like or spec)))
        return run

    return equal
