"""The objects of a script that are looked into, and their names."""

import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from elaswave_plugin.rehearsal.record import Found, attributes, is_own

SCRIPT = """
import random
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.calls = 3
        self.last = {"hidden": torch.ones(2)}

class Counter:
    total = 7

def counted(module):
    counter = Counter()
    counter.here = 1

    def hook(module, inputs, output):
        counter.here += 1

    module.register_forward_hook(hook)
    return module

NOISE = random.Random(5)
net = counted(Net())
plain = torch.optim.Adam(net.parameters())
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a script that has run as `__main__`."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(SCRIPT, main.__dict__)
    return main.__dict__


def found_in(name: str, value: Any, **besides: Any) -> Found:
    found = Found(**besides)
    found.look(name, value)
    return found


def test_tensors_and_values_have_names(script: dict[str, Any]) -> None:
    found = found_in("net", script["net"])
    assert {"net.inner.weight", "net.inner.bias", "net.last['hidden']"} <= set(found.tensors)
    assert found.values["net.calls"] == 3


def test_what_a_hook_holds_is_found(script: dict[str, Any]) -> None:
    found = Found()
    for name, value in attributes(script["net"]):
        found.look(f"model.{name}", value)
    assert found.values["model.hook.counter.here"] == 1
    assert found.values["model.hook.counter.__class__.total"] == 7


def test_a_generator_is_compared_by_its_state(script: dict[str, Any]) -> None:
    before = found_in("NOISE", script["NOISE"]).tensors
    assert before == found_in("NOISE", random.Random(5)).tensors
    script["NOISE"].random()
    assert found_in("NOISE", script["NOISE"]).tensors != before


def test_what_others_look_at_is_left_out(script: dict[str, Any]) -> None:
    net = script["net"]
    assert found_in("net", net, besides=[net]).tensors == {}


def test_a_tensor_differs_by_bits_shape_and_kind(script: dict[str, Any]) -> None:
    ones = [torch.ones(2), torch.ones(1, 2), torch.ones(2).double(), torch.tensor([1.0, -1.0])]
    digests = [found_in("one", one).tensors["one"] for one in ones]
    assert len(set(digests)) == len(ones)
    assert digests[0] == found_in("one", torch.ones(2)).tensors["one"]


def test_a_file_is_judged_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is asked of every module before every step, which took most of a rehearsal."""
    assert is_own(str(tmp_path / "own.py"))
    monkeypatch.setattr(Path, "resolve", None)
    assert is_own(str(tmp_path / "own.py"))
    assert not is_own(random.__file__) and not is_own(torch.__file__)


def test_the_callbacks_that_a_library_holds_are_found(script: dict[str, Any]) -> None:
    """As a Trainer's: what the script made is looked into, what the library has is not."""
    exec("class Holder:\n    pass", library := {"__name__": "torch_like.library"})
    trainer, holder = library["Holder"](), library["Holder"]()
    trainer.steps, trainer.holder = 3, holder
    exec("counter = type('Counts', (), {})()\ncounter.seen = 5", script)
    holder.callbacks = [library["Holder"](), script["counter"]]
    holder.trainer = trainer
    found = found_in("trainer", trainer)
    assert found.values["trainer.holder.callbacks[1].seen"] == 5
    assert "trainer.steps" not in found.values


COUNTS = """
import dataclasses, fractions, types
import numpy as np

class Slotted:
    __slots__ = ("seen",)

@dataclasses.dataclass(slots=True)
class Counts:
    slotted: Slotted
    whole: int = 3
    numpy_whole: int = np.int64(3)
    mean: float = np.float32(0.5)
    part: object = fractions.Fraction(3, 4)
    samples: set = dataclasses.field(default_factory=lambda: {4, 5})
    space: object = dataclasses.field(default_factory=lambda: types.SimpleNamespace(steps=3))

counts = Counts(Slotted())
counts.slotted.seen = 3
"""


def test_numbers_of_all_kinds_are_found(script: dict[str, Any]) -> None:
    """In slots, of NumPy and of Python's own kinds; of a set how many it has."""
    exec(COUNTS, script)
    values = {name: str(one) for name, one in found_in("c", script["counts"]).values.items()}
    wanted = {"c.slotted.seen": "3", "c.whole": "3", "c.numpy_whole": "3", "c.mean": "0.5"}
    wanted |= {"c.part": "3/4", "c.samples.__len__()": "2", "c.space.steps": "3"}
    assert wanted.items() <= values.items()
