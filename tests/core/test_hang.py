"""The verdict on a hanging worker: examples, and what holds for any pages."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.agreement.hang import (
    COMMIT,
    NOBODY,
    OUTSIDE,
    Sample,
    Waiting,
    verdict,
    who_waits,
    with_native_waits,
)
from elaswave_plugin.core.agreement.limits import (
    FACTOR,
    START_LIMIT_S,
    STEPS_FOR_A_MEDIAN,
    UNKNOWN_LIMIT_S,
    PhaseLimits,
)
from tests.core.over_the_wire import again


def page(slot: int, waits_for: int = NOBODY, *, stalled_s: float = 2.5, **more: object) -> Sample:
    fields = {"epoch": 1, "step": 7, "operations": 40, "phase": "backward", "limit_s": 2.0, **more}
    fields = {"incarnation": 0, **fields}
    return Sample(slot=slot, stalled_s=stalled_s, waits_for=waits_for, **fields)  # type: ignore[arg-type]


def verdicts(*samples: Sample, members: int = 4) -> dict[int, str]:
    known = {sample.slot: sample for sample in samples}
    waiting = who_waits(range(members), known)
    found = {slot: verdict(one, waiting.get(slot, Waiting())) for slot, one in known.items()}
    return {slot: text for slot, text in found.items() if text is not None}


def test_the_one_that_waits_for_nobody_is_the_culprit() -> None:
    assert verdicts(page(0, 1), page(1, 2), page(2), page(3, 0)) == {
        2: "no progress for 2.5 s in backward of step 7 (limit 2 s with a recovery);"
        " workers 0, 1, 3 wait for it"
    }


@pytest.mark.parametrize("seen_by", [(2,), (3,), (2, 3)])
def test_of_two_that_do_not_hear_each_other_the_higher_one_goes(seen_by: tuple[int, ...]) -> None:
    """Whichever of them notices, whichever is behind, and though their operations differ."""
    unheard = {slot: (5 - slot,) if slot in seen_by else () for slot in (2, 3)}
    two = [page(slot, 5 - slot, operations=40 + slot, unheard=unheard[slot]) for slot in (2, 3)]
    words = (
        "no progress for 2.5 s in backward of step 7 (limit 2 s with a recovery); workers 0, 2"
        " wait for it in a circle, in which it and another one do not hear each other"
    )
    assert verdicts(page(0, 3), *two) == {3: words}
    differs = [replace(one, waits_in=one.slot, limit_s=60.0, floor_s=2.0) for one in two]
    assert verdicts(page(0, 3), *differs) == {3: words}
    # Without a silence it is the one that is behind.
    assert list(verdicts(page(0, 3), *(replace(one, unheard=()) for one in two))) == [2]


def test_a_silence_of_others_is_not_the_circle_s() -> None:
    two = [page(1, 2, operations=39, unheard=(3,)), page(2, 1)]
    assert list(verdicts(*two)) == [1]


def test_a_stopped_worker_that_blocks_another_is_named_as_stopped() -> None:
    assert verdicts(page(0, 1), page(1, stopped_s=2.2, phase="data")) == {
        1: "no progress for 2.5 s in data of step 7, stopped by a signal for 2.2 s"
        " (limit 2 s with a recovery); worker 0 waits for it"
    }


def test_a_stopped_worker_has_the_same_limit_in_every_phase() -> None:
    """A save may take half an hour, but no save is made by a process that does not run."""
    save = {"phase": "save", "limit_s": 1800.0, "announced": True}
    assert list(verdicts(page(0, 1), page(1, stopped_s=2.0, **save))) == [1]
    assert verdicts(page(0, 1), page(1, stopped_s=1.9, **save)) == {}
    assert verdicts(page(0, 1), page(1, **save)) == {}
    # It waited for somebody when it was stopped: it will not go on when that one does.
    assert list(verdicts(page(0, 1), page(1, 2, stopped_s=2.0, **save))) == [1]
    assert verdicts(page(0), page(1, stopped_s=2.0, **save)) == {}


def test_a_worker_for_which_nobody_waits_may_take_its_time() -> None:
    assert verdicts(page(0), page(1), page(2), page(3)) == {}


def test_within_its_limit_nobody_hangs() -> None:
    assert verdicts(page(0, 1, stalled_s=9.0), page(1, stalled_s=1.59)) == {}
    assert verdicts(page(0, 1), page(1, stalled_s=20.5, limit_s=21.0)) == {}


def test_a_limit_has_room_for_the_recovery() -> None:
    assert list(verdicts(page(0, 1), page(1, stalled_s=1.61))) == [1]
    assert list(verdicts(page(0, 1), page(1, stalled_s=20.7, limit_s=21.0))) == [1]
    assert page(1, limit_s=0.5).may_stall_s == 0.4  # a fifth, where that is less


def test_whoever_waits_for_a_worker_that_is_at_work_waits_for_nobody_guilty() -> None:
    waiting = who_waits(range(4), {0: page(0, 1), 2: page(2, 0)})
    assert waiting == {1: Waiting(slots=(0, 2))}
    assert verdicts(page(0, 1), page(2, 0)) == {}


def test_a_job_that_is_stopped_as_a_whole_does_not_hang() -> None:
    assert verdicts(page(0, 1, stopped_s=9.0), page(1, stopped_s=9.0)) == {}


def circle(**newcomer: object) -> list[Sample]:
    """Two at the end of their script, for which no limit is known, wait for one that goes on."""
    slow = {"limit_s": UNKNOWN_LIMIT_S, "floor_s": 2.0}
    return [
        page(0, 2, waits_in=5, **slow),
        page(2, 1, waits_in=5, **slow),
        page(1, 0, **{"incarnation": 1, "operations": 90, "waits_in": 6, **slow, **newcomer}),
    ]


def test_a_circle_of_different_operations_ends_by_the_shortest_limit() -> None:
    """Of those, the one that came later does what the others do not, whatever it has done."""
    (text,) = verdicts(*circle(), members=3).values()
    assert text == (
        "no progress for 2.5 s in backward of step 7 (limit 2 s with a recovery); workers 0, 2 wait"
        " for it in another operation than the one in which it waits for them; it came later, and"
        " its script does something else than theirs: one that counts its steps itself has not seen"
        " those before it; count those that the job has made (what job.train yields; in DeepSpeed"
        " engine.global_steps), keep the count by elaswave_plugin.keep, or set respawn to 0"
    )
    assert list(verdicts(*circle(), members=3)) == [1]


@pytest.mark.parametrize("newcomer", [{"waits_in": 5}, {"stalled_s": 1.5}, {"stopped_s": 0.5}])
def test_a_circle_of_one_operation_may_take_as_long_as_its_phase(newcomer: object) -> None:
    assert verdicts(*circle(**newcomer), members=3) == {}  # type: ignore[arg-type]


def test_of_a_circle_the_one_behind_has_to_go() -> None:
    found = verdicts(page(0, 1), page(1, 2, operations=39), page(2, 0), page(3, 0))
    assert found == {
        1: "no progress for 2.5 s in backward of step 7 (limit 2 s with a recovery);"
        " workers 0, 2, 3 wait for it"
        " in a circle, in which it is the furthest behind"
    }


def test_a_circle_in_which_one_is_within_its_limit_may_be_two_moments() -> None:
    assert verdicts(page(0, 1), page(1, 0, stalled_s=1.0)) == {}


def test_whoever_does_not_stop_for_a_view_keeps_all_waiting() -> None:
    found = verdicts(page(0, COMMIT), page(1, COMMIT), page(2), page(3, COMMIT))
    assert list(found) == [2]
    assert "workers 0, 1, 3 wait for it" in found[2]


def test_a_wait_for_an_agent_blames_no_trainer() -> None:
    assert verdicts(page(0, 1), page(1, OUTSIDE)) == {}
    assert who_waits(range(2), {0: page(0, 1), 1: page(1, OUTSIDE)}) == {}


def test_a_page_survives_its_way_over_the_wire() -> None:
    sample = page(3, COMMIT, stopped_s=1.5)
    assert again(sample) == sample


samples = st.integers(2, 6).flatmap(
    lambda size: st.tuples(
        *(
            st.builds(
                page,
                st.just(slot),
                st.sampled_from([NOBODY, COMMIT, OUTSIDE, *(set(range(size)) - {slot})]),
                stalled_s=st.sampled_from([0.5, 2.5, 30.0]),
                limit_s=st.sampled_from([2.0, 20.0]),
                operations=st.integers(0, 3),
                stopped_s=st.sampled_from([None, 0.0, 1.0, 2.5]),
            )
            for slot in range(size)
        )
    )
)


@given(samples)
def test_the_guilty_are_late_and_awaited(pages: tuple[Sample, ...]) -> None:
    waiting = who_waits(range(len(pages)), {one.slot: one for one in pages})
    for slot in verdicts(*pages, members=len(pages)):
        one, awaited = pages[slot], waiting[slot]
        assert one.is_late
        assert awaited.slots
        assert slot not in awaited.slots
        assert not any(pages[waiter].is_stopped for waiter in awaited.slots)
        in_circle = one.waits_for >= 0 and awaited.in_circle
        assert one.waits_for == NOBODY or in_circle or one.is_stopped


@given(samples)
def test_who_waits_for_a_worker_outside_of_a_circle_is_innocent(pages: tuple[Sample, ...]) -> None:
    waiting = who_waits(range(len(pages)), {one.slot: one for one in pages})
    circles = {slot for slot, one in waiting.items() if one.in_circle}
    for slot in set(verdicts(*pages, members=len(pages))) - circles:
        assert pages[slot].waits_for == NOBODY or pages[slot].is_stopped


@given(samples)
def test_late_workers_that_wait_without_an_end_have_one_guilty_among_them(
    pages: tuple[Sample, ...],
) -> None:
    """A deadlock of everyone, in any shape, is always broken."""
    late = tuple(
        replace(one, stalled_s=99.0, stopped_s=None, waits_for=(one.slot + 1) % len(pages))
        if one.waits_for < 0
        else replace(one, stalled_s=99.0, stopped_s=None)
        for one in pages
    )
    assert verdicts(*late, members=len(late))


def test_a_phase_has_a_limit_once_it_is_known() -> None:
    limits = PhaseLimits(2.0)
    for _ in range(STEPS_FOR_A_MEDIAN):
        assert limits.of("forward") == START_LIMIT_S
        limits.note("forward", 1.5)
        limits.note("forward", 0.1)
        limits.note("data", 0.1)
        limits.step_over()
    assert limits.of("forward") == pytest.approx(FACTOR * 1.5)
    assert limits.of("data") == 2.0
    assert limits.of("optimizer") == START_LIMIT_S


def test_reading_data_may_stall_for_longer() -> None:
    """Storage stalls for all workers of a stage at once, and all later stages wait for them."""
    limits = PhaseLimits(2.0, data_floor_s=30.0)
    for _ in range(STEPS_FOR_A_MEDIAN):
        limits.note("forward", 0.1)
        limits.note("data", 0.1)
        limits.step_over()
    assert (limits.of("forward"), limits.of("data")) == (2.0, 30.0)
    assert PhaseLimits(60.0, data_floor_s=30.0)._data_floor_s == 60.0


def test_a_compilation_does_not_make_the_limit_of_all_later_steps() -> None:
    limits = PhaseLimits(2.0)
    for seconds in (300.0, 1.0, 1.0):
        limits.note("forward", seconds)
        limits.step_over()
    assert limits.of("forward") == pytest.approx(FACTOR)


def test_an_interrupted_step_counts_for_nothing() -> None:
    limits = PhaseLimits(2.0)
    for _ in range(2 * STEPS_FOR_A_MEDIAN):
        limits.note("reduce", 30.0)
        limits.drop_step()
    limits.step_over()
    assert limits.of("reduce") == START_LIMIT_S


def test_a_phase_of_a_few_steps_only_does_not_forget_what_it_took() -> None:
    """A phase that is absent from a step does not count as one of no time."""
    limits = PhaseLimits(2.0)
    for step in range(9):
        if step % 3 == 0:
            limits.note("gather", 5.0)
        limits.step_over()
    assert limits.of("gather") == pytest.approx(15.0)


def test_the_median_is_of_the_recent_steps() -> None:
    limits = PhaseLimits(2.0)
    for seconds in [10.0] * 20 + [1.0] * 20:
        limits.note("forward", seconds)
        limits.step_over()
    assert limits.of("forward") == pytest.approx(FACTOR)


def test_what_the_kernel_holds_is_given_up_only_where_a_limit_was_set() -> None:
    """SIGKILL would not end it, and what it holds would not be free."""
    held = {"stalled_s": 0.1, "in_kernel_s": 1000.0}
    assert page(1, **held).is_held and not page(1).is_held
    assert verdicts(page(0, 1), page(1, **held)) == {}
    assert verdicts(page(0, 1), page(1, in_kernel_limit_s=1001.0, **held)) == {}
    assert verdicts(page(0, 1), page(1, in_kernel_limit_s=900.0, **held)) == {
        1: "no progress for 0.1 s in backward of step 7, in a call of the kernel's that no signal"
        " ends for 1000.0 s (limit 900 s with a recovery); worker 0 waits for it"
    }


def in_a_native_call(slot: int, *entered: int, stalled_s: float = 2.5, **more: object) -> Sample:
    """A worker that has entered so many calls on communicators 7, 8, ...; None: it has none."""
    counts = tuple((7 + index, calls) for index, calls in enumerate(entered) if calls)
    return page(slot, stalled_s=stalled_s, entered=counts, operations=sum(entered), **more)


def native_verdicts(*samples: Sample) -> list[int]:
    known = with_native_waits(samples, still_s=0.1)
    waiting = who_waits(range(len(samples)), known)
    own = {sample.slot: sample for sample in samples}
    return [slot for slot in known if verdict(own[slot], waiting.get(slot, Waiting()))]


def test_who_has_not_entered_a_native_call_is_the_culprit() -> None:
    hung = in_a_native_call(1, 4)
    assert native_verdicts(*(in_a_native_call(slot, 5) for slot in (0, 2, 3)), hung) == [1]


def test_who_is_blocked_natively_behind_another_is_not_guilty() -> None:
    """Workers 0 and 1 share one communicator, 1 and 2 another; 2 has not entered its call."""
    behind = in_a_native_call(0, 9, 0), in_a_native_call(1, 8, 5), in_a_native_call(2, 0, 4)
    assert native_verdicts(*behind) == [2]


def test_who_is_blocked_natively_behind_one_at_work_is_not_guilty() -> None:
    works = in_a_native_call(2, 0, 4, stalled_s=0.01)
    assert native_verdicts(in_a_native_call(0, 9, 0), in_a_native_call(1, 8, 5), works) == []


def test_where_all_have_entered_a_native_call_nobody_is_guilty() -> None:
    assert native_verdicts(*(in_a_native_call(slot, 5) for slot in range(4))) == []


def test_a_stopped_one_is_found_behind_native_calls() -> None:
    """Also if it had entered the call: the threads that carry it out are stopped with it."""
    for calls in (5, 6):
        stopped = in_a_native_call(1, 5, stopped_s=2.1)
        others = in_a_native_call(0, calls), in_a_native_call(2, calls)
        assert native_verdicts(others[0], stopped, others[1]) == [1]


def test_native_waits_of_many_workers_are_found_within_a_beat() -> None:
    """All stand still, as in a save: the cost grows with the workers, not with their square."""
    samples = [in_a_native_call(slot, *range(9, 29)) for slot in range(2000)]
    started_s = time.process_time()
    assert len(with_native_waits(samples, still_s=0.1)) == 2000
    assert time.process_time() - started_s < 0.5
