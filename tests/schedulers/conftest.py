"""The zygote, the dataset and the reference runs of the fault tests, and one Slurm a module."""

from collections.abc import Iterator

import pytest

from tests.faults.conftest import data as data
from tests.faults.conftest import reference as reference
from tests.faults.conftest import run as run
from tests.faults.conftest import zygote as zygote
from tests.schedulers.slurm import Slurm


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Four nodes on this host."""
    with Slurm() as running:
        yield running
