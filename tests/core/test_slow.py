"""A slow worker is named within five steps, and nobody is where all are as slow."""

import random
from statistics import median

import pytest

from elaswave_plugin.core.layer_times import FORWARD, LAYER, PassTimes
from elaswave_plugin.core.slow import STEPS_TO_NAME, SlowWatch, reason_of_view, slowness_told

STAGES = [(0, 1, 2, 3), (4, 5, 6, 7)]
LEVEL = dict.fromkeys(range(8), 1e-6)


def test_named_in_four_steps_and_in_golden_words() -> None:
    watch = SlowWatch()
    slow = {**LEVEL, 6: 1.3e-6}
    assert [watch.step(slow, STAGES) for _ in range(6)] == [False] * 3 + [True] + [False] * 2
    assert STEPS_TO_NAME == 4
    assert {slot: str(one) for slot, one in watch.slow.items()} == {
        6: "takes 1.30x as long for a layer as workers 4, 5, 7, which have the same ones, in 4"
        " steps in a row"
    }


def test_one_peer_is_enough_and_none_is_not() -> None:
    watch = SlowWatch()
    for _ in range(4):
        watch.step({0: 2.0, 1: 1.0, 4: 9.0}, STAGES)
    assert list(watch.slow) == [0]
    assert str(watch.slow[0]).startswith("takes 2.00x as long for a layer as worker 1, which has ")


def test_stages_are_not_compared_with_each_other() -> None:
    watch = SlowWatch()
    for _ in range(10):
        assert not watch.step({slot: 1.0 if slot < 4 else 5.0 for slot in range(8)}, STAGES)


def test_a_step_at_the_level_begins_the_count_anew() -> None:
    watch = SlowWatch()
    for number in range(20):
        pace = 1e-6 if number % STEPS_TO_NAME == STEPS_TO_NAME - 1 else 9e-6
        assert not watch.step({**LEVEL, 2: pace}, STAGES)


def test_it_is_taken_back_when_the_worker_is_level_again() -> None:
    watch = SlowWatch()
    for _ in range(4):
        watch.step({**LEVEL, 2: 2e-6}, STAGES)
    for _ in range(8):
        watch.step({**LEVEL, 2: 1.2e-6}, STAGES)
    assert list(watch.slow) == [2]
    changes = [watch.step(LEVEL, STAGES) for _ in range(4)]
    assert changes == [False, False, False, True] and not watch.slow


def test_a_new_view_begins_with_what_one_worker_has_told() -> None:
    watch, other = SlowWatch(), SlowWatch()
    for _ in range(4):
        watch.step({**LEVEL, 2: 2e-6}, STAGES)
    for _ in range(3):
        watch.step({**LEVEL, 2: 2e-6, 5: 2e-6}, STAGES)
    told = watch.told()
    for one in (watch, other):
        one.restart(told)
        assert one.slowness == slowness_told(told) == {2: 2.0}
        assert str(one.slow[2]).startswith("takes 2.00x as long for a layer as workers 0, 1, 3, ")
        # The row of worker 5 begins anew.
        assert not any(one.step({**LEVEL, 2: 2e-6, 5: 2e-6}, STAGES) for _ in range(3))
        assert one.step({**LEVEL, 2: 2e-6, 5: 2e-6}, STAGES)
    assert watch.slow == other.slow


def test_it_is_named_anew_where_it_is_much_slower_or_faster() -> None:
    watch = SlowWatch()
    for pace, slowness in ((1.5, 1.5), (1.9, 1.5), (3.0, 3.0), (2.5, 3.0), (1.25, 1.2)):
        for _ in range(4):
            watch.step({**LEVEL, 2: pace * 1e-6}, STAGES)
        assert watch.slowness == {2: slowness}


def test_a_worker_that_comes_and_goes_is_taken_back_later_each_time() -> None:
    watch, taken_back_after = SlowWatch(), []
    for _ in range(4):
        while not watch.slow:
            watch.step({**LEVEL, 2: 2e-6}, STAGES)
        steps = 0
        while watch.slow:
            watch.step(LEVEL, STAGES)
            steps += 1
        taken_back_after.append(steps)
    assert taken_back_after == [4, 8, 16, 32]


def test_the_least_ratio_of_the_row_counts() -> None:
    watch = SlowWatch()
    for pace in (9.0, 1.44, 7.0, 3.0):
        watch.step({**LEVEL, 2: pace * 1e-6}, STAGES)
    assert watch.slowness == {2: 1.4}
    assert reason_of_view(watch.slow) == "less work for what is slow: worker 2 (1.4x)"
    assert reason_of_view({}) == "no worker is slow any more: none gets less to do"


def test_no_false_alarm_where_lengths_vary() -> None:
    """Tokens of 512 to 4096 a sample: attention makes long ones dearer by the token, up to 1.7x."""
    dice = random.Random(7)

    def pace() -> float:
        """The fastest of eight micro-batches, with 3 % of noise."""
        lengths = [dice.randint(512, 4096) for _ in range(8)]
        return min((1 + 0.7 * n / 4096) * dice.gauss(1, 0.03) for n in lengths)

    watch = SlowWatch()
    for _ in range(3000):
        assert not watch.step({slot: pace() for slot in range(8)}, STAGES)
    for _ in range(4):
        watch.step({slot: pace() * (2 if slot == 3 else 1) for slot in range(8)}, STAGES)
    assert set(watch.slow) == {3}


