"""Reads what runs of W&B have left in a folder, without W&B's own service."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest


def records(path: Path) -> list[Any]:
    """The records of a .wandb file: protobuf messages in the log format of LevelDB."""
    wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")

    data, place, whole, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, last
            message = wandb_internal_pb2.Record()
            message.ParseFromString(whole)
            found.append(message)
            whole = b""
    return found


def history(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of every offline run in a folder, by the run's directory."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        rows[path.parent.name] = [
            {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            for record in records(path)
            if (items := record.history.item)
        ]
    return rows


def run_ids(folder: Path) -> set[str]:
    paths = folder.glob("wandb/offline-run-*/run-*.wandb")
    return {r.run.run_id for path in paths for r in records(path) if r.run.run_id}
