"""Fixtures that a session makes once, for all folders: zygotes, a dataset, runs to compare with."""

import contextlib
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.faults.growth import grow
from tests.faults.harness import PRELOAD, Outcome, Zygote, launch

# Of any kind of specification; the conftests of folders name their own.
Runs = Callable[[Any], Outcome]


class Zygotes(Protocol):
    """Gives the zygote of these modules, which are looked for in ``path`` first."""

    def __call__(
        self, preload: tuple[str, ...] = PRELOAD, *, path: tuple[Path, ...] = ()
    ) -> Zygote: ...


class Run(Protocol):
    """Launches a specification; ``zygote``: one with other modules than its own."""

    def __call__(self, spec: Any, zygote: Zygote | None = None) -> Outcome: ...


@pytest.fixture(scope="session")
def zygotes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygotes]:
    """Processes that have imported modules, each when it is first asked for."""
    made: dict[tuple[tuple[str, ...], tuple[Path, ...]], Zygote] = {}
    with contextlib.ExitStack() as stack:

        def of(preload: tuple[str, ...] = PRELOAD, *, path: tuple[Path, ...] = ()) -> Zygote:
            if (preload, path) not in made:
                zygote = Zygote(tmp_path_factory.mktemp("zygote"), preload, path=path)
                made[preload, path] = zygote
                stack.callback(zygote.close)
            return made[preload, path]

        yield of


@pytest.fixture(scope="session")
def zygote(zygotes: Zygotes) -> Zygote:
    """A process that has imported Megatron-Core."""
    return zygotes()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An indexed dataset made of a part of the machine's own standard library."""
    from elaswave_plugin.demo.text import find_text, write_dataset

    folder = tmp_path_factory.mktemp("data")
    write_dataset(find_text(Path(sysconfig.get_path("stdlib")) / "json"), folder / "text")
    return folder


@pytest.fixture(scope="session")
def run(zygotes: Zygotes, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Launch a specification in a directory of its own."""

    def launched(spec: Any, zygote: Zygote | None = None) -> Outcome:
        where = {"data": data, "directory": tmp_path_factory.mktemp("run")}
        zygote = zygote or zygotes(spec.preload)
        if spec.joiners:
            return grow(spec, joiners=spec.joiners, zygote=zygote, **where)
        return launch(spec, zygote=zygote, **where)

    return launched


def each_once(run: Runs) -> Runs:
    """Launch a specification when it is first asked for; it has to end well."""
    made: dict[Any, Outcome] = {}

    def remembered(spec: Any) -> Outcome:
        if spec not in made:
            made[spec] = run(spec)
            assert made[spec].returncode == 0, made[spec].output[-4000:]
        return made[spec]

    return remembered


@pytest.fixture(scope="session")
def once(run: Run) -> Runs:
    """Launch each specification once."""
    return each_once(run)


@pytest.fixture(scope="session")
def reference(once: Runs) -> Runs:
    """The run of a specification that nothing disturbs, and that nobody joins."""
    return lambda spec: once(spec.undisturbed())
