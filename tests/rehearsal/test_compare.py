"""The comparison of two runs and its first difference, by made-up records."""

from typing import Any

from elaswave_plugin.rehearsal.compare import Reference, RunRecords, step_differences


def state(slot: int, at: int, **said: Any) -> dict[str, Any]:
    names = ("tensors", "settings", "kept", "draws", "script", "values")
    empty: dict[str, Any] = {name: {} for name in names}
    who = {"slot": slot, "incarnation": 0, "part": "stage 0 tp 0"}
    return {"kind": "state", **who, "at": at, **empty, **said}


def passed(slot: int, at: int, samples: str, batch: str, **draws: str) -> dict[str, Any]:
    said = {"pass": samples, "call": 0, "batch": batch, "draws": draws}
    return {"kind": "pass", "slot": slot, "part": "stage 0 tp 0", "at": at, **said}


def evaluated(slot: int, at: int, **results: str) -> dict[str, Any]:
    who = {"slot": slot, "incarnation": 0, "part": ""}
    return {"kind": "result", **who, "at": at, "results": results}


def run(*records: dict[str, Any]) -> RunRecords:
    return RunRecords(records=records)


UNDISTURBED = run(
    *(state(slot, 1, tensors={"weight a": 1}, script={"ema": 5, "batch": slot}) for slot in (0, 1)),
    passed(0, 1, "samples 0 to 0", "x", torch="t0"),
    passed(1, 1, "samples 1 to 1", "y", torch="t1"),
    *(state(slot, 2, tensors={"weight a": 2}, script={"ema": 6, "batch": slot}) for slot in (0, 1)),
)


def test_the_same_work_by_others_is_equal() -> None:
    """A value of each worker's own, as its last batch, is nobody's business."""
    other = run(
        state(1, 1, tensors={"weight a": 1}, script={"ema": 5, "batch": 0}),
        passed(1, 1, "samples 0 to 0", "x", torch="t0"),
        passed(1, 1, "samples 1 to 1", "y", torch="t1"),
        state(1, 2, tensors={"weight a": 2}, script={"ema": 6, "batch": 1}),
    )
    assert Reference(UNDISTURBED).differences(other) == []


def test_what_is_each_workers_own_is_named() -> None:
    """Samples and draws are of a pass, whoever runs it."""
    assert Reference(UNDISTURBED).own == ("script batch",)


def test_the_first_difference_is_the_earliest_one() -> None:
    other = run(
        state(0, 2, tensors={"weight a": 3}),
        passed(0, 1, "samples 1 to 1", "z", torch="t9"),
        state(1, 2, script={"ema": 7}),
    )
    found = Reference(UNDISTURBED).differences(other)
    assert [one.name for one in found] == [
        "batch of samples 1 to 1",
        "of torch in samples 1 to 1",
        "ema",
        "weight a",
    ]
    assert str(found[0]) == "sample batch of samples 1 to 1 in step 1, on worker 0"
    assert found[3].slots == (0,)


def test_a_twin_has_values_of_its_own() -> None:
    """In fast mode the planned change says what is equal, the undisturbed run what is compared."""
    twin = run(state(0, 2, tensors={"weight a": 8}, script={"ema": 9, "batch": 4}))
    reference = Reference(UNDISTURBED).restricted(twin)
    assert reference.differences(run(state(1, 2, tensors={"weight a": 8}))) == []
    (one,) = reference.differences(run(state(1, 2, tensors={"weight a": 2}, script={"batch": 1})))
    assert one.name == "weight a"


def test_losses_are_compared_by_their_bits() -> None:
    mine = {0: (1.0, 2.0), 1: (1.0, 0.0)}
    assert step_differences(mine, {0: (1.0, 2.0), 1: (1.0, 0.0)}) == []
    (one,) = step_differences(mine, {0: (1.0, 2.0), 1: (1.0, -0.0)})
    assert (one.kind, one.moment.step) == ("gradient norm", 1)
    (gone,) = step_differences(mine, {0: (1.0, 2.0)})
    assert gone.kind == "end of the job"


def test_a_completed_step_that_fewer_made_again_counts_as_they_made_it() -> None:
    """View 2 went back to step 3, of which a survivor had completed its part in view 1."""
    early, again, later = (
        state(0, at, tensors={"weight a": value}, script={"loss": value}) | {"view": view}
        for at, value, view in ((4, 7, 1), (4, 8, 2), (5, 9, 2))
    )
    before = state(0, 3, tensors={"weight a": 6}, script={"loss": 6}) | {"view": 1}
    found = run(before, early, again, later).without_undone({2: 3})
    assert found == run(before, {**again, "script": {}, "values": {"loss": 8}}, later)
    # Beside a difference that counts it is named all the same.
    twin = run(before, *(state(0, at, script={"loss": 0}) | {"view": 2} for at in (4, 5)))
    reference = Reference(twin)
    assert [one.moment.step for one in reference.notes(found)] == [4, 5]
    assert [one.moment.step for one in reference.differences(found)] == [5]