def passes(
    dice: random.Random, number: int, *, lengths: tuple[int, int], slow: float = 1.0
) -> tuple[float, int]:
    """What a worker tells of a step of so many micro-batches, with 3 % of noise."""
    times = PassTimes()
    for _ in range(number):
        tokens = dice.randint(*lengths)
        a_token_s = slow * (1 + 0.7 * tokens / 4096) * dice.gauss(1, 0.03)
        times.note(LAYER, FORWARD, a_token_s * tokens, tokens=tokens)
    times.step_over()
    told = times.told_pace()
    assert told is not None
    return told


def watched(
    watch: SlowWatch,
    width: int,
    number: int,
    lengths: tuple[int, int],
    slow: float,
    steps: int,
    *,
    seed: int = 0,
) -> int | None:
    """So many steps of a stage whose worker 0 takes ``slow`` times as long; when anything changed.

    In an order that only the sizes and the ``seed`` decide.
    """
    dice = random.Random(1000 * width + number + 100_000 * seed)
    for step in range(steps):
        told = {
            slot: passes(dice, number, lengths=lengths, slow=1.0 if slot else slow)
            for slot in range(width)
        }
        paces = {slot: pace for slot, (pace, _) in told.items()}
        tokens = {slot: count for slot, (_, count) in told.items()}
        if watch.step(paces, [tuple(range(width))], tokens):
            return step + 1
    return None


# Thousands of steps take seconds each.
@pytest.mark.parametrize(
    ("number", "peers"),
    [
        pytest.param(
            number, peers, marks=() if (number, peers) in ((1, 3), (8, 1)) else pytest.mark.slow
        )
        for number in (1, 2, 4, 8)
        for peers in (1, 3)
    ],
)
def test_no_false_alarm_however_few_micro_batches_of_varying_lengths(
    number: int, peers: int
) -> None:
    watch = SlowWatch()
    assert watched(watch, peers + 1, number, (512, 4096), 1.0, 3000) is None
    # Control: it is not deaf to one that is twice as slow.
    assert watched(watch, peers + 1, number, (512, 4096), 2.0, 9) == STEPS_TO_NAME
    assert set(watch.slow) == {0}
    # Nor is that taken back while it lasts.
    named = watched(watch, peers + 1, number, (512, 4096), 2.0, 1000)
    assert named is None or set(watch.slow) == {0}


@pytest.mark.parametrize("peers", [1, 3])
@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize(
    ("seen", "slow", "typical", "most"),
    # A job whose lengths are known names as soon as one of equal lengths, or a little later.
    [(0, 2.0, 7, 12), (20, 2.0, STEPS_TO_NAME, 12), (100, 1.5, STEPS_TO_NAME, 12)],
)
def test_who_is_slow_among_varying_lengths_is_named_soon(
    seen: int, slow: float, typical: int, most: int, number: int, peers: int
) -> None:
    found = []
    for seed in range(11):
        watch = SlowWatch()
        assert watched(watch, peers + 1, number, (512, 4096), 1.0, seen, seed=seed) is None
        found.append(watched(watch, peers + 1, number, (512, 4096), slow, most, seed=99 + seed))
        assert found[-1] is not None and set(watch.slow) == {0}
    assert median(filter(None, found)) <= typical


def test_what_all_take_longer_names_nobody() -> None:
    """Hosts that grow hot together; the curve is that of faster steps."""
    watch = SlowWatch()
    assert watched(watch, 4, 1, (512, 4096), 1.0, 100) is None
    dice = random.Random(5)
    for _ in range(100):
        told = {slot: passes(dice, 1, lengths=(512, 4096), slow=2.0) for slot in range(4)}
        paces = {slot: pace for slot, (pace, _) in told.items()}
        assert not watch.step(paces, [(0, 1, 2, 3)], {s: n for s, (_, n) in told.items()})


@pytest.mark.parametrize("peers", [1, 3])
@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_where_lengths_are_equal_it_is_named_as_soon_however_few_they_are(
    number: int, peers: int
) -> None:
    assert watched(SlowWatch(), peers + 1, number, (2048, 2048), 1.0, 1000) is None
    assert watched(SlowWatch(), peers + 1, number, (2048, 2048), 1.5, 9) == STEPS_TO_NAME


def test_whoever_was_told_takes_back_when_the_others_do() -> None:
    """A worker that came later has not seen how often another was named."""
    old, new = SlowWatch(), SlowWatch()
    for _ in range(3):
        for pace in ({**LEVEL, 2: 2e-6}, LEVEL):
            while not old.step(pace, STAGES):
                pass
    assert not old.slow
    new.restart(old.told())
    seen = []
    for pace in ({**LEVEL, 2: 2e-6}, LEVEL):
        changes = [(old.step(pace, STAGES), new.step(pace, STAGES)) for _ in range(40)]
        assert all(mine == theirs for mine, theirs in changes)
        seen.append(1 + changes.index((True, True)))
    assert seen == [STEPS_TO_NAME, 8 * STEPS_TO_NAME]
    assert slowness_told(old.told()) == {}
