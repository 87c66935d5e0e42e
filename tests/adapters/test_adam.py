"""FusedAdam keeps its state in other places than torch's Adam; on the stand-ins for a CPU."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
from megatron.core.optimizer import distrib_optimizer

from elaswave_plugin.adapters.megatron.compat.te_groups import forget_groups
from elaswave_plugin.adapters.megatron.state import adam

STAND_INS = Path(__file__).resolve().parents[1] / "stand_ins"
PACKAGES = {"te": "transformer_engine.pytorch.optimizers", "apex": "apex.optimizers"}


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """Import a module with a stand-in of this kind in place; it is forgotten afterwards."""
    known = set(sys.modules)

    def find(kind: str, name: str) -> Any:
        for path in (STAND_INS, STAND_INS / f"with_{kind}"):
            monkeypatch.syspath_prepend(str(path))
        return importlib.import_module(name)

    yield find
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.fixture(params=PACKAGES)
def fused(request: pytest.FixtureRequest, imported: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in's FusedAdam in the place that Megatron-Core has for it."""
    found = imported(request.param, PACKAGES[request.param]).FusedAdam
    monkeypatch.setattr(distrib_optimizer, "Adam", found)
    return found


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(3))
    made.grad = torch.full((3,), 0.5)
    return made


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capturable", True),
        ("master_weights", True),
        ("use_decoupled_grad", True),
        ("exp_avg_dtype", torch.float16),
        ("exp_avg_sq_dtype", torch.uint8),
    ],
)
def test_what_is_not_carried_of_it_is_named(fused: Any, name: str, value: Any) -> None:
    inner = fused([parameter()])
    assert list(adam.problems(inner)) == []
    setattr(inner, name, value)
    ((setting, seen, carried),) = adam.problems(inner)
    assert (setting, seen) == (f"{name} of FusedAdam", value) and carried != value


def test_steps_are_counted_by_group_also_where_one_was_empty(fused: Any) -> None:
    inner = fused([{"params": [parameter()]}, {"params": [parameter()]}])
    inner.param_groups[1]["params"] = []
    assert adam.applied_steps(inner) == 0
    inner.step()
    inner.step()
    assert adam.applied_steps(inner) == 2 and "step" not in inner.param_groups[1]
    adam.set_applied_steps(inner, 5)
    inner.param_groups[1]["params"] = [parameter()]
    inner.step()
    assert [group["step"] for group in inner.param_groups] == [6, 6]


def test_every_parameter_that_comes_into_a_group_is_updated(fused: Any) -> None:
    inner = fused([{"params": [parameter()]}])
    here = [parameter(), parameter()]
    inner.param_groups[0]["params"] = here
    for param in here:
        moments = {name: torch.zeros(3) for name in ("exp_avg", "exp_avg_sq")}
        inner.state[param] = adam.fresh_state(inner, moments)
    first, last = (inner.state[param]["exp_avg"] for param in here)
    adam.fit_groups(inner)
    inner.step()
    assert all(bool((param < 1).all()) for param in here)
    assert bool(first.all()) and torch.equal(first, last)


def test_ranks_in_groups_are_asked_again(imported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_groups()
    module = imported("te", "transformer_engine.pytorch.distributed")
    members = {"rank": 3, "size": 4}
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: members["rank"])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: members["size"])
    group = object()

    def asked() -> tuple[int, int]:
        return module.get_distributed_rank(group), module.get_distributed_world_size(group)

    assert asked() == (3, 4)
    members |= {"rank": 1, "size": 2}
    assert asked() == (3, 4)
    forget_groups()
    assert asked() == (1, 2)
