"""The page of `elaswave status`: how it is drawn, and how the answers of agents are merged."""

import io
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from elaswave_plugin.agent.agent import Agent
from elaswave_plugin.agent.peers.unheard import Silence
from elaswave_plugin.agent.trainer_session import StatusBoard
from elaswave_plugin.cli.status import merge
from elaswave_plugin.cli.status_screen import draw_nodes, draw_status, draw_workers
from elaswave_plugin.core.agreement.hang import OUTSIDE, Sample
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.life import Life, Process, Stage
from elaswave_plugin.core.agreement.messages import Ballot, Ring
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import first_view
from elaswave_plugin.core.codec import to_json
from elaswave_plugin.core.layout.reserve import NOWHERE

Record = dict[str, Any]


def column(status: Record, name: str) -> list[Any]:
    return [worker[name] for worker in status["workers"]]


def drawn(status: Record) -> str:
    screen = io.StringIO()
    Console(width=160, file=screen).print(draw_status(status))
    return screen.getvalue()


def test_all_columns_fit_a_terminal_of_80(tmp_path: Path) -> None:
    held = [{"slot": slot, "epoch": 3, "step": 1232} for slot in (1, 2)]
    worker = {
        **{"slot": 12, "incarnation": 1, "rank": 0, "node": 0, "suspicion": None},
        **{"trainer_pid": 1234567, "agent_pid": 1234500, "phase": "between steps"},
        **{"step": 1234, "waits_for": 2, "stalled_s": 10.5},
        "snapshot": {"epoch": 3, "step": 1233, "bytes": 123456789, "held_by": held},
    }
    screen = io.StringIO()
    Console(width=80, file=screen).print(draw_workers([worker]))
    text = screen.getvalue()
    wanted = ("12.1", "1234567", "between", "1234", "2, 10.5 s", "1233 (view 3)")
    assert all(word in text for word in (*wanted, "(1232)", "117.74")), text


def test_each_node_is_a_row_with_its_agent_and_how_many_it_had() -> None:
    leads = {
        **{"node": 0, "host": "tor1", "address": "10.0.0.1:4001", "pid": 71, "life": 2},
        **{"slots": [0, 1, 2, 9], "leads": True, "silent": None},
    }
    silent = {
        **{"node": 3, "host": None, "address": "10.0.0.3:4001", "pid": None, "life": None},
        **{"slots": [3], "leads": False, "silent": "timed out"},
    }
    screen = io.StringIO()
    Console(width=80, file=screen).print(draw_nodes([leads, silent]))
    *_, first, second = [line.split() for line in screen.getvalue().splitlines() if line.strip()]
    assert first == ["0", "tor1", "71", "3", "0-2,", "9", "leads"]
    assert second == ["3", "10.0.0.3", "-", "-", "3", "timed", "out"]


def answer(node: int, **more: Any) -> Record:
    """Return what the agent of one of three nodes answers; `more`: of it, or of its worker."""
    worker: Record = {
        **{"slot": node, "trainer_pid": 200 + node, "incarnation": 0, "phase": "training"},
        **{"progress": None, "proposal": None, "layout": None, "slow": [], "late_in": None},
        "exited": None,
    }
    worker |= {key: more.pop(key) for key in [*worker] if key in more}
    return {
        "t": "status",
        "node": node,
        "host": f"host{node}",
        "pid": 100 + node,
        "life": 0,
        "leader": 0,
        "workers": [{**worker, "views": []}],
        "view": to_json(first_view((0, 1, 2))),
        "views": [],
        "lost": [],
        "unheard": [],
        "vacant": [],
        "nodes": [0, 1, 2],
        "addresses": {str(node): f"h:{node}" for node in range(3)},
        "snapshots": [],
        "standby_places": 0,
        **more,
    }


def agreement(*nodes: int) -> Agreement:
    """The part of node 0, of a job with these nodes of slots."""
    made = Agreement(node=0, nodes=nodes, timeouts=Timeouts())
    made.addresses = {node: f"h:{node}" for node in {*nodes} - {NOWHERE}}
    return made


def trainer_of(slot: int, *, stage: Stage = Stage.TRAINING, slow: Any = ()) -> Any:
    """A trainer as its agent knows it."""
    life, told = Life(incarnation=0, stage=stage), {"slow": slow, "layout": None, "late_in": None}
    return SimpleNamespace(slot=slot, pid=200 + slot, life=life, **told)


