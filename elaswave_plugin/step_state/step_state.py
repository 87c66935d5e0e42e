"""The state of a step that is in no shard: kept before the step begins, put back for its redo.

One list, `Part` by `Part`; a framework's adapter says which ones there are. What the loop's body
has changed between two steps is in it, since it is taken when the next one begins. A later
worker gets it from a worker of the same part of the model, and proves by digests that it has it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from elaswave_plugin.errors import ConfigurationError, ElasWaveError
from elaswave_plugin.kept import accessors, check_state, kept_objects
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.step_state.moved_state import fetch_missing, receive, send
from elaswave_plugin.values.detached import detached_copy
from elaswave_plugin.values.plain import bytes_of, encode, gathered, row_of

Kept = dict[str, Any]
_NOTED = "the state of a step"

_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_ROW = 1 << 20


class Part(ABC):
    """One kind of state; by default shared as it is kept, of no layer, and changed as one likes."""

    name: str
    """The name that messages use for it."""
    of_passes = False
    """True if forward and backward passes may change it."""
    of_bodies = False
    """True if a loop may set it once a step has begun, before the first pass."""

    @abstractmethod
    def keep(self) -> Any:
        """A copy of it: tensors on the host and plain values, in dicts, lists and tuples."""

    @abstractmethod
    def put_back(self, kept: Any) -> None:
        """Make it as it was kept; any number of times."""

    def find(self) -> Any:
        """Like ``keep``, as the first pass of a step finds it."""
        return self.keep()

    def whole(self) -> Any:
        """Like ``find``, for a worker that has anything in its place."""
        return self.find()

    def shared(self, kept: Any) -> Any:
        """Return the part of it that a later worker takes."""
        return kept

    def missing(self, kept: Any) -> Mapping[str, bool]:
        """The names of what this worker has now, as layers have moved to it, and did not keep.

        With each: whether the job cannot go on if no other worker has it.
        """
        return {}

    def part_of(self, kept: Any, names: Sequence[str], *, is_current: bool) -> Mapping[str, Any]:
        """Those of another worker's missing ones that are here.

        ``is_current``: whether it was kept just now, and the loop can have changed nothing since.
        """
        return {}

    def take_in(self, kept: Any, more: Mapping[str, Any]) -> None:  # noqa: B027, most miss nothing
        """Install what was missing, and keep it as well."""

    def sealed(self) -> None:  # noqa: B027, most are compared with nothing
        """A step was sealed: what is changed from here on, the loop's body has changed."""

    def check(self, kept: Any) -> None:  # noqa: B027, passes may change most
        """Raise ConfigurationError for what the passes of a step have changed and may not change.

        Comes before the update; ``kept`` before the step.
        """

    def is_still(self, kept: Any) -> bool:
        """Return whether the passes of a step have changed nothing of it; ``kept`` before them."""
        return _digest_of_kept(self.keep()) == _digest_of_kept(kept)

    def proof(self) -> int:
        """A 63-bit digest of what has to be alike on all workers of a part of the model."""
        return 0

    def told(self) -> dict[str, str]:
        """Name each value of it, for a sentence on workers whose proofs differ."""
        return {}


class KeptObjects(Part):
    """The objects that the script keeps by ``elaswave_plugin.keep``."""

    name = "what the script keeps"
    of_passes = True

    def keep(self) -> dict[str, Any]:
        """The state of each object, by its name; raises ConfigurationError, as `keep`."""
        objects = kept_objects()
        for name, value in objects.items():
            check_state(name, value)
        return {name: copied(accessors(name, value)[0]()) for name, value in objects.items()}

    def put_back(self, kept: Any) -> None:
        """Install them; raises ConfigurationError where another worker keeps others."""
        objects = kept_objects()
        if missing := sorted(kept.keys() - objects.keys()):
            raise ConfigurationError(
                f"the other workers keep {missing[0]!r}, and this one, which came later, has not "
                "called elaswave_plugin.keep with that name: call it on every worker before its "
                "first step"
            )
        for name, state in kept.items():
            accessors(name, objects[name])[1](copied(state))

    def proof(self) -> int:
        """Of their names."""
        return xxhash.xxh3_64_intdigest("\n".join(sorted(kept_objects())).encode()) >> 1

    def told(self) -> dict[str, str]:
        """Their names."""
        return dict.fromkeys(kept_objects(), "kept")


