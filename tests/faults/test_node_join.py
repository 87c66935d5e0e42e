"""A node is lost with all that it holds, and another one takes its place in the running job."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.ipc.address_file import read_addresses
from elaswave_plugin.tracking.events import EVENTS_FILE, Tail
from tests.faults.conftest import Reference
from tests.faults.harness import (
    JobSpec,
    Outcome,
    Zygote,
    check_equal,
    failed_by_themselves,
    lose_nodes,
    open_launcher,
    started,
)
from tests.faults.hybrid_matrix import TP2_PP2_DP2
from tests.faults.test_join import LATER, check_nothing_thrown_away, entered, last_ranks
from tests.idle import Deadline
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

LIMIT_S = 60.0
# A node a worker: the others cannot reach what the lost one leaves behind.
SPEC = JobSpec(nodes=4, steps=10, dump="last", respawn=10)


def lose_and_join(
    spec: JobSpec, nodes: list[int], *, zygote: Zygote, data: Path, directory: Path
) -> Outcome:
    """Run a job that loses nodes in step 3 and is joined by one with as many workers."""
    width = spec.nproc // spec.nodes
    slots = [slot for slot in range(spec.nproc) if slot // width in nodes]
    sabotage = lose_nodes(spec, nodes) + spec.sabotage
    spec = replace(spec, sabotage=sabotage)
    started_s = time.monotonic()
    with started(spec, zygote=zygote, data=data, directory=directory) as launchers:
        events = Tail(directory / EVENTS_FILE)
        deadline = Deadline(LIMIT_S)
        while not any(
            e["kind"] == "view_committed" and not set(slots) & set(e["ranks"]) for e in events.new()
        ):
            assert deadline.left_s(), (directory / "output").read_text()[-3000:]
            time.sleep(0.02)  # the file is all that a running job shows
        contact = next(one for one in read_addresses(directory) if one.node not in nodes)
        place = [f"--join={contact}", f"--nproc-per-node={len(slots)}"]
        joiner = open_launcher(spec, place, zygote=zygote, data=data, directory=directory)
        launchers.append(joiner)
        codes = [launcher.wait(LIMIT_S) for launcher in launchers]
    output = (directory / "output").read_text()
    assert [bool(code) for code in codes] == [node in nodes for node in range(len(codes))], output[
        -4000:
    ]
    seconds = time.monotonic() - started_s
    return Outcome(spec=spec, directory=directory, returncode=0, output=output, seconds=seconds)


def lose_with_standby(
    spec: JobSpec, slot: int, *, zygote: Zygote, data: Path, directory: Path
) -> Outcome:
    """Run a job with an idle place a node; one of the nodes is lost in step 3."""
    lose = lose_nodes(spec, [slot])
    spec = replace(spec, sabotage=lose + spec.sabotage, launcher=("--standby=1",))
    started_s = time.monotonic()
    with started(spec, zygote=zygote, data=data, directory=directory) as launchers:
        codes = [launcher.wait(LIMIT_S) for launcher in launchers]
    output = (directory / "output").read_text()
    assert not any(code for node, code in enumerate(codes) if node != slot), output[-4000:]
    seconds = time.monotonic() - started_s
    return Outcome(spec=spec, directory=directory, returncode=0, output=output, seconds=seconds)


@proves(Kind.NODE_RETURN, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("slot", [0, 3])
def test_a_standby_takes_the_place_of_a_lost_node(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference, slot: int
) -> None:
    spec = replace(SPEC, awaits=((6, 1),))
    run = lose_with_standby(spec, slot, zygote=zygote, data=data, directory=tmp_path)
    check_equal(run, reference(replace(run.spec, launcher=())))
    assert entered(run) == [(slot, 1)]
    assert last_ranks(run) == [0, 1, 2, 3]
    assert len(run.events("node_admitted")) == 1
    assert read_addresses(tmp_path) == []


@proves(Kind.NODE_RETURN, Promise.EQUAL)
@pytest.mark.parametrize("slot", sampled([0, 2]))
def test_a_lost_node_comes_back(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference, slot: int
) -> None:
    spec = replace(SPEC, awaits=((6, 1),))
    run = lose_and_join(spec, [slot], zygote=zygote, data=data, directory=tmp_path)
    check_equal(run, reference(run.spec))
    assert entered(run) == [(slot, 1)]
    assert last_ranks(run) == [0, 1, 2, 3]
    assert read_addresses(tmp_path) == []
    check_nothing_thrown_away(run)


@proves(Kind.NEWCOMER, Promise.EQUAL, victim="2.1", moment="0:move")
@pytest.mark.slow
def test_a_newcomer_of_a_lost_node_dies_on_its_way_in(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference
) -> None:
    spec = replace(SPEC, steps=12, kills=("2.1@0:move",), awaits=((6, 1), (8, 2)))
    run = lose_and_join(spec, [2], zygote=zygote, data=data, directory=tmp_path)
    check_equal(run, reference(run.spec))
    assert entered(run) == [(2, 2)]
    assert last_ranks(run) == [0, 1, 2, 3]


@proves(Kind.NODE_RETURN, Promise.EQUAL)
@pytest.mark.slow
def test_two_lost_nodes_of_tp_pp_dp_come_back(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference
) -> None:
    # Once one of them asks to be let in, the other comes after the next step.
    spec = replace(TP2_PP2_DP2, nodes=8, steps=10, dump="last", respawn=10, awaits=((6, 1), (8, 2)))
    run = lose_and_join(spec, [1, 6], zygote=zygote, data=data, directory=tmp_path)
    check_equal(run, reference(run.spec))
    assert sorted(entered(run)) == [(1, 1), (6, 1)]
    assert last_ranks(run) == list(range(8))


@proves(Kind.NODE_RETURN, Promise.EQUAL, victim="2 3 4", moment="3:backward 4:backward")
@pytest.mark.slow
def test_a_node_of_two_workers_comes_back_while_a_third_is_missing(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference
) -> None:
    spec = replace(TP2_PP2_DP2, nodes=4, steps=12, dump="last", respawn=10, kills=("4@4:backward",))
    spec = replace(spec, awaits=((6, 2), (9, 3)), sabotage=LATER.format(slot=4))
    run = lose_and_join(spec, [1], zygote=zygote, data=data, directory=tmp_path)
    check_equal(run, reference(run.spec))
    assert not failed_by_themselves(run)
    assert sorted(entered(run)[:2]) == [(2, 1), (3, 1)] and entered(run)[2:] == [(4, 1)]
    assert last_ranks(run) == list(range(8))
