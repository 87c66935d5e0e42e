"""Reversible run-time patches: each a record with target, reason, valid range and fingerprint.

Applying is an explicit call and all or nothing: every record of a set is checked against the
installed distribution first, then all are applied; ``undo`` restores what was there.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

from elaswave_plugin.errors import PatchMismatchError

_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRecord:
    """One replaced attribute of an installed distribution.

    ``target`` is "module:attribute.path"; ``make`` builds the replacement from what is there;
    ``parameters`` is the fingerprint: the names in the target's signature, None where it has none.
    """

    target: str
    reason: str
    distribution: str
    valid: str
    make: Callable[[Any], Any]
    parameters: tuple[str, ...] | None = None
    may_be_absent: bool = False

    def __str__(self) -> str:
        return f"{self.target} ({self.distribution} {self.valid}): {self.reason}"

    def locate(self) -> tuple[Any, str]:
        """The object that holds the attribute, and the attribute's name."""
        module, _, path = self.target.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name

    def check(self) -> None:
        """Raise PatchMismatchError unless the installed target is the one this was written for."""
        try:
            installed = version(self.distribution)
        except PackageNotFoundError:
            raise PatchMismatchError(
                f"{self.distribution} is not installed, wanted {self.valid}; install it"
            ) from None
        if not SpecifierSet(self.valid).contains(installed, prereleases=True):
            raise PatchMismatchError(
                f"{self.distribution} {installed} is installed and the patch of {self.target} was "
                f"written for {self.valid}; install a version in that range"
            )
        owner, name = self.locate()
        found: Any = getattr(owner, name, _ABSENT)
        if found is _ABSENT:
            if self.may_be_absent:
                return
            raise PatchMismatchError(f"{self.target} does not exist in {installed}")
        if self.parameters is not None:
            seen = tuple(inspect.signature(found).parameters)
            if seen != self.parameters:
                raise PatchMismatchError(
                    f"{self.target} takes {seen} in {self.distribution} {installed}, "
                    f"wanted {self.parameters}; look at the upstream change of this function"
                )


class PatchSet:
    """An ordered set of records that is applied and undone as one."""

    def __init__(self, records: Sequence[PatchRecord]) -> None:
        self.records = tuple(records)
        self._originals: list[tuple[Any, str, Any]] = []

    def apply(self) -> None:
        """Check every record, then apply all; a second call changes nothing.

        Raises PatchMismatchError before anything is changed.
        """
        if self._originals:
            return
        for record in self.records:
            record.check()
        try:
            for record in self.records:
                owner, name = record.locate()
                replacement = record.make(getattr(owner, name, None))
                self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
                setattr(owner, name, replacement)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore every target, last applied first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
