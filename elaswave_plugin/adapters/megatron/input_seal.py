"""Batches that a script has in memory: drawn before their call, with copies on other workers.

Nobody else can read them. Micro-batches of a lost worker are read from the copy, which lies where
copies of that worker's snapshots do. What is in no copy is left out of its step. Those of a replica
may have more at one pipeline stage than at another, as log-probabilities at the last one.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.megatron.batch_values import BatchValues
from elaswave_plugin.adapters.megatron.compat import rng
from elaswave_plugin.adapters.megatron.own_timers import stopped_where_interrupted
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow
from elaswave_plugin.core.recovery_plan.plan import copy_targets
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.plain import decode, encode, gathered, told_by

# The batches of one worker's call, one a micro-batch.
Batches = list[bytes]
# What a micro-batch reads: by which method, with which arguments, and what that returned.
Reads = list[list[Any]]
_WHAT = "a batch of data_iterator"


class _Reached(BaseException):
    """A forward step has come to the model."""


class _Noting:
    """An iterator that notes what is read of it."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.noted: Reads = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._iterator, name)
        if not callable(method):
            raise ConfigurationError(
                f"forward_step reads {name} of data_iterator, a {type(self._iterator).__name__},"
                " which is in this worker alone: read batches by next or by a method"
            )

        def read(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.noted.append([name, [[*args], kwargs], result])
            return result

        return read


def drawn(
    iterator: Any,
    count: int,
    *,
    forward_step: Callable[..., Any],
    chunk: Any,
    values: BatchValues,
) -> Batches:
    """Draw what ``count`` micro-batches read of an iterator; raises StopIteration at its end.

    Of one without ``__next__``, as with ``get_next(keys)``, the first one's forward step shows what
    that is: it runs up to the model. Raises ConfigurationError for batches that cannot be copied.
    """
    if hasattr(iterator, "__next__"):
        return [_encoded([["__next__", [[], {}], next(iterator)]], values) for _ in range(count)]
    noting = _Noting(iterator)
    hook = chunk.register_forward_pre_hook(_stop, prepend=True)
    try:
        with (
            rng.undone_draws(),
            suppress(_Reached),
            stopped_where_interrupted(forward_step),
        ):
            forward_step(noting, chunk)
    finally:
        hook.remove()
    reads = [noting.noted]
    for _ in range(count - 1):
        again = ((name, how, getattr(iterator, name)) for name, how, _ in noting.noted)
        reads.append([[name, how, read(*how[0], **how[1])] for name, how, read in again])
    return [_encoded(one, values) for one in reads]


def _stop(*_: Any) -> NoReturn:
    raise _Reached


def _encoded(reads: Reads, values: BatchValues) -> bytes:
    return encode([[name, how, values.apart(result, _WHAT)] for name, how, result in reads])


class InputSeal:
    """The batches of the last steps' calls that trained: a worker's own, and copies of others'."""

    def __init__(
        self,
        worker: Worker,
        *,
        replica: int,
        num_replicas: int,
        stage: int = 0,
        num_stages: int = 1,
    ) -> None:
        """``replica``, ``stage``: those of this worker at the launch."""
        self.worker, self._width, self._num_places = worker, num_replicas, num_replicas * num_stages
        self.stage, self.place = stage, self.place_of(stage, replica)
        self.values = BatchValues()
        self.position = 0
        """The call that comes next, of those with batches in memory."""
        # By call: the step that it was of, and batches by place.
        self._laid: dict[int, tuple[int, dict[int, Batches]]] = {}
        self._has_said, self._missed = False, frozenset[int]()
        self.left_out = frozenset[int]()
        """The replicas whose batches of the last call are in no worker."""

    def place_of(self, stage: int, replica: int) -> int:
        """Return the number of a replica at a stage, by which its batches are known."""
        return stage * self._width + replica

    def next_call(self) -> int:
        """Begin the next call; returns its number."""
        self.position, self.left_out = self.position + 1, frozenset()
        return self.position - 1

    def lay(self, call: int, own: Batches) -> dict[int, Batches]:
        """Have copies of a call's batches where copies of snapshots lie, and hold those of others.

        Collective over WORLD. Returns what lies here, by place. Raises ConfigurationError, alike
        on all workers, where batches are larger than is set, or not as many on each.
        """
        worker = self.worker
        oldest = worker.completed - worker.state.remembered_steps
        for old in [one for one, (step, _) in self._laid.items() if step <= oldest]:
            del self._laid[old]
        here = self._laid.setdefault(call, (worker.completed, {}))[1]
        here[self.place] = own
        whole = torch.frombuffer(bytearray(encode([self.place, own], _WHAT)), dtype=torch.uint8)
        table = [torch.zeros(2, dtype=torch.int64) for _ in worker.ranks]
        dist.all_gather(table, torch.tensor([len(whole), len(own)]))
        sizes, counts = zip(*(row.tolist() for row in table), strict=True)
        self._check(sizes, counts)
        me = worker.ranks.index(worker.slot)
        holders = [self._holders(slot) for slot in worker.ranks]
        sent: list[Any] = [dist.isend(whole, holder) for holder in holders[me]]
        for rank, size in enumerate(sizes):
            if me in holders[rank]:
                copy = torch.zeros(size, dtype=torch.uint8)
                dist.recv(copy, rank)
                place, batches = decode(copy.numpy().data, _WHAT)
                here.setdefault(place, batches)
        for one in sent:
            one.wait()
        return {**here}

    def _holders(self, slot: int) -> list[int]:
        """The ranks that have the copies of a worker's batches."""
        worker = self.worker
        group = worker.placement.shard_group_of(slot)
        targets = copy_targets(
            slot,
            ranks=worker.view.ranks,
            nodes=worker.view.nodes,
            copies=worker.config.snapshot_copies,
            peers=() if group is None else group.ranks,
        )
        return [*map(worker.ranks.index, targets)]

    def _check(self, sizes: tuple[int, ...], counts: tuple[int, ...]) -> None:
        if len({*counts}) > 1:
            rank = next(rank for rank, one in enumerate(counts) if one != counts[0])
            raise ConfigurationError(
                f"num_microbatches is {counts[rank]} on rank {rank} and {counts[0]} on rank 0, and"
                " who runs those of a lost worker would not know how many it had: give the same on"
                " all, as by an all_reduce of the most"
            )
        limit, largest = self.worker.config.input_seal_mib, max(sizes) / (1 << 20)
        if largest > limit:
            raise ConfigurationError(
                f"the batches that the script has in memory for one call of forward_backward are"
                f" {largest:.1f} MiB on rank {sizes.index(max(sizes))}, and input_seal_mib is"
                f" {limit}: raise it, or give an iterator over a DataLoader, which is read again"
            )
        if not self._has_said and self.worker.owns_rank_0:
            copies = self.worker.config.snapshot_copies
            say(
                f"the script has its batches in memory: {sum(sizes) / (1 << 20):.1f} MiB of all"
                f" workers in the first call, copied to {copies} other{'s' * (copies != 1)} each;"
                " those of later calls are lost with a replica (an iterator over a DataLoader goes"
                " on)"
            )
        self._has_said = True

    def share(
        self,
        here: dict[int, Batches],
        flow: Callable[[frozenset[int]], Dataflow | PipelineFlow],
        *,
        with_all: bool,
    ) -> dict[int, Batches]:
        """Give each worker the batches that it runs; returns those that are here then.

        Collective over WORLD. ``flow(replicas)`` leaves these out: those that have none, of which
        users are told. ``with_all``: all batches to all workers.
        """
        worker, width = self.worker, self._width
        held = [{*one} for one in gathered(sorted(here))]
        missing = {*range(self._num_places)}.difference(*held)
        self.left_out, here = frozenset(place % width for place in missing), {**here}
        self._tell_missing()
        dealt = flow(self.left_out)
        for place in sorted({*range(self._num_places)} - missing):
            stage, replica = divmod(place, width)
            wants = (
                with_all
                or (
                    stage_in(dealt, slot) == stage
                    and any(k % width == replica for k in dealt.microbatches(slot))
                )
                for slot in worker.ranks
            )
            if any(one and place not in has for one, has in zip(wants, held, strict=True)):
                source = next(rank for rank, has in enumerate(held) if place in has)
                here[place] = told_by(source, here.get(place), _WHAT)
        return here

    def _tell_missing(self) -> None:
        """Say of which replicas batches are missing from now on, or are there again."""
        lost, back = self.left_out - self._missed, self._missed - self.left_out
        self._missed = self.left_out
        if not (lost or back) or not self.worker.owns_rank_0:
            return
        names, step = ", ".join(map(str, sorted(lost or back))), self.worker.completed
        say(
            f"the batches that the script of replica {names} had in memory are lost with it:"
            f" from step {step} on gradients are those of the other replicas,"
            f" divided by {self._width} as before, or by their tokens (calculate_per_token_loss)"
            if lost
            else f"replica {names} has batches again, and adds to gradients from step {step} on"
        )


def stage_in(flow: Dataflow | PipelineFlow, slot: int) -> int | None:
    """Return the stage of a worker; None for one without a place."""
    if isinstance(flow, Dataflow):
        return 0
    place = flow.coordinate(slot)
    return None if place is None else place.stage


class SealedCall:
    """The batches of one call, as of an iterator that the forward step reads."""

    def __init__(
        self,
        seal: InputSeal,
        own: Batches,
        *,
        trains: bool,
        flow: Callable[[frozenset[int]], Dataflow | PipelineFlow],
        is_rehearsed: Callable[[], bool],
    ) -> None:
        """``flow(replicas)``: that of the call now, without these.

        ``is_rehearsed()``: whether others run the call as well.
        """
        self._seal, self._own, self._trains = seal, own, trains
        self._flow, self._is_rehearsed = flow, is_rehearsed
        self._batches: dict[int, Batches] = {}
        # What the micro-batch that is due reads, and what of that is left.
        self._reads: Reads = []
        self._due: deque[list[Any]] = deque()

    @property
    def left_out(self) -> frozenset[int]:
        """The replicas whose batches are in no worker."""
        return self._seal.left_out

    def take(self, count: int) -> int:
        """Have the batches here that this worker runs now; returns the number of the call.

        Collective over WORLD, unless nothing is trained and all is as at the launch.
        """
        call, self._batches = self._seal.next_call(), {self._seal.place: self._own}
        if self._trains:
            self._batches = self._seal.lay(call, self._own)
        with_all = self._trains and self._is_rehearsed()
        if with_all or not self._flow(frozenset()).is_healthy:
            self._batches = self._seal.share(self._batches, self._flow, with_all=with_all)
        return call

    def has(self, first: int, replica: int, number: int) -> bool:
        """Return whether a replica's batch is here."""
        return self._place(replica) in self._batches

    def deliver(self, first: int, replica: int, number: int) -> None:
        """The next batch is a replica's ``number``-th."""
        batch, whole = self._batches[self._place(replica)][number], self._seal.values.whole
        self._reads = [[name, how, whole(one, _WHAT)] for name, how, one in decode(batch, _WHAT)]
        self._due = deque(self._reads)

    def _place(self, replica: int) -> int:
        """The number of a replica at the stage where this worker is."""
        stage = stage_in(self._flow(self.left_out), self._seal.worker.slot)
        return self._seal.place_of(self._seal.stage if stage is None else stage, replica)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The item that the forward step reads next of the batch that is due."""
        return self._read("__next__")

    def __getattr__(self, name: str) -> Any:
        if all(name != method for method, _, _ in self._reads):
            raise AttributeError(name)
        return partial(self._read, name)

    def _read(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method, how, result = self._due.popleft() if self._due else ("", None, None)
        if [method, how] != [name, [[*args], kwargs]]:
            raise ConfigurationError(
                f"forward_step reads its data_iterator by {name}{args} once more than of the first"
                " micro-batch in front of the model: read there all that a micro-batch needs, once"
            )
        return result

    def read_by(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward step as it is: all of its batches were there before."""
        return forward_step
