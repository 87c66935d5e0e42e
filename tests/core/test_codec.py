"""Every message comes over the wire as it was, and nothing else is taken for one."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import IntEnum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_plugin.core.agreement.life import Life
from elaswave_plugin.core.agreement.record import Record
from elaswave_plugin.core.agreement.view import FailureEvent, MembershipView
from elaswave_plugin.core.codec import (
    UnreadableMessageError,
    WireMessage,
    from_json,
    kind_of,
    to_json,
)
from elaswave_plugin.core.layout.worker_facts import WorkerFacts
from elaswave_plugin.ipc.frames import FromAgent, FromPeer, FromTrainer
from elaswave_plugin.ipc.peer import Peer
from tests.core.over_the_wire import again, as_json

SAID = [(side, one) for side in (FromTrainer, FromAgent, FromPeer) for one in get_args(side)]
NAMES = [one.__name__ for _, one in SAID]
NOTED = (Record, Life, WorkerFacts, Peer)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=3),
    bool: st.booleans(),
    NoneType: st.none(),
}
ANYTHING = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)
few_times = settings(derandomize=True, max_examples=15, deadline=None)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type that a message may have in a field."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if hint is Any:
        return ANYTHING
    if hint is MembershipView:
        return views()
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        given = {one.name: values_of(hints[one.name]) for one in fields(hint)}
        if hint is FailureEvent:
            given["kind"] = st.sampled_from(("exit", "lost", "leave"))
        return st.builds(hint, **given)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return st.sampled_from(hint)
    if is_typeddict(hint):
        return st.dictionaries(st.text(max_size=3), ANYTHING, max_size=2)
    if origin in (Union, UnionType):
        return st.one_of(*map(values_of, inner))
    if issubclass(origin, Mapping):
        return st.dictionaries(*map(values_of, inner), max_size=2)
    if origin is tuple and inner[-1] is not ...:
        return st.tuples(*map(values_of, inner))
    many = st.lists(values_of(inner[0]), max_size=2)
    return many.map(tuple) if origin is tuple else many


def views() -> st.SearchStrategy[MembershipView]:
    def of_slots(slots: list[int]) -> st.SearchStrategy[MembershipView]:
        numbers = st.tuples(*(st.integers(0, 3) for _ in slots))
        return st.builds(
            MembershipView,
            epoch=st.integers(),
            ranks=st.just(tuple(slots)),
            incarnations=numbers,
            nodes=numbers,
            reason=st.text(max_size=3),
        )

    return st.lists(st.integers(0, 9), unique=True, max_size=3).flatmap(of_slots)


@pytest.mark.parametrize(("side", "kind"), SAID, ids=NAMES)
@few_times
@given(data=st.data())
def test_every_message_comes_as_it_was_said(
    side: Any, kind: type[WireMessage], data: st.DataObject
) -> None:
    message = data.draw(values_of(kind))
    record = as_json(message)
    assert record["t"] == kind_of(kind)
    assert from_json(side, record) == message == again(message)


@pytest.mark.parametrize("kind", NOTED)
@few_times
@given(data=st.data())
def test_every_record_is_read_as_it_was_written(kind: type, data: st.DataObject) -> None:
    record = data.draw(values_of(kind))
    assert again(record) == record


def test_no_two_messages_to_one_reader_are_of_one_kind() -> None:
    for side in (FromTrainer, FromAgent, FromPeer):
        kinds = [kind_of(one) for one in get_args(side)]
        assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(("side", "kind"), SAID, ids=NAMES)
@few_times
@given(data=st.data())
def test_what_lacks_a_field_or_has_one_more_is_refused(
    side: Any, kind: Any, data: st.DataObject
) -> None:
    record = as_json(data.draw(values_of(kind)))
    with pytest.raises(UnreadableMessageError, match=f"said '{kind_of(kind)}' with 'x', unknown"):
        from_json(side, {**record, "x": 1})
    for one in fields(kind):
        if one.default is MISSING and one.default_factory is MISSING:
            less = {name: value for name, value in record.items() if name != one.name}
            with pytest.raises(UnreadableMessageError, match=f"without '{one.name}': have all run"):
                from_json(side, less)


@pytest.mark.parametrize(("side", "kind"), SAID, ids=NAMES)
@few_times
@given(data=st.data())
def test_a_field_of_another_type_is_refused(side: Any, kind: Any, data: st.DataObject) -> None:
    record = as_json(data.draw(values_of(kind)))
    hints = get_type_hints(kind)
    for one in fields(kind):
        if hints[one.name] is not Any:
            wrong = "x" if hints[one.name] is not str else 1
            with pytest.raises(UnreadableMessageError, match=f"'{kind_of(kind)}' with {one.name} "):
                from_json(side, {**record, one.name: wrong})


@pytest.mark.parametrize("side", [FromTrainer, FromAgent, FromPeer])
@pytest.mark.parametrize("record", [None, 7, "begun", [], {}, {"t": []}, {"t": None}, {"t": "x"}])
def test_what_is_no_message_is_refused(side: Any, record: Any) -> None:
    with pytest.raises(UnreadableMessageError, match="unknown here: have all run the same version"):
        from_json(side, record)


def test_a_flaw_inside_is_named() -> None:
    view = {"epoch": 3, "ranks": [1, 1], "incarnations": [0, 0], "nodes": [0, 0], "reason": ""}
    ballot = {"term": 1, "leader": 0, "epoch": 3}
    proposal = {"ballot": ballot, "view": view}
    committed = {"t": "committed", "proposal": proposal, "payload": ""}
    said = {"t": "deliver", "skipped": [], "committed": committed}
    with pytest.raises(UnreadableMessageError, match=r"committed' with something .*a slot twice"):
        from_json(FromAgent, said)
    proposal["view"] = {**view, "ranks": [0, "1"]}
    with pytest.raises(UnreadableMessageError, match=r"'committed' with ranks \[0, '1'\]:"):
        from_json(FromAgent, said)
    proposal["view"] = {"epoch": 3}
    with pytest.raises(UnreadableMessageError, match="said 'committed' without 'ranks'"):
        from_json(FromAgent, said)


def test_news_in_a_promise_are_news() -> None:
    ballot = {"term": 1, "leader": 0, "epoch": 2}
    promise = {"t": "promise", "ballot": ballot, "applied_epoch": 1, "asked_epoch": 1}
    promise |= {"newer": [], "accepted": None, "lost": []}
    assert from_json(FromPeer, {**promise, "news": [{"t": "first_seal", "slot": 1}]}).news
    with pytest.raises(UnreadableMessageError, match="said 'accuse', unknown here"):
        from_json(FromPeer, {**promise, "news": [{"t": "accuse", "node": 1, "evidence": "e"}]})


def test_what_is_no_dataclass_is_not_written() -> None:
    with pytest.raises(TypeError, match="is no dataclass"):
        to_json(object())
