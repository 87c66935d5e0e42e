"""Which cases of a test run in `make test`; all of them run in `make matrix`."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def sampled(cases: Sequence[Any], keep: Collection[int]) -> list[Any]:
    """The cases, of which all but those numbered ``keep`` are marked slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if number in keep else pytest.mark.slow,
        )
        for number, case in enumerate(cases)
    ]