def answered(part: Agreement, *boards: StatusBoard) -> Record:
    """The answers of an agent, with these boards of its workers."""

    def status(slot: int, now_s: float) -> Record:
        return boards[slot].report(trainer_of(slot), None, now_s=now_s)

    seats = {slot: SimpleNamespace(status=partial(status, slot)) for slot in range(len(boards))}
    agent = SimpleNamespace(
        _agreement=part,
        _life=0,
        _seats=seats,
        _common=SimpleNamespace(store=SimpleNamespace(inventory=lambda address: [])),
        _server=SimpleNamespace(address="h:0"),
        _coordinator=SimpleNamespace(unheard=SimpleNamespace(silences=(Silence(2, 1.5),))),
        _standby=SimpleNamespace(waiting=0),
    )
    told = Agent._answer_status(cast("Agent", agent), {"t": "status"})
    read: Record = json.loads(json.dumps(told))
    return read


def ring(epoch: int, **more: Any) -> Ring:
    return Ring(ballot=Ballot(term=0, leader=0, epoch=epoch), reason="r", within_s=1.0, **more)


def sealed(owner: int, step: int, epoch: int, holder: int) -> Record:
    return {"owner": owner, "step": step, "epoch": epoch, "length": 10, "holder": holder}


def test_the_newest_view_holds_and_its_losses() -> None:
    new = {**to_json(first_view((0, 1, 2))), "epoch": 3, "ranks": [2, 1], "reason": "so"}
    shut_out = answer(0, lost=[{"slot": 1, "evidence": "its connection closed"}])
    rest = [answer(s, view=new, lost=[{"slot": 0, "evidence": "silent"}]) for s in (1, 2)]
    status = merge([shut_out, *rest], silent={}, now_s=5.0)
    assert status["view"]["epoch"] == 3 and column(status, "rank") == [None, 1, 0]
    assert column(status, "suspicion") == ["silent", None, None]
    assert column(status, "phase") == ["gone", "training", "training"]


def test_the_reserve_is_room_and_no_loss() -> None:
    part = agreement(0, 1, NOWHERE)
    part.lost(1, "its connection closed")
    told = answered(part, StatusBoard())
    assert [one["slot"] for one in told["lost"]] == [1] and told["vacant"] == [2]
    status = merge([told], silent={}, now_s=5.0)
    assert column(status, "slot") == [0, 1] and "; 1 more may join" in drawn(status)
    assert column(status, "suspicion") == [None, "its connection closed"]


def test_the_leader_has_the_evidence() -> None:
    said = [{"slot": 0, "evidence": words} for words in ("declared lost", "its connection closed")]
    answers = [answer(2, lost=[said[0]]), answer(1, lost=[said[1]])]
    assert column(merge(answers, silent={}, now_s=5.0), "suspicion")[0] == said[1]["evidence"]


def sample(slot: int, **more: Any) -> Record:
    usual: dict[str, Any] = {"phase": "backward", "stalled_s": 4.0, "limit_s": 2.0}
    where = {"slot": slot, "incarnation": 0, "epoch": 1, "step": 7, "operations": 3}
    return to_json(Sample(**where, **{**usual, **more}))


def test_a_worker_without_progress_is_suspected_with_who_waits_for_it() -> None:
    pages = [sample(0, waits_for=1), sample(1), sample(2, stalled_s=0.0)]
    status = merge([answer(s, progress=pages[s]) for s in range(3)], silent={}, now_s=5.0)
    evidence = (
        "no progress for 4.0 s in backward of step 7 (limit 2 s with a recovery);"
        " worker 0 waits for it"
    )
    assert column(status, "suspicion") == [None, evidence, None]
    assert column(status, "phase") == ["backward"] * 3 and column(status, "step") == [7] * 3
    assert column(status, "waits_for") == [1, None, None]
    assert "1, 4.0 s" in drawn(status)


def test_a_slow_worker_is_suspected_unless_something_is_worse() -> None:
    slow = ((1, "takes 1.60x as long"), (2, "takes 9.00x as long"))
    told = StatusBoard().report(trainer_of(0, slow=slow), None, now_s=0.0)["slow"]
    lost = [{"slot": 2, "evidence": "its link is gone"}]
    status = merge([answer(0, slow=told, lost=lost), answer(1)], silent={}, now_s=5.0)
    assert column(status, "suspicion") == [None, "takes 1.60x as long", "its link is gone"]
    gone = merge([answer(0, slow=told, trainer_pid=0), answer(1)], silent={}, now_s=5.0)
    assert column(gone, "suspicion")[1] is None


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (
            sample(1),
            "no progress for 4.0 s in backward (limit 2 s with a recovery); no worker waits for it",
        ),
        (sample(1, waits_for=OUTSIDE), None),
        (sample(1, stalled_s=0.1, stopped_s=0.5), "stopped by a signal"),
    ],
)
def test_who_stands_still_and_keeps_nobody_waiting(page: Record, words: str | None) -> None:
    status = merge([answer(0), answer(1, progress=page)], silent={}, now_s=5.0)
    assert column(status, "suspicion")[1] == words


