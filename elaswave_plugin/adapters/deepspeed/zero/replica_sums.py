"""Gradients apart by replica of the launch, and their average in the order of the replicas.

A reduction of a job that has lost nobody is a left-to-right fold in rank order, which is that of
the replicas. Where workers run several replicas each, what they have added up for each is kept
apart, and every worker folds its piece of all of them in the same order. The bits are the same.

Stages 0 and 1 fold the sums of a step; stage 2 folds those of each micro-batch, and adds them up.
Source: deepspeed/runtime/engine.py, ``allreduce_bucket``, ``coalesce_grad_reduction``, and
deepspeed/runtime/zero/stage_1_and_2.py, ``average_tensor``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from elaswave_plugin.adapters.deepspeed.zero.padded_updates import PaddedUpdates
from elaswave_plugin.values.set_within import set_within

# Elements that are sent, folded and given back at once.
_AT_ONCE = 1 << 22
# Where passes add to, and the accumulators of 16-bit gradients.
_PLACES = ("grad", "grad_accum")

# The gradients of each parameter, by place.
Gradients = list[tuple[torch.Tensor | None, ...]]


class ReplicaSums:
    """The gradients that one worker's passes have added up, by replica and part of the step."""

    def __init__(self, engine: Any, *, width: int) -> None:
        """``width``: replicas of the launch."""
        self._engine = engine
        self._zero = engine.optimizer if int(engine.zero_optimization_stage()) else None
        self._width = width
        if self._zero is not None:
            PaddedUpdates(engine.basic_optimizer)
        self._params = [one for one in engine.module.parameters() if one.requires_grad]
        self._kept: dict[tuple[int, int], Gradients] = {}
        self._present: tuple[int, int] | None = None

    def begin(self, sums: Mapping[int, Gradients]) -> None:
        """A step begins, with these sums of replicas already."""
        self._kept = {(replica, 0): one for replica, one in sums.items()}
        self._present = None

    def take(self) -> dict[int, Gradients]:
        """Return what has been added up, by replica, which is no longer here."""
        self._put_away()
        sums, self._kept = {replica: one for (replica, _), one in self._kept.items()}, {}
        return sums

    def select(self, replica: int, part: int) -> None:
        """Have passes add to the gradients of a replica from now on, those of a part of the step.

        A stage that folds whole steps has one part.
        """
        chosen = replica, part if self.folds_passes else 0
        if chosen != self._present:
            self._put_away()
            self._present = chosen
            self._place(self._kept.pop(chosen, None))

    @property
    def folds_passes(self) -> bool:
        """True where the gradients of each micro-batch are averaged by themselves."""
        return bool(self._engine.zero_optimization_partition_gradients())

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Backward passes in this block reduce nothing."""
        with ExitStack() as stack:
            stack.enter_context(set_within(self._engine, "inside_no_sync_ctxt", True))
            if self._zero is not None:
                stack.enter_context(set_within(self._zero, "_coalesce_grad_reduction", True))
            yield

    @torch.no_grad()
    def reduce(self, hosts: Sequence[int]) -> None:
        """Have the average over all replicas where DeepSpeed has it (collective over WORLD).

        ``hosts``: the rank that has run each replica. Of the selected part of the step.
        """
        assert self._present is not None
        part = self._present[1]
        self._put_away()
        mine = [self._kept[one, part] for one in self._hosted(hosts)]
        place = _PLACES.index("grad_accum") if self._accumulates else 0
        owned = [at for at, one in enumerate(mine[0]) if one[place] is not None]
        for bucket in self._buckets(owned):
            terms = [[each[at][place] for at in bucket] for each in mine]
            for at, average in zip(bucket, self._averages(terms, bucket, hosts), strict=True):
                setattr(self._params[at], _PLACES[place], average)
        if self._zero is not None:
            nothing = lambda *given, **named: None  # noqa: E731
            with (
                set_within(self._zero, "average_tensor", nothing),
                set_within(self._zero, "buffered_reduce_fallback", nothing),
            ):
                self._engine._flush_coalesced_reduction_zero12(self._zero)
        # Not before: a loss meets it.
        for one in self._hosted(hosts):
            del self._kept[one, part]

    # ---- in memory ------------------------------------------------------------------------------

    @property
    def _accumulates(self) -> bool:
        return bool(getattr(self._zero, "use_grad_accum_attribute", False))

    def _put_away(self) -> None:
        if self._present is not None:
            self._kept[self._present] = [
                tuple(getattr(one, name, None) for name in _PLACES) for one in self._params
            ]
            self._present = None
        self._place(None)

    def _place(self, gradients: Gradients | None) -> None:
        for at, one in enumerate(self._params):
            for order, name in enumerate(_PLACES):
                if hasattr(one, name):
                    setattr(one, name, None if gradients is None else gradients[at][order])

    # ---- the fold -------------------------------------------------------------------------------

    def _hosted(self, hosts: Sequence[int]) -> list[int]:
        rank = dist.get_rank(self._group)
        return [replica for replica, host in enumerate(hosts) if host == rank]

    @property
    def _group(self) -> Any:
        return self._engine.seq_data_parallel_group

    def _buckets(self, owned: Sequence[int]) -> Iterator[list[int]]:
        """Yield parameters that are folded together: of one dtype, and few elements."""
        bucket: list[int] = []
        for at in owned:
            same = not bucket or self._params[bucket[0]].dtype == self._params[at].dtype
            if not same or sum(self._params[one].numel() for one in bucket) >= _AT_ONCE:
                yield bucket
                bucket = []
            bucket.append(at)
        if bucket:
            yield bucket

    def _averages(
        self, terms: Sequence[Sequence[Any]], bucket: Sequence[int], hosts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the averages of some parameters, each with the shape of its gradient."""
        flats = [torch.cat([one.reshape(-1) for one in each]) for each in terms]
        kind = flats[0].dtype
        if self._zero is None:
            total = self._folded(
                [one.to(self._engine.communication_data_type) for one in flats], hosts
            )
            if self._width > 1:
                total.mul_(1.0 / self._width)
        else:
            sent = self._zero.get_param_comm_dtype(self._params[bucket[0]])
            total = self._folded([one.div_(float(self._width)).to(sent) for one in flats], hosts)
        like = terms[0]
        pieces = total.to(kind).split([one.numel() for one in like])
        return [piece.view(one.shape) for piece, one in zip(pieces, like, strict=True)]

    def _folded(self, own: Sequence[torch.Tensor], hosts: Sequence[int]) -> torch.Tensor:
        """Return ((x0 + x1) + x2) + ... over all replicas, of which ``own`` are this worker's."""
        world, length = dist.get_world_size(self._group), own[0].numel()
        if [*hosts] == [*range(world)]:
            # The group's own sum is this fold, and costs less than the messages below.
            dist.all_reduce(own[0], group=self._group)
            return own[0]
        size = -(-length // world)
        sent = torch.stack([pad(one, (0, size * world - length)) for one in own])
        sent = sent.view(len(own), world, size).transpose(0, 1).reshape(-1)
        counts = [size * hosts.count(rank) for rank in range(world)]
        came = sent.new_empty(sum(counts))
        dist.all_to_all_single(came, sent, counts, [size * len(own)] * world, group=self._group)
        # They come by rank.
        order = sorted(range(len(hosts)), key=lambda replica: (hosts[replica], replica))
        terms = dict(zip(order, came.view(-1, size), strict=True))
        first, *others = in_order(hosts)
        total = terms[first]
        for replica in others:
            total = total + terms[replica]
        whole = total.new_empty(size * world)
        dist.all_gather_into_tensor(whole, total.contiguous(), group=self._group)
        return whole[:length]


def in_order(hosts: Sequence[int]) -> Sequence[int]:
    """Return the replicas in the order of the additions, on whatever ranks they were run."""
    return range(len(hosts))
