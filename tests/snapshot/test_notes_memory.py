"""Notes go to two memories in turn, and take none that is not there."""

import os

from elaswave_plugin.ipc.snapshot_record import NOTES, read_record
from elaswave_plugin.snapshot.snapshot_pool import NotesMemory


def test_what_was_left_last_is_whole_while_more_is_left() -> None:
    fds = [os.memfd_create(f"notes {buffer}") for buffer in NOTES]
    notes = NotesMemory(fds, slot=3)
    found = []
    for step in (4, 5, 6):
        notes.seal(b"known", step=step, epoch=2, shard_group=(0, 0))
        found.append([None if one is None else one.step for one in map(read_record, fds)])
    assert found == [[4, None], [4, 5], [6, 5]]
    notes.free()
    assert [read_record(fd) for fd in fds] == [None, None]


def test_notes_that_are_there_need_no_more_memory() -> None:
    fds = [os.memfd_create(f"notes {buffer}") for buffer in NOTES]
    notes = NotesMemory(fds, slot=3)
    assert notes.has_room_for(b"known", available_bytes=1 << 20)
    assert not notes.has_room_for(b"known", available_bytes=1 << 10)
    for step in (4, 5):
        notes.seal(b"known", step=step, epoch=2, shard_group=(0, 0))
    assert notes.has_room_for(b"known", available_bytes=0)
