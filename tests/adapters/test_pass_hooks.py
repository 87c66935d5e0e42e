"""Hooks of a model's passes: the same calls, compiled or not, and no part of what is compiled."""

import copy
import threading

import pytest
import torch

from elaswave_plugin.adapters.pass_hooks import PassHooks

Model = torch.nn.Sequential


def model_of(*, fails: bool = False) -> Model:
    """Two layers; the second one may fail."""
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    if fails:
        layers[1] = torch.nn.Linear(5, 4)
    return Model(*layers)


class Locked:
    """A part of the job, which nobody can copy."""

    def __init__(self, seen: list[str]) -> None:
        self._lock, self._seen = threading.Lock(), seen

    def note(self, module: torch.nn.Module) -> None:
        """Note a pass."""
        self._seen.append("begin")


def watched(model: Model) -> tuple[PassHooks, list[str]]:
    """Hooks before the model and its first layer and after both; and what they saw."""
    hooks, seen = PassHooks(model), list[str]()
    hooks.add(model, lambda _: seen.append("begin"), lambda _: seen.append("end"), always=True)
    hooks.add(model[0], lambda _: seen.append("layer"), lambda one: seen.append(str(one.shape[0])))
    return hooks, seen


EAGER = ["begin", "layer", "3", "end"]


def test_a_copy_of_the_model_has_the_same_hooks() -> None:
    model = model_of()
    hooks, seen = PassHooks(model), list[str]()
    hooks.add(model, Locked(seen).note, lambda _: seen.append("end"))
    copy.deepcopy(model)(torch.ones(3, 4))
    assert seen == ["begin", "end"]


def test_hooks_of_a_pass_that_is_not_compiled() -> None:
    model = model_of()
    _, seen = watched(model)
    model(torch.ones(3, 4))
    assert seen == EAGER


@pytest.mark.parametrize("first", [True, False])
def test_a_compiled_pass_is_one_graph_between_the_hooks(first: bool) -> None:
    torch._dynamo.reset()
    model = model_of()
    if first:
        model.compile(backend="eager", fullgraph=True)
    hooks, seen = watched(model)
    if not first:
        model.compile(backend="eager", fullgraph=True)
    hooks.compiled()
    hooks.compiled()
    for _ in range(2):
        model(torch.ones(3, 4))
        # Those of layers are called around the whole.
        assert seen == ["begin", "layer", "end", "3"]
        seen.clear()
    with hooks.uncompiled():
        model(torch.ones(3, 4))
    assert sorted(seen) == sorted(EAGER)


def test_a_compiled_layer_in_a_pass_that_is_not() -> None:
    torch._dynamo.reset()
    model = model_of()
    hooks, seen = watched(model)
    model[0].compile(backend="eager", fullgraph=True)
    hooks.compiled()
    model(torch.ones(3, 4))
    assert seen == EAGER


def test_a_layer_that_is_compiled_with_its_model() -> None:
    torch._dynamo.reset()
    model = model_of()
    hooks, seen = watched(model)
    model[0].compile(backend="eager")
    model.compile(backend="eager")
    hooks.compiled()
    model(torch.ones(3, 4))
    assert seen == ["begin", "layer", "end", "3"]


def test_a_model_in_a_compiled_one() -> None:
    torch._dynamo.reset()
    inner = model_of()
    model = torch.compile(inner, backend="eager", fullgraph=True)
    hooks, seen = PassHooks(model), list[str]()
    hooks.add(model, lambda _: seen.append("begin"), lambda _: seen.append("end"))
    hooks.add(inner[0], lambda _: seen.append("layer"), lambda one: seen.append(str(one.shape[0])))
    hooks.compiled()
    model(torch.ones(3, 4))
    assert seen == EAGER
    seen.clear()
    with hooks.uncompiled():
        model(torch.ones(3, 4))
    assert seen == EAGER


@pytest.mark.parametrize("compiles", [True, False])
def test_what_is_called_always_is_called_where_a_pass_fails(compiles: bool) -> None:
    torch._dynamo.reset()
    model = model_of(fails=True)
    hooks, seen = watched(model)
    if compiles:
        model.compile(backend="eager")
        hooks.compiled()
    with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError)):
        model(torch.ones(3, 4))
    assert "end" in seen and seen.count("3") == (0 if compiles else 1)
