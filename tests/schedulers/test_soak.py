"""A few minutes of the soak: losses by a seed, which the shipped array job survives."""

from argparse import Namespace
from pathlib import Path

import pytest

from tests.proofs import Kind, Promise, proves
from tests.schedulers.soak import soak
from tests.schedulers.soak_watch import Watch, grows

# With it the first loss is that of node 0, which leads; some others follow.
SEED = 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@proves(Kind.NODE_RETURN, Promise.EQUAL)
def test_four_minutes_of_losses_by_a_seed(tmp_path: Path) -> None:
    result = soak(Namespace(minutes=4.0, seed=SEED, pace_s=0.25), tmp_path)
    assert not result["failures"], result["failures"]
    assert result["rows"][0]["kind"] == "node" and result["rows"][0]["is_leader"]
    assert result["returns"] == result["losses"]


@pytest.mark.parametrize(
    ("mib", "fds", "minutes", "is_seen"),
    [(106, 30, 20, True), (104, 30, 20, False), (100, 34, 20, True), (106, 34, 9, False)],
)
def test_growth_is_seen(mib: int, fds: int, minutes: float, is_seen: bool, tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    for number in range(101):
        late = number > 60
        figures = {"rss_mib": mib if late else 100, "fds": fds if late else 30}
        who = {"role": "agent", "pid": 1, "started_s": 0.0}
        watch.samples.append({"time_s": 0.6 * minutes * number, **who, **figures})
    assert any(map(grows, watch.growth())) == is_seen
