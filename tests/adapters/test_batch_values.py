"""Batches of classes that a script brings, taken apart and made again."""

import enum
from collections import UserDict, defaultdict, deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from elaswave_plugin.adapters.megatron.batch_values import BatchValues
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.plain import decode, encode


class Pair(NamedTuple):
    """A tuple with names."""

    tokens: torch.Tensor
    length: int


@dataclass
class Sample:
    """A dataclass whose constructor does more than to keep what it is given."""

    tokens: torch.Tensor
    made: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.made = [len(self.tokens)]


@dataclass(frozen=True, slots=True)
class Frozen:
    """A dataclass without a dict."""

    pair: Pair


class Kind(enum.Enum):
    """A choice."""

    CHOSEN = "chosen"


class Rows(MutableMapping[str, Any]):
    """Rows by key, like a TensorDict: a mapping that is no dict."""

    def __init__(self, rows: dict[str, Any], *, batch_size: torch.Size) -> None:
        self._rows, self.batch_size = rows, batch_size

    def __getitem__(self, key: str) -> Any:
        return self._rows[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._rows[key] = value

    def __delitem__(self, key: str) -> None:
        del self._rows[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def told(values: BatchValues, value: Any, to: BatchValues | None = None) -> Any:
    """The value as a worker has it that was told it by another."""
    data = encode(values.apart(value, "a batch"))
    return (to or values).whole(decode(data), "a batch")


def batch() -> Any:
    tokens = torch.arange(3)
    inner = Rows({"a": tokens}, batch_size=torch.Size([3]))
    sample = Sample(tokens)
    sample.made.append(7)
    rows = Rows({"inner": inner, "more": [sample, None]}, batch_size=torch.Size([3]))
    return {"rows": rows, "one": (Frozen(Pair(tokens, 3)), Kind.CHOSEN)}


def test_objects_are_as_they_were() -> None:
    found = told(BatchValues(), batch())
    rows, (frozen, kind) = found["rows"], found["one"]
    assert type(rows) is Rows and type(rows["inner"]) is Rows and type(frozen) is Frozen
    assert rows.batch_size == rows["inner"].batch_size == torch.Size([3])
    assert rows["inner"]["a"].tolist() == frozen.pair.tokens.tolist() == [0, 1, 2]
    assert rows["more"][0].made == [3, 7] and rows["more"][1] is None
    assert type(frozen.pair) is Pair and frozen.pair.length == 3 and kind is Kind.CHOSEN
    assert told(BatchValues(), UserDict({"a": deque([1, 2], 2)})) == {"a": deque([1, 2])}


def test_rows_of_several_lengths() -> None:
    rows = [torch.arange(2), torch.arange(3)]
    found = told(
        BatchValues(),
        Rows(
            {"a": torch.nested.as_nested_tensor(rows, layout=torch.jagged)},
            batch_size=torch.Size([2]),
        ),
    )
    assert found["a"].layout == torch.jagged
    assert [one.tolist() for one in found["a"].unbind()] == [[0, 1], [0, 1, 2]]


def test_plain_batches_need_no_class() -> None:
    value = {"a": [1, (2.0, {"b"})], "c": None}
    assert told(BatchValues(), value, to=BatchValues()) == value


def test_no_class_is_made_that_the_own_script_has_not_given() -> None:
    with pytest.raises(ConfigurationError, match=r"of the class .*Pair, and none of this worker's"):
        told(BatchValues(), Pair(torch.ones(1), 1), to=BatchValues())


class Loop:
    """An object that has itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"a": [object()]}, r"a batch\['a'\]\[0\] is of the class builtins.object"),
        (Rows({"a": len}, batch_size=torch.Size()), r"\['_rows'\]\['a'\] is of the class builtins"),
        (defaultdict(list), "is of the class builtins.type"),
        ([iter([])], "is of the class"),
        (Loop(), "is nested in itself"),
        (torch.ones(2).numpy().astype(object), "is a NumPy array of object"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
    ],
)
def test_what_cannot_be_copied_is_a_sentence(value: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        BatchValues().apart(value, "a batch")
