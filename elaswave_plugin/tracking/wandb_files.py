"""Reads from W&B's own files how far an offline run was written, by any worker."""

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
    """Find the last step that is in the files of a run, in ``directory``/wandb; -1 where none is.

    An owner that was killed may have left half a record, which ends its file.
    Source: wandb/sdk/internal/datastore.py.
    """
    pattern = f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb"
    for file in sorted(directory.glob(pattern), reverse=True):
        steps = [step for message in _messages(file.read_bytes()) for step in _steps(message)]
        if steps:
            return max(steps)
    return -1


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


def _steps(message: bytes) -> Iterator[int]:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto import wandb_internal_pb2

    record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
    try:
        record.ParseFromString(message)
    except DecodeError:
        return
    for item in record.history.item:
        if ((item.nested_key and ".".join(item.nested_key)) or item.key) == "_step":
            yield int(json.loads(item.value_json))
