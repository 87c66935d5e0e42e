"""A worker that is given up for its silence has no lease by then, with any network."""

import random

from elaswave_plugin.core.agreement.lease import Lease

LASTS_S, EVERY_S = 3.0, 0.5


class Agent:
    """One of some, whose clock is off by its own amount."""

    def __init__(self, node: int, off_s: float) -> None:
        self.node = node
        self.off_s = off_s
        self.lease = Lease(lasts_s=LASTS_S)
        self.heard: dict[int, tuple[int, float]] = {}
        self.heard_s: dict[int, float] = {}
        self.frozen_until_s = 0.0

    def holds(self, now_s: float) -> bool:
        return now_s + self.off_s < self.lease.until_s


def check_one(seed: int, *, faults: bool = True) -> tuple[int, int]:
    """A leader and others that beat, are cut off and stand still.

    How often one of the others held it, and how often one had to be without.
    """
    dice = random.Random(seed)
    count = dice.choice((3, 4, 5))
    all_of = [Agent(node, dice.uniform(100.0, 900.0)) for node in range(count)]
    wires: list[tuple[float, int, int, int, int, float]] = []
    cut: set[int] = set()
    held, without = 0, 0
    for tick in range(400):
        now_s = tick * 0.1
        if faults and dice.random() < 0.02:
            cut ^= {dice.randrange(count)}
        if faults and dice.random() < 0.02:
            all_of[dice.randrange(count)].frozen_until_s = now_s + dice.uniform(0.5, 8.0)
        for one in all_of:
            if now_s < one.frozen_until_s:
                continue
            local_s = now_s + one.off_s
            due = sorted(w for w in wires if w[0] <= now_s and w[2] == one.node)
            for arrives, sender, to, number, echo, left_s in due:
                wires.remove((arrives, sender, to, number, echo, left_s))
                if cut & {sender, to}:
                    continue
                one.heard[sender] = number, local_s
                one.heard_s[sender] = now_s
                if sender == 0:
                    one.lease.granted(echo, left_s=left_s, now_s=local_s)
                else:
                    one.lease.acknowledged(sender, echo, now_s=local_s)
            if tick % 5 == one.node % 5:
                if one.node == 0:
                    one.lease.lead(own=0, voters=range(count), now_s=local_s)
                number = one.lease.send(now_s=local_s)
                for to in range(1, count) if one.node == 0 else (0,):
                    echo, at_s = one.heard.get(to, (0, local_s))
                    delay_s = dice.choice((0.0, 0.1, 0.3, 2.0) if faults else (0.0, 0.1))
                    left_s = one.lease.left_s(at_s)
                    wires.append((now_s + delay_s, one.node, to, number, echo, left_s))
        # Most of the others have not heard of the leader for so long: they may choose another.
        silent = [now_s - one.heard_s.get(0, 0.0) > LASTS_S for one in all_of[1:]]
        if 2 * sum(silent) > count:
            without += 1
            assert not all_of[0].holds(now_s), (seed, now_s)
        for one in all_of[1:]:
            held += one.holds(now_s)
            if now_s - all_of[0].heard_s.get(one.node, 0.0) > LASTS_S:
                without += 1
                assert not one.holds(now_s), (seed, now_s, one.node)
    return held, without


def test_nobody_who_may_have_been_given_up_holds_a_lease() -> None:
    outcomes = [check_one(seed) for seed in range(60)]
    assert sum(held for held, _ in outcomes) > 60 * 200
    assert sum(without for _, without in outcomes) > 60 * 200


def test_whoever_is_heard_holds_it_all_the_time() -> None:
    for seed in range(10):
        count = random.Random(seed).choice((3, 4, 5))
        held, without = check_one(seed, faults=False)
        # But for the first beats, which nobody can have answered.
        assert held >= (400 - 20) * (count - 1) and without == 0