def test_the_result_of_an_evaluation_is_compared_with_its_numbers() -> None:
    """A part that each worker has of its own, as a time, is left out."""
    undisturbed = run(*(evaluated(slot, 2, loss="0.911", time=str(slot)) for slot in (0, 1)))
    other = run(evaluated(0, 2, loss="0.456", time="7"), evaluated(0, 4, loss="0.2"))
    (one,) = Reference(undisturbed).differences(other)
    assert str(one) == "result of loss before step 2, on worker 0 (0.456 for 0.911)"
    assert one.to_json()["numbers"] == ["0.456", "0.911"]


def test_a_result_that_follows_the_workers_is_off_also_where_the_twin_has_it() -> None:
    """Sums in another order, texts, and losses that were drawn otherwise are not."""
    results = {"loss": "0.9", "mean": "0.5", "none": "0.0", "text": "'a'"}
    undisturbed = Reference(run(*(evaluated(slot, 2, **results) for slot in (0, 1))))
    results = {"loss": "0.6", "mean": "0.5000001", "none": "0.1", "text": "'b'"}
    twin = run(evaluated(0, 2, **results))
    other = run(evaluated(0, 2, **{**results, "mean": "0.5000002"}))
    assert undisturbed.restricted(twin).differences(other) == []
    assert Reference(twin).far_results(other, 1e-5) == []
    (one,) = undisturbed.far_results(other, 1 / 6)
    assert str(one) == "result of loss before step 2, on worker 0 (0.6 for 0.9)"
    assert undisturbed.far_results(other, 0.4) == []
    zero, five, nan = (run(evaluated(0, 2, mean=value)) for value in ("0", "5", "nan"))
    assert Reference(zero).far_results(five, 0.4) and Reference(five).far_results(zero, 0.4)
    assert Reference(nan).far_results(zero, 0.4) and not Reference(nan).far_results(nan, 0.4)


def test_numbers_of_who_came_back_are_named_once() -> None:
    """Not what those who stayed have as well, nor what it has only of a step that is redone."""
    values = {3: "4", 4: "5"}
    undisturbed = run(
        *(
            state(slot, at, values={"c.seen": seen, "began": "100", "name": "'a'", "loss": "0.5"})
            for slot in (0, 1)
            for at, seen in values.items()
        )
    )
    stayed = [
        state(1, at, values={"c.seen": seen, "began": "200", "name": "'b'", "loss": "0.51"})
        for at, seen in values.items()
    ]
    came = [
        state(0, at, values={"c.seen": seen, "began": began, "name": "'c'", "loss": loss})
        | {"incarnation": 1}
        for at, seen, began, loss in (
            (3, "0", "200", "0.51"),
            (4, "1", "200", "0.51"),
            (3, "1", "300", "0.6"),
        )
    ]
    (one,) = Reference(undisturbed).of_newcomers(run(*stayed, *came))
    assert (one.name, one.numbers, one.moment.step, one.slots) == ("c.seen", ("0", "4"), 3, (0,))
    assert Reference(undisturbed).differences(run(*stayed, *came)) == []


def test_counts_of_who_stayed_are_named_once_and_widths_are_not() -> None:
    values = [("3", "2", "0.5"), ("4", "2", "0.4")]
    undisturbed = run(
        *(
            state(slot, at, values={"calls[0]": calls, "world": world, "loss": loss})
            for slot in (0, 1)
            for at, (calls, world, loss) in enumerate(values, start=3)
        )
    )
    stayed = [
        state(1, at, values={"calls[0]": calls, "world": "1", "loss": "0.3"})
        for at, calls in ((3, "3"), (3, "4"), (4, "5"))
    ]
    came = state(0, 3, values={"calls[0]": "0"}) | {"incarnation": 1}
    (one,) = Reference(undisturbed).of_survivors(run(*stayed, came))
    assert (one.name, one.numbers, one.slots) == ("calls[0]", ("4", "3"), (1,))


def test_where_nobody_has_stayed_whole_numbers_are_compared_with_the_undisturbed_run() -> None:
    undisturbed = run(*(state(slot, 3, values={"n": "4", "loss": "0.5"}) for slot in (0, 1)))
    came = [
        state(slot, 3, values={"n": "1", "loss": "0.6"}) | {"incarnation": 1} for slot in (0, 1)
    ]
    (one,) = Reference(undisturbed).of_newcomers(run(*came))
    assert (one.name, one.slots) == ("n", (0, 1))
