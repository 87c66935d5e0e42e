"""Keeps what the calls of a script's loop returned, by which that of a later worker passes over.

A worker that comes later runs its script from the start. Where that makes a call that the others
have behind them, it is given what the call returned to them, so that it comes to their step with
the same variables, and has computed and met nothing on the way.
"""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.packed import packed, unpacked

_WHAT = "what the calls of the script's loop returned"
_ENDS = "at the end of its data"
# So many calls are packed together: numbers of one kind take less room so.
_BLOCK = 512


class CallRecord:
    """The calls of one worker's loop, in order; or those of another that are to be passed over."""

    def __init__(
        self,
        *,
        lags: Callable[[], bool],
        draws: Callable[[], Any],
        follow_draws: Callable[[Any], object],
    ) -> None:
        """``lags()``: whether the script is at steps that the others have behind them.

        ``draws()``: what its draws follow from behind a call, a plain value; ``follow_draws`` has
        them follow from that again.
        """
        self._lags = lags
        self._draws, self._follow_draws = draws, follow_draws
        self._blocks: list[bytes] = []
        self._newest: list[tuple[str, Any, Any]] = []
        self._coming: deque[tuple[str, Any, Any]] = deque()
        self._blocks_coming: deque[bytes] = deque()
        self._passed = 0
        # Why no later worker can be told.
        self._flaw: str | None = None

    @property
    def is_behind(self) -> bool:
        """True where the others have calls behind them that this worker's script has not made."""
        return bool(self._coming) or self._lags()

    def note(self, call: str, returned: Any) -> None:
        """Note what a call has returned to the script; values that are not plain end the record."""
        self._append(call, self._draws(), returned)

    def _append(self, call: str, draws: Any, returned: Any) -> None:
        if self._flaw is not None:
            return
        kept = _pytree.tree_map_only(torch.Tensor, _copy, returned)
        self._newest.append((call, draws, kept))
        if len(self._newest) == _BLOCK:
            self._blocks += self._packed()
            self._newest.clear()

    def _packed(self) -> list[bytes]:
        """Return the newest calls as a block; none where a value is not plain."""
        calls = self._newest
        if torch.cuda.is_available():
            # Here, not at each call, as the host would wait for the device there.
            calls = _pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, calls)
        try:
            return [zlib.compress(packed(calls, _WHAT), 1)]
        except ConfigurationError as flaw:
            self._flaw = str(flaw)
            self._blocks.clear()
            return []

    def of(self, call: str, make: Callable[[], Any], *, is_made: bool = False) -> Any:
        """Return what ``make()`` does to the script, or has returned to the others.

        ``is_made``: make it in any case, as one of the step in which the others stand.
        """
        if not self.is_behind:
            try:
                returned = make()
            except StopIteration:
                # A script may catch it, as the end of its data.
                self.note(f"{call} {_ENDS}", None)
                raise
            self.note(call, returned)
            return returned
        ends = f"{call} {_ENDS}"
        is_end = bool(self._coming) and self._coming[0][0] == ends
        returned = self.pass_over(ends if is_end else call)
        if is_made:
            return make()
        if is_end:
            raise StopIteration
        return returned

    def pass_over(self, call: str) -> Any:
        """Return what the next call returned to the others; raises ConfigurationError for another.

        It is noted here as well, for those who come after this worker.
        """
        theirs = self._coming[0][0] if self._coming else "nothing more before their present step"
        if theirs != call:
            raise ConfigurationError(self._differs(call, theirs))
        _, draws, returned = self._coming.popleft()
        self._unpack()
        self._passed += 1
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
            f" {theirs}, after {self._passed} calls: a script runs from its start in such a worker,"
            " and has to do the same, whatever its rank is and whatever files the job has written"
            " since; where it goes on from a checkpoint of this run, set respawn to 0"
        )

    def told(self) -> list[bytes] | str:
        """Return all of it, or why it cannot be told: a value that is not plain."""
        told = [*self._blocks, *self._packed()]
        return told if self._flaw is None else self._flaw

    def learn(self, told: list[bytes]) -> None:
        """Have all of these calls passed over."""
        self._blocks_coming.extend(told)
        self._unpack()

    def _unpack(self) -> None:
        while self._blocks_coming and not self._coming:
            block = zlib.decompress(self._blocks_coming.popleft())
            self._coming.extend(map(tuple, unpacked(block, _WHAT)))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
