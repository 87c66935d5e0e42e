"""One Slurm a module."""

from collections.abc import Iterator

import pytest

from tests.schedulers.slurm import Slurm


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Four nodes on this host."""
    with Slurm() as running:
        yield running
