"""Functions that the adapters re-implement are those that they were written for."""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elaswave_plugin.adapters import upstream_sources
from elaswave_plugin.adapters.upstream_sources import (
    Row,
    digest_of,
    say_unknown,
    source_digest,
)
from tests.adapters.megatron_lm.harness import REPOSITORY, needs_repository
from tests.tidy.upstream_digests import digest_in, rows

ADAPTERS = Path(upstream_sources.__file__).parent
# A path in a framework's repository, as docstrings name where something is re-implemented from.
CITES = re.compile(
    r"(?:megatron/(?:core|training)|deepspeed/runtime|accelerate)/(?:\s?\w+/)*\s?\w+\.py"
)
# Files that name such a path for what they call, set or read, and re-implement nothing of.
CALLS = {
    "deepspeed/compat/unsupported.py": "refuses batches of two shapes, which it cannot receive",
    "deepspeed_settings.py": "refuses the keys that it has removed",
    "megatron/compat/rng.py": "sets the states that recomputation restores",
    "megatron/state/adam.py": "carries the Adams that it makes",
    "megatron/state/layer_units.py": "orders units as its buffers are filled",
    "megatron/state/open_passes.py": "ends what its pipelines enter",
    "megatron/state/recomputed_buffers.py": "puts back what recomputation changes again",
    "megatron/step/reported_losses.py": "takes losses in the forms that it takes",
    "megatron_lm/loader.py": "reads by its samplers",
    "megatron_lm/script_writers.py": "opens its writers",
    "megatron_lm/triton_stub.py": "imports as it does",
}
SOURCE = '''    @decorated  # why
    def function(self, one,
                 two="#no comment"):
        """Says.

        What.
        """
        # A comment.

        def inner():
            "Says."
            return one  # why

        return """no
        docstring"""
'''


def lines(source: str) -> list[str]:
    return source.splitlines(keepends=True)


def test_what_is_no_code_does_not_count() -> None:
    bare = '''    @decorated
    def function(self, one,
                 two="#no comment"):
        def inner():
            return one
        return """no
        docstring"""
'''
    digest = source_digest(lines(SOURCE))
    assert source_digest(lines(bare)) == digest
    after = "\n    # Of the next one.\n    other = 1\n\nclass Other:\n    pass\n"
    assert source_digest(lines(SOURCE + after)) == digest


@pytest.mark.parametrize(
    "change", [("return one", "return two"), ("#no", "# no"), ("no\n", "not\n"), ("@dec", "@ed")]
)
def test_code_counts(change: tuple[str, str]) -> None:
    changed = SOURCE.replace(*change)
    assert changed != SOURCE
    assert source_digest(lines(changed)) != source_digest(lines(SOURCE))


def marks(row: Row) -> tuple[pytest.MarkDecorator, ...]:
    """Functions of Megatron-LM's scripts are in its checkout."""
    return (needs_repository,) if row[0].startswith("megatron.training") else ()


@pytest.mark.parametrize("row", [pytest.param(row, marks=marks(row), id=row[0]) for row in rows()])
def test_functions_that_are_installed_are_known(row: Row) -> None:
    place, file, known = row
    module = place.partition(":")[0]
    assert (ADAPTERS / file).is_file()
    if module.startswith("megatron.training"):
        # Its package needs more than is installed here; jobs of such scripts import it.
        assert digest_in(Path(REPOSITORY), place) in dict(known)
        return
    found = import_module(module).__file__
    assert found is not None
    folder = Path(found).parents[module.count(".")]
    # As a job finds it, and as releases are read.
    assert digest_of(place) == digest_in(folder, place)
    assert digest_of(place) in dict(known)


def test_an_unknown_source_is_said_in_one_sentence_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some_upstream.py").write_text("class Thing:\n    def cut(self):\n        pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    place = "some_upstream:Thing.cut"
    digest = digest_of(place)
    assert digest is not None
    known = (place, "megatron/state/buffers.py", ((digest, "1.0 to 1.2"),))
    say_unknown([known])
    assert capsys.readouterr().err == ""
    changed = (*known[:2], (("0" * 16, "1.0 to 1.2"),))
    say_unknown([known, changed])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("elaswave: the source is that of no known release: some_upstream.Thing")
    assert (
        "adapters/megatron/state/buffers.py; known: 1.0 to 1.2)" in said
        and "`elaswave rehearse COMMAND`" in said
    )


class Nested:
    """Has a lambda within other lines."""

    def make(self) -> Any:
        return lambda one: one

    other = 1


@pytest.mark.parametrize(
    "place", ["no_such_module:name", "math:sqrt", "made:without_source", "made:within"]
)
def test_what_has_no_source_is_not_known(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = ModuleType("made")
    exec("def without_source(): pass", vars(made))
    made.within = Nested().make()
    monkeypatch.setitem(sys.modules, "made", made)
    assert digest_of(place) is None


def test_each_file_that_names_its_upstream_is_in_the_table() -> None:
    citing = {
        path.relative_to(ADAPTERS).as_posix()
        for path in ADAPTERS.rglob("*.py")
        if CITES.search(path.read_text("utf-8")) and path.name != "reimplemented.py"
    }
    in_table = {file for _, file, _ in rows()}
    assert citing - in_table - CALLS.keys() == set()
    assert CALLS.keys() <= citing - in_table
