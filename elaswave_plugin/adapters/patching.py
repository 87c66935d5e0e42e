"""Reversible run-time patches: each a record with target, reason, valid range and fingerprint.

Applying is an explicit call and all or nothing: every record of a set is checked against the
installed distribution first, then all are applied; ``undo`` restores what was there. Where a diff
of ``patches/`` gave the source a hook of its own, the hook is set and nothing is replaced.
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


@dataclass(frozen=True, slots=True)
class Hook:
    """A name that a diff of ``patches/`` adds to the source, None until it is set.

    ``place`` is "module:name"; ``make`` builds what is set from the record's target.
    """

    place: str
    make: Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRecord:
    """One replaced attribute of an installed distribution.

    ``target`` is "module:attribute.path"; ``make`` builds the replacement from what is there;
    ``parameters`` is the fingerprint: the names in the target's signature, None where it has none;
    ``elsewhere`` has those of ranges of versions in which it is another one; versions in ``gone``
    have no such target and need no patch; ``hook`` is set in place of the replacement where the
    source has it. ``of_instances``: only instances have the attribute, and ``make`` is given None.
    """

    target: str
    reason: str
    distribution: str
    valid: str
    make: Callable[[Any], Any]
    parameters: tuple[str, ...] | None = None
    elsewhere: tuple[tuple[str, tuple[str, ...]], ...] = ()
    gone: str | None = None
    hook: Hook | None = None
    of_instances: bool = False

    def __str__(self) -> str:
        return f"{self.target} ({self.distribution} {self.valid}): {self.reason}"

    def locate(self) -> tuple[Any, str]:
        """The object that holds the attribute, and the attribute's name."""
        return _locate(self.target)

    @property
    def native(self) -> Any:
        """The present attribute; raises ImportError or AttributeError where nothing is."""
        owner, name = self.locate()
        return None if self.of_instances else getattr(owner, name)

    @property
    def point(self) -> Hook:
        """The place that applying this sets: the hook where the source has it, else the target."""
        if self.hook is not None and hasattr(*_locate(self.hook.place)):
            return self.hook
        return Hook(self.target, self.make)

    def is_gone(self, installed: str | None) -> bool:
        """Return whether the installed version has no such target and needs no patch."""
        if self.gone is None or installed is None:
            return False
        return SpecifierSet(self.gone).contains(installed, prereleases=True)

    def check(self, installed: str | None) -> None:
        """Raise PatchMismatchError unless the installed target is the one this was written for.

        ``installed`` is the version of the distribution, None where it is not installed.
        """
        if installed is None:
            raise PatchMismatchError(
                f"{self.distribution} is not installed, wanted {self.valid}; install it"
            )
        if not SpecifierSet(self.valid).contains(installed, prereleases=True):
            raise PatchMismatchError(
                f"{self.distribution} {installed} is installed and the patch of {self.target} was "
                f"written for {self.valid}; install a version in that range"
            )
        found, wanted = self._found(installed), self.parameters
        for versions, parameters in self.elsewhere:
            if SpecifierSet(versions).contains(installed, prereleases=True):
                wanted = parameters
        if wanted is not None:
            seen = tuple(inspect.signature(found).parameters)
            if seen != wanted:
                raise PatchMismatchError(
                    f"{self.target} takes {seen} in {self.distribution} {installed}, "
                    f"wanted {wanted}; {self._whose(found)}"
                )
        point = self.point
        if point is self.hook and (taken := getattr(*_locate(point.place))) is not None:
            raise PatchMismatchError(
                f"{point.place} is set already, to {taken!r}, wanted None; take out what sets it"
            )

    def _whose(self, found: Any) -> str:
        """Return what to do about a target of another signature, perhaps not upstream's."""
        module = getattr(found, "__module__", None)
        own = self.target.partition(":")[0].partition(".")[0]
        if module is None or module.partition(".")[0] == own:
            return "look at the upstream change of this function"
        return f"what is there now is of the module {module!r}, which replaced it: take that out"

    def _found(self, installed: str) -> Any:
        try:
            return self.native
        except (ImportError, AttributeError) as error:
            raise PatchMismatchError(
                f"{self.target} does not exist in {self.distribution} {installed} ({error}), and "
                f"was there in {self.valid}; look at the upstream change"
            ) from error


def installed_version(distribution: str) -> str | None:
    """The version of a distribution by the code that runs; None where there is none.

    A checkout that comes before the wheel on the path runs, whatever the wheel's metadata says.
    These are asked, which takes milliseconds, where the code does not say its version.
    """
    try:
        # megatron-core is the module megatron.core.
        module = importlib.import_module(distribution.replace("-", "."))
        return str(module.__version__)
    except (ImportError, AttributeError):
        pass
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _locate(place: str) -> tuple[Any, str]:
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


class PatchSet:
    """An ordered set of records that is applied and undone as one."""

    def __init__(self, records: Sequence[PatchRecord]) -> None:
        self.records = tuple(records)
        self._originals: list[tuple[Any, str, Any]] = []

    def check(self) -> list[PatchRecord]:
        """Those that what is installed has need of; raises PatchMismatchError. Changes nothing."""
        distributions = {record.distribution for record in self.records}
        versions = {name: installed_version(name) for name in distributions}
        there = [one for one in self.records if not one.is_gone(versions[one.distribution])]
        for record in there:
            record.check(versions[record.distribution])
        return there

    def apply(self) -> None:
        """Check every record, then apply all; a second call changes nothing.

        Raises PatchMismatchError before anything is changed.
        """
        if self._originals:
            return
        there = self.check()
        try:
            for record in there:
                point = record.point
                owner, name = _locate(point.place)
                replacement = point.make(record.native)
                self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
                setattr(owner, name, replacement)
        except BaseException:
            self.undo()
            raise

    @property
    def places(self) -> tuple[str, ...]:
        """The places that applying sets: hooks where the source has them, else targets."""
        return tuple(record.point.place for record in self.records)

    def undo(self) -> None:
        """Restore every target, last applied first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
