"""Reads batches ahead of the training, in processes of a torch DataLoader, in an expected order.

A step is expected to read what the step before it has read. A batch that is asked for again, as a
redone step does, is what was read; one that was not expected is read in the training process.
"""

import copy
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch


class Key(NamedTuple):
    """A batch: the place of its step in the data, and the part of the step that it is."""

    place: int
    part: Hashable


class StepPattern:
    """The parts that a step reads, in order, and how far the next step is from it."""

    def __init__(self) -> None:
        self._place: int | None = None
        self._stride = 0
        self._now: list[Hashable] = []
        self._last: list[Hashable] = []

    def note(self, key: Key) -> bool:
        """Note what is read; True where it begins another step."""
        begins = key.place != self._place
        if begins:
            if self._place is not None:
                self._last, self._stride = self._now, key.place - self._place
            self._place, self._now = key.place, []
        elif key.part in self._now:
            # The step is redone.
            self._now = []
        self._now.append(key.part)
        return begins

    def following(self, key: Key) -> Key | None:
        """The batch that is read after this one; None where nobody knows."""
        if key.part not in self._last or self._stride <= 0:
            return None
        after = self._last.index(key.part) + 1
        if after < len(self._last):
            return Key(key.place, self._last[after])
        return Key(key.place + self._stride, self._last[0])


# Of a DataLoader, how its processes read.
_SETTINGS = (
    *("num_workers", "prefetch_factor", "worker_init_fn"),
    *("multiprocessing_context", "timeout"),
)


def read_in_processes(
    read: Callable[[Any], Any],
    requests: Callable[[], Iterator[Any]],
    *,
    like: "torch.utils.data.DataLoader[Any]",
    persistent_workers: bool = False,
) -> "torch.utils.data.DataLoader[Any]":
    """Make a DataLoader of what is read by requests, with processes like those of another."""
    requested: Any = Requested(read)
    return torch.utils.data.DataLoader(
        requested,
        batch_size=None,
        sampler=_Requests(requests),
        collate_fn=_as_it_is,
        persistent_workers=persistent_workers,
        # Its own, so that those of the script draw what they would without us.
        generator=torch.Generator(),
        **{name: getattr(like, name) for name in _SETTINGS},
    )


class ReadAhead:
    """Serves batches by key; processes read those that are expected, if there are any."""

    def __init__(
        self,
        read: Callable[[Any], Any],
        request: Callable[[Key], Any],
        *,
        like: "torch.utils.data.DataLoader[Any] | None",
    ) -> None:
        """``request(key)`` says what to read, None behind the end of the data; ``read`` reads it.

        ``read`` is also called in processes like those of the loader ``like``, if it has any.
        """
        self._read, self._request = read, request
        self._pattern = StepPattern()
        # What was read of the present step, and what is on its way, each by what was asked for.
        self._kept: dict[Key, tuple[Any, Any]] = {}
        self._expected: deque[tuple[Key, Any]] = deque()
        self._begin: Key | None = None
        self._arriving: Iterator[Any] = iter(())
        self._loader = None
        if like is not None and like.num_workers:
            self._loader = read_in_processes(
                read, self._requests, like=like, persistent_workers=True
            )

    def take(self, key: Key, request: Any) -> Any:
        """The batch of ``key``, to be read by ``request``; the caller may change it."""
        if self._loader is None:
            return self._read(request)
        if self._pattern.note(key):
            self._kept.clear()
        if key not in self._kept or self._kept[key][0] != request:
            self._kept[key] = request, self._taken(key, request)
        return copy.deepcopy(self._kept[key][1])

    def close(self) -> None:
        """End its processes."""
        self._arriving, self._loader = iter(()), None

    def _taken(self, key: Key, request: Any) -> Any:
        if self._expected and self._expected[0] == (key, request):
            self._expected.popleft()
            return next(self._arriving)
        self._expected.clear()
        batch = self._read(request)
        self._begin = self._pattern.following(key)
        if self._begin is not None:
            assert self._loader is not None
            self._arriving = iter(self._loader)
        return batch

    def _requests(self) -> Iterator[Any]:
        """Yield what comes from the first expected batch on; asked for by the DataLoader."""
        key = self._begin
        while key is not None:
            request = self._request(key)
            if request is None:
                return
            self._expected.append((key, request))
            yield request
            key = self._pattern.following(key)


class _Requests:
    """The order of its samples, for a DataLoader."""

    def __init__(self, requests: Callable[[], Iterator[Any]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Any]:
        return self._requests()


class Requested:
    """A dataset for a DataLoader: one item a request."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __getitem__(self, request: Any) -> Any:
        return self._read(request)


def _as_it_is(batch: Any) -> Any:
    return batch
