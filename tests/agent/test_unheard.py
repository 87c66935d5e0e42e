"""Nodes that are not heard are told once each way, in the events and in the log."""

from pathlib import Path

import pytest

from elaswave_plugin.agent.peers.unheard import Silence, Unheard
from elaswave_plugin.tracking.events import EventLog, read_lines


def test_a_silence_is_told_when_it_begins_and_when_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [100.0]
    with EventLog(tmp_path / "events.jsonl") as events:
        unheard = Unheard(0, events=events, clock=lambda: now_s[0])
        unheard.look({2: 4.9, 3: 0.0, 4: 0.0})
        assert unheard.silences == ()
        unheard.look({2: 5.5, 3: 5.6, 4: 0.0})
        unheard.look({2: 6.0, 3: 6.1, 4: 0.0})
        assert unheard.silences == (Silence(2, 94.5), Silence(3, 94.4))
        now_s[0] = 140.0
        unheard.look({2: 0.1, 4: 0.0})
        assert unheard.silences == ()
    told = [
        (one["kind"], one["node"], one["peer"], round(one["seconds"], 1))
        for one in read_lines(tmp_path / "events.jsonl")
    ]
    # The third had gone meanwhile: nothing is known of the network to it.
    assert told == [("unheard", 0, 2, 5.5), ("unheard", 0, 3, 5.6), ("heard_again", 0, 2, 45.5)]
    captured = capsys.readouterr()
    lines = captured.err.splitlines() + captured.out.splitlines()
    assert [line.split(": ", 1)[-1] for line in lines] == [
        "node 0: nothing of node 2 is heard here for 5.5 s",
        "node 0: nothing of node 3 is heard here for 5.6 s",
        "node 0: node 2 is heard here again after 45.5 s",
    ]
