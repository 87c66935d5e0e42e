"""Networks that lose single flows: two nodes may hear different other nodes."""

import random

import pytest

from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.testing import Cluster
from tests.core.test_agreement_random import (
    exit_who_is_over,
    let_somebody_come,
    lose_who_is_silent,
    works,
)
from tests.sample import sampled

NODES = (
    (0, 1, 2, 2),
    (2, 1, 0, 0),
    (0, 1, 1, 2, 2),
    (0, 0, 1, 1, 2, 2),
    (0, 0, 1, 1, 2, 2, 3, 3),
    (0, 1, 1, 2, 3, 3, 4),
    (3, 0, 0, 0, 1, 1, 2),
)
MOST = 20_000


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("link", [(0, 1), (0, 3)])
def test_a_broken_link_costs_one_worker(seed: int, link: tuple[int, int]) -> None:
    """A would-be leader does not get the agents that still hear the leader."""
    dice = random.Random(seed)
    cluster = sealed_job((0, 1, 2, 3, 4))
    cluster.act(f"sunder {' '.join(map(str, link))}")
    come_to_rest(cluster, dice)
    assert working(cluster) == set(range(5)) - {link[1]}
    check(cluster)


@pytest.mark.parametrize("seed", range(200))
def test_while_links_break_one_by_one_a_part_that_may_go_on_does(seed: int) -> None:
    """The members of the two parts hear each other for a while yet, whatever they decide."""
    dice = random.Random(seed)
    cluster = sealed_job((0, 0, 1, 1, 2, 3, 3, 4))
    links = [(a, b) for a in (0, 1, 4) for b in (2, 3)]
    for a, b in dice.sample(links, len(links)):
        cluster.act(f"sunder {a} {b}")
        cluster.run(dice, most=dice.randrange(6))
        for quiet in dice.sample(cluster.seated, len(cluster.seated)):
            if dice.random() < 0.3:
                cluster.act(f"quiesce {quiet}")
    come_to_rest(cluster, dice)
    assert working(cluster)
    check(cluster)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("within", ["step", "recovery", "departure", "join"])
@pytest.mark.parametrize("pair", [(0, 2), (2, 3)])
def test_parted_from_the_leader_one_is_lost_and_two_others_meet_again(
    seed: int, within: str, pair: tuple[int, int]
) -> None:
    """As tests/faults/test_parted.py has it with packets, in any order of what is said and heard.

    Of two others that stay apart `core/agreement/hang.py` gives one up (tests/core/test_hang.py).
    """
    dice = random.Random(seed)
    cluster = sealed_job((0, 1, 2, 3))
    if within in ("recovery", "join"):
        cluster.act("exit 1 SIGKILL")
    if within == "departure":
        cluster.act("notice 1")
    if within == "join":
        come_to_rest(cluster, dice)
        cluster.act("respawn 1")
        pair = (1, pair[0])
    cluster.run(dice, most=dice.randrange(25))
    for quiet in dice.sample(cluster.seated, dice.randrange(len(cluster.seated) + 1)):
        cluster.act(f"quiesce {quiet}")
        cluster.run(dice, most=dice.randrange(5))
    cluster.act(f"sunder {pair[0]} {pair[1]}")
    # Who takes part hears nothing of the other in a collective, and says so.
    for end in dice.sample(pair, len(pair)):
        cluster.run(dice, most=dice.randrange(5))
        if end in working(cluster) and cluster.commits[end]:
            cluster.act(f"sever {end}")
    come_to_rest(cluster, dice)
    check(cluster)
    gone = {1} if within in ("recovery", "departure") else set()
    parted = {*pair} - {0} if 0 in pair else set()
    assert {0, 1, 2, 3} - working(cluster) == gone | parted


@pytest.mark.parametrize("seed", sampled(range(1500)))
def test_no_cut_of_flows_makes_two_parts_go_on(seed: int) -> None:
    """One view an epoch, one path, and in the end one part at most that works."""
    check(torn_run(random.Random(seed)))


@pytest.mark.parametrize("seed", sampled(range(500)))
def test_no_cut_of_flows_makes_newcomers_go_on_apart(seed: int) -> None:
    """The same, while other nodes take the places of lost ones."""
    check(torn_run(random.Random(seed), newcomers=True))


@pytest.mark.parametrize("seed", sampled(range(500)))
def test_no_cut_of_flows_and_death_of_agents_makes_two_parts_go_on(seed: int) -> None:
    """The same, while agents die and their next lives begin."""
    check(torn_run(random.Random(seed), newcomers=seed % 2 == 0, restarts=True))


