"""The ordered list of operations of each worker of a ragged pipeline, by the window rule.

A *slot* t of the step is a run of samples that passes through the pipeline together; a worker of
stage s runs some pieces of it (sample intervals, a whole micro-batch each unless resized). With
W_s slots in flight at stage s, every worker sorts its own operations by

    forward of slot t -> (t, 0)      backward of slot t -> (t + W_s - 1, 1)      then first sample

No list can block another if W_0 >= W_1 >= ... >= 1, whatever the widths and counts: let t be the
lowest slot that is not done. Before a backward of t there are only done backwards, and forwards of
slots below t + W_s; these wait at earlier stages for backwards of slots below t only, because the
windows there are no smaller. So they run, and then so does the backward, from the last stage up.

>>> pieces = tuple(Piece(slot, 2 * slot, 2 * slot + 2) for slot in range(4))
>>> print(show_ops(window_ops(pieces, window=2), microbatch_size=2))
F0 F1 B0 F2 B1 F3 B2 B3
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from elaswave_plugin.errors import ConfigurationError

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"


class Piece(NamedTuple):
    """Samples [start, stop) of the step's global batch, as part of a slot; a tuple for speed."""

    slot: int
    start: int
    stop: int


class Op(NamedTuple):
    """One operation: F forward, B backward, W weight gradients (then B gives input gradients only).

    ``chunk`` is the model chunk of the worker (0 without interleaving).
    """

    kind: str
    chunk: int
    slot: int
    start: int
    stop: int


WorkerOps = tuple[Op, ...]
# [stage][worker of the stage], in the order of the layout's replicas
Assignment = tuple[tuple[tuple[Piece, ...], ...], ...]
OpLists = tuple[tuple[WorkerOps, ...], ...]


def window_sizes(num_stages: int, *, extra: int = 0) -> tuple[int, ...]:
    """Return slots in flight by stage: P - s is exactly 1F1B; ``extra`` more except at the last."""
    last = num_stages - 1
    return tuple(num_stages - s + (extra if s < last else 0) for s in range(num_stages))


def fit_windows(windows: Sequence[int], limits: Sequence[int]) -> tuple[int, ...]:
    """Shrink windows to at most ``limits[s]`` slots in flight and keep them non-increasing.

    Raises ConfigurationError if a stage cannot hold one slot.
    """
    fitted: list[int] = []
    for stage, (window, limit) in enumerate(zip(windows, limits, strict=True)):
        if limit < 1:
            raise ConfigurationError(
                f"stage {stage} has memory for {limit} micro-batch slots in flight, wanted 1 or"
                " more; raise the memory limit or use more stages"
            )
        fitted.append(min(window, limit, *fitted[-1:]))
    return tuple(fitted)


def window_ops(pieces: Sequence[Piece], *, window: int) -> WorkerOps:
    """Order one worker's pieces by the window rule; O(n log n) in its own pieces.

    Raises ValueError for a window under 1. The windows of the stages must not increase.
    """
    if window < 1:
        raise ValueError(f"window is {window}, wanted 1 or more")
    keyed = []
    for slot, start, stop in pieces:
        keyed.append(((slot, 0, start), Op(FORWARD, 0, slot, start, stop)))
        keyed.append(((slot + window - 1, 1, start), Op(BACKWARD, 0, slot, start, stop)))
    return tuple(op for _, op in sorted(keyed))


def window_lists(assignment: Assignment, windows: Sequence[int]) -> OpLists:
    """The lists of all workers; raises ValueError for windows that increase (they deadlock)."""
    if len(windows) != len(assignment):
        raise ValueError(f"{len(windows)} windows for {len(assignment)} stages")
    if any(before < after for before, after in pairwise(windows)):
        raise ValueError(f"windows are {tuple(windows)}, wanted non-increasing ones")
    return tuple(
        tuple(window_ops(pieces, window=window) for pieces in stage)
        for stage, window in zip(assignment, windows, strict=True)
    )


def interleaved_ops(
    pieces: Sequence[Piece], *, stage: int, num_stages: int, num_chunks: int
) -> WorkerOps:
    """Order one worker's pieces for ``num_chunks`` model chunks a worker, in groups of P slots.

    Chunk c of stage s is virtual stage c P + s. The keys rise along every dependency, so the lists
    cannot block, also where the number of slots is no multiple of P.
    """
    round_size = num_stages * num_chunks
    shift = 2 * (num_chunks - 1) * num_stages + 4 * (num_stages - 1) + 1

    def place(slot: int, chunk: int) -> int:
        return slot // num_stages * round_size + chunk * num_stages + slot % num_stages

    keyed = []
    for slot, start, stop in pieces:
        for chunk in range(num_chunks):
            forward = 2 * place(slot, chunk) + 2 * stage
            backward = 2 * place(slot, num_chunks - 1 - chunk) + shift - 2 * stage
            keyed.append(((forward, start), Op(FORWARD, chunk, slot, start, stop)))
            keyed.append(((backward, start), Op(BACKWARD, chunk, slot, start, stop)))
    return tuple(op for _, op in sorted(keyed))


def interleaved_lists(assignment: Assignment, *, num_chunks: int) -> OpLists:
    """The lists of all workers of an interleaved pipeline."""
    return tuple(
        tuple(
            interleaved_ops(pieces, stage=stage, num_stages=len(assignment), num_chunks=num_chunks)
            for pieces in workers
        )
        for stage, workers in enumerate(assignment)
    )


def peak_in_flight(ops: WorkerOps, amount: Callable[[Op], float]) -> float:
    """Return the most that a worker holds at once: from a forward until its last backward."""
    last = WEIGHTS if any(op.kind == WEIGHTS for op in ops) else BACKWARD
    held = peak = 0.0
    for op in ops:
        if op.kind == FORWARD:
            held += amount(op)
            peak = max(peak, held)
        elif op.kind == last:
            held -= amount(op)
    return peak


def show_ops(ops: Sequence[Op], *, microbatch_size: int = 1) -> str:
    """Write a list as text: "F3": forward of micro-batch 3, "B1.2": backward of 2 in chunk 1.

    Pieces that are no whole micro-batch are shown as samples, "F[4,6)".
    """
    chunks = any(op.chunk for op in ops)
    words = []
    for op in ops:
        index, rest = divmod(op.start, microbatch_size)
        whole = rest == 0 and op.stop - op.start == microbatch_size
        words.append(
            op.kind
            + (f"{op.chunk}." if chunks else "")
            + (str(index) if whole else f"[{op.start},{op.stop})")
        )
    return " ".join(words)
