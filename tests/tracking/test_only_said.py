"""A tracker that fails is said; what ends the job goes on to do so."""

import logging
from typing import NoReturn

import pytest

from elaswave_plugin.errors import EpochChanged, JobStopped
from elaswave_plugin.tracking.only_said import only_said


def fails(error: BaseException) -> NoReturn:
    """Raise it."""
    raise error


def test_a_tracker_that_fails_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    dropped: list[bool] = []
    with caplog.at_level(logging.WARNING):
        assert not only_said(
            fails, OSError("the disk\nis full"), what="X", otherwise=lambda: dropped.append(True)
        )
    (said,) = caplog.messages
    assert said == "tracking: X (OSError: the disk is full); training goes on without it"
    assert dropped


@pytest.mark.parametrize("error", [JobStopped("it is over"), EpochChanged(2, "a loss")], ids=str)
def test_what_ends_the_work_is_no_failure_of_a_tracker(error: BaseException) -> None:
    """The main thread may learn in any call that it was given up while it was stopped."""
    with pytest.raises(type(error)):
        only_said(fails, error, what="X", otherwise=lambda: pytest.fail("it was dropped"))
