"""Many alike JSON objects as one table: each distinct value once, and what each object has.

The objects of thousands of workers differ in little, and mostly from one to the next by as much: a
table of them is short, and shorter still once it is compressed.

>>> objects = [{"a": 7, "b": "x"}, {"a": 7, "b": "y"}, {"a": 7}]
>>> table = table_of(objects)
>>> table
{'count': 3, 'columns': {'a': [[7], []], 'b': [['x', 'y'], [1, 1, -2]]}}
>>> objects_of(table) == objects
True
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any


def table_of(objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the table of some JSON objects.

    A column has its values in the order in which they first come, and for each object the number
    of its value, from 1 on, as the difference to the object before; 0 is for one without the
    field. No numbers: all have the only value.
    """
    names = dict.fromkeys(name for one in objects for name in one)
    return {
        "count": len(objects),
        "columns": {name: _column([one.get(name, _Absent) for one in objects]) for name in names},
    }


def objects_of(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a table; raises ValueError where it is none."""
    try:
        objects: list[dict[str, Any]] = [{} for _ in range(table["count"])]
        for name, (values, differences) in table["columns"].items():
            numbers = accumulate(differences) if differences else (1 for _ in objects)
            for one, number in zip(objects, numbers, strict=True):
                if number > 0:
                    one[name] = values[number - 1]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no table of objects: {error}") from error
    return objects


class _Absent:
    """Stands for the value of a field that an object lacks."""


def _column(values: list[Any]) -> list[list[Any]]:
    # By their text: 1 and True are equal, and lists have no hash.
    texts = [None if one is _Absent else repr(one) for one in values]
    known = {text: one for text, one in zip(texts, values, strict=True) if text is not None}
    numbers: dict[str | None, int] = {text: n for n, text in enumerate(known, start=1)}
    numbers[None] = 0
    found = [numbers[text] for text in texts]
    if len(known) == 1 and 0 not in found:
        return [list(known.values()), []]
    return [list(known.values()), [b - a for a, b in zip([0, *found], found, strict=False)]]
