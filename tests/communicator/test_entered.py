"""The native calls that a worker has entered, as its progress page tells them."""

from elaswave_plugin.communicator.device.engine import Entered
from elaswave_plugin.ipc.progress_page import MOST_ENTERED, ProgressPage

PAIR = (3, 5)


def told(page: ProgressPage) -> dict[int, int]:
    """The calls by communicator."""
    page.touch()
    sample = page.sample(slot=0)
    assert sample is not None
    return dict(sample.entered)


def test_members_that_have_entered_as_many_calls_tell_alike() -> None:
    pages = ProgressPage(), ProgressPage()
    for rank, page in enumerate(pages):
        entered = Entered(page)
        for call in ("allreduce", "allgather"):
            entered.count("pair@1", PAIR, call, me=rank, peer=None)
        entered.count("pair@1", PAIR, "send" if rank == 0 else "recv", me=rank, peer=1 - rank)
    first, second = map(told, pages)
    assert first == second and sorted(first.values()) == [1, 2]


def test_messages_of_both_directions_are_apart() -> None:
    page = ProgressPage()
    entered = Entered(page)
    entered.count("pair@1", PAIR, "send", me=0, peer=1)
    entered.count("pair@1", PAIR, "recv", me=0, peer=1)
    entered.count("pair@1", PAIR, "recv", me=0, peer=1)
    assert sorted(told(page).values()) == [1, 2]


def test_communicators_that_have_ended_are_told_no_more() -> None:
    page = ProgressPage()
    entered = Entered(page)
    for name in ("first@1", "second@1"):
        entered.count(name, PAIR, "allreduce", me=0, peer=None)
    kept = told(page)
    entered.keep({"second@1"})
    assert len(told(page)) == 1 and told(page).items() <= kept.items()
    entered.count("first@2", PAIR, "allreduce", me=0, peer=None)
    assert len(told(page)) == 2


def test_more_communicators_than_the_page_has_room_for_are_not_told() -> None:
    page = ProgressPage()
    entered = Entered(page)
    for number in range(MOST_ENTERED + 3):
        entered.count(f"{number}@1", PAIR, "allreduce", me=0, peer=None)
    assert len(told(page)) == MOST_ENTERED
    entered.keep({"0@1"})
    entered.count("late@1", PAIR, "allreduce", me=0, peer=None)
    assert len(told(page)) == 2
