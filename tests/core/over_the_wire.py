"""Values as they come over the wire."""

import json
from typing import Any, TypeVar

from elaswave_plugin.core.codec import from_json, to_json

Value = TypeVar("Value")


def as_json(value: object) -> Any:
    """Return what the other side reads, before it is taken for what it is."""
    return json.loads(json.dumps(value, default=to_json))


def again(value: Value) -> Value:
    """The value on the other side."""
    read: Value = from_json(type(value), as_json(value))
    return read
