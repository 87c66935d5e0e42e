"""Compares the settings that the workers of a job were given."""

from collections.abc import Mapping
from typing import Any

from elaswave_plugin.errors import ConfigurationError


def check_given(given: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigurationError, alike on all workers, where what some were given differs."""
    (first, wanted), *others = given.items()
    for who, found in others:
        for name, value in wanted.items():
            if found.get(name) != value:
                raise ConfigurationError(
                    f"{name} is {value!r} for {first} and {found.get(name)!r} for {who}: give every"
                    " worker of a job the same settings and the same version"
                )
