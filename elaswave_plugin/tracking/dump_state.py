"""Writes a worker's pieces of parameters and optimizer state, for an outside reader to compare."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


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
        arrays[f"{piece.name}|{piece.part}|{piece.start}"] = piece.data.detach().cpu().numpy()
        numel[piece.name] = piece.numel
    stem = folder / f"slot-{slot}-epoch-{epoch}"
    partial = stem.with_suffix(".partial.npz")
    np.savez(partial, **arrays)
    os.replace(partial, stem.with_suffix(".npz"))
    description = {"epoch": epoch, "step": step, "slot": slot, "numel": numel}
    partial = stem.with_suffix(".partial.json")
    partial.write_text(json.dumps(description))
    os.replace(partial, stem.with_suffix(".json"))
