"""The returns of workers, from made-up events: which end counts, and whose stand-still."""

from elaswave_plugin.observer.observer import joins_of
from tests.observer.made_up import run_of


def test_a_join_is_timed_from_the_end_of_the_last_that_worked() -> None:
    exited = [
        {"slot": 2, "incarnation": 0, "pid": 20, "time_s": 10.0},
        # Died on its way in: it has never worked.
        {"slot": 2, "incarnation": 1, "pid": 21, "time_s": 11.0},
        {"slot": 2, "incarnation": 2, "pid": 22, "time_s": 90.0},
    ]
    steps = [
        {"slot": slot, "pid": pid, "epoch": epoch, "step": step, "time_s": time_s}
        for slot, pid, epoch, step, time_s in (
            (0, 10, 1, 3, 9.0),
            (2, 20, 1, 3, 9.5),
            (0, 10, 3, 7, 14.0),
            (2, 22, 3, 7, 14.25),
            (0, 10, 3, 8, 15.0),
            (2, 22, 3, 8, 15.0),
        )
    ]
    recovered = [
        {"slot": 0, "epoch": 2, "pause_s": 5.0},
        {"slot": 0, "epoch": 3, "pause_s": 0.125},
        {"slot": 2, "epoch": 3, "pause_s": 0.5, "fetched_bytes": 912},
    ]
    entered = [
        {
            "slot": 2,
            "incarnation": 2,
            "epoch": 3,
            "step": 7,
            "beside_s": 1.5,
            "fetched_bytes": 304,
            "time_s": 13.0,
        }
    ]
    run = run_of(entered=entered, recovered=recovered, worker_exited=exited, steps=steps)
    assert joins_of(run) == [
        {
            "epoch": 3,
            "slot": 2,
            "incarnation": 2,
            "step": 7,
            "beside_s": 1.5,
            "stall_s": 0.125,
            "time_to_full_s": 4.25,
            "bytes": 912,
        }
    ]


def test_a_join_without_a_completed_step_has_no_time_to_full() -> None:
    entered = [
        {
            "slot": 2,
            "incarnation": 1,
            "epoch": 3,
            "step": 7,
            "beside_s": 1.5,
            "fetched_bytes": 304,
            "time_s": 13.0,
        }
    ]
    (join,) = joins_of(run_of(entered=entered))
    assert (join["stall_s"], join["time_to_full_s"]) == (None, None)