class StepState:
    """All parts of one worker, and what there was before each of the last steps."""

    def __init__(
        self, worker: Worker, parts: Sequence[Part] = (), *, repeats_bodies: bool = False
    ) -> None:
        """``repeats_bodies``: what is between two steps runs again where both are redone."""
        self._worker = worker
        self._parts = {part.name: part for part in (*parts, KeptObjects())}
        self.repeats_bodies = repeats_bodies
        self._before: dict[int, Kept] = {}
        # What the first pass of a step has found, where the loop sets it until then.
        self._found: dict[int, dict[str, Any]] = {}
        self._awaits_passes = self._is_redone = False
        self._asks = worker.detached
        # The number of the part of the model that this worker held when it kept what is newest.
        self._kept_of = -1
        worker.notes.add(_NOTED, self._known)

    def begin(self, step: int) -> None:
        """A step begins: keep what there is, or put back what there was when it first began."""
        self._awaits_passes = True
        self._is_redone = step in self._before
        if self._is_redone:
            self.put_back(self._before[step])
            return
        self._before[step] = self.keep()
        self._kept_of = self._shard_group
        oldest = step - self._worker.state.remembered_steps
        for states in (self._before, self._found):
            for old in [one for one in states if one <= oldest]:
                del states[old]

    def enter_passes(self) -> None:
        """The first pass of a step begins: it finds what it found when it first began.

        A loop may have set that by a variable of its own that says once: it does not do so again
        in a redo, and a worker that has just come does so alone. Collective over WORLD for that.
        """
        if not self._awaits_passes:
            return
        step, self._awaits_passes = self._worker.completed, False
        if self._is_redone and step in self._found:
            self.put_back(self._found[step])
        self.find()
        if self._worker.untried:
            self._find_alike(self._found[step])

    def find(self) -> None:
        """Keep, once, what the loop has set since the step began; its first pass comes next."""
        step = self._worker.completed
        if step not in self._found:
            of_bodies = {name: part for name, part in self._parts.items() if part.of_bodies}
            self._found[step] = {name: part.find() for name, part in of_bodies.items()}

    def _find_alike(self, found: dict[str, Any]) -> None:
        """Have those that have just come find what the others do."""
        came = str(self._worker.member.worker) in self._worker.untried
        rows = _told([came, self._shard_group, *map(_digest_of_kept, found.values())])
        able = {row[1]: rank for rank, row in reversed([*enumerate(rows)]) if not row[0]}
        for rank, (is_new, shard_group, *digests) in enumerate(rows):
            source = able.get(shard_group)
            if not is_new or source is None or shard_group < 0:
                continue
            for name, mine, others in zip(found, digests, rows[source][2:], strict=True):
                if mine == others:
                    continue
                if dist.get_rank() == source:
                    send(self._parts[name].whole(), rank)
                elif dist.get_rank() == rank:
                    self._parts[name].put_back(receive(source))
                    found[name] = self._parts[name].find()

    def before(self, step: int) -> Kept:
        """Return what was kept before a step that has begun."""
        return self._before[step]

    def keep(self) -> Kept:
        """A copy of all parts, by name."""
        return {name: part.keep() for name, part in self._parts.items()}

    def put_back(self, kept: Kept) -> None:
        """Make all parts as they were kept."""
        for name, one in kept.items():
            self._parts[name].put_back(one)

    @contextmanager
    def passes_undone(self) -> Iterator[None]:
        """Put back what passes inside change; a recovery does so where they are interrupted."""
        kept = {name: part.keep() for name, part in self._parts.items() if part.of_passes}
        yield
        self.put_back(kept)

    def is_as_begun(self, step: int) -> bool:
        """Return whether passes of a step have changed nothing that they may change."""
        before = self._before.get(step)
        of_passes = [part for part in self._parts.values() if part.of_passes]
        return before is not None and all(one.is_still(before[one.name]) for one in of_passes)

    def check(self, step: int) -> None:
        """Raise ConfigurationError for what the passes of this step may not change."""
        for name, one in (self._before[step] | self._found.get(step, {})).items():
            self._parts[name].check(one)

    def sealed(self) -> None:
        """A step was sealed."""
        for part in self._parts.values():
            part.sealed()

    # ---- after a recovery -----------------------------------------------------------------------

    def restored(self, step: int) -> None:
        """Go back to the beginning of a step; each worker that needs it is given what there was.

        Collective over WORLD. Raises ElasWaveError where none has it, ConfigurationError on a
        worker that came later and does not fit.
        """
        # What was sealed is here again, in the layout of this view.
        self.sealed()
        # Also who came in the step after this one, if it cannot be redone from its own seal.
        came_later = self._asks or min(self._before, default=step) > step
        if self.repeats_bodies:
            for states in (self._before, self._found):
                for later in [one for one in states if one > step]:
                    del states[later]
        rows = _told([came_later, step in self._before, self._shard_group, self._kept_of])
        rows = [
            [asks or self._is_given_a_place(rows, rank), *row]
            for rank, (asks, *row) in enumerate(rows)
        ]
        for rank, (asks, _, wanted, _) in enumerate(rows):
            # Also one that has no place yet: its script's loop goes on with the others'.
            if asks:
                self._give(step, to=rank, source=self._source(rows, wanted))
        self._asks = False
        newest = step if step in self._before else max(self._before, default=step)
        moved = fetch_missing(
            self._parts,
            self._before.get(newest, {}),
            is_placed=self._shard_group >= 0,
            is_current=newest == step,
        )
        came = any(asks for asks, *_ in rows)
        if came and step in self._before:
            self.put_back(self._before[step])
        if came or moved:
            self._compare([number for _, _, number, _ in rows], self._part_from)

    def _is_given_a_place(self, rows: Sequence[Sequence[int]], rank: int) -> bool:
        """True if that rank had no place: its loop went on beside a model without weights.

        Not between two steps, where nobody has kept what it could be given.
        """
        *_, wanted, kept_of = rows[rank]
        if not kept_of < 0 <= wanted:
            return False
        gives = (has and not asks and (held >= 0 or of < 0) for asks, has, of, held in rows)
        return any(gives) or self._noted(wanted)

    def _noted(self, shard_group: int) -> bool:
        """True if a worker of that part of the model has left notes."""
        groups = self._worker.placement.shard_groups
        return shard_group >= 0 and self._worker.notes.are_of(groups[shard_group].key)

    def _source(self, rows: Sequence[Sequence[int]], shard_group: int) -> int | None:
        """The rank that gives: the first of the same part of the model, or else of any other.

        None where notes do: of the same part, or because nobody is left.
        """
        able = [rank for rank, (asks, has, *_) in enumerate(rows) if has and not asks]
        alike = [rank for rank in able if rows[rank][3] == shard_group]
        if not alike and self._noted(shard_group):
            return None
        return next(iter(alike or able), None)

    def _give(self, step: int, *, to: int, source: int | None) -> None:
        rank = dist.get_rank()
        if rank == source:
            send(self._known(step), to)
        elif rank == to:
            told = self._worker.notes.read(_NOTED) if source is None else receive(source)
            for one, kept in zip((self._before, self._found), told, strict=False):
                one[step] = kept
            self._kept_of = self._shard_group

    def _known(self, step: int) -> list[Kept]:
        """Return what a later worker takes of what there was before a step."""
        known = [one[step] for one in (self._before, self._found) if step in one]
        return [{n: self._parts[n].shared(one) for n, one in kept.items()} for kept in known]

    @property
    def _shard_group(self) -> int:
        """The number of the part of the model that this worker holds; -1 for a free one."""
        placement = self._worker.placement
        shard_group = placement.shard_group_of(self._worker.slot)
        return -1 if shard_group is None else list(placement.shard_groups).index(shard_group)

    def check_alike(self) -> None:
        """Raise ConfigurationError where workers differ at the start; collective over WORLD."""
        self._compare([shard_group for (shard_group,) in _told([self._shard_group])], self._refuse)

    def check_digest(self, digest: int, sentence: str) -> None:
        """Raise ConfigurationError where workers of one part of the model have different ones.

        Collective over WORLD; ``sentence`` says what differs, and what to do.
        """
        known: dict[int, int] = {}
        for shard_group, one in _told([self._shard_group, digest]):
            if shard_group >= 0 and known.setdefault(shard_group, one) != one:
                raise ConfigurationError(sentence)

    def _compare(self, shard_groups: Sequence[int], differs: Callable[[str], None]) -> None:
        """Compare part by part; call ``differs`` on all workers where a shard group differs."""
        names = list(self._parts)
        rows = _told([part.proof() for part in self._parts.values()])
        for shard_group in set(shard_groups) - {-1}:
            of_shard_group = [
                row for row, one in zip(rows, shard_groups, strict=True) if one == shard_group
            ]
            for name, values in zip(names, zip(*of_shard_group, strict=True), strict=True):
                if len(set(values)) > 1:
                    differs(name)

    def _refuse(self, what: str) -> None:
        raise ConfigurationError(
            f"workers that hold the same part of the model differ in {what}, before the first step:"
            " build it alike on all of them, from one seed, or broadcast it before job.bind"
        )

    def _part_from(self, what: str) -> None:
        """Workers differ in ``what``: those that have just come leave, which interrupts this.

        Collective over WORLD.
        """
        everyone = gathered([str(self._worker.member.worker), self._parts[what].told()])
        if str(self._worker.member.worker) in self._worker.untried:
            mine = self._parts[what].told()
            theirs = (told for who, told in everyone if who not in self._worker.untried)
            raise ConfigurationError(
                f"this worker came later and differs from the others in {what}"
                f"{_difference(mine, next(theirs, mine))}; have the script build the same wherever"
                " it starts, read a checkpoint in what the job calls on the workers of the launch"
                ' alone (job.run(load, phase="load"), engine.load_checkpoint), and give'
                " elaswave_plugin.keep(name, object) what its loop changes, or set respawn to 0 and"
                " leave --reserve out"
            )
        if self._worker.untried:
            dist.barrier()
        raise ElasWaveError(
            f"workers that hold the same part of the model differ in {what}; restart from the last "
            "checkpoint"
        )


