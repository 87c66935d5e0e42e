"""Writes and reads the state dumps of a run; hashes them by parameter name, whatever the layout.

A dump of one worker at one step is `state/step-XXXXX/slot-N*.npz`, with one-dimensional float32
pieces named `<parameter>|<part>|<start>` (part: master, exp_avg or exp_avg_sq, or buffer of what no
optimizer updates; start: offset in the flattened parameter), and beside it, of the same name, a
`.json` with "epoch", "step", "slot" and "numel" {parameter: total}.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elaswave_plugin.errors import ElasWaveError

STATE_FOLDER = "state"
PARTS = ("exp_avg", "exp_avg_sq", "master")
BUFFER = "buffer"

Pieces = dict[tuple[str, str], list[tuple[int, npt.NDArray[np.float32]]]]


class StateDumpError(ElasWaveError):
    """A dump has a gap, two pieces that disagree, or is not there at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHash:
    """SHA-256 of a whole state: `sha256` over all parts, `by_name` per parameter."""

    step: int
    epoch: int
    sha256: str
    by_name: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"step {self.step}, view {self.epoch}, sha256 {self.sha256}"


def dumped_steps(directory: Path) -> tuple[int, ...]:
    """Return the steps of which the run directory holds a dump, in order."""
    folders = (directory / STATE_FOLDER).glob("step-*")
    return tuple(sorted(int(folder.name.removeprefix("step-")) for folder in folders))


def hash_state(directory: Path, step: int | None = None) -> StateHash:
    """Hash the dump of a step (the last one if none is named); raises StateDumpError.

    Only the files of the highest epoch count. The hash runs over "name|part|numel" and the raw
    bytes of each part of each parameter, sorted by name and part.
    """
    steps = dumped_steps(directory)
    if not steps or (step is not None and step not in steps):
        wanted = "any step" if step is None else f"step {step}"
        raise StateDumpError(f"{directory} holds no state of {wanted}, only of {list(steps)}")
    step = steps[-1] if step is None else step
    folder = _folder(directory, step)
    epoch, numel, pieces = _read(folder)
    whole, by_name = hashlib.sha256(), []
    for name in sorted(numel):
        one = hashlib.sha256()
        for part in (BUFFER,) if (name, BUFFER) in pieces else PARTS:
            data = _assembled(folder, name, part, numel[name], pieces.get((name, part), []))
            for sink in (whole, one):
                sink.update(f"{name}|{part}|{numel[name]}\n".encode())
                sink.update(data)
        by_name.append((name, one.hexdigest()))
    return StateHash(step=step, epoch=epoch, sha256=whole.hexdigest(), by_name=tuple(by_name))


def parts_in(directory: Path, step: int, part: str) -> dict[str, npt.NDArray[np.float32]]:
    """Return one part of all parameters at a step, flattened, by name; raises StateDumpError."""
    folder = _folder(directory, step)
    _, numel, pieces = _read(folder)
    return {
        name: np.frombuffer(_assembled(folder, name, part, total, pieces[name, part]), np.float32)
        for name, total in numel.items()
        if (name, part) in pieces
    }


def differing_names(first: StateHash, second: StateHash) -> tuple[str, ...]:
    """Return the parameters whose state differs or that only one of the two has."""
    return tuple(sorted({name for name, _ in set(first.by_name) ^ set(second.by_name)}))


def _folder(directory: Path, step: int) -> Path:
    for folder in (directory / STATE_FOLDER).glob("step-*"):
        if int(folder.name.removeprefix("step-")) == step:
            return folder
    raise StateDumpError(f"{directory} holds no state of step {step}")


def _read(folder: Path) -> tuple[int, dict[str, int], Pieces]:
    # A worker killed while it wrote leaves a *.partial file, which is no dump.
    paths = [p for p in sorted(folder.glob("slot-*.json")) if ".partial" not in p.name]
    heads = [(path, json.loads(path.read_text())) for path in paths]
    if not heads:
        raise StateDumpError(f"{folder} holds no slot-N.json")
    epoch = max(int(head["epoch"]) for _, head in heads)
    numel: dict[str, int] = {}
    pieces: Pieces = {}
    for path, head in heads:
        if head["epoch"] != epoch:
            continue
        for name, total in head["numel"].items():
            if numel.setdefault(name, int(total)) != total:
                raise StateDumpError(
                    f"{path}: {name} has {total} elements, elsewhere {numel[name]}"
                )
        for name, part, start, data in _pieces_of(path.with_suffix(".npz")):
            if name not in numel or part not in (*PARTS, BUFFER):
                raise StateDumpError(f"{path}: {name}|{part} is not announced")
            pieces.setdefault((name, part), []).append((start, data))
    return epoch, numel, pieces


def _pieces_of(path: Path) -> Iterator[tuple[str, str, int, npt.NDArray[np.float32]]]:
    try:
        archive = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise StateDumpError(f"{path} cannot be read: {error}") from error
    with archive:
        for key in archive.files:
            name, part, start = key.rsplit("|", 2)
            data = archive[key]
            if data.dtype != np.float32 or data.ndim != 1:
                raise StateDumpError(f"{path}: {key} is {data.dtype} {data.shape}, wanted float32")
            yield name, part, int(start), data


def _assembled(
    folder: Path,
    name: str,
    part: str,
    total: int,
    pieces: list[tuple[int, npt.NDArray[np.float32]]],
) -> bytes:
    # Compared as integers: NaN must equal itself and -0 must differ from 0.
    words = np.zeros(total, np.uint32)
    covered = np.zeros(total, np.bool_)
    for start, data in pieces:
        stop = start + data.size
        where = f"{folder}: {name}|{part} [{start}, {stop})"
        if start < 0 or stop > total:
            raise StateDumpError(f"{where} lies outside of [0, {total})")
        fresh, known = data.view(np.uint32), covered[start:stop]
        if not np.array_equal(words[start:stop][known], fresh[known]):
            raise StateDumpError(f"{where} disagrees with another worker's piece")
        words[start:stop] = fresh
        covered[start:stop] = True
    if not covered.all():
        gap = int(np.argmin(covered))
        raise StateDumpError(f"{folder}: {name}|{part} has a gap at element {gap} of {total}")
    return words.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPiece:
    """Elements [start, start + len) of a parameter by global name, in one part of the state."""

    name: str
    part: str
    start: int
    numel: int
    data: torch.Tensor


def dump_state(
    directory: Path, *, slot: int, epoch: int, step: int, pieces: Iterable[NamedPiece]
) -> None:
    """Write DIR/state/step-N/slot-S-epoch-E.npz and .json, complete or not at all."""
    folder = directory / "state" / f"step-{step:05d}"
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    numel: dict[str, int] = {}
    for piece in pieces:
        # Numpy has no bf16; it and float32 lie in float32 here, as in a snapshot.
        data = piece.data.detach().float().cpu()
        arrays[f"{piece.name}|{piece.part}|{piece.start}"] = np.from_dlpack(data)
        numel[piece.name] = piece.numel
    stem = folder / f"slot-{slot}-epoch-{epoch}"
    partial = stem.with_suffix(".partial.npz")
    np.savez(partial, **arrays)
    os.replace(partial, stem.with_suffix(".npz"))
    description = {"epoch": epoch, "step": step, "slot": slot, "numel": numel}
    partial = stem.with_suffix(".partial.json")
    partial.write_text(json.dumps(description))
    os.replace(partial, stem.with_suffix(".json"))
