"""Batches that processes read ahead: which ones, in which order, and what a redo is served."""

import os
from typing import Any

import torch

from elaswave_plugin.adapters.read_ahead import Key, ReadAhead, StepPattern

END = 40


def _read(request: int) -> dict[str, Any]:
    return {"pid": os.getpid(), "ids": torch.tensor([request])}


def _request(key: Key) -> int | None:
    assert isinstance(key.part, int)
    number = key.place + key.part
    return number if number < END else None


def _ahead(num_workers: int) -> ReadAhead:
    dataset: Any = [0]
    like = torch.utils.data.DataLoader[Any](dataset, num_workers=num_workers)
    return ReadAhead(_read, _request, like=like)


def _taken(ahead: ReadAhead, place: int, part: int) -> tuple[int, bool]:
    """The sample, and whether another process has read it."""
    key = Key(place, part)
    batch = ahead.take(key, _request(key))
    number = int(batch["ids"])
    # As a script may change what it is given.
    batch["ids"].fill_(-1)
    return number, batch["pid"] != os.getpid()


def test_a_step_is_expected_to_read_what_the_one_before_has_read() -> None:
    pattern = StepPattern()
    for part in (0, 2):
        pattern.note(Key(0, part))
    assert pattern.following(Key(0, 0)) is None
    assert pattern.note(Key(8, 0))
    assert not pattern.note(Key(8, 2))
    assert pattern.following(Key(8, 0)) == Key(8, 2)
    assert pattern.following(Key(8, 2)) == Key(16, 0)
    assert pattern.following(Key(16, 2)) == Key(24, 0)
    assert pattern.following(Key(8, 1)) is None


def test_other_processes_read_what_is_expected() -> None:
    ahead = _ahead(2)
    taken = [_taken(ahead, place, part) for place in range(0, END, 8) for part in (0, 2, 5)]
    assert [number for number, _ in taken] == [
        place + part for place in range(0, END, 8) for part in (0, 2, 5)
    ]
    # The first step, and the batch by which the second one is known to be like it.
    assert [elsewhere for _, elsewhere in taken] == [False] * 4 + [True] * (len(taken) - 4)


def test_a_redone_step_is_served_from_what_was_read() -> None:
    ahead = _ahead(1)
    for place in (0, 8, 16):
        for part in (0, 2):
            _taken(ahead, place, part)
    # Interrupted, and dealt otherwise: part 1 comes from a lost worker.
    assert _taken(ahead, 16, 1) == (17, False)
    assert _taken(ahead, 16, 0) == (16, True)
    assert _taken(ahead, 16, 2) == (18, True)
    later = [_taken(ahead, place, part) for place in (24, 32) for part in (1, 0, 2)]
    assert [number for number, _ in later] == [25, 24, 26, 33, 32, 34]
    assert later[-1][1]


def test_without_processes_nothing_is_kept() -> None:
    ahead = _ahead(0)
    assert [_taken(ahead, 0, part) for part in (0, 1, 0)] == [(0, False), (1, False), (0, False)]


def test_the_generators_of_the_script_draw_what_they_would() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    ahead = _ahead(1)
    for place in (0, 8, 16):
        _taken(ahead, place, 0)
    assert torch.equal(torch.rand(3), wanted)
