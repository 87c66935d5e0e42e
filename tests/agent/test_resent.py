"""An agent has twice the time where packets to it are lost and its machine answers."""

import pytest

from elaswave_plugin.agent.peers.unheard import Resent
from elaswave_plugin.ipc.silence import Answers


@pytest.mark.parametrize(
    ("silent_s", "sent_again", "after_s", "limit_s"),
    [
        pytest.param(0.3, 5, 0.5, 6.0, id="lossy"),
        pytest.param(0.3, 5, 2.9, 6.0, id="lossy a while ago"),
        pytest.param(0.3, 5, 3.1, 3.0, id="lossy long ago"),
        pytest.param(0.3, 4, 0.5, 3.0, id="stopped, on a good network"),
        pytest.param(1.6, 5, 0.5, 3.0, id="gone"),
    ],
)
def test_the_limit(silent_s: float, sent_again: int, after_s: float, limit_s: float) -> None:
    resent = Resent(3.0)
    # What was sent again before the first look says nothing.
    assert resent.limit_s(2, Answers(0.1, 4), now_s=9.5) == 3.0
    resent.limit_s(2, Answers(0.1, sent_again), now_s=10.0)
    now_s = 10.0 + after_s
    assert resent.limit_s(2, Answers(silent_s, sent_again), now_s=now_s) == limit_s


def test_another_connection_begins_again() -> None:
    resent = Resent(3.0)
    resent.limit_s(2, Answers(0.1, 4), now_s=9.5)
    resent.forget(2)
    assert resent.limit_s(2, Answers(0.1, 9), now_s=10.0) == 3.0
