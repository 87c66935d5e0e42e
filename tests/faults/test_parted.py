"""Two nodes that do not lead lose each other's packets, silently, while the leader hears both."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from elaswave_plugin.tracking.events import STEPS_FILE, read_lines
from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.network import Network, network_of
from tests.faults.networked import LIMIT_S, Seen, end, launched
from tests.proofs import Kind, Promise, proves

PAIR = (2, 3)
# The last time that the others stand still for.
WITHIN_S = 10.0
SPEC = JobSpec(nproc=4, nodes=4, steps=60, dump="last")


@pytest.fixture
def network() -> Iterator[Network]:
    with network_of(SPEC.nodes) as made:
        yield made


class Parted:
    """A job of four nodes, two of which are parted in its third step or later."""

    def __init__(self, stack: ExitStack, network: Network, spec: JobSpec, data: Path, out: Path):
        self.spec, self.directory, self._network = spec, out, network
        out.mkdir()
        arguments = spec.arguments(data, out)
        self.seen = Seen(out)
        self._launchers = []
        for node in range(spec.nodes):
            self._launchers.append(launched(network, node, spec, arguments, out))
            stack.callback(end, self._launchers[-1])
        self.seen.wait_for("view_committed", epoch=1)
        while self.steps_of(0) < 3:
            time.sleep(0.02)
        network.part(*PAIR)

    def steps_of(self, slot: int) -> int:
        return len([*self.times_of(slot)])

    def times_of(self, slot: int) -> list[float]:
        file = self.directory / STEPS_FILE
        records = read_lines(file) if file.exists() else ()
        return [float(one["time_s"]) for one in records if one["slot"] == slot]

    def heal(self) -> None:
        self._network.heal(*PAIR)

    def end(self) -> Outcome:
        """Wait for the end of all launchers."""
        codes = [launcher.wait(LIMIT_S) for launcher in self._launchers]
        output = (self.directory / "output").read_text()
        assert codes == [0] * self.spec.nodes, output[-3000:]
        return Outcome(
            spec=self.spec, directory=self.directory, returncode=0, output=output, seconds=0
        )

    def longest_pause_s(self) -> float:
        times = self.times_of(0)
        return max(after - before for before, after in pairwise(times))


@proves(Kind.LINK, Promise.EQUAL)
@pytest.mark.timeout(300)
def test_a_pair_parted_silently_loses_one_of_the_two(
    network: Network, data: Path, tmp_path: Path, reference: Reference
) -> None:
    with ExitStack() as stack:
        job = Parted(stack, network, SPEC, data, tmp_path / "run")
        run = job.end()
    check_equal(run, reference(SPEC))
    views = [event["ranks"] for event in run.events("view_committed")]
    # By the links, or before them by the hang watch, where the others wait in a circle.
    assert views[-1] in ([0, 1, 2], [0, 1, 3]) and all(len(ranks) >= 3 for ranks in views)
    assert job.longest_pause_s() < WITHIN_S


@proves(Kind.LINK, Promise.EQUAL)
@pytest.mark.timeout(300)
def test_who_was_given_up_stays_out_until_it_reaches_all(
    network: Network, data: Path, tmp_path: Path, reference: Reference
) -> None:
    spec = replace(SPEC, steps=300, respawn=1)
    with ExitStack() as stack:
        job = Parted(stack, network, spec, data, tmp_path / "run")
        out = job.seen.wait_for("unreached")
        job.heal()
        job.seen.wait_for("entered", slot=out["slot"])
        run = job.end()
    check_equal(run, reference(spec))
    views = [event["ranks"] for event in run.events("view_committed")]
    assert views[-1] == [0, 1, 2, 3] and all(len(ranks) >= 3 for ranks in views)
    assert {out["slot"], *out["members"]} == {*PAIR}
    assert job.longest_pause_s() < WITHIN_S
