"""Outputs of a model are told as plain values, and built of no class but the model's own."""

import sys
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from elaswave_plugin.adapters.deepspeed.engine.output_forms import Forms
from elaswave_plugin.adapters.deepspeed.engine.placeholder_output import StandIn
from elaswave_plugin.errors import ConfigurationError, UnreadableValueError
from elaswave_plugin.values.plain import decode, encode


class Losses(NamedTuple):
    """As models return them."""

    total: torch.Tensor
    parts: dict[str, torch.Tensor]


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As HF's ModelOutput: a mapping that is a data class."""

    loss: Any = None
    cache: Any = None

    def __post_init__(self) -> None:
        self.update(loss=self.loss, cache=self.cache)


@dataclass
class Plain:
    """A data class."""

    loss: Any


class Cache:
    """An object that an output has beside tensors."""


class Model(torch.nn.Module):
    """A model of this file."""


def _there(forms: Forms, value: Any, *, lossy: bool = False) -> Any:
    """Tell a value, and build it elsewhere."""
    return forms.made(decode(encode(forms.told(value, "the output", lossy=lossy))))


@pytest.fixture
def forms() -> Forms:
    return Forms(Model())


def test_outputs_come_with_their_classes(forms: Forms) -> None:
    one = torch.tensor(1.5)
    made = _there(forms, (Losses(one, {"a": one}), [Plain(one)], OrderedDict(b=3), {"c": (None,)}))
    assert made == (Losses(one, {"a": one}), [Plain(one)], OrderedDict(b=3), {"c": (None,)})
    assert [type(part) for part in made] == [Losses, list, OrderedDict, dict]
    output = _there(forms, Output(loss=one))
    assert isinstance(output, Output) and output.loss == output["loss"] == one


def test_objects_within_an_output_are_left_out(forms: Forms) -> None:
    output = Output(loss=torch.tensor(1.0), cache=Cache())
    made = _there(forms, output, lossy=True)
    assert made.cache is None and made.loss == 1.0
    with pytest.raises(ConfigurationError, match=r"the output\['cache'\] is of the class"):
        _there(forms, output)
    with pytest.raises(ConfigurationError, match="the output is of the class"):
        _there(forms, Cache(), lossy=True)


def test_classes_of_other_files_are_refused_and_mappings_are_dicts(
    forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Losses, "__module__", "elsewhere")
    with pytest.raises(ConfigurationError, match=r"elsewhere.Losses, which neither the script"):
        _there(forms, Losses(torch.ones(1), {}))
    batch = UserDict(a=torch.ones(1))
    assert _there(forms, batch) == {"a": torch.ones(1)}


@pytest.mark.parametrize("name", ["subprocess.Popen", "builtins.set", "types.SimpleNamespace"])
def test_no_other_class_is_built(forms: Forms, name: str) -> None:
    with pytest.raises(UnreadableValueError, match="is unknown here"):
        forms.made((name, {"args": (None, "true")}))


def test_a_class_of_the_script_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    script.Out = NamedTuple("Out", [("loss", int)])  # type: ignore[attr-defined]
    script.Out.__module__ = "__main__"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert _there(Forms(Model()), script.Out(3)) == script.Out(3)  # type: ignore[attr-defined]


def test_a_stand_in_tells_what_it_has_seen_to_one_that_has_not() -> None:
    first, second = StandIn(Model()), StandIn(Model())
    first.remember(((torch.ones(2, 3),), {}), Output(loss=torch.tensor(0.5), cache=Cache()))
    second.follow(decode(encode(first.tell())))
    made = second.make(((torch.ones(4, 3),), {}), torch.device("cpu"), counts=False)
    assert isinstance(made, Output) and made.loss == 0.5 and made.cache is None


def test_what_could_not_be_told_is_refused_in_the_first_pass() -> None:
    with pytest.raises(ConfigurationError, match="the output of the engine is of the class"):
        StandIn(Model()).remember(((torch.ones(2),), {}), Cache())
    with pytest.raises(ConfigurationError, match="the batch that the engine is called with"):
        StandIn(Model()).remember(((Cache(),), {}), torch.tensor(1.0))