def test_jobs_outlive_cuts() -> None:
    """The runs above are about something: in most of them a part of the job goes on."""
    runs = [torn_run(random.Random(seed)) for seed in range(200)]
    assert sum(bool(working(run)) for run in runs) >= 50
    assert sum(bool(run.ends and working(run)) for run in runs) >= 50


def sealed_job(nodes: tuple[int, ...]) -> Cluster:
    """A job that a loss does not end any more."""
    cluster = Cluster(nodes, Timeouts(quiesce_timeout_s=1e9, join_timeout_s=1e9))
    cluster.verbose = False
    cluster.do("start")
    cluster.do("quiesce all")
    cluster.do("seal all")
    return cluster


def torn_run(dice: random.Random, *, newcomers: bool = False, restarts: bool = False) -> Cluster:
    cluster = sealed_job(dice.choice(NODES))
    for turn in range(dice.randrange(1, 6)):
        if not cluster.alive:
            break
        what = dice.random()
        if what < 0.6:
            tear(cluster, dice)
        elif what < 0.8:
            slot = dice.choice(cluster.seated or [0])
            if slot in cluster.trainers:
                cluster.act(f"exit {slot} SIGKILL")
        elif restarts and dice.random() < 0.7:
            cluster.act(f"restart {dice.choice(sorted(cluster.alive))}")
        elif len(cluster.alive) > 1:
            cluster.act(f"kill {dice.choice(sorted(cluster.alive))}")
        if newcomers and cluster.alive:
            let_somebody_come(cluster, dice, fresh_node=10 + turn)
        for slot in sorted(cluster.new & set(cluster.seated)):
            if dice.random() < 0.5:
                cluster.act(f"ready {slot}")
        for _ in range(dice.randrange(4)):
            cluster.run(dice, most=dice.randrange(12))
            for quiet in dice.sample(cluster.seated, len(cluster.seated)):
                if dice.random() < 0.5:
                    cluster.act(f"quiesce {quiet}")
            if dice.random() < 0.5:
                exit_who_is_over(cluster)
            if dice.random() < 0.3:
                cluster.act(f"tick {dice.choice((0.5, 1.5))}")
    come_to_rest(cluster, dice)
    return cluster


def come_to_rest(cluster: Cluster, dice: random.Random) -> None:
    """Let everything that is said or waited for come to its end."""
    for _ in range(30):
        cluster.run(dice, most=MOST)
        cluster.give_up_asking()
        cluster.run(dice, most=MOST)
        assert not cluster.order, "they talk without end"
        cluster.act("quiesce all")
        cluster.run(dice, most=MOST)
        built = sorted(cluster.new & set(cluster.seated))
        cluster.act(f"ready {' '.join(map(str, built))}")
        for one in dice.sample(cluster.seated, len(cluster.seated)):
            cluster.act(f"step {one}")
        cluster.run(dice, most=MOST)
        exit_who_is_over(cluster)
        lose_who_is_silent(cluster)
        cluster.act("tick 3")


def tear(cluster: Cluster, dice: random.Random) -> None:
    """Cut each flow between two nodes, or all between two groups of them."""
    nodes = sorted(cluster.alive)
    pairs = [(a, b) for a in nodes for b in nodes if a < b]
    pairs = [pair for pair in pairs if pair not in cluster.cut]
    if dice.random() < 0.5:
        share = dice.choice((0.1, 0.3, 0.5))
        torn = [pair for pair in pairs if dice.random() < share]
    else:
        side = {node for node in nodes if dice.random() < 0.5}
        torn = [(a, b) for a, b in pairs if (a in side) != (b in side)]
    cluster.act(f"sunder {' '.join(str(node) for pair in torn for node in pair)}")


def working(cluster: Cluster) -> set[int]:
    """The workers whose job goes on, as far as their agents know."""
    return {slot for slot in cluster.seated if slot in cluster.trainers and works(cluster, slot)}


def check(cluster: Cluster) -> None:
    decided = sorted(cluster.decided)
    for path in cluster.commits.values():
        if not path:
            continue  # it came later, and was not let in yet
        epochs = [view.epoch for view in path]
        # Nobody passes over a view that somebody else was told of.
        assert epochs == [epoch for epoch in decided if epoch <= epochs[-1]], (epochs, decided)
    finals = {cluster.commits[slot][-1] for slot in working(cluster)}
    assert len(finals) <= 1
    for view in finals:
        assert sorted(view.ranks) == sorted(working(cluster))
        assert view.epoch == decided[-1]
    assert not cluster.open.keys() & working(cluster)
    # Else the leader's time runs out, and all wait for ever (`Coordinator._beat`).
    assert all(cluster.alive[cluster.home[slot]].follows for slot in working(cluster))
