"""Jobs that workers join."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import pytest

from tests.faults.growth import without_reserve
from tests.faults.harness import JobSpec, Outcome, check_equal

Launch = Callable[[JobSpec], Outcome]
Reference = Callable[[JobSpec], Outcome]


class Grown(Protocol):
    """Grows a job by so many workers; ``like``: the job that it has to equal, without growth."""

    def __call__(
        self, spec: JobSpec, *, joiners: int = 1, like: JobSpec | None = None
    ) -> Outcome: ...


@pytest.fixture
def grown(run: Launch, reference: Reference) -> Grown:
    """A run that workers join, bit for bit as the undisturbed one of a job that cannot grow."""

    def equal(spec: JobSpec, *, joiners: int = 1, like: JobSpec | None = None) -> Outcome:
        grew = run(replace(spec, joiners=joiners))
        check_equal(grew, reference(without_reserve(like or spec)))
        return grew

    return equal
