"""Two nodes lose each other's packets, silently: one of the two is given up, and comes back."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.parted_cases import ALL_PRELOADED, JOBS, NODES, Case, cases, check
from tests.faults.parting import WITHIN_S, Cut, Nodes, check_parted, run_parted, warm_nodes
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# The limit of the issue, after the network is whole again.
BACK_WITHIN_S = 30.0
# Until the lost worker is back, steps take a while without computing: the job outlasts the cut.
PACE_S = 0.25
PACED = f"""
import time
from elaswave_plugin.loops.guarded_steps import GuardedSteps
begin_now, back = GuardedSteps.begin, []
def begin_slowly(self):
    begin_now(self)
    if not back:
        back[:] = ["back"] * ('"entered"' in open(self.worker.events.path).read())
        time.sleep({PACE_S})
GuardedSteps.begin = begin_slowly
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Namespaces with a zygote each; every test leaves them joined."""
    with warm_nodes(NODES, ALL_PRELOADED, tmp_path_factory.mktemp("nodes")) as made:
        yield made


# Three real cuts in each part, with the one below; tests/core/test_agreement_cuts.py has others in
# virtual time, in any order of what is said and heard.
@proves(Kind.LINK, Promise.EQUAL)
@pytest.mark.parametrize("case", sampled(cases(), most=2), ids=str)
@pytest.mark.timeout(200)
def test_a_pair_parted_silently_loses_one_of_the_two(
    nodes: Nodes, data: Path, tmp_path: Path, once: Launch, case: Case
) -> None:
    parted = run_parted(case.spec, case.cut, nodes, data=data, directory=tmp_path)
    check(case, parted, launched=once)


@proves(Kind.LINK, Promise.EQUAL)
@pytest.mark.parametrize(
    "cut_s",
    [
        8.0,
        pytest.param(45.0, marks=pytest.mark.slow),
        pytest.param(130.0, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
@pytest.mark.timeout(500)
def test_who_was_given_up_comes_back_when_the_network_heals(
    nodes: Nodes, data: Path, tmp_path: Path, reference: Reference, cut_s: float
) -> None:
    steps = int((cut_s + BACK_WITHIN_S) / PACE_S)
    spec = replace(JOBS["dp4"], steps=steps, respawn=1, dump="last", sabotage=PACED)
    cut = Cut(pair=(2, 3), phase="backward", heals_after_s=cut_s)
    parted = run_parted(spec, cut, nodes, data=data, directory=tmp_path)
    check_parted(parted, cut)
    (lost,) = parted.lost
    assert parted.ranks[-1] == [0, 1, 2, 3] and parted.pause_s < WITHIN_S
    (healed,), (entered,) = parted.run.events("healed"), parted.run.events("entered")
    # While they were apart it stayed out, and said of whom it hears nothing.
    assert 0.0 < entered["time_s"] - healed["time_s"] < BACK_WITHIN_S
    out = parted.run.events("unreached")
    assert [one["nodes"] for one in out if one["slot"] == lost] == [[5 - lost], []]
    assert "reaches all members again" in parted.run.output
    # So did the agents, and when they heard each other again.
    for kind in ("unheard", "heard_again"):
        told = {(one["node"], one["peer"]) for one in parted.run.events(kind)}
        assert told == {(2, 3), (3, 2)}
    assert "nothing of node 2 is heard here" in parted.run.output
    assert "node 2 is heard here again" in parted.run.output
    assert parted.run.trace() == reference(replace(spec, nodes=1, respawn=0, sabotage="")).trace()
