"""The variables that a function of a script reads from outside: an unset one is passed over."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
from megatron.core.timers import Timers

from elaswave_plugin.adapters.closure import globals_of, nonlocals_of
from elaswave_plugin.adapters.megatron.own_timers import stopped_where_interrupted
from elaswave_plugin.errors import EpochChanged
from elaswave_plugin.rehearsal.record import Found

NUMBER = 3


def function_of(*, averages: bool, timers: Any = None) -> Callable[[], Any]:
    """A training step that names a variable which only an option of the script sets."""
    if averages:
        average = 0.5

    def train_step() -> Any:
        return (average if averages else NUMBER), timers

    return train_step


def test_variables_that_are_not_set_are_passed_over() -> None:
    unset, known = function_of(averages=False), function_of(averages=True)
    assert isinstance(unset, FunctionType) and isinstance(known, FunctionType)
    assert dict(nonlocals_of(unset)) == {"averages": False, "timers": None}
    assert dict(nonlocals_of(known))["average"] == 0.5
    assert dict(globals_of(known)) == {"NUMBER": NUMBER}


def test_a_step_that_names_an_unset_variable_runs_and_its_timers_stop() -> None:
    timers = Timers(log_level=0, log_option="minmax")
    timers("step", log_level=0)
    step = function_of(averages=False, timers=timers)

    def interrupted() -> None:
        with stopped_where_interrupted(step):
            assert step()[0] == NUMBER
            timers._timers["step"]._started = True
            raise EpochChanged(2)

    with pytest.raises(EpochChanged):
        interrupted()
    assert not timers._timers["step"]._started


def test_a_rehearsal_looks_into_a_function_that_names_an_unset_variable() -> None:
    step = function_of(averages=False)
    step.__module__ = "__main__"
    found = Found()
    found.look("step", step)
    assert found.values["step.averages"] is False
