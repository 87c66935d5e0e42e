"""A slow worker is named within eight steps, and nobody is where all are as slow."""

import itertools
import random
from pathlib import Path
from statistics import median

import pytest

from elaswave_plugin.core.planner.layer_times import FORWARD, LAYER, PassTimes
from elaswave_plugin.core.planner.payback import Payback
from elaswave_plugin.core.planner.slow import (
    LONGEST,
    SHORTEST,
    SlowWatch,
    reason_of_view,
    slowness_of,
)
from tests.sample import sampled

STAGES = [(0, 1, 2, 3), (4, 5, 6, 7)]
LEVEL = dict.fromkeys(range(8), 1e-6)


def test_named_in_eight_steps_and_in_golden_words() -> None:
    watch = SlowWatch()
    slow = {**LEVEL, 6: 1.3e-6}
    assert [watch.step(slow, STAGES) for _ in range(10)] == [False] * 7 + [True] + [False] * 2
    assert SHORTEST == 8
    assert {slot: str(one) for slot, one in watch.slow.items()} == {
        6: "takes 1.30x as long for a layer as workers 4, 5, 7, which have the same ones, in 8"
        " steps"
    }


def test_one_peer_is_enough_and_none_is_not() -> None:
    watch = SlowWatch()
    for _ in range(SHORTEST):
        watch.step({0: 2.0, 1: 1.0, 4: 9.0}, STAGES)
    assert list(watch.slow) == [0]
    assert str(watch.slow[0]).startswith("takes 2.00x as long for a layer as worker 1, which has ")


def test_stages_are_not_compared_with_each_other() -> None:
    watch = SlowWatch()
    for _ in range(10):
        assert not watch.step({slot: 1.0 if slot < 4 else 5.0 for slot in range(8)}, STAGES)


def test_a_worker_that_is_slow_every_other_step_is_not_named() -> None:
    watch = SlowWatch()
    for number in range(64):
        assert not watch.step({**LEVEL, 2: 9e-6 if number % 2 else 1e-6}, STAGES)


def test_it_is_taken_back_when_the_worker_is_level_again() -> None:
    watch = SlowWatch()
    for _ in range(SHORTEST):
        watch.step({**LEVEL, 2: 2e-6}, STAGES)
    for _ in range(2 * LONGEST):
        watch.step({**LEVEL, 2: 1.2e-6}, STAGES)
    assert list(watch.slow) == [2]
    changes = [watch.step(LEVEL, STAGES) for _ in range(LONGEST)]
    assert changes.index(True) == LONGEST // 2 and not watch.slow


def test_a_new_view_begins_with_what_one_worker_has_told() -> None:
    watch, other = SlowWatch(), SlowWatch()
    for _ in range(SHORTEST):
        watch.step({**LEVEL, 2: 2e-6}, STAGES)
    for _ in range(SHORTEST - 2):
        watch.step({**LEVEL, 2: 2e-6, 5: 2e-6}, STAGES)
    told = watch.reports()
    for one in (watch, other):
        one.restart(told)
        assert one.slowness == slowness_of(told) == {2: 2.0}
        assert str(one.slow[2]).startswith("takes 2.00x as long for a layer as workers 0, 1, 3, ")
        # The evidence against worker 5 begins anew.
        slow = {**LEVEL, 2: 2e-6, 5: 2e-6}
        assert not any(one.step(slow, STAGES) for _ in range(SHORTEST - 1))
        assert one.step(slow, STAGES)
    assert watch.slow == other.slow


def test_it_is_named_anew_where_it_is_much_slower_or_faster() -> None:
    watch = SlowWatch()
    for pace, slowness in ((1.5, 1.5), (1.9, 1.5), (3.0, 3.0), (2.5, 3.0), (1.25, 1.2)):
        for _ in range(LONGEST):
            watch.step({**LEVEL, 2: pace * 1e-6}, STAGES)
        assert watch.slowness == {2: slowness}


def test_three_of_four_steps_are_as_slow_as_is_said() -> None:
    watch = SlowWatch()
    for pace in (9.0, 1.32, 1.44, 7.0, 3.0, 3.0, 3.0, 3.0):
        watch.step({**LEVEL, 2: pace * 1e-6}, STAGES)
    assert watch.slowness == {2: 1.4}
    assert reason_of_view(watch.slow) == "less work for what is slow: worker 2 (1.4x)"
    assert reason_of_view({}) == "no worker is slow any more: none gets less to do"


