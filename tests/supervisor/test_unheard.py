"""Supervisors that are not heard are told once each way, by slot, and to the log once a node."""

from pathlib import Path

import pytest

from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.supervisor.peers.unheard import Silence, Unheard
from elaswave_plugin.tracking.events import EventLog, read_lines


def peer(slot: int, node: int) -> Peer:
    return Peer(slot=slot, node=node, pid=1, control=f"10.0.0.{node}:1", data="", machine="")


def test_a_silence_is_told_when_it_begins_and_when_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [100.0]
    far, beside, other = peer(2, 1), peer(3, 1), peer(4, 2)
    with EventLog(tmp_path / "events.jsonl") as events:
        unheard = Unheard(0, events=events, clock=lambda: now_s[0])
        unheard.look({far: 4.9, beside: 0.0, other: 0.0}, speaks=True)
        assert unheard.silences == ()
        unheard.look({far: 5.5, beside: 5.6, other: 0.0}, speaks=True)
        unheard.look({far: 6.0, beside: 6.1, other: 0.0}, speaks=True)
        assert unheard.silences == (Silence(2, 94.5), Silence(3, 94.4))
        now_s[0] = 140.0
        unheard.look({far: 0.1, other: 0.0}, speaks=True)
        assert unheard.silences == ()
    told = [
        (one["kind"], one["slot"], one["peer"], round(one["seconds"], 1))
        for one in read_lines(tmp_path / "events.jsonl")
    ]
    # The fourth had left meanwhile: nothing is known of the network to it.
    assert told == [("unheard", 0, 2, 5.5), ("unheard", 0, 3, 5.6), ("heard_again", 0, 2, 45.5)]
    lines = capsys.readouterr().err.splitlines() + capsys.readouterr().out.splitlines()
    assert [line.split(": ", 2)[-1] for line in lines] == [
        "nothing of node 1 is heard here for 5.5 s (worker 2, 10.0.0.1:1)",
        "node 1 is heard here again after 45.5 s (worker 2, 10.0.0.1:1)",
    ]


def test_only_the_speaker_of_a_node_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:
        Unheard(1, events=events).look({peer(2, 1): 5.5}, speaks=False)
    assert [one["kind"] for one in read_lines(tmp_path / "events.jsonl")] == ["unheard"]
    captured = capsys.readouterr()
    assert not captured.out and not captured.err
