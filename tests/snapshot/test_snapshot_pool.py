"""Sealed snapshots: any range comes back as a plain copy has it, any flipped bit is seen."""

import mmap
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.errors import ConfigurationError, SnapshotUnreadableError
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET, pack_record
from elaswave_plugin.snapshot import snapshot_pool
from elaswave_plugin.snapshot.snapshot_pool import (
    SnapshotPool,
    VerifiedReader,
    capacity_of,
    taken_of,
)
from tests.core.sealed import sealed

SLOT, CAPACITY_BYTES = 3, 1 << 20
SMALL_CHUNK_BYTES = 64


@contextmanager
def opened_pool(capacity_bytes: int = CAPACITY_BYTES) -> Iterator[SnapshotPool]:
    """A pool over two anonymous buffers, as a guardian makes them."""
    fds = (os.memfd_create("even"), os.memfd_create("odd"))
    try:
        yield SnapshotPool(
            fds, slot=SLOT, capacity_bytes=capacity_bytes, needed_bytes=1, available_bytes=1
        )
    finally:
        for fd in fds:
            os.close(fd)


def nothing() -> None:
    """Seal without a look in between."""


def seal(
    pool: SnapshotPool,
    parts: Sequence[torch.Tensor],
    capsule: bytes,
    *,
    step: int = 6,
    before_seal: Callable[[], None] = nothing,
) -> SealedShard:
    """Seal, and describe what was sealed as the inventory of a commit would."""
    record = pool.begin_seal(
        step=step,
        epoch=2,
        ranks=(0, SLOT, 2),
        parts=parts,
        capsule=capsule,
        before_seal=before_seal,
    )()
    return replace(record, holder=SLOT, holder_address="127.0.0.1:1")


def plain_copy(parts: Sequence[torch.Tensor], capsule: bytes) -> bytes:
    """Return what the snapshot has to hold: the parts one after the other, then the capsule."""
    return b"".join(part.contiguous().numpy().tobytes() for part in parts) + capsule