def named_settings(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name each setting of an optimizer's groups, with its value as text."""
    return {
        f"{name} of group {number}": f"{value!r:.100}"
        for number, group in enumerate(groups)
        for name, value in group.items()
    }


def _difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Name the first value that differs, in brackets; nothing where none does."""
    for name in {**theirs, **mine}:
        here, there = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if here != there:
            return f" ({name}: {here} here, {there} there)"
    return ""


def _told(mine: Sequence[int]) -> list[list[int]]:
    """Gather each worker's numbers, by rank (collective over WORLD)."""
    row = torch.tensor(mine, dtype=torch.int64)
    table = [torch.zeros_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(table, row)
    return [one.tolist() for one in table]


def copied(value: Any) -> Any:
    """A copy with its tensors on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copied(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return detached_copy(value)


def _digest_of_kept(kept: Any) -> int:
    tensors: list[torch.Tensor] = []
    digest = xxhash.xxh3_64(encode(kept, "the state of a step", beside=tensors))
    for tensor in tensors:
        digest.update(digest_of(tensor).to_bytes(8, "little"))
    return digest.intdigest() >> 1


# Odd and far from a power of two, so that no two places within a row weigh the same modulo 2**64.
@torch.no_grad()
def digest_of(tensor: torch.Tensor) -> int:
    """63 bits; two workers get the same for the same bits on the same kind of device."""
    if tensor.is_cuda:
        return _on_device(row_of(tensor))
    return xxhash.xxh3_64_intdigest(bytes_of(tensor)) >> 1


def _on_device(flat: torch.Tensor) -> int:
    """A sum of the bits, weighted by their places: it needs no copy to the host."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(kinds[flat.element_size()])
    weights = torch.arange(1, min(_ROW, len(bits)) + 1, device=bits.device) * _STRIDE
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _ROW):
        row = bits[start : start + _ROW].to(torch.int64)
        total = total * 31 + (row * weights[: len(row)]).sum()
    return int(total) & ((1 << 63) - 1)
