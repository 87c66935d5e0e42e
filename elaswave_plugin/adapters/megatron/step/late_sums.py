"""Sums over replicas that a loss function makes for its report: made when all passes are over.

After a loss workers run unequal numbers of micro-batches, so that such calls do not meet while
passes run. A script reads their results nowhere but in the report.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch.utils import _pytree

from elaswave_plugin.communicator.groups.group_core import ElasticWork
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.errors import ConfigurationError, ElasWaveError
from elaswave_plugin.values.plain import gathered

_FOLDS: tuple[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]], ...] = (
    ("SUM", torch.add),
    ("AVG", torch.add),
    ("PRODUCT", torch.mul),
    ("MAX", torch.maximum),
    ("MIN", torch.minimum),
)
# What shows a part of a tensor, or all of it, and reads none of its numbers.
_SHOWS = ("__getitem__", "detach", "view", "reshape", "unbind", "__get__", "select", "squeeze")


class _Late(torch.Tensor):
    """A sum that comes later."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name not in _SHOWS:
            raise ConfigurationError(
                f"the loss function reads what its all_reduce returned ({name}), and sums over"
                " replicas are made when all passes are over, as workers run unequal numbers of"
                " them after a loss: have it return that tensor in its report, and read it there"
            )
        return super().__torch_function__(function, types, args, kwargs or {})


class LateSums:
    """The sums that this worker's loss functions make in the passes of a call."""

    def __init__(self, links: LinkTable, *, width: int, members: Callable[[Any], Any]) -> None:
        """``width``: replicas at the launch; ``members(group)``: of what a group was made."""
        self._links, self._width, self._members = links, width, members
        self._group: Any = None
        self._number = 0
        # By micro-batch: what it gives to each sum, and by leaf of its report, which sum is there.
        self._given: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._places: dict[int, dict[int, tuple[int, Any]]] = {}
        self._made: list[_Late] = []

    def begin(self, group: Any) -> None:
        """A call begins; ``group``: the replicas of this worker's part of the model."""
        self._group = group
        self._given.clear()
        self._places.clear()

    @property
    def are_any(self) -> bool:
        """True where the loss functions of the call have made such sums."""
        return bool(self._given)

    def start(self, number: int) -> None:
        """The passes of a micro-batch begin."""
        self._number = number

    def leave_out(self, forward_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a forward step, whose loss function's sums come later."""
        result = forward_step(*args, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2 or not callable(result[1]):
            return result
        output, loss = result

        def called(*given: Any, **named: Any) -> Any:
            self._made = []
            with self._links.with_body(self):
                outputs = loss(*given, **named)
            return self._noted(outputs) if self._made else outputs

        return output, called

    def run(self, group: Any, call: str, args: Sequence[Any], start: Callable[..., Any]) -> Any:
        """Leave an all-reduce of the replicas for later; make any other call."""
        if call != "allreduce" or self._members(group) != self._members(self._group):
            return self.note(group, call, args, lambda *given: start(group))
        (tensor,) = args[0] if isinstance(args[0], list | tuple) else args[:1]
        kind = group.reduction(*args[1:2])
        if kind not in dict(_FOLDS) or not tensor.is_contiguous():
            raise ConfigurationError(
                f"the loss function's all_reduce is a {kind} of a tensor with the strides"
                f" {tensor.stride()}, wanted one of {', '.join(dict(_FOLDS))}, of a contiguous one"
            )
        self._given.setdefault(self._number, []).append((kind, tensor.detach().clone()))
        tensor.__class__ = _Late
        self._made.append(tensor)
        return ElasticWork(self._links, ())

    def note(self, group: Any, call: str, args: Sequence[Any], start: Callable[..., Any]) -> Any:
        """Make a call."""
        with self._links.with_body(None):
            return start(*args)

    def interrupted(self, call: str) -> None:
        """A loss has met a call: the passes run again."""

    def _noted(self, outputs: Any) -> Any:
        """Return a loss function's outputs with plain tensors; note where sums are in the report.

        Raises ConfigurationError where one is elsewhere.
        """
        *others, report = outputs
        leaves, shape = _pytree.tree_flatten(report)
        places = self._places[self._number] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, _Late):
                leaves[place] = plain = _plain(leaf)
                which, offset = self._part_of(plain)
                places[place] = which, (plain.shape, plain.stride(), offset)
        if any(isinstance(one, _Late) for one in _pytree.tree_leaves(others)):
            raise ConfigurationError(
                "the loss function returns what its all_reduce returned as its loss, or as tokens:"
                " return those of this micro-batch, and the sum over replicas in the report"
            )
        return (*others, _pytree.tree_unflatten(leaves, shape))

    def _part_of(self, plain: torch.Tensor) -> tuple[int, int]:
        """Return of which of the micro-batch's sums a tensor is a part, and where that begins."""
        first = len(self._given[self._number]) - len(self._made)
        for which, whole in enumerate(map(_plain, self._made), first):
            offset = int(plain.storage_offset() - whole.storage_offset())
            is_same = plain.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            if is_same and 0 <= offset < whole.numel():
                return which, offset
        raise ElasWaveError("a sum over replicas is in a report, and is of no all_reduce")

    def settle(self, numbers: Sequence[int], reports: Sequence[Any]) -> list[Any]:
        """Return the reports of these micro-batches with the sums (collective over the replicas).

        The replicas are added in their order, on whichever worker each was run.
        """
        if not self._given:
            return [*reports]
        mine = [
            [number, [[kind, tensor.cpu()] for kind, tensor in given]]
            for number, given in self._given.items()
        ]
        given = dict(one for told in gathered(mine, group=self._group) for one in told)
        return [
            self._filled(report, self._places.get(number, {}), self._sums(number, given))
            for number, report in zip(numbers, reports, strict=True)
        ]

    def _sums(self, number: int, given: Mapping[int, Any]) -> list[torch.Tensor]:
        row = number // self._width
        parts = [given[row * self._width + replica] for replica in range(self._width)]
        sums = []
        for same in zip(*parts, strict=True):
            total = reduce(dict(_FOLDS)[same[0][0]], (tensor for _, tensor in same))
            sums.append(total / self._width if same[0][0] == "AVG" else total)
        return sums

    def _filled(self, report: Any, places: Mapping[int, Any], sums: Sequence[torch.Tensor]) -> Any:
        leaves, shape = _pytree.tree_flatten(report)
        for place, (which, view) in places.items():
            leaves[place] = sums[which].as_strided(*view).clone().to(leaves[place].device)
        return _pytree.tree_unflatten(leaves, shape)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)
