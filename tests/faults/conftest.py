"""One zygote, one dataset and one reference run per specification for the whole session."""

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.harness import JobSpec, Outcome, Zygote, launch

Launch = Callable[[JobSpec], Outcome]
Reference = Callable[[JobSpec], Outcome]


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
        spec = replace(spec, kills=(), changes=(), lost_trainers=(), lost_supervisors=())
        if spec.awaits:
            spec = replace(spec, awaits=(), sabotage="", respawn=0)
        if spec not in made:
            made[spec] = run(spec)
            assert made[spec].returncode == 0, made[spec].output[-4000:]
        return made[spec]

    return undisturbed
