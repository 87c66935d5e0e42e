"""Keeps what the calls of a script's loop returned, by which that of a later worker passes over.

A worker that comes later runs its script from the start. Where that makes a call that the others
have behind them, it is given what the call returned to them, so that it comes to their step with
the same variables, and has computed and met nothing on the way.
"""

import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.plain import packed, unpacked

_WHAT = "what the calls of the script's loop returned"
_ENDS = "at the end of its data"
_NOTHING = "nothing more before their present step"
# So many calls are packed together: numbers of one kind take less room so. As many are kept as they
# are, for those who are a few calls behind.
_BLOCK = 512
LARGEST = 1 << 20
"""What a call returns beyond this many bytes is not kept."""
_MOST = 1 << 28

# The name of a call, the draws behind it, and in a list what it returned; nothing if not kept.
Entry = tuple[str, Any, list[Any]]


class CallRecord:
    """The calls of one worker's loop, in order; or those of another that are to be passed over."""

    # Whether the last calls are kept where no later worker can be told.
    _keeps_on = False

    def __init__(
        self,
        *,
        lags: Callable[[], bool] = lambda: False,
        draws: Callable[[], Any] = lambda: None,
        follow_draws: Callable[[Any], object] = lambda told: None,
        own: Collection[str] = (),
        when_level: Callable[[], object] = lambda: None,
    ) -> None:
        """``lags()``: whether the script is at steps that the others have behind them.

        ``draws()``: what its draws follow from behind a call, a plain value; ``follow_draws`` has
        them follow from that again. ``own``: calls that some workers' scripts make, and others not.
        ``when_level()``: the script has come to the call that the others make next.
        """
        self._lags, self._level = lags, when_level
        self._draws, self._follow_draws = draws, follow_draws
        self._own = frozenset([*own, *(f"{call} {_ENDS}" for call in own)])
        self._blocks: list[bytes] = []
        self._newest: list[Entry] = []
        self._coming: deque[Entry] = deque()
        self._blocks_coming: deque[bytes] = deque()
        self._made = self._bytes = 0
        # Why no later worker can be told.
        self._flaw: str | None = None

    @property
    def is_behind(self) -> bool:
        """True where the others have calls behind them that this worker's script has not made."""
        return bool(self._coming) or self._lags()

    def note(self, call: str, returned: Any) -> None:
        """Note what a call has returned to the script.

        Values that are not plain, or large, are not kept, and end what a later worker can be told.
        """
        self._append(call, self._draws(), returned)

    def _append(self, call: str, draws: Any, returned: Any) -> None:
        self._made += 1
        if self._flaw is not None and not self._keeps_on:
            return
        size = sum(one.nbytes for one in _pytree.tree_leaves(returned) if torch.is_tensor(one))
        if size > LARGEST:
            self.end(f"{call} has returned {size} bytes, and at most {LARGEST} are kept")
        self._bytes += size
        if self._bytes > _MOST:
            self.end(f"calls have returned {self._bytes} bytes, and at most {_MOST} are kept")
        kept = [_pytree.tree_map_only(torch.Tensor, _copy, returned)] if size <= LARGEST else []
        self._newest.append((call, draws, kept))
        if len(self._newest) == 2 * _BLOCK:
            oldest, self._newest = self._newest[:_BLOCK], self._newest[_BLOCK:]
            self._blocks += self._packed(oldest)

    def _packed(self, calls: Sequence[Entry]) -> list[bytes]:
        """Pack calls into a block; into none where the record has ended, or ends by them."""
        if self._flaw is not None or not calls:
            return []
        try:
            return [block_of(calls)]
        except ConfigurationError as flaw:
            self.end(str(flaw))
            return []

    def of(self, call: str, make: Callable[[], Any], *, is_made: bool = False) -> Any:
        """Return what ``make()`` does to the script, or has returned to the others.

        ``is_made``: make it in any case, as one of the step in which the others stand.
        """
        ends, own = f"{call} {_ENDS}", None
        comes = self._next_of(call, ends)
        if not self.is_behind:
            try:
                own = make()
            except StopIteration:
                # A script may catch it, as the end of its data.
                if not self.is_behind:
                    self.note(ends, None)
                    raise
            if not self.is_behind:
                self.note(call, own)
                return own
            # A loss has met it, and another worker has it behind it.
            comes = self._next_of(call, ends)
        if (comes is None and call in self._own) or (comes == call and not self._coming[0][2]):
            # Its own, or what the others have not kept.
            own = make() if own is None else own
        if comes is None and call in self._own:
            return own
        returned = self.pass_over(comes or call, own)
        if is_made:
            return make()
        if comes == ends:
            raise StopIteration
        return returned

    def _next_of(self, *calls: str) -> str | None:
        """Return which of these comes next, behind what others have called by themselves; or None.

        The last of those are left out, where these are calls of all.
        """
        number = 0
        while number < len(self._coming) or self._blocks_coming:
            if number == len(self._coming):
                self._coming.extend(calls_of(self._blocks_coming.popleft()))
            call = self._coming[number][0]
            if call in calls:
                for _ in range(number):
                    self._coming.popleft()
                return call
            if call not in self._own:
                return None
            number += 1
        if self._coming and calls[0] not in self._own:
            self._coming.clear()
            self._level()
        return None

    def pass_over(self, call: str, own: Any = None) -> Any:
        """Return what the next call returned to the others; raises ConfigurationError for another.

        ``own``: what it has returned here, for what the others have not kept. It is noted here as
        well, for those who come after this worker.
        """
        if self._next_of(call) is None:
            theirs = next((one for one, _, _ in self._coming if one not in self._own), _NOTHING)
            raise ConfigurationError(self._differs(call, theirs))
        _, draws, kept = self._coming.popleft()
        self._unpack()
        if not self._coming:
            self._level()
        returned = kept[0] if kept else own
        self._follow_draws(draws)
        self._append(call, draws, returned)
        return returned

    @property
    def draws_coming(self) -> Any:
        """The others' draws behind the call that is passed over next, as told; None without one."""
        return self._coming[0][1] if self._coming else None

    def fill(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        """Pass over a collective: have in its tensors what the others had in theirs.

        Raises ConfigurationError for tensors of other sizes.
        """
        theirs = self.pass_over(call)
        if [one.shape for one in theirs] != [one.shape for one in tensors]:
            raise ConfigurationError(self._differs(f"{call} with tensors of other sizes", call))
        for tensor, value in zip(tensors, theirs, strict=True):
            tensor.copy_(value)

    def _differs(self, mine: str, theirs: str) -> str:
        return (
            f"this worker came later, and its script calls {mine} where those of the others called"
            f" {theirs}, after {self._made} calls: a script runs from its start in such a worker,"
            " and has to do the same, whatever its rank is and whatever files the job has written"
            " since; where it goes on from a checkpoint of this run, set respawn to 0"
        )

    def end(self, why: str) -> None:
        """Have no later worker told what the calls returned: ``why`` is said instead."""
        self._flaw = self._flaw or why
        self._blocks.clear()
        if not self._keeps_on:
            self._newest.clear()

    def told(self) -> list[bytes] | str:
        """Return all of it, also what is to be passed over, or why it cannot be told."""
        newest, coming = self._packed(self._newest), self._packed(self._coming)
        blocks = [*self._blocks, *newest, *coming, *self._blocks_coming]
        return blocks if self._flaw is None else self._flaw

    def learn(self, told: list[bytes]) -> None:
        """Have all of these calls passed over."""
        self._coming.clear()
        self._blocks_coming = deque(told)
        self._unpack()

    def _unpack(self) -> None:
        while self._blocks_coming and not self._coming:
            self._coming.extend(calls_of(self._blocks_coming.popleft()))


def block_of(calls: Iterable[Entry]) -> bytes:
    """Pack calls; raises ConfigurationError for values that are not plain."""
    calls = [*calls]
    if torch.cuda.is_available():
        # Here, not at each call, as the host would wait for the device there.
        calls = _pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, calls)
    return zlib.compress(packed(calls, _WHAT), 1)


def calls_of(block: bytes) -> list[Entry]:
    """Return the calls of a block."""
    return [(call, draws, kept) for call, draws, kept in unpacked(zlib.decompress(block), _WHAT)]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
