"""The deterministic cluster: its page is right, its commands are known, chance repeats itself."""

import doctest
import random
import re
from pathlib import Path

import pytest

from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.testing import Cluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "testing.md"


def commands() -> set[str]:
    return {name.removeprefix("_do_") for name in vars(Cluster) if name.startswith("_do_")}


def test_the_example_of_the_page_runs() -> None:
    found = doctest.testfile(str(PAGE), module_relative=False)
    assert found.attempted >= 6 and not found.failed


def test_the_page_has_every_command() -> None:
    listed = PAGE.read_text("utf-8").partition("- Trainers: ")[2].partition("\n\n")[0]
    told = re.findall(r"`([a-z]+)(?:\s+[A-Z][^`]*)?`", listed)
    assert sorted(told) == sorted(commands())


def test_an_unknown_command_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"the command is 'ponder', wanted one of .*quiesce"):
        Cluster((0,), Timeouts()).do("ponder")


def test_a_seed_delivers_in_the_same_order_every_time() -> None:
    def run(seed: int) -> list[str]:
        cluster = Cluster((0, 1, 2), Timeouts())
        for command in ("start", "quiesce all", "seal all"):
            cluster.act(command)
            cluster.run(random.Random(seed))
        return cluster.lines

    assert run(1) == run(1)
    assert any(run(1) != run(seed) for seed in range(2, 9))
