"""The start of a job in a script without a line of ours, and what its calls are given there."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elaswave_plugin import megatron_core
from elaswave_plugin.adapters.megatron.state.states_to_save import StatesToSave
from elaswave_plugin.adapters.megatron.step.reported_losses import first_loss
from elaswave_plugin.adapters.megatron.world import leave_start_to_script
from elaswave_plugin.around import around


@pytest.fixture
def of_a_job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have this process look like a worker's, started with these words and variables."""

    def started(*words: str, **environ: str) -> None:
        monkeypatch.setenv("ELASWAVE_AGENT", "socket")
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return started


def parsed(*words: str) -> tuple[argparse.Namespace, list[str]]:
    native = argparse.ArgumentParser.parse_known_args
    while hasattr(native, "__wrapped__"):
        native = native.__wrapped__
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    found: tuple[argparse.Namespace, list[str]] = megatron_core._without_ours(native, parser, words)
    return found


def test_a_strict_parser_does_not_see_our_options(of_a_job: Callable[..., None]) -> None:
    of_a_job("--elaswave")
    words = (
        "--steps",
        "3",
        "--elaswave",
        "--elaswave-kill",
        "1@2:data",
        "--elaswave-seed=7",
        "--x",
    )
    arguments, others = parsed(*words)
    assert (arguments.steps, others) == (3, ["--x"])


def test_it_is_wanted_by_the_flag_or_the_variable(of_a_job: Callable[..., None]) -> None:
    of_a_job("--steps=3")
    assert not megatron_core._is_wanted()
    assert parsed("--elaswave-seed=7")[1] == ["--elaswave-seed=7"]
    of_a_job("--steps=3", ELASWAVE="1")
    assert megatron_core._is_wanted()
    of_a_job("--elaswave", ELASWAVE="0")
    assert megatron_core._is_wanted()


def test_attach_puts_back_what_makes_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    native = dist.init_process_group
    while hasattr(native, "__elaswave__"):
        native = vars(native)["__elaswave__"]
    monkeypatch.setattr(dist, "init_process_group", megatron_core._Start().joining(native))
    leave_start_to_script()
    assert dist.init_process_group is native
    leave_start_to_script()
    assert dist.init_process_group is native


class _Loop:
    """A loop whose script is behind the others at a call in a world of three."""

    world_size_behind, has_place = 3, True

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.shares = SimpleNamespace(ask_width=lambda: self.asked.append("width"))

    def gathered_behind(self) -> list[tuple[torch.Tensor, int]]:
        pair = distributed_c10d._object_to_tensor({"a": 1}, torch.device("cpu"), None)
        return [(pair[0], int(pair[1]))] * 3


class _Made:
    def __init__(self, loop: _Loop | None, *, is_behind: bool) -> None:
        self.loop, self.is_behind = loop, is_behind


def test_a_script_behind_the_others_counts_as_they_did_and_saves_nothing() -> None:
    start, written = megatron_core._Start(), list[object]()
    width = around(start.as_then)(lambda group=None: 4)
    gather = around(start.gathered_then)(lambda into, one, group: into.append("native"))
    save = around(start.once)(lambda one, path: written.append(one))
    for made, seen in (
        (None, 4),
        (_Made(None, is_behind=True), 4),
        (_Made(_Loop(), is_behind=True), 3),
    ):
        start._made = made
        assert (width(), width("group")) == (seen, 4)
    objects: list[object] = [None] * 3
    gather(objects, "mine")
    assert objects == [{"a": 1}] * 3
    save("behind", "path")
    start._made = None
    gather(objects, "mine")
    save("there", "path")
    assert (objects[3:], written) == (["native"], ["there"])


def test_a_device_is_chosen_where_there_is_one(of_a_job: Callable[..., None]) -> None:
    chosen = list[int]()
    megatron_core._where_there_is_one(chosen.append, 0)
    of_a_job("--elaswave")
    megatron_core._where_there_is_one(chosen.append, 1)
    assert chosen == [0, *([1] if torch.cuda.is_available() else [])]


def test_a_state_is_built_again_where_the_script_has_put_it() -> None:
    states, view = StatesToSave(), {"name": "a"}

    def outer() -> dict[str, Any]:
        # As the wrapper of a model asks the model, which is guarded as well.
        return {"of": view["name"], **states.build(partial(dict, inner=1), 1)}

    state = states.build(partial(outer), 1)
    state["iteration"] = 4
    view["name"] = "b"
    states.renew(1)
    assert state == {"of": "a", "inner": 1, "iteration": 4}
    states.renew(2)
    assert state == {"of": "b", "inner": 1, "iteration": 4}
    states.forget()
    view["name"] = "c"
    states.renew(3)
    assert state["of"] == "b"


def test_a_copy_of_a_state_is_built_again_too() -> None:
    """In another dict, nested, in part, or as an argument of the state that is built behind it."""
    states, view = StatesToSave(), {"layers": [0, 1]}

    def model() -> dict[str, Any]:
        return {f"layer {n}": object() for n in view["layers"]} | {"kind": "gpt"}

    def optimizer(of: dict[str, Any]) -> dict[str, Any]:
        return {"of": [*of.values()]}

    first = states.build(partial(model), 1)
    saved = {"models": [{**first}], "part": {"layer 0": first["layer 0"]}, "step": 3}
    saved["optimizer"] = states.build(partial(optimizer, {**first, "step": 3}), 1)
    old, view["layers"] = set(map(id, first.values())), [0, 1, 2]
    states.renew(2, saved)
    layers = {name: one for name, one in first.items() if name != "kind"}
    assert len(layers) == 3 and not old & set(map(id, layers.values()))
    assert saved["models"] == [{**layers, "kind": "gpt"}] and saved["step"] == 3
    assert saved["part"] == {"layer 0": layers["layer 0"]}
    assert {*saved["optimizer"]["of"]} == {*layers.values(), "gpt", 3}


def test_the_first_loss_of_a_report_counts() -> None:
    assert first_loss({"lm loss": torch.tensor([6.0, 2.0]), "aux": 1.0}) == (6.0, 2.0, 2.0)
    assert first_loss(3.0) == (3.0, 1.0, 0.0)
    assert first_loss({"rewards": "none"}).total != first_loss({"rewards": "none"}).total
