"""The record at the start of a snapshot buffer, by which the memory itself tells what it holds.

Written by the trainer, read by each holder of the memory (standard library only). A buffer without
a whole record is not sealed: the record is cleared before the first byte of the body changes and
written after the last one, so a trainer may die at any moment.
"""

import json
import os
import struct
import zlib

from elaswave_plugin.core.codec import from_json, to_json
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.errors import ConfigurationError

BODY_OFFSET = 1 << 16
"""The offset of the body in bytes; room for the record of some ten thousand workers."""
BUFFERS = 2
"""The memories of a worker, into which it seals in turn."""
NOTES = (BUFFERS, BUFFERS + 1)
"""The memories behind these, in which it leaves notes in turn for those that enter."""
MEMORIES = BUFFERS + 2

_HEAD = struct.Struct("<II")


def pack_record(record: SealedShard) -> bytes:
    """The record as the first bytes of a buffer; raises ConfigurationError where it has no room."""
    text = json.dumps(record, default=to_json).encode()
    if _HEAD.size + len(text) > BODY_OFFSET:
        raise ConfigurationError(
            f"the record of a snapshot is {len(text)} bytes and has room for"
            f" {BODY_OFFSET - _HEAD.size}: it names every worker that shares the state and every"
            " part of the model that they have; use fewer data-parallel replicas or more stages"
        )
    return _HEAD.pack(len(text), zlib.crc32(text)) + text


def write_record(buffer: memoryview, record: SealedShard) -> None:
    """Seal the buffer with this record, whose head comes last; raises ConfigurationError."""
    packed = pack_record(record)
    buffer[_HEAD.size : len(packed)] = packed[_HEAD.size :]
    buffer[: _HEAD.size] = packed[: _HEAD.size]


def clear_record(buffer: memoryview) -> None:
    """The buffer is not sealed any more."""
    buffer[: _HEAD.size] = bytes(_HEAD.size)


def read_record(fd: int) -> SealedShard | None:
    """The record of a memory, None where nothing is sealed in it."""
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack(head)
    text = os.pread(fd, min(length, BODY_OFFSET - _HEAD.size), _HEAD.size)
    is_whole = length and len(text) == length and zlib.crc32(text) == checksum
    return from_json(SealedShard, json.loads(text)) if is_whole else None
