"""Reads from W&B's own files what a run has, written by any worker."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The log format of LevelDB: blocks of 32 KiB, records with checksum, length and kind before them.
_BLOCK, _FILE_HEADER = 32768, 7
_RECORD = struct.Struct("<IHB")
_FULL, _LAST = 1, 4


def last_history_step(directory: Path, run_id: str) -> int:
    """Find the last step in the files of a run, in ``directory``/wandb; -1 where none is."""
    return max((row["_step"] for row in history_rows(directory, run_id)), default=-1)


def history_rows(directory: Path, run_id: str) -> list[dict[str, Any]]:
    """Read the rows that the files of a run have, in ``directory``/wandb, offline and online.

    An owner that was killed may have left half a record, which ends its file.
    Source: wandb/sdk/internal/datastore.py.
    """
    return [
        row
        for folder in folders_of(directory, run_id)
        for message in _messages((folder / f"run-{run_id}.wandb").read_bytes())
        if (row := _row(message)) is not None
    ]


def folders_of(directory: Path, run_id: str) -> list[Path]:
    """Find the folders of a run in ``directory``/wandb, one an owner, from the first on."""
    found = directory.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb")
    return sorted((one.parent for one in found), key=lambda one: one.name.removeprefix("offline-"))


def whereabouts(directory: Path, run_id: str) -> tuple[str, ...]:
    """Name a run, where it is, and how it is uploaded: a sentence, none where it has no folder."""
    folders = [*map(str, folders_of(directory, run_id))]
    if not folders:
        return ()
    if not Path(folders[0]).name.startswith("offline-"):
        return (f"W&B run {run_id}: {' '.join(folders)}",)
    return (f"W&B run {run_id} is offline; upload it with\nwandb sync {' '.join(folders)}",)


def _messages(data: bytes) -> Iterator[bytes]:
    place, whole = _FILE_HEADER, b""
    while place + _RECORD.size <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _RECORD.size:
            place += left
            continue
        _, length, kind = _RECORD.unpack_from(data, place)
        place += _RECORD.size
        if place + length > len(data) or kind == 0:
            return
        whole += data[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield whole
            whole = b""


def _row(message: bytes) -> dict[str, Any] | None:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto import wandb_internal_pb2

    record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
    try:
        record.ParseFromString(message)
    except DecodeError:
        return None
    row = {
        ".".join(item.nested_key) or item.key: json.loads(item.value_json)
        for item in record.history.item
    }
    return row if "_step" in row else None