def test_an_agent_that_is_silent_is_suspected_itself() -> None:
    status = merge([answer(0), answer(2)], silent={1: "timed out"}, now_s=5.0)
    assert column(status, "suspicion")[1] == "the agent of node 1 does not answer: timed out"
    assert column(status, "phase") == ["training", "unknown", "training"]


def test_a_snapshot_after_a_roll_back_is_newer_than_a_later_step_before() -> None:
    owner = answer(0, snapshots=[sealed(0, 9, 1, 0), sealed(0, 8, 2, 0)])
    holder = answer(1, snapshots=[sealed(0, 9, 1, 1), sealed(0, 7, 2, 1)])
    status = merge([owner, holder, answer(2)], silent={}, now_s=5.0)
    assert column(status, "snapshot") == [
        {"step": 8, "epoch": 2, "bytes": 10, "held_by": [{"slot": 1, "step": 7, "epoch": 2}]},
        None,
        None,
    ]
    assert "1 (7)" in drawn(status)


def test_a_proposal_that_was_committed_is_open_no_more() -> None:
    view = {**to_json(first_view((0, 1, 2))), "epoch": 2, "ranks": [0, 1]}
    old = {"epoch": 2, "reason": "r", "open_s": 4.0, "late": True}
    # The agent of a lost trainer is not told of a view that it has no part in.
    status = merge([answer(0, view=view), answer(2, proposal=old)], silent={}, now_s=5.0)
    assert status["proposal"] is None
    status = merge([answer(0), answer(2, proposal=old)], silent={}, now_s=5.0)
    assert status["proposal"] == {"epoch": 2, "reason": "r", "open_s": 4.0}


def test_of_each_view_the_first_moment_counts() -> None:
    views = [[{"epoch": e, "time_s": t, "workers": 3, "reason": "r"}] for e, t in ((1, 7), (1, 6))]
    status = merge([answer(s, views=views[s]) for s in (0, 1)], silent={}, now_s=9.0)
    assert [view["time_s"] for view in status["views"]] == [6]


def test_the_pairs_that_do_not_hear_each_other_are_named() -> None:
    assert answered(agreement(0, 1, 2))["unheard"] == [{"node": 2, "since_s": 1.5}]
    answers = [answer(0), answer(2, unheard=[{"node": 1, "since_s": 1.5}])]
    status = merge(answers, silent={}, now_s=5.0)
    assert status["unheard"] == [{"node": 2, "peer": 1, "since_s": 1.5}]
    assert "node 2 hears nothing of node 1 for 4 s" in drawn(status)


def test_a_worker_that_leaves_is_not_shown_as_one_that_died() -> None:
    board, trainer = StatusBoard(), trainer_of(0)
    trainer.life.process, trainer.life.end = Process.GONE, ("killed by SIGKILL", None)
    told = board.report(trainer, None, now_s=2.0)
    assert (told["trainer_pid"], told["phase"]) == (0, "exited")
    assert told["exited"] == "killed by SIGKILL"
    trainer = trainer_of(0, stage=Stage.LEAVING)
    trainer.life.process = Process.GONE
    assert board.report(trainer, None, now_s=2.0)["phase"] == "leaving"


def test_a_proposal_is_late_where_it_cannot_wait() -> None:
    board, trainer = StatusBoard(), trainer_of(0)
    assert board.report(trainer, None, now_s=2.0)["proposal"] is None
    late = []
    for asked in (ring(2, boundary=True), ring(2, boundary=True, before_step=5), ring(3)):
        board.proposed(asked, 1.0)
        late.append(board.report(trainer, None, now_s=2.0)["proposal"]["late"])
    assert late == [False, True, True]
    board.answered()
    assert not board.report(trainer, None, now_s=2.0)["proposal"]["late"]


def test_a_view_is_among_the_views_as_soon_as_it_is_the_one() -> None:
    """It is decided a moment before the trainers are told, and a request may come in between."""
    board, part = StatusBoard(), agreement(0, 1)
    assert answered(part, board)["views"] == []
    view = replace(part.committed, epoch=1, reason="a worker was lost")
    part.history.append(view)
    before_s = time.time()
    for is_told in (False, True):
        if is_told:
            board.committed([view], 1.0)
        (told,) = answered(part, board)["views"]
        assert told["epoch"] == 1
        assert told["time_s"] == 1.0 if is_told else told["time_s"] >= before_s


def test_idle_places_are_told_by_node() -> None:
    status = merge([answer(1, standby_places=2), answer(0)], silent={}, now_s=5.0)
    assert status["standbys"] == [{"node": 1, "places": 2}]
    assert "; standby: 2 of node 1" in drawn(status)
