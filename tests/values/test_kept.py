"""A kept object whose state could not go to another worker is refused when it is kept."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from elaswave_plugin import kept
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.kept import keep
from elaswave_plugin.step_state.step_state import KeptObjects


class Policy:
    """A class of a script's."""


class Schedule:
    """An object with a state, in which another one may be."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    token = kept._OBJECTS.set(())
    yield
    kept._OBJECTS.reset(token)


def test_states_as_scripts_have_them_are_kept() -> None:
    model = torch.nn.BatchNorm1d(3)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    for number, one in enumerate(
        (
            average,
            optimizer,
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
            torch.Generator(),
            np.random.default_rng(1),
            np.random.RandomState(1),
            random.Random(1),
            torch.ones(3),
            {"step": 0, "best": np.float64(0.5), "seen": {1, 2}, "of": (1, None)},
            [1.5, "a"],
        )
    ):
        keep(f"number {number}", one)
    state = KeptObjects().keep()
    KeptObjects().put_back(state)
    assert len(state) == 10


def test_a_state_with_an_object_is_refused_by_its_place_and_class() -> None:
    with pytest.raises(ConfigurationError) as caught:
        keep("schedule", Schedule(step=1, policies=[Policy()]))
    assert (
        "the state of keep('schedule', ...)['policies'][0] is of the class"
        " tests.values.test_kept.Policy, and only plain values go from worker to worker"
    ) in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"keep\('last', ...\)\['policy'\] is of"):
        keep("last", {"policy": Policy()})
    assert kept.kept_objects() == {}


def test_an_object_that_comes_into_it_later_is_refused_before_the_next_step() -> None:
    schedule = keep("schedule", Schedule(step=1))
    KeptObjects().keep()
    schedule.state["policy"] = Policy()
    with pytest.raises(ConfigurationError, match=r"\['policy'\] is of the class"):
        KeptObjects().keep()


def test_an_object_of_no_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="got a Policy, wanted an object with state_dict"):
        keep("policy", Policy())
