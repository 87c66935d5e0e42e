"""A worker's state between two seals: one that fails leaves nothing that a recovery may rely on."""

from concurrent.futures import Future
from typing import Any

import pytest

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import EpochChanged
from elaswave_plugin.recovery.state_keeper import StateKeeper


def keeper() -> StateKeeper:
    """A keeper that has sealed step 3 of view 1, and whose state is in place."""
    nothing: Any = None
    made = StateKeeper(nothing, config=ElasticConfig(), phases=nothing, record=nothing)
    made.live = 3, 1
    return made


def test_a_seal_that_was_interrupted_leaves_no_state_in_place() -> None:
    state, sealing = keeper(), Future[None]()
    sealing.set_exception(EpochChanged(2, "a worker was lost"))
    state._sealing = sealing
    with pytest.raises(EpochChanged):
        state.finish_seal()
    assert state.live is None
    state.finish_seal()  # it is over


def test_control_a_complete_seal_is_relied_on() -> None:
    state, sealing = keeper(), Future[None]()
    sealing.set_result(None)
    state._sealing = sealing
    state.finish_seal()
    assert state.live == (3, 1)
