"""A part of the job that was given up, and paused in any line of a save, replaces nothing newer."""

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from elaswave_plugin.checkpoints import draft
from elaswave_plugin.checkpoints.draft import (
    Attempt,
    begin_draft,
    begin_pointer,
    discard_drafts,
    is_draft,
    pointing_to,
    publish,
)

LIMIT_S = 20.0
FILES = ("model", "optimizer")
POINTER = "latest"


# What ends a part that was given up: its lease, or that the others do not meet it any more.
LEASE, MEETING = "lease", "meeting"


class GivenUpError(Exception):
    """The others have decided a later view."""


@dataclass
class Part:
    """A part of the job, in a view of its own: it saves step 4, and steps after it."""

    folder: Path
    epoch: int
    steps: tuple[int, ...] = (4,)
    ended_by: tuple[str, ...] = (LEASE, MEETING)
    given_up: bool = False
    published: list[str] = field(default_factory=list)

    def save(self) -> None:
        """Save as `recovery/drafts.py` does, and as the adapters name the newest checkpoint."""
        attempt = Attempt("launch", self.epoch, lambda: self._end_by(LEASE))
        for step in self.steps:
            place = self.folder / f"step{step}"
            folder = begin_draft(place, attempt)
            begin_pointer(self.folder / POINTER, attempt)
            self._end_by(MEETING)
            for name in FILES:
                (folder / name).write_text(str(self.epoch))
            publish(place, attempt)
            self.published.append(place.name)
            with pointing_to(self.folder / POINTER, attempt) as pointer:
                pointer.write(str(step))
            self.published.append(POINTER)

    def _end_by(self, what: str) -> None:
        if self.given_up and what in self.ended_by:
            raise GivenUpError


class Paused:
    """Runs a part in a thread of its own, which stands still after so many lines of `draft.py`."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.error: BaseException | None = None
        self.lines = 0
        self._left = 0
        self._goes, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go(self, lines: int | None = None) -> bool:
        """Run so many lines more, or to the end; false once it has ended."""
        if not self._ended:
            self._left = sys.maxsize if lines is None else lines
            self._goes.release()
            assert self._stands.acquire(timeout=LIMIT_S)
        return not self._ended

    def _run(self) -> None:
        assert self._goes.acquire(timeout=LIMIT_S)
        sys.settrace(self._call)
        try:
            self.part.save()
        except (OSError, GivenUpError) as error:
            self.error = error
        finally:
            sys.settrace(None)
            self._ended = True
            self._stands.release()

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename == draft.__file__ else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            if not self._left:
                self._stands.release()
                assert self._goes.acquire(timeout=LIMIT_S)
            self._left -= 1
            self.lines += 1
        return self._line


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "_exchange", lambda first, second: False)


def folder_of(tmp_path: Path, number: int, former: bool) -> Path:
    """A folder to save to; with ``former`` a checkpoint of an earlier launch has the name."""
    folder = tmp_path / str(number)
    folder.mkdir()
    if former:
        (folder / "step4").mkdir()
        for name in FILES:
            (folder / "step4" / name).write_text("0")
        (folder / POINTER).write_text("4")
    return folder


def wrongs(folder: Path, newer: Part) -> list[str]:
    """List what is not the newer part's, or not whole, of all that has a name."""
    wanted = {f"step{step}" for step in newer.steps} | {POINTER}
    found = {path.name for path in folder.iterdir() if not is_draft(path)}
    wrong = [f"{name} is there or missing" for name in sorted(wanted ^ found)]
    for step in newer.steps:
        texts = {path.name: path.read_text() for path in (folder / f"step{step}").glob("*")}
        if texts != dict.fromkeys(FILES, str(newer.epoch)):
            wrong.append(f"step{step} has {texts}")
    pointer = folder / POINTER
    if pointer.exists() and pointer.read_text() != str(newer.steps[-1]):
        wrong.append(f"{POINTER} names {pointer.read_text()}")
    return wrong


