"""The record at the start of a snapshot buffer, by which the memory itself tells what it holds.

Written by the trainer, read by whoever holds the memory (standard library only). A buffer without
a whole record is not sealed: the record is cleared before the first byte of the body changes and
written after the last one, so a trainer may die at any moment.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from typing import Any

from elaswave_plugin.errors import ConfigurationError

Record = dict[str, Any]

BODY_OFFSET = 1 << 16
"""Where the body begins, bytes; room for the record of some ten thousand workers."""

_HEAD = struct.Struct("<II")


def write_record(buffer: memoryview, record: Record) -> None:
    """Seal the buffer with this record; raises ConfigurationError where it has no room."""
    text = json.dumps(record).encode()
    if _HEAD.size + len(text) > BODY_OFFSET:
        raise ConfigurationError(
            f"the record of a snapshot is {len(text)} bytes and has room for"
            f" {BODY_OFFSET - _HEAD.size}: it names every worker that shares the state and every"
            " part of the model that they have; use fewer data-parallel replicas or more stages"
        )
    buffer[_HEAD.size : _HEAD.size + len(text)] = text
    buffer[: _HEAD.size] = _HEAD.pack(len(text), zlib.crc32(text))


def clear_record(buffer: memoryview) -> None:
    """The buffer is not sealed any more."""
    buffer[: _HEAD.size] = bytes(_HEAD.size)


def read_record(fd: int) -> Record | None:
    """The record of a memory, None where nothing is sealed in it."""
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack(head)
    text = os.pread(fd, min(length, BODY_OFFSET - _HEAD.size), _HEAD.size)
    if not length or len(text) != length or zlib.crc32(text) != checksum:
        return None
    record: Record = json.loads(text)
    return record


def pack_record(record: Record) -> bytes:
    """The record as the bytes at the start of a buffer."""
    room = bytearray(BODY_OFFSET)
    write_record(memoryview(room), record)
    return bytes(room)
