"""An attribute that has another value while a block runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def set_within(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``value``."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
