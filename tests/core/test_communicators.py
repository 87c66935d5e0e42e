"""The communicators that outlive a change of the view, and the choice of NCCL for GPU tensors."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_plugin.core.layout.device_groups import (
    CommunicatorFacts,
    Fate,
    fate_of,
    obstacle,
    shrink_is_safe,
    uses_nccl,
)
from elaswave_plugin.errors import ConfigurationError
from tests.core.over_the_wire import again

IDLE = CommunicatorFacts(
    name="tp@1", members=(0, 1, 2), collectives=7, sent={}, received={}, idle=True, shrinks=True
)


def held(**of_slot: CommunicatorFacts | None) -> dict[int, CommunicatorFacts | None]:
    """IDLE at slots 0, 1 and 2, but for what is given as s0=, s1=, s2=."""
    return {slot: of_slot.get(f"s{slot}", IDLE) for slot in range(3)}


def test_kept_when_members_are_unchanged_counters_equal_and_nothing_is_in_flight() -> None:
    assert fate_of("tp@1", held(), (0, 1, 2)).fate is Fate.KEEP


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (held(s1=replace(IDLE, idle=False)), "slot 1 has operations in flight"),
        (held(s2=replace(IDLE, collectives=8)), "slot 0 began 7 collectives, slot 2 8"),
        (held(s2=None), "slot 2 does not hold it"),
        (held(s2=replace(IDLE, name="tp@2")), "slot 2 does not hold it"),
        (held(s0=replace(IDLE, sent={2: 1})), "slot 0 sent 1 messages to slot 2, which took 0"),
        (held(s1=replace(IDLE, received={0: 2})), "slot 0 sent 0 messages to slot 1, which took 2"),
    ],
)
def test_aborted_whenever_one_member_knows_better(
    answers: dict[int, CommunicatorFacts | None], reason: str
) -> None:
    verdict = fate_of("tp@1", answers, (0, 1, 2))
    assert (verdict.fate, verdict.reason) == (Fate.ABORT, reason)


def test_equal_point_to_point_counters_do_not_stand_in_the_way() -> None:
    answers = held(s0=replace(IDLE, sent={1: 3}), s1=replace(IDLE, received={0: 3}))
    assert fate_of("tp@1", answers, (0, 1, 2)).fate is Fate.KEEP


def test_shrunk_when_the_rest_keeps_its_order() -> None:
    assert fate_of("tp@1", held(), (0, 1)).fate is Fate.SHRINK
    assert fate_of("tp@1", held(), (0, 2)).fate is Fate.SHRINK
    assert fate_of("tp@1", held(), (2, 1)).fate is Fate.ABORT  # in another order


def test_not_shrunk_where_it_cannot_be() -> None:
    old = replace(IDLE, shrinks=False)
    assert fate_of("tp@1", held(s1=old), (0, 1)).fate is Fate.ABORT
    unused = replace(IDLE, collectives=0)
    assert fate_of("tp@1", held(s0=unused, s1=unused, s2=unused), (0, 1)).fate is Fate.ABORT
    assert fate_of("tp@1", held(), (0, 1, 2, 3)).fate is Fate.ABORT  # slot 3 has joined


def test_a_slot_with_a_new_incarnation_holds_nothing() -> None:
    """A respawned worker has the old slot number and none of the old communicators."""
    assert fate_of("tp@1", {0: IDLE, 1: IDLE}, (0, 1, 2)).fate is Fate.ABORT


@pytest.mark.parametrize(
    ("version", "safe"),
    [((2, 26, 5), False), ((2, 27, 0), True), ((2, 30, 9), True), ((2, 31, 0), False)],
)
def test_shrink_by_version(version: tuple[int, ...], safe: bool) -> None:
    assert shrink_is_safe(version) is safe


def _facts() -> st.SearchStrategy[CommunicatorFacts | None]:
    counts = st.dictionaries(st.integers(0, 2), st.integers(0, 1), max_size=2)
    some = st.builds(
        CommunicatorFacts,
        name=st.sampled_from(["tp@1", "tp@2"]),
        members=st.just((0, 1, 2)),
        collectives=st.integers(0, 1),
        sent=counts,
        received=counts,
        idle=st.booleans(),
        shrinks=st.booleans(),
    )
    return st.one_of(st.none(), st.just(IDLE), st.just(replace(IDLE, shrinks=False)), some)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    answers=st.fixed_dictionaries({slot: _facts() for slot in range(3)}),
    members=st.sampled_from([(0, 1, 2), (0, 1), (1, 2), (2, 1), (0,)]),
)
def test_all_members_decide_alike(
    answers: dict[int, CommunicatorFacts | None], members: tuple[int, ...]
) -> None:
    """Each asks about the name it holds; who goes on does so with everybody or not at all."""
    goes_on = {}
    for slot in members:
        facts = answers[slot]
        goes_on[slot] = None if facts is None else fate_of(facts.name, answers, members).fate
    if set(goes_on.values()) - {None, Fate.ABORT}:
        assert len(set(goes_on.values())) == 1
        assert all(facts is not None and facts.idle for facts in map(answers.get, members))


@settings(derandomize=True, max_examples=50, deadline=None)
@given(facts=_facts())
def test_facts_survive_the_commit(facts: CommunicatorFacts | None) -> None:
    if facts is not None:
        assert again(facts) == facts


def test_nccl_needs_a_device_of_its_own_for_everybody() -> None:
    assert obstacle({0: "GPU-a", 1: "GPU-b"}) == ""
    assert obstacle({0: "GPU-a", 1: ""}) == "slots [1] have no CUDA device with NCCL"
    assert "slots [0, 2] share the device GPU-a" in obstacle({0: "GPU-a", 1: "GPU-b", 2: "GPU-a"})


def test_the_setting_gpu_engine() -> None:
    own, shared = {0: "GPU-a", 1: "GPU-b"}, {0: "GPU-a", 1: "GPU-a"}
    assert [uses_nccl(setting, own) for setting in ("auto", "nccl", "host")] == [True, True, False]
    assert [uses_nccl(setting, shared) for setting in ("auto", "host")] == [False, False]
    with pytest.raises(ConfigurationError, match=r"gpu_engine is nccl, but slots \[0, 1\] share"):
        uses_nccl("nccl", shared)
