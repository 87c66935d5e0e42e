"""The facts that a worker tells come through a commit as they were told."""

import json
from dataclasses import fields

import pytest

from elaswave_plugin.core.agreement.messages import Payload, pack_payload, read_payload
from elaswave_plugin.core.codec import UnreadableMessageError, from_json, to_json
from elaswave_plugin.core.layout.device_groups import CommunicatorFacts
from elaswave_plugin.core.layout.worker_facts import (
    OutOfMemory,
    SlowReport,
    WorkerFacts,
    step_told,
)
from tests.core.over_the_wire import as_json
from tests.core.sealed import sealed

COMMUNICATOR = CommunicatorFacts(
    name="dp@2", members=(0, 1), collectives=3, sent={1: 2}, received={}, idle=True, shrinks=False
)
ALL = WorkerFacts(
    address="tcp://x:1",
    communicators={"dp": COMMUNICATOR},
    step=7,
    live=(7, 2),
    unreadable=(sealed(1, 6, holder=0), sealed(3, 6, holder=2, is_copy=True)),
    placed_epoch=2,
    placement={"cuts": [0, 2, 4]},
    times={"layer": [0.1, 0.2]},
    slow=(SlowReport(1, 1.5, (0, 2), 8), SlowReport(2, 2.0, (), 32)),
    slow_views=(2, 40, True),
    seal_interval=4,
    cuts_wanted=(0, 1, 4),
    out_of_memory=OutOfMemory(1.25, 2, "2.00 GiB wanted"),
    told_to_leave=True,
    run_id="r",
    launch_id="l",
    given={"mode": "exact"},
)
FEWEST = WorkerFacts(address="a")


def test_all_facts_come_through_a_commit() -> None:
    assert all(getattr(ALL, one.name) for one in fields(WorkerFacts))
    told = {slot: as_json(facts) for slot, facts in ((0, ALL), (3, FEWEST))}
    assert [step_told(one) for one in told.values()] == [7, 0]
    heard = read_payload(pack_payload(told, [as_json(sealed(1, 6))]))
    assert heard == Payload(facts={0: ALL, 3: FEWEST}, inventory=[sealed(1, 6)])


def test_what_is_empty_costs_nothing_on_the_wire() -> None:
    assert json.dumps(FEWEST, default=to_json) == '{"address": "a"}'


def test_an_unknown_fact_is_an_error() -> None:
    with pytest.raises(UnreadableMessageError, match="adress"):
        from_json(WorkerFacts, {"adress": "a"})