def read(reader: VerifiedReader, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """The bytes of (offset, length) ranges."""
    targets = [bytearray(length) for _, length in ranges]
    reader.read_ranges(
        [(start, memoryview(t)) for (start, _), t in zip(ranges, targets, strict=True)]
    )
    return [bytes(target) for target in targets]


@st.composite
def contents(draw: st.DrawFn) -> tuple[list[torch.Tensor], bytes]:
    """Parts of any bits (nan and signed zero among them) and shapes, and a capsule."""
    word = st.integers(-(2**31), 2**31 - 1)
    parts = []
    for words in draw(st.lists(st.lists(word, max_size=60), max_size=4)):
        flat = torch.tensor(words, dtype=torch.int32).view(torch.float32)
        parts.append(flat.reshape(2, -1) if len(words) % 2 == 0 and words else flat)
    return parts, draw(st.binary(max_size=200))


@st.composite
def contents_and_ranges(
    draw: st.DrawFn,
) -> tuple[list[torch.Tensor], bytes, list[tuple[int, int]]]:
    """Contents, and byte ranges within them: empty, overlapping, in any order."""
    parts, capsule = draw(contents())
    size = len(plain_copy(parts, capsule))
    ranges = []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, size))
        ranges.append((start, draw(st.integers(0, size - start))))
    return parts, capsule, ranges


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """Checksum chunks so small that little data has many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_pool, "CHUNK_BYTES", SMALL_CHUNK_BYTES)
        yield


# ---- round trip ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(contents_and_ranges(), st.integers(0, 9))
def test_any_range_comes_back_as_it_was_sealed(
    given_contents: tuple[list[torch.Tensor], bytes, list[tuple[int, int]]], step: int
) -> None:
    parts, capsule, ranges = given_contents
    copy = plain_copy(parts, capsule)
    with opened_pool() as pool:
        sealed = seal(pool, parts, capsule, step=step)
        assert (sealed.payload_bytes, sealed.capsule_bytes) == (
            len(copy) - len(capsule),
            len(capsule),
        )
        asked: list[tuple[int, int]] = []
        copied, most = pool.reader(sealed.buffer), [0]

        def read_asked(offset: int, into: memoryview) -> None:
            # But for the table, which comes before any range.
            if offset < len(copy):
                most[0] = max(most[0], len(asked))
                assert asked.pop(0) == (offset, len(into))
            copied(offset, into)

        reader = VerifiedReader(
            sealed, read_asked, ask=lambda offset, length: asked.append((offset, length))
        )
        assert read(reader, ranges) == [copy[start : start + length] for start, length in ranges]
        assert reader.read_capsule() == capsule
        assert not asked and most[0] <= 2


def test_whole_chunks_of_the_real_size_come_back() -> None:
    size = 2 * 256 * 1024
    with pytest.MonkeyPatch.context() as patch, opened_pool(4 * size) as pool:
        patch.setattr(snapshot_pool, "CHUNK_BYTES", size // 2)
        parts = [torch.randn(size // 4), torch.randn(7)]
        sealed = seal(pool, parts, b"capsule")
        copy = plain_copy(parts, b"capsule")
        reader = VerifiedReader(sealed, pool.reader(sealed.buffer))
        ranges = [(0, size), (size - 1, 2), (size // 2 - 4, 8), (size, 28)]
        assert read(reader, ranges) == [copy[start : start + length] for start, length in ranges]


def test_a_record_names_its_owner_shard_step_and_buffer() -> None:
    with opened_pool() as pool:
        for step in (6, 7):
            sealed = seal(pool, [torch.ones(3)], b"c", step=step)
            assert (sealed.owner, sealed.shard, sealed.step, sealed.epoch) == (SLOT, 1, step, 2)


def test_the_bytes_are_in_place_before_the_seal_is_announced() -> None:
    seen: list[bytes] = []
    with opened_pool() as pool:

        def look() -> None:
            target = bytearray(8)
            pool.reader(0)(0, memoryview(target))
            seen.append(bytes(target))

        seal(pool, [torch.tensor([1.0, -2.0])], b"", before_seal=look)
    assert seen == [torch.tensor([1.0, -2.0]).numpy().tobytes()]


def test_two_steps_live_beside_each_other() -> None:
    with opened_pool() as pool:
        steps = {}
        for step in range(5):
            parts = [torch.full((100,), float(step)), torch.arange(50.0) + step]
            steps[step] = (seal(pool, parts, f"capsule {step}".encode(), step=step), parts)
            for live in (step - 1, step) if step else (step,):
                sealed, wanted = steps[live]
                reader = VerifiedReader(sealed, pool.reader(sealed.buffer))
                assert read(reader, [(0, 600)]) == [plain_copy(wanted, b"")]
                assert reader.read_capsule() == f"capsule {live}".encode()
        # The step before those two is overwritten, and a reader of it is told so.
        with pytest.raises(SnapshotUnreadableError, match="of step 2 at w3 does not match"):
            VerifiedReader(steps[2][0], pool.reader(steps[2][0].buffer)).read_capsule()


@pytest.mark.parametrize("every", [1, 3])
def test_what_a_recovery_went_back_to_is_not_overwritten_by_the_next_seal(every: int) -> None:
    with opened_pool() as pool:

        def sealed(number: int) -> SealedShard:
            return seal(pool, [torch.full((9,), float(number))], b"", step=number * every)

        one, two = sealed(1), sealed(2)
        assert one.buffer != two.buffer
        # The second one is not sealed everywhere.
        pool.go_back(one.buffer)
        again = sealed(2)
        assert again.buffer == two.buffer
        pool.go_back(again.buffer)
        assert sealed(3).buffer == one.buffer


# ---- damage -------------------------------------------------------------------------------------


class Damaged:
    """Reads a buffer with one bit of it flipped; bit -1 flips none."""

    def __init__(self, source: Callable[[int, memoryview], None], bit: int) -> None:
        self._source = source
        self._byte, self._mask = bit // 8, 1 << bit % 8

    def __call__(self, offset: int, into: memoryview) -> None:
        self._source(offset, into)
        if offset <= self._byte < offset + len(into):
            into[self._byte - offset] ^= self._mask


def is_read(sealed: SealedShard, source: Callable[[int, memoryview], None]) -> bool:
    """Return whether all of the snapshot can be read, or the error names another one."""
    try:
        reader = VerifiedReader(sealed, source)
        read(reader, [(0, sealed.payload_bytes)])
        reader.read_capsule()
    except SnapshotUnreadableError as error:
        return bool(error.sealed != sealed)
    return True


def test_every_single_flipped_bit_is_seen() -> None:
    with opened_pool() as pool:
        sealed = seal(pool, [torch.randn(33), torch.randn(20)], os.urandom(45))
        assert sealed.length == 212 + 45 + 8 * 5  # payload, capsule, table
        source = pool.reader(sealed.buffer)
        assert is_read(sealed, Damaged(source, -1))
        unseen = [bit for bit in range(8 * sealed.length) if is_read(sealed, Damaged(source, bit))]
        assert unseen == []
        # A bit behind the snapshot is none of its own.
        assert is_read(sealed, Damaged(source, 8 * sealed.length))


def test_damage_elsewhere_does_not_spoil_a_range() -> None:
    with opened_pool() as pool:
        part = torch.randn(64)
        sealed = seal(pool, [part], b"capsule")
        reader = VerifiedReader(sealed, Damaged(pool.reader(sealed.buffer), 8 * 200))
        assert read(reader, [(0, 192)]) == [part.numpy().tobytes()[:192]]
        with pytest.raises(SnapshotUnreadableError, match="chunk 3 of shard 1/3 of step 6"):
            read(reader, [(0, 193)])


# ---- memory -------------------------------------------------------------------------------------


def test_too_little_memory_is_one_sentence() -> None:
    fds = (os.memfd_create("even"), os.memfd_create("odd"))
    with pytest.raises(ConfigurationError) as caught:
        SnapshotPool(fds, slot=0, capacity_bytes=4096, needed_bytes=8192, available_bytes=8191)
    message = str(caught.value)
    assert "need 8192 bytes" in message and "8191 are available" in message
    assert "--elaswave-snapshots" in message and "\n" not in message
    assert [os.fstat(fd).st_size for fd in fds] == [0, 0]  # nothing was taken
    SnapshotPool(fds, slot=0, capacity_bytes=4096, needed_bytes=8192, available_bytes=8192)
    # Whoever comes after finds the memory that it needs.
    SnapshotPool(fds, slot=0, capacity_bytes=4096, needed_bytes=8192, available_bytes=0)
    for fd in fds:
        os.close(fd)


def test_a_limit_of_this_process_is_one_sentence() -> None:
    fds = (os.memfd_create("even"), os.memfd_create("odd"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(ConfigurationError) as caught:
            SnapshotPool(fds, slot=5, capacity_bytes=8192, needed_bytes=0, available_bytes=1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        for fd in fds:
            os.close(fd)
    message = str(caught.value)
    assert message.startswith("worker 5 wants 2 buffers of 8192 bytes of shared memory")
    assert "may have 4096 (File too large): raise `ulimit -f`" in message and "\n" not in message


def test_the_memory_of_a_shard_is_taken_before_it_is_used() -> None:
    fds = (os.memfd_create("even"), os.memfd_create("odd"))
    capacity = capacity_of(1 << 20)
    SnapshotPool(
        fds,
        slot=0,
        capacity_bytes=capacity,
        needed_bytes=0,
        available_bytes=0,
        body_bytes=100_000,
    )
    taken = [512 * os.fstat(fd).st_blocks for fd in fds]
    assert taken == [taken_of(100_000) - mmap.PAGESIZE] * 2
    for fd in fds:
        os.close(fd)


def test_a_smaller_shard_gives_back_what_a_larger_one_took() -> None:
    fds = (os.memfd_create("even"), os.memfd_create("odd"))
    pool = SnapshotPool(
        fds, slot=SLOT, capacity_bytes=capacity_of(1 << 20), needed_bytes=0, available_bytes=0
    )
    for step, numel in ((4, 1 << 17), (5, 1 << 17), (6, 1 << 16), (7, 1 << 16), (8, 1 << 17)):
        part = torch.randn(numel)
        sealed = seal(pool, [part], b"capsule", step=step)
        assert 512 * os.fstat(fds[step % 2]).st_blocks == taken_of(sealed.payload_bytes + 7)
        reader = VerifiedReader(sealed, pool.reader(sealed.buffer))
        assert read(reader, [(0, 4 * numel)]) == [part.numpy().tobytes()]
    for fd in fds:
        os.close(fd)


def test_a_snapshot_that_does_not_fit_is_not_cut_short() -> None:
    with opened_pool(BODY_OFFSET + 4096) as pool, pytest.raises((ConfigurationError, RuntimeError)):
        seal(pool, [torch.zeros(1020)], bytes(16))


def test_what_has_no_room_in_a_snapshot_is_named() -> None:
    with opened_pool() as pool:
        with pytest.raises(ConfigurationError, match=r"is 2097152 bytes, which do not fit .* keep"):
            seal(pool, [torch.ones(3)], bytes(2 * CAPACITY_BYTES))
        with pytest.raises(ConfigurationError, match=r"bytes and has room for 65528: .* use"):
            pack_record(sealed(0, 1, ranks=tuple(range(20_000))))
