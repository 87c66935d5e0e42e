"""Packets are dropped or late: a job goes on, and at 5 % nobody is given up."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.tracking.events import STEPS_FILE
from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec, Outcome, check_survived
from tests.faults.lossy import LossyNetwork, lossy_network_of
from tests.faults.networked import LIMIT_S, end, launched
from tests.idle import Deadline
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# As a switch that is overloaded may be.
BAD_S = 25.0
SPEC = JobSpec(nodes=4, steps=30, dump="last")


@pytest.fixture
def network() -> Iterator[LossyNetwork]:
    with lossy_network_of(SPEC.nodes) as made:
        yield made


def disturbed(
    spec: JobSpec,
    network: LossyNetwork,
    *,
    loss: float,
    delay_s: float = 0.0,
    lasts_s: float | None = None,
    data: Path,
    out: Path,
) -> Outcome:
    """A run whose network is bad from its first step on, to its end or for so long."""
    with ExitStack() as stack:
        launchers = []
        for node in range(spec.nodes):
            arguments = spec.arguments(data, out)
            launchers.append(launched(network.network, node, spec, arguments, out))
            stack.callback(end, launchers[-1])
        # What is lost before the first seal ends a job.
        deadline = Deadline(LIMIT_S)
        while not ((out / STEPS_FILE).exists() and (out / STEPS_FILE).stat().st_size):
            assert deadline.left_s(), (out / "output").read_text()[-3000:]
            time.sleep(0.05)  # the file is all that a running job shows
        network.disturb(loss=loss, delay_s=delay_s)
        if lasts_s is not None:
            time.sleep(lasts_s)  # as long as the network is bad
            network.disturb(loss=0.0)
        codes = [launcher.wait(2 * LIMIT_S) for launcher in launchers]
    dropped, held = network.disturb(loss=0.0)
    assert (dropped > 0, held > 0) == (loss > 0, delay_s > 0), "the disturbance never came"
    output = (out / "output").read_text()
    code = 0 if 0 in codes else next(code for code in codes if code)
    return Outcome(spec=spec, directory=out, returncode=code, output=output, seconds=0)


@proves(Kind.LINK, Promise.NOBODY_LOST)
@pytest.mark.parametrize(("loss", "delay_s"), sampled([(0.05, 0.0), (0.0, 0.2)]))
@pytest.mark.timeout(400)
def test_nobody_is_given_up(
    network: LossyNetwork,
    data: Path,
    tmp_path: Path,
    reference: Reference,
    loss: float,
    delay_s: float,
) -> None:
    # Each step waits for many late packets in turn.
    spec = replace(SPEC, steps=12) if delay_s else SPEC
    run = disturbed(spec, network, loss=loss, delay_s=delay_s, data=data, out=tmp_path)
    check_survived(run)
    assert all(event["ranks"] == [0, 1, 2, 3] for event in run.events("view_committed"))
    assert run.trace() == reference(replace(spec, nodes=1)).trace()


@pytest.mark.slow  # two minutes and a half
@proves(Kind.LINK, Promise.GOES_ON)
@pytest.mark.timeout(400)
def test_the_job_goes_on_after_30_percent(
    network: LossyNetwork, data: Path, tmp_path: Path, reference: Reference
) -> None:
    spec = replace(SPEC, steps=200, respawn=10)
    run = disturbed(spec, network, loss=0.3, lasts_s=BAD_S, data=data, out=tmp_path)
    assert run.returncode == 0, run.output[-4000:]
    # Of each change it is said why.
    for event in run.events("view_committed")[1:]:
        assert event["reason"] in run.output
    assert run.trace() == reference(replace(spec, nodes=1, respawn=0)).trace()
