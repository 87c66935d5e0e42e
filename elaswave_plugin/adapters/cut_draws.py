"""Draws of samples that are cut from micro-batches: each meets what it would in the whole one.

A worker that runs some samples of a micro-batch draws for all of them, by the micro-batch's own
stream of numbers, and takes the rows of those that it runs. What it runs of several micro-batches
has a stream for each. While it runs one as a whole nothing is in the way of a draw.

The first stream is torch's own generator, whose states name those of the others: activation
recomputation goes back to one of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from elaswave_plugin.adapters.drawing_kernels import Call, DrawingKernels

Interval = tuple[int, int]


class Part(NamedTuple):
    """Samples [start, stop) of an iteration, of the micro-batch ``whole``, which draws by a key."""

    key: int
    whole: Interval
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """The number of samples."""
        return self.stop - self.start


def parts_of(
    share: Interval, wholes: Sequence[Interval], key: Callable[[int], int]
) -> tuple[Part, ...]:
    """Return the parts of a worker's share; ``key(start)``: that of the micro-batch there.

    >>> [part[1:] for part in parts_of((3, 6), [(0, 2), (2, 4), (4, 6)], key=hash)]
    [((2, 4), 3, 4), ((4, 6), 4, 6)]
    """
    return tuple(
        Part(key(first), (first, last), max(share[0], first), min(share[1], last))
        for first, last in wholes
        if max(share[0], first) < min(share[1], last)
    )


class _Streams(NamedTuple):
    """The parts that are drawn for, and the state of a generator for each."""

    parts: tuple[Part, ...]
    states: tuple[torch.Tensor, ...]


class _Rows(NamedTuple):
    """The place of samples in tensors: dimension ``dim``, of blocks of samples, of many entries."""

    dim: int
    length: int
    blocks: int
    samples: int

    def has(self, value: Any) -> bool:
        return (
            torch.is_tensor(value)
            and value.dim() > self.dim
            and value.shape[self.dim] == self.length
        )

    def view(self, tensor: torch.Tensor, samples: int, start: int, stop: int) -> torch.Tensor:
        """Samples of a tensor that has some number of them."""
        apart = tensor.unflatten(self.dim, (self.blocks, samples, -1))
        return apart.narrow(self.dim + 1, start, stop - start)

    def resized(self, tensor: torch.Tensor, samples: int, had: int) -> torch.Tensor:
        """An empty tensor like this one, which had another number of samples."""
        shape = list(tensor.shape)
        shape[self.dim] = shape[self.dim] // had * samples
        # Kernels draw in the order of the memory.
        order = [*range(tensor.dim())]
        if not tensor.is_contiguous():
            order.sort(key=tensor.stride, reverse=True)
        return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)


class CutDraws:
    """The draws of one worker's passes."""

    def __init__(
        self,
        tell: Callable[[tuple[int, ...] | None], None] = lambda shape: None,
        *,
        sequence_first: bool = False,
    ) -> None:
        """``tell(shape)``: numbers of this shape are not keyed by sample, as found in passes.

        Without a shape they are drawn by other kernels than torch's, as found while watched.
        ``sequence_first``: tensors of three dimensions have samples in the second one, if anywhere.
        """
        self._tell, self._sequence_first = tell, sequence_first
        self._kernels = DrawingKernels(self._draw)
        self.parts: tuple[Part, ...] = ()
        # Rows of a batch, by its samples: pairs have two blocks of them.
        self.blocks = 1
        self._is_on = False
        # While watched: the states in which torch's own kernels leave its generators.
        self._left: set[bytes] | None = None
        # The streams that belong to a state of torch's own generator, by its device.
        self._known: dict[tuple[torch.device, bytes], _Streams] = {}
        self._last: dict[torch.device, _Streams] = {}

    def begin(self, parts: tuple[Part, ...], *, watched: bool = False) -> None:
        """Draw for these samples from now on; ``watched``: tell also while they are not cut."""
        self._look()
        torch.manual_seed(parts[0].key)
        self.parts, self._left = parts, None
        self._forget()
        self._is_on = watched or self.is_cut
        if self._is_on:
            self._kernels.install()
        else:
            self._kernels.remove()
        if watched:
            self._left = set()
            self._leave()

    def know(self, parts: tuple[Part, ...]) -> None:
        """Draw for these samples wherever torch's own generator is seeded by their first key."""
        self._kernels.install()
        device = _devices()[-1]
        states = tuple(_fresh(one.key, device) for one in parts)
        self._known[device, _name(states[0])] = _Streams(parts, states)
        self.parts, self._is_on = parts, True

    def end(self) -> None:
        """Samples have been drawn for."""
        self._look()
        self._is_on, self._left = False, None

    def close(self) -> None:
        """Leave torch as it was."""
        self.end()
        self._forget()
        self._kernels.remove()

    def _forget(self) -> None:
        self._known.clear()
        self._last.clear()

    @property
    def is_cut(self) -> bool:
        """True if the samples are no whole micro-batch."""
        return len(self.parts) > 1 or any((one.start, one.stop) != one.whole for one in self.parts)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Draws in this block are of no samples."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    @contextmanager
    def narrowed(self, start: int, stop: int) -> Iterator[None]:
        """Passes in this block are of some of the samples, [start, stop) of the iteration."""
        if not (self._is_on and self.is_cut):
            yield
            return
        outer = self.parts
        inner = {
            place: one._replace(start=max(one.start, start), stop=min(one.stop, stop))
            for place, one in enumerate(outer)
            if max(one.start, start) < min(one.stop, stop)
        }
        before = {device: self._streams(device) for device in _devices()}
        self.parts = tuple(inner.values())
        for device, streams in before.items():
            states = tuple(streams.states[place] for place in inner)
            self._go_on(device, _Streams(self.parts, states))
        try:
            yield
        finally:
            after = {device: self._streams(device).states for device in before}
            self.parts = outer
            for device, streams in before.items():
                drawn = {
                    **dict(enumerate(streams.states)),
                    **dict(zip(inner, after[device], strict=True)),
                }
                self._go_on(device, _Streams(outer, tuple(drawn.values())))

    # ---- the streams ----------------------------------------------------------------------------

    def _streams(self, device: torch.device) -> _Streams:
        """Return the streams of the state of torch's own generator; without states if uncut."""
        generator = _generator(device)
        state = generator.get_state()
        known = self._known.get((device, _name(state)))
        if known is not None or not self.is_cut:
            return known or _Streams(self.parts, ())
        if generator.initial_seed() != self.parts[0].key:
            # The script has seeded it, in the passes of all micro-batches alike.
            return _Streams(self.parts, (state,) * len(self.parts))
        # Fresh, or drawn from by a kernel that is not ours.
        last = self._last.get(device)
        states = last.states if last else tuple(_fresh(one.key, device) for one in self.parts)
        return _Streams(self.parts, (state, *states[1:]))

    def _go_on(self, device: torch.device, streams: _Streams) -> None:
        _generator(device).set_state(streams.states[0])
        self._known[device, _name(streams.states[0])] = streams
        self._last[device] = streams

    # ---- a draw ---------------------------------------------------------------------------------

    def _draw(self, call: Call) -> Any:
        tensors = [one for one in call.values.values() if torch.is_tensor(one)]
        if not (self._is_on and tensors) or tensors[0].device.type not in ("cpu", "cuda"):
            return call.made()
        self._look()
        device = tensors[0].device
        streams = self._streams(device)
        rows = self._rows(tensors[0], streams.parts) if call.has_rows else None
        if rows is None:
            self._tell(tuple(tensors[0].shape))
        made = self._drawn(call, device, streams, rows) if streams.states else call.made()
        self._leave()
        return made

    def _look(self) -> None:
        """Tell once of numbers that other kernels have drawn, unless the script seeds by itself."""
        if self._left is None or {*_states()} <= self._left:
            return
        self._left = None
        if {_generator(device).initial_seed() for device in _devices()} == {self.parts[0].key}:
            self._tell(None)

    def _leave(self) -> None:
        """Note the states of the generators, while watched."""
        if self._left is not None:
            self._left.update(_states())

    def _rows(self, tensor: torch.Tensor, parts: Sequence[Part]) -> _Rows | None:
        """Return where samples are in a tensor; None where it has none, as far as sizes tell."""
        samples, shape = sum(one.rows for one in parts), tensor.shape
        lengths = [samples * self.blocks, samples]
        for length in lengths:
            dims = (0, 1)[: 2 if len(shape) > 2 else len(shape)]
            for dim in dims[::-1] if self._sequence_first and len(shape) == 3 else dims:
                if shape[dim] == length:
                    return _Rows(dim, length, length // samples, samples)
        # Heads or places of each sample.
        if len(shape) > 1 and shape[0] and shape[0] % lengths[0] == 0:
            return _Rows(0, shape[0], self.blocks, samples)
        return None

    def _drawn(
        self, call: Call, device: torch.device, streams: _Streams, rows: _Rows | None
    ) -> Any:
        """Draw by the stream of each part; without rows, the first one's numbers are for all."""
        results, wholes, states, begin = [], [], [], 0
        for number, (part, state) in enumerate(zip(*streams, strict=True)):
            _generator(device).set_state(state)
            values = call.values
            if rows is not None:
                for key, one in values.items():
                    values[key] = _whole(one, rows, part, begin) if rows.has(one) else one
            elif number:
                values.update({key: values[key].clone() for key in call.written})
            results.append(call.made_with(values))
            wholes.append(values)
            states.append(_generator(device).get_state())
            begin += part.rows
        self._go_on(device, _Streams(streams.parts, tuple(states)))
        if rows is None:
            return results[0]
        for key in call.written:
            if rows.has(call.values[key]):
                drawn = [whole[key] for whole in wholes]
                call.values[key].copy_(_joined(drawn, rows, streams.parts))
        return _returned(call, results, wholes, rows, streams.parts)


def _returned(
    call: Call,
    results: Sequence[Any],
    wholes: Sequence[dict[int | str, Any]],
    rows: _Rows,
    parts: Sequence[Part],
) -> Any:
    """Return what the call returns: rows of the results, or what it has written."""

    def of(each: Sequence[Any]) -> Any:
        for key in call.written:
            if each[0] is wholes[0][key]:
                return call.values[key]
        size = parts[0].whole[1] - parts[0].whole[0]
        entries = rows.length // rows.samples * size
        first = each[0]
        if torch.is_tensor(first) and first.dim() > rows.dim and first.shape[rows.dim] == entries:
            return _joined(each, rows, parts)
        return first

    if isinstance(results[0], tuple | list):
        return tuple(of(each) for each in zip(*results, strict=True))
    return of(results)


def _whole(tensor: torch.Tensor, rows: _Rows, part: Part, begin: int) -> torch.Tensor:
    """Return the micro-batch of a part, whose other samples are like the part's first one.

    ``begin``: of the part in the tensor.
    """
    first, size = part.start - part.whole[0], part.whole[1] - part.whole[0]
    whole = rows.resized(tensor, size, rows.samples)
    given = rows.view(tensor, rows.samples, begin, begin + part.rows)
    for start, stop in ((0, first), (first + part.rows, size)):
        rows.view(whole, size, start, stop).copy_(given.narrow(rows.dim + 1, 0, 1))
    rows.view(whole, size, first, first + part.rows).copy_(given)
    return whole


def _joined(wholes: Sequence[torch.Tensor], rows: _Rows, parts: Sequence[Part]) -> torch.Tensor:
    """Return the rows of the parts, taken out of their micro-batches."""
    made = rows.resized(wholes[0], rows.samples, parts[0].whole[1] - parts[0].whole[0])
    begin = 0
    for whole, part in zip(wholes, parts, strict=True):
        first = part.start - part.whole[0]
        taken = rows.view(whole, part.whole[1] - part.whole[0], first, first + part.rows)
        rows.view(made, rows.samples, begin, begin + part.rows).copy_(taken)
        begin += part.rows
    return made


def _devices() -> list[torch.device]:
    devices = [torch.device("cpu")]
    if torch.cuda.is_initialized():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return devices


def _states() -> list[bytes]:
    return [_name(_generator(device).get_state()) for device in _devices()]


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


def _fresh(key: int, device: torch.device) -> torch.Tensor:
    return torch.Generator(device).manual_seed(key).get_state()


def _name(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