def pauses(
    folder_at: Callable[[int], Path], steps: tuple[int, ...], ended_by: tuple[str, ...]
) -> Iterator[tuple[Paused, list[str]]]:
    """Pause the older part before each line once, while the newer one makes all of its saves.

    Yields the older part, at its end, and what is wrong then.
    """
    lines = 0
    while True:
        older = Paused(Part(folder_at(lines), epoch=1, ended_by=ended_by))
        was_there = older.go(lines)
        older.part.given_up = True
        newer = Part(older.part.folder, epoch=2, steps=steps)
        newer.save()
        older.go()
        if not was_there:
            return
        yield older, wrongs(newer.folder, newer)
        lines += 1


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("former", [True, False])
@pytest.mark.parametrize("steps", [(4,), (4, 6)])
@pytest.mark.parametrize("ended_by", [LEASE, MEETING])
def test_paused_in_any_line_it_replaces_nothing_newer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exchanges: bool,
    former: bool,
    steps: tuple[int, ...],
    ended_by: str,
) -> None:
    if not exchanges:
        without_exchange(monkeypatch)
    ends = [
        (older.error, older.part.published, wrong)
        for older, wrong in pauses(lambda n: folder_of(tmp_path, n, former), steps, (ended_by,))
    ]
    assert [wrong for _, _, wrong in ends if wrong] == []
    # It was ended by either, by what the newer one took away, and in between it had published.
    errors = {type(error) for error, _, _ in ends}
    assert errors == {GivenUpError, FileNotFoundError, type(None)}
    assert {len(published) for _, published, _ in ends} == {0, 1, 2}


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("former", [True, False])
def test_both_paused_in_any_line_leave_what_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, former: bool
) -> None:
    """The older one stands still, the newer one begins and stands still, the older one goes on."""
    if not exchanges:
        without_exchange(monkeypatch)
    number, first, older_lines = 0, 0, 0
    while first <= older_lines:
        second, newer_lines = 0, 1
        while second <= newer_lines:
            folder = folder_of(tmp_path, number, former)
            older = Paused(Part(folder, epoch=1))
            older.go(first)
            older.part.given_up = True
            newer = Paused(Part(folder, epoch=2))
            newer.go(second)
            older.go()
            newer.go()
            assert newer.error is None, (first, second)
            assert wrongs(folder, newer.part) == [], (first, second)
            older_lines, newer_lines = max(older_lines, older.lines), newer.lines
            number, second = number + 1, second + 4
        first += 3
    assert number > 100


@pytest.mark.parametrize("ended_by", [(), (LEASE, MEETING)], ids=["nothing ends it", "both"])
def test_without_the_one_half_or_the_other_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: tuple[str, ...]
) -> None:
    """Negative controls: an end alone leaves the gap after it, and taking away needs an end."""
    if ended_by:
        monkeypatch.setattr(draft, "_take_away_others", lambda place, attempt: None)
    ends = list(pauses(lambda n: folder_of(tmp_path, n, False), (4, 6), ended_by))
    assert any(wrong for _, wrong in ends)


def test_one_that_was_given_up_takes_nothing_of_a_later_view_away(tmp_path: Path) -> None:
    place = tmp_path / "step4"
    older, newer = (Attempt("launch", epoch, ask=lambda: None) for epoch in (9, 10))
    folder = begin_draft(place, newer)
    begin_draft(place, older)
    discard_drafts(place, older)
    assert list(tmp_path.iterdir()) == [folder]


def test_drafts_of_other_launches_are_taken_away(tmp_path: Path) -> None:
    place = tmp_path / "step4"
    begin_draft(place, Attempt("other", 12, ask=lambda: None))
    folder = begin_draft(place, Attempt("launch", 1, ask=lambda: None))
    assert list(tmp_path.iterdir()) == [folder]


def test_a_former_checkpoint_comes_back_from_a_draft_that_is_taken_away(tmp_path: Path) -> None:
    """A process died between the two renames that replace it without an exchange of names."""
    place = tmp_path / "step4"
    folder = begin_draft(place, Attempt("launch", 1, ask=lambda: None))
    (folder / ".former").mkdir()
    (folder / ".former" / "model").write_text("0")
    begin_draft(place, Attempt("launch", 2, ask=lambda: None))
    assert (place / "model").read_text() == "0"
