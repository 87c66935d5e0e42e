"""Long frames are compressed, and come out as they were or not at all."""

import json
import zlib

import pytest

from elaswave_plugin.ipc.wire import LENGTH, FrameBuffer, encode

LONG = {"t": "say", "words": ["worker"] * 20_000}


def test_a_long_frame_is_short_on_the_way() -> None:
    data = encode(LONG)
    assert len(data) < 2000 < len(json.dumps(LONG))
    assert list(FrameBuffer().feed(data[:7])) == []
    buffer = FrameBuffer()
    assert list(buffer.feed(data + encode({"t": "more"}))) == [LONG, {"t": "more"}]


def test_it_is_no_longer_than_the_reader_takes() -> None:
    """A few bytes that stand for gigabytes take no memory."""
    with pytest.raises(ValueError, match="more than 4096 bytes once it is decompressed"):
        list(FrameBuffer(longest_bytes=4096).feed(encode(LONG)))


@pytest.mark.parametrize("cut", [3, -1])
def test_a_damaged_one_is_no_frame(cut: int) -> None:
    body = zlib.compress(json.dumps(LONG).encode())[:cut]
    with pytest.raises(ValueError, match=r"damaged|once it is decompressed"):
        list(FrameBuffer().feed(LENGTH.pack(len(body)) + body))
