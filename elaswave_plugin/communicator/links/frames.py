"""The wire format between trainers: a fixed header before every piece of payload."""

import json
import struct
from enum import IntEnum
from typing import NamedTuple

from elaswave_plugin.errors import LinkError

MAGIC = b"EW1\n"
FRAME_BYTES = 1 << 20
"""Largest payload of one frame: bounds what an interrupted sender still has to complete."""

_LAYOUT = struct.Struct("<4sBBBHIQQqQQQ")
HEADER_BYTES = _LAYOUT.size

OPERATIONS = (
    "hello",
    "accept",
    "send",
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "reduce",
    "barrier",
)
"""Names of the operations; the position is the code on the wire."""

DTYPES = (
    "any",
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
)
"""Names of torch's dtypes; the position is the code on the wire, 0 is not compared."""


class Kind(IntEnum):
    """The purpose of a frame."""

    HELLO = 1
    ACCEPT = 2
    COLLECTIVE = 3
    POINT = 4
    FAILURE = 5


class FrameHeader(NamedTuple):
    """One header; sizes in bytes.

    A message of `length` bytes travels as consecutive frames of at most FRAME_BYTES; `offset` is
    the place of this frame's `size` bytes in the message.  `whole` is the size of the sender's
    tensor, so that unequal tensors are noticed even where their pieces happen to be equal.
    """

    kind: int
    op: int
    dtype: int
    part: int
    size: int
    epoch: int
    group: int
    sequence: int
    whole: int
    length: int
    offset: int

    def pack(self) -> bytes:
        """The header as bytes."""
        return _LAYOUT.pack(MAGIC, *self)

    def pack_frame(self, size: int, offset: int) -> bytes:
        """The same of the frame with the message's `size` bytes at `offset`."""
        kind, op, dtype, part, _, epoch, group, sequence, whole, length, _ = self
        return _LAYOUT.pack(
            MAGIC, kind, op, dtype, part, size, epoch, group, sequence, whole, length, offset
        )

    @classmethod
    def unpack(cls, data: bytearray | bytes | memoryview, start: int = 0) -> "FrameHeader":
        """The header at `start`. Raises LinkError when the stream is not at a header."""
        magic, *fields = _LAYOUT.unpack_from(data, start)
        if magic != MAGIC:
            raise LinkError(f"the stream is not at a frame header (found {magic!r})")
        return cls(*fields)


class Hello(NamedTuple):
    """The greeting of a dialling worker: its slot, its listening address and its open epoch.

    `link` is a number for the new link, `replaces` that of the last link which the dialling side
    had with this peer (0: none).  A greeting that was overtaken by the peer's own dial names
    another one than the link that stands, and is refused.
    """

    slot: int
    address: str
    epoch: int
    link: int
    replaces: int

    def pack(self) -> bytes:
        """The greeting as one frame."""
        payload = json.dumps(self._asdict()).encode()
        return control_header(Kind.HELLO, len(payload)).pack() + payload

    @classmethod
    def unpack(cls, payload: bytes) -> "Hello":
        """The greeting in a HELLO frame. Raises LinkError when it is malformed."""
        try:
            fields = json.loads(payload)
            numbers = (int(fields[name]) for name in ("epoch", "link", "replaces"))
            return cls(int(fields["slot"]), str(fields["address"]), *numbers)
        except (ValueError, KeyError, TypeError) as error:
            raise LinkError(f"malformed greeting {payload[:80]!r}") from error


def control_header(kind: Kind, size: int) -> FrameHeader:
    """The header of a HELLO or ACCEPT frame with `size` bytes of payload."""
    return FrameHeader(kind, kind - 1, 0, 0, size, 0, 0, 0, size, size, 0)