def test_never_more_than_half_of_those_with_the_same_layers() -> None:
    """As those that grew slow in turn, until nobody was left whom they were slower than."""
    watch = SlowWatch()
    for slow in range(8):
        for _ in range(LONGEST):
            watch.step({**LEVEL, slow: 9e-6}, STAGES)
            for stage in STAGES:
                assert 2 * len(watch.slow.keys() & set(stage)) <= len(stage)
    for number in range(1, 4):
        watch = SlowWatch()
        for _ in range(SHORTEST):
            watch.step({slot: 9.0 if slot < number else 1.0 for slot in range(4)}, STAGES)
        assert len(watch.slow) == {1: 1, 2: 2, 3: 0}[number]


def busy_steps() -> list[dict[int, float]]:
    """The paces of six workers on two cores, as recorded; all alike but for the noise."""
    text = Path(__file__).with_name("busy_paces.txt").read_text()
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return [dict(enumerate(map(float, line))) for line in lines]


def test_a_busy_machine_makes_nobody_slow() -> None:
    watch, named = SlowWatch(), 0
    for paces in busy_steps():
        before = set(watch.slow)
        watch.step(paces, [tuple(range(6))])
        named += len(watch.slow.keys() - before)
        assert len(watch.slow) <= 1
    assert named <= 1


@pytest.mark.parametrize("busy", [True, False])
def test_who_takes_three_times_as_long_is_named_on_a_busy_machine_as_well(busy: bool) -> None:
    """Within eight steps, and within fifty where the noise is ten times what is to be found."""
    steps, took, dice = busy_steps(), [], random.Random(3)
    if not busy:
        steps = [{slot: dice.gauss(1, 0.05) for slot in range(6)} for _ in steps]
    for begins in range(40, len(steps) - 100, 50):
        slow, watch = dice.randrange(6), SlowWatch()
        for paces in steps[begins - 40 : begins]:
            watch.step(paces, [tuple(range(6))])
        for number, paces in enumerate(steps[begins : begins + 60], start=1):
            watch.step({**paces, slow: 3 * paces[slow]}, [tuple(range(6))])
            if slow in watch.slow:
                took.append(number)
                break
        else:
            raise AssertionError(f"worker {slow} is not named after step {begins}")
    print(f"named after {median(took)} steps, at most {max(took)}")
    assert max(took) <= (50 if busy else 8)


def views_of(steps: list[dict[int, float]]) -> list[int]:
    """The steps before which views are asked for that deal work anew."""
    watch, payback, gain, asked = SlowWatch(), Payback(), 0.0, []
    for step, paces in enumerate(steps):
        payback.note(step_s=0.3)
        if watch.step(paces, [tuple(range(6))]):
            gain = 0.3
        if payback.pays(gain=gain, step=step):
            payback.ask(step=step)
            watch.restart(watch.reports())
            payback.restart(payback.asked)
            gain = 0.0
            asked.append(step)
    return asked


def test_shares_do_not_go_back_and_forth() -> None:
    assert len(views_of(busy_steps())) <= 2
    # A worker that is slow and level in turn, so that each time there is something to gain.
    restless = [
        {slot: 5.0 if slot == 1 and step // 70 % 2 else 1.0 for slot in range(6)}
        for step in range(4000)
    ]
    asked = views_of(restless)
    print(f"before steps {asked}")
    assert len(asked) >= 5 and all(
        sum(first <= step < first + 1000 for step in asked) <= 5 for first in asked
    )


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
    for _ in range(SHORTEST):
        watch.step({slot: pace() * (2 if slot == 3 else 1) for slot in range(8)}, STAGES)
    assert set(watch.slow) == {3}


def passes(
    dice: random.Random, number: int, *, lengths: tuple[int, int], slow: float = 1.0
) -> tuple[float, int]:
    """Return what a worker tells of a step of ``number`` micro-batches, with 3 % of noise."""
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
@pytest.mark.parametrize(("number", "peers"), sampled(itertools.product((1, 2, 4, 8), (1, 3))))
def test_no_false_alarm_however_few_micro_batches_of_varying_lengths(
    number: int, peers: int
) -> None:
    watch = SlowWatch()
    assert watched(watch, peers + 1, number, (512, 4096), 1.0, 3000) is None
    # Control: it is not deaf to one that is twice as slow.
    assert watched(watch, peers + 1, number, (512, 4096), 2.0, 16) in range(SHORTEST - 2, 14)
    assert set(watch.slow) == {0}
    # Nor is that taken back while it lasts.
    named = watched(watch, peers + 1, number, (512, 4096), 2.0, 1000)
    assert named is None or set(watch.slow) == {0}


@pytest.mark.parametrize("peers", [1, 3])
@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize(
    ("seen", "slow", "typical", "most"),
    # A job whose lengths are known names as soon as one of equal lengths, or a little later.
    sampled([(0, 2.0, 12, 24), (20, 2.0, SHORTEST, 16), (100, 1.5, SHORTEST, LONGEST)]),
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
    assert watched(SlowWatch(), peers + 1, number, (2048, 2048), 1.5, 9) in (SHORTEST - 1, SHORTEST)
