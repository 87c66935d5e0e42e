"""The communicator's benchmark: its input, and one small run of each measurement."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.communicator import check_options, main, opened
from benchmarks.communicator_report import draw
from benchmarks.group_list import Layout, default_layout, parse_layout
from benchmarks.native_groups import (
    LIMIT_S,
    await_end_of_threads,
    gloo_backend,
    native_threads,
)
from elaswave_plugin.errors import ConfigurationError


def test_the_groups_of_a_small_layout() -> None:
    groups = Layout(tp=2, pp=2, dp=2).groups()
    assert groups["tp 0,0"] == (0, 1)
    assert groups["dp 1,0"] == (1, 3)
    assert groups["pp 0,1"] == (2, 6)
    assert groups["tp-pp 0"] == (0, 1, 4, 5)
    assert groups["tp-dp 1"] == (4, 5, 6, 7)
    assert groups["emb 1,1"] == (3, 7)
    assert len(groups) == 4 + 4 + 4 + 2 + 2 + 4


def test_groups_of_one_are_left_out() -> None:
    assert set(Layout(tp=1, pp=1, dp=3).groups()) == {"dp 0,0", "tp-dp 0"}


@pytest.mark.parametrize(("world", "layout"), [(8, "2x2x2"), (16, "2x2x4"), (64, "2x4x8")])
def test_default_layouts(world: int, layout: str) -> None:
    assert str(default_layout(world)) == layout
    assert default_layout(world).world == world


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"world": "8,x"}, "--world is '8,x', wanted sizes"),
        ({"world": "10"}, "--world has 10, which is no multiple of TP 2 x PP 2"),
        ({"layout": "2,2"}, "--layout is '2,2', wanted TP,PP,DP"),
        ({"layout": "2,2,4"}, "--layout 2,2,4 has 16 workers, but --world has 8"),
        ({"per_node": 3}, "--per-node is 3, wanted a divisor of each of the sizes 8"),
        ({"runs": 0}, "--runs is 0"),
        ({"runs": 6}, "--runs is 6, which leaves too few of 8 workers"),
        ({"json_file": Path("/nowhere/x.json")}, "--json is '/nowhere/x.json', whose folder"),
        ({"plot": Path("/nowhere/x.png")}, "--plot is '/nowhere/x.png', whose folder"),
        ({"plot": Path("x.txt")}, "--plot is 'x.txt', wanted a name that ends in one of: "),
    ],
)
def test_bad_input_is_one_sentence(options: dict[str, object], complaint: str) -> None:
    given: dict[str, object] = {"world": "8", "layout": None, "runs": 1, "kills": 0}
    with pytest.raises(ConfigurationError, match=complaint):
        check_options(**{"json_file": None, "plot": None, **given, **options})  # type: ignore[arg-type]


def test_bad_input_of_the_command_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world", "9"]) == 2
    assert "elaswave: --world has 9" in capsys.readouterr().err


def test_a_native_group_has_threads_as_long_as_somebody_holds_it() -> None:
    make: Any = torch._C._distributed_c10d.HashStore
    group = gloo_backend(make(), 0, 1)
    deadline_s = time.monotonic() + LIMIT_S
    while not native_threads():
        assert time.monotonic() < deadline_s, "a group has no thread"
        time.sleep(0.001)
    with pytest.raises(TimeoutError, match="threads of native groups run: somebody holds one"):
        await_end_of_threads(0.05)
    del group
    await_end_of_threads()


def test_a_loss_is_measured_in_three_ways_and_a_kill_once(tmp_path: Path) -> None:
    with opened(per_node=2) as bench:
        row = bench.departures(parse_layout("2,1,2", 4), 1)
        killed_ms = bench.kill_to_verified_ms(Layout(tp=1, pp=1, dp=4))
    assert row["world"] == 4 and row["layout"] == "2x1x2"
    for way in ("full", "partial", "edit"):
        assert 0 < row[f"{way}_ms"] <= row["verified_ms"][way] < 60_000
    assert math.isclose(row["ratio_full"], row["full_ms"] / row["edit_ms"])
    assert row["per_node"] == 2
    assert 0 < row["floor_ms"] < row["edit_ms"]
    held = row["resources"]
    assert held["elastic"]["threads"] == 0 < held["gloo"]["threads"]
    assert 0 < killed_ms < 60_000
    result = {"rows": [row], "hardware": "test", "date": "today"}
    draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
