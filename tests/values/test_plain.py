"""Plain values survive bytes bit for bit; bytes that were changed build nothing, and say so."""

import pickle
import random
import tracemalloc
from argparse import Namespace
from collections import Counter, OrderedDict, namedtuple
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elaswave_plugin.errors import ConfigurationError, UnreadableValueError
from elaswave_plugin.values import plain
from elaswave_plugin.values.plain import As, check, decode, encode

Point = namedtuple("Point", "x y")
SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.binary()
    | st.text(st.characters())
)
SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
TENSORS = st.builds(lambda shape, dtype: torch.rand(shape).to(dtype), SHAPES, DTYPES)
ARRAYS = st.builds(
    lambda shape, kind: np.ones(shape).astype(kind),
    SHAPES,
    st.sampled_from(["<f8", ">i4", "<U3", "S2", "?", "<M8[ns]", "<m8[s]"]),
)
SCALARS = st.sampled_from([np.float64(0.1), np.int8(-3), np.bool_(True), np.str_("a")])
KEYS = st.recursive(
    SIMPLE.filter(lambda one: one == one),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
VALUES = st.recursive(
    SIMPLE | TENSORS | ARRAYS | SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(st.text(), inner, max_size=3).map(lambda one: Namespace(**one))
        | st.dictionaries(st.text(), inner, max_size=3).map(lambda one: SimpleNamespace(**one))
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=12,
)
# What optimizers, schedulers, scalers, samplers and generators keep.
OF_FRAMEWORKS = (
    np.random.RandomState(3).get_state(),
    random.Random(3).getstate(),
    np.random.default_rng(3).bit_generator.state,
    np.random.Generator(np.random.Philox(3)).bit_generator.state,
    torch.Generator().manual_seed(3).get_state(),
    Counter({5: 2, 7: 1}),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda", 1),
    {"dtype": torch.float16, "betas": (0.9, 0.999), "lr": torch.tensor(0.1), 3: {(1, 2): None}},
    1 << 200,
    -(1 << 64),
    bytearray(b"ab"),
    "\udcff of a file's name",
    float("nan"),
)


def same(one: Any, other: Any) -> bool:
    """Compare two values to the bit, and their types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and one.shape == other.shape) and (
            one.reshape(-1).view(torch.uint8).tolist()
            == other.reshape(-1).view(torch.uint8).tolist()
        )
    if isinstance(one, np.ndarray | np.generic):
        return bool(one.dtype == other.dtype and one.shape == other.shape) and (
            one.tobytes() == other.tobytes()
        )
    if isinstance(one, Namespace | SimpleNamespace):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(x, y)
            for (a, x), (b, y) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    return bool(one == other)


@given(VALUES)
@settings(max_examples=300, deadline=None)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize("value", OF_FRAMEWORKS, ids=lambda one: type(one).__name__)
def test_states_of_frameworks_come_back(value: Any) -> None:
    assert same(decode(encode(value)), value)


def test_states_of_optimizers_and_schedules_come_back() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    schedules = torch.optim.lr_scheduler
    for make in (
        lambda: schedules.MultiStepLR(optimizer, [2, 5]),
        lambda: schedules.OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda: schedules.ReduceLROnPlateau(optimizer),
        lambda: schedules.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda: schedules.LambdaLR(optimizer, lambda step: 1.0),
        lambda: schedules.SequentialLR(
            optimizer,
            [schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)],
            [3],
        ),
    ):
        optimizer.step()
        state = make().state_dict()
        assert same(decode(encode(state)), state)
    state = optimizer.state_dict()
    assert same(decode(encode(state)), state)
    assert same(dict(decode(encode(model.state_dict()))), dict(model.state_dict()))


def test_a_tensor_is_written_as_its_values_are() -> None:
    base = torch.arange(12.0).view(3, 4)
    for one in (base.t(), base[:, 1:3], base.to(torch.complex64).conj(), torch.tensor(3.0)):
        assert torch.equal(decode(encode(one)), one.resolve_conj())
    parameter = torch.nn.Parameter(base)
    told = decode(encode(parameter))
    assert torch.equal(told, base)
    assert not told.requires_grad
    told[0, 0] = 5.0  # its memory is its own
    array = decode(encode(np.arange(3)))
    array[0] = 5


def test_a_tensor_without_data_has_its_shape() -> None:
    told = decode(encode(torch.empty(3, 4, dtype=torch.int16, device="meta")))
    assert (told.device.type, told.shape, told.dtype) == ("meta", (3, 4), torch.int16)


def test_tensors_beside_are_described_and_bounded() -> None:
    tensors: list[torch.Tensor] = []
    data = encode({"a": torch.ones(1000), "b": [torch.ones(2, dtype=torch.int8)]}, beside=tensors)
    assert [len(one) for one in tensors] == [1000, 2]
    assert len(data) < 100
    room: list[torch.Tensor] = []
    value = decode(data, beside=room, beside_bytes=4002)
    assert [(len(one), one.dtype) for one in room] == [(1000, torch.float32), (2, torch.int8)]
    assert value["a"] is room[0]
    for announced in (0, 4001, 4003):
        with pytest.raises(UnreadableValueError):
            decode(data, beside=[], beside_bytes=announced)
    with pytest.raises(UnreadableValueError):
        decode(data)


class Own:
    """A class of a script's."""


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (Own(), "the capsule is of the class tests.values.test_plain.Own"),
        ({"scheduler": [1, {"warmup": Own()}]}, "the capsule['scheduler'][1]['warmup'] is"),
        ({(1, 2): lambda: None}, "the capsule[(1, 2)] is of the class builtins.function"),
        (Point(1, 2), "test_plain.Point"),
        ({Point(1, 2): 1}, "the key Point(x=1, y=2) of the capsule is"),
        (np.array([Own()]), "a NumPy array of object"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (As.TUPLE, "As"),
        (msgpack.ExtType(1, b""), "ExtType"),
        (msgpack.Timestamp(1), "Timestamp"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_place_and_class(value: Any, where: str) -> None:
    for refuse in (encode, check):
        with pytest.raises(ConfigurationError, match="plain values") as caught:
            refuse(value, "the capsule")
        assert where in str(caught.value)


def test_what_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigurationError, match="nested deeper than 100"):
        encode(endless, "the state")


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode({"a": 1})
    monkeypatch.setattr(plain, "__version__", "0.2.0rc1")
    with pytest.raises(UnreadableValueError, match=r"'0.1.0' of elaswave_plugin.*'0.2.0rc1'"):
        decode(data, "the capsule")


def test_a_value_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(bytes(1000))
    monkeypatch.setattr(plain, "LONGEST_BYTES", 500)
    with pytest.raises(ConfigurationError, match="has 1003 bytes, and at most 500"):
        encode(bytes(1000), "the capsule")
    with pytest.raises(UnreadableValueError, match="the capsule has 1003 bytes"):
        decode(data, "the capsule")


def test_a_pickle_runs_nothing() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return exec, ("raise SystemExit('it ran')",)

    with pytest.raises(UnreadableValueError, match="begins with"):
        decode(pickle.dumps(Bomb()))


HEAD = encode(None)[:-1]
DEEP = b"\x91" * 5000
HUGE = (
    b"\xdd\xff\xff\xff\xff",  # a list of 4 Gi
    b"\xc6\xff\xff\xff\xff",  # bytes
    msgpack.packb([msgpack.ExtType(As.TENSOR, b""), "torch.float32", [1 << 40], b""]),
    msgpack.packb([msgpack.ExtType(As.ARRAY, b""), "<f8", [1 << 40], b""]),
    msgpack.packb([msgpack.ExtType(As.SCALAR, b""), "|S999999999", b""]),
    msgpack.packb([msgpack.ExtType(As.ARRAY, b""), "O", [1], b"12345678"]),
    msgpack.packb([msgpack.ExtType(As.TENSOR_BESIDE, b""), "torch.float32", [1 << 40]]),
    msgpack.packb([msgpack.ExtType(As.META_TENSOR, b""), "torch.float32", [1 << 62, 1 << 62]]),
    msgpack.packb([msgpack.ExtType(As.SET, b""), [1]]),
    msgpack.packb([msgpack.ExtType(99, b"")]),
)


@pytest.mark.parametrize("body", HUGE, ids=range(len(HUGE)))
def test_sizes_without_bytes_take_no_memory(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableValueError):
            decode(HEAD + body, beside=[])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(
    VALUES.map(encode),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
    st.floats(0, 1),
    st.binary(max_size=8),
)
@example(encode([]), [], 1.0, DEEP)
@settings(max_examples=600, deadline=None)
def test_changed_bytes_are_a_value_or_say_that_they_are_none(
    data: bytes, changes: list[tuple[float, int]], keep: float, more: bytes
) -> None:
    changed = bytearray(data)
    for place, byte in changes:
        changed[int(place * len(changed))] = byte
    changed = changed[: round(keep * len(changed))] + more
    _read_within(bytes(changed))


@given(st.binary(max_size=200))
@example(DEEP)
@settings(max_examples=600, deadline=None)
def test_any_bytes_behind_a_head_are_a_value_or_say_that_they_are_none(body: bytes) -> None:
    _read_within(HEAD + body)


def _read_within(data: bytes) -> None:
    tracemalloc.start()
    try:
        decode(data)
    except UnreadableValueError:
        pass
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < (1 << 20) + 300 * len(data)
