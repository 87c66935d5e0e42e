"""A lost worker comes back: it builds beside the training and enters between two steps."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.cli.main import run_command
from elaswave_plugin.config import RECOVERY_PHASES
from tests.faults import own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived
from tests.faults.hybrid_matrix import PP2_VPP2_DP2, TP2_PP2_DP2
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

BACK = JobSpec(steps=10, dump="last", respawn=10, awaits=((5, 1),))
RECOVERY = ("agree", "edit", "move", "rebind", "verify")
SOME_OF_EIGHT = sampled([(s, RECOVERY[s % 5]) for s in (0, 2, 5, 7)])


def drawn_pairs(count: int) -> list[tuple[tuple[tuple[int, str], ...]]]:
    """Two different victims, each with the phase in which it dies."""
    dice = random.Random(20261122)
    phases = ("data", "forward", "backward", "reduce", "optimizer", "gather")
    return [
        (tuple((slot, dice.choice(phases)) for slot in dice.sample(range(4), 2)),)
        for _ in range(count)
    ]


# A survivor dies when it has edited its groups for a view that lets somebody in.
LOSE_AT_JOIN = """
import os, signal, time
from elaswave_plugin.recovery.worker import Worker
install = Worker.install_view
def die(self, commit):
    install(self, commit)
    if self._newcomers and self.member.worker.incarnation == 0 and self.slot == {slot}:
        self.events.emit("lost_at_join", slot=self.slot)
        os.kill(os.getpid(), signal.SIGKILL)
Worker.install_view = die
"""


def entered(run: Outcome) -> list[tuple[int, int]]:
    """List the workers that came back, as (slot, incarnation), in order."""
    return [(event["slot"], event["incarnation"]) for event in run.events("entered")]


def check_nothing_thrown_away(run: Outcome) -> None:
    """Check that a worker that joins finds the newest state, that of the boundary."""
    (joined,) = {event["epoch"] for event in run.events("recovered") if event["newcomers"]}
    done = [line["step"] for line in run.files.steps if line["epoch"] < joined]
    restored = {e["restored_step"] for e in run.events("recovered") if e["epoch"] == joined}
    assert restored == {max(done) + 1}


def last_ranks(run: Outcome) -> list[int]:
    """The slots of the last view."""
    ranks: list[int] = run.events("view_committed")[-1]["ranks"]
    return ranks


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize("slot", sampled(range(4)))
def test_a_lost_worker_comes_back(run: Launch, reference: Reference, slot: int) -> None:
    spec = replace(BACK, kills=(f"{slot}@3:backward",))
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert entered(survived) == [(slot, 1)]
    assert last_ranks(survived) == [0, 1, 2, 3]
    check_nothing_thrown_away(survived)
    check_console(survived, slot)


# What NVIDIA's run_simple_mcore_train_loop.py reports: the loss itself, which Megatron-Core then
# divides in place by the micro-batches of the call.
REPORTS_THE_LOSS = (
    "    return total / tokens, reported\n",
    '    loss = total / tokens\n    return loss, {"lm loss": loss}\n',
)


@proves(Kind.RETURN, Promise.EQUAL, victim="2", moment="3:backward")
def test_who_comes_back_may_report_the_loss_itself(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    script = own_scripts.write(tmp_path, REPORTS_THE_LOSS)
    spec = replace(BACK, script=script, kills=("2@3:backward",))
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert entered(survived) == [(2, 1)]


def check_console(survived: Outcome, slot: int) -> None:
    """Each thing is said once for the job, and in this order."""
    phases = "  ".join(rf"{name} [\d.]+" for name in RECOVERY_PHASES if name != "detect")
    (entry,) = survived.events("entered")
    steps = survived.spec.steps
    heirs = [f"; worker {one} is rank 0 from now on" for one in (1, 0)]
    heir = heirs if slot == 0 else ["", ""]
    wanted = (
        rf"worker {slot} \(node 0\) exited: .*; the job goes on with 3 workers \(view 2\)",
        rf"recovered: state of step 3 restored, \d+ KiB moved; ms: {phases}{heir[0]}",
        rf"worker {slot} works again from step {entry['step']} on; the others stood still for"
        rf" [\d.]+ ms{heir[1]}",
        rf"the job is done: {steps} steps completed, 1 loss survived, 1 arrival, \d+ s;"
        " samples: 0 lost, 0 repeated",
    )
    lines = survived.output.splitlines()
    found = [
        [n for n, line in enumerate(lines) if re.fullmatch(f"elaswave: {one}", line)]
        for one in wanted
    ]
    assert [len(one) for one in found] == [1, 1, 1, 1], survived.output
    assert found == sorted(found)
    assert lines.count(f"elaswave: worker {slot} is being started again") == 1


# The newcomer of this slot asks to be let in only once the other one is in.
LATER = """
import json, time
from elaswave_plugin.recovery.worker import Worker
ask = Worker.ask_to_enter
def ask_second(self):
    deadline_s = time.monotonic() + 60
    while self.slot == {slot} and time.monotonic() < deadline_s:
        kinds = [json.loads(line)["kind"] for line in open(self.config.dir / "events.jsonl")]
        if "entered" in kinds:
            break
        time.sleep(0.02)
    ask(self)
Worker.ask_to_enter = ask_second
"""
# Newcomers ask to be let in one after the other, in this order of their slots.
IN_TURN = """
import json, time
from elaswave_plugin.recovery.worker import Worker
ask = Worker.ask_to_enter
def ask_in_turn(self):
    before, deadline_s = {order}[: {order}.index(self.slot)], time.monotonic() + 60
    while True:
        lines = open(self.config.dir / "events.jsonl")
        events = (json.loads(line) for line in lines if line.endswith("\\n"))
        if {{*before}} <= {{e["slot"] for e in events if e["kind"] == "entered"}}:
            break
        assert time.monotonic() < deadline_s, f"{{before}} did not come back"
        time.sleep(0.02)
    ask(self)
Worker.ask_to_enter = ask_in_turn
"""


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize("victims", sampled(drawn_pairs(3)), ids=str)
def test_two_lost_workers_come_back_one_after_the_other(
    run: Launch, reference: Reference, victims: tuple[tuple[int, str], ...]
) -> None:
    """4 -> 3 -> 2 -> 3 -> 4, the victims drawn at random."""
    (first, in_first), (second, in_second) = victims
    spec = replace(
        BACK,
        steps=12,
        kills=(f"{first}@2:{in_first}", f"{second}@3:{in_second}"),
        awaits=((5, 1), (7, 2)),
        sabotage=LATER.format(slot=second),
    )
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert entered(survived) == [(first, 1), (second, 1)]
    assert [len(e["ranks"]) for e in survived.events("view_committed")] == [4, 3, 2, 3, 4]
    assert last_ranks(survived) == [0, 1, 2, 3]


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize(("slot", "phase"), SOME_OF_EIGHT)
def test_a_lost_worker_of_tp_pp_dp_comes_back(
    run: Launch, reference: Reference, slot: int, phase: str
) -> None:
    """The newcomer dies on its way in, too; the next one enters."""
    spec = replace(
        TP2_PP2_DP2,
        steps=12,
        dump="last",
        respawn=10,
        kills=(f"{slot}@3:forward", f"{slot}.1@0:{phase}"),
        awaits=((5, 1), (7, 2)),
    )
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert entered(survived) == [(slot, 2)]
    assert last_ranks(survived) == list(range(8))


@proves(Kind.RETURN, Promise.EQUAL, victim="3", moment="3:backward")
def test_a_lost_worker_of_an_interleaved_pipeline_comes_back(
    run: Launch, reference: Reference
) -> None:
    spec = replace(
        PP2_VPP2_DP2, steps=10, dump="last", respawn=10, kills=("3@3:backward",), awaits=((5, 1),)
    )
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert entered(survived) == [(3, 1)]
    assert last_ranks(survived) == [0, 1, 2, 3]
    assert run_command(["report", str(survived.directory)]) == 0


# The first newcomer of slot 2 dies when it has called this method of the class.
DIE_AFTER = """
import os, signal
from elaswave_plugin.trainer.member import Member
from elaswave_plugin.recovery.worker import Worker
method = {owner}.{method}
def die(self, *args, **kwargs):
    result = method(self, *args, **kwargs)
    if os.environ["ELASWAVE_SLOT"] == "2" and os.environ["ELASWAVE_INCARNATION"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return result
{owner}.{method} = die
"""
# Where it dies, whether it had asked to be let in, and who then came in.
DEATHS = [
    ("startup", False),
    *((phase, True) for phase in RECOVERY),
    ("Member.start", False),
    ("Worker.ask_to_enter", True),
]


@proves(Kind.NEWCOMER, Promise.EQUAL, victim="2")
@pytest.mark.parametrize(("where", "asked"), sampled(DEATHS))
def test_a_newcomer_dies_in_a_phase_of_its_join(
    run: Launch, reference: Reference, where: str, asked: bool
) -> None:
    """Before it joins its agent, while it is built, while it waits, while it is let in."""
    owner, _, method = where.partition(".")
    spec = replace(
        BACK,
        steps=12,
        kills=("2@3:backward", *(() if method else (f"2.1@0:{where}",))),
        # One that dies while it is built never waits to be let in.
        awaits=((5, 1), (8, 2 if asked else 1)),
        sabotage=DIE_AFTER.format(owner=owner, method=method) if method else "",
    )
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert entered(survived) == [(2, 2)]
    assert last_ranks(survived) == [0, 1, 2, 3]
    exits = [e["incarnation"] for e in survived.events("worker_exited") if "SIGKILL" in e["status"]]
    assert exits == [0, 1]


@proves(Kind.NEWCOMER, Promise.EQUAL, victim="2")
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["data", "forward", "reduce", "optimizer", "gather", "snapshot"])
def test_a_newcomer_dies_in_its_first_step(run: Launch, reference: Reference, phase: str) -> None:
    """It is in, and some of its optimizer state is not here yet."""
    spec = replace(
        BACK, steps=14, kills=("2@3:backward", f"2.1@6:{phase}"), awaits=((5, 1), (9, 2))
    )
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert entered(survived) == [(2, 1), (2, 2)]
    assert last_ranks(survived) == [0, 1, 2, 3]


@proves(Kind.RETURN_LOSS, Promise.EQUAL, moment="3:backward")
@pytest.mark.parametrize("slot", sampled([0, 1]))
def test_a_survivor_dies_while_it_lets_somebody_in(
    run: Launch, reference: Reference, slot: int
) -> None:
    spec = replace(
        BACK,
        steps=12,
        kills=("2@3:backward",),
        awaits=((5, 1), (8, 2)),
        sabotage=LOSE_AT_JOIN.format(slot=slot),
    )
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert len(survived.events("lost_at_join")) == 1
    assert entered(survived) == [(2, 1), (slot, 1)]


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_kills_and_joins_in_one_run(run: Launch, reference: Reference) -> None:
    dice = random.Random(6)
    lives = [0, 0, 0, 0]
    kills = []
    for turn in range(10):
        slot = dice.randrange(4)
        phase = dice.choice(["data", "forward", "backward", "reduce", "optimizer", "gather"])
        kills.append(f"{slot}.{lives[slot]}@{2 + 3 * turn}:{phase}")
        lives[slot] += 1
    awaits = tuple((3 + 3 * turn, turn + 1) for turn in range(10))
    spec = replace(BACK, steps=34, kills=tuple(kills), awaits=awaits)
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert len(entered(survived)) == 10
    assert last_ranks(survived) == [0, 1, 2, 3]
    assert "34 steps completed, 10 losses survived, 10 arrivals" in survived.output


@proves(Kind.RETURN, Promise.GOES_ON, victim="2 2.1", moment="3:backward 7:backward")
def test_the_limit_of_respawn(run: Launch) -> None:
    spec = replace(
        BACK, respawn=1, steps=12, kills=("2@3:backward", "2.1@7:backward"), awaits=((5, 1),)
    )
    survived = run(spec)
    check_survived(survived)
    (given_up,) = survived.events("respawn_given_up")
    assert given_up["reason"] == "it was started again 1 times, the limit of respawn"
    assert last_ranks(survived) == [0, 1, 3]


@proves(Kind.RETURN, Promise.SENT_AWAY, victim="2", moment="3:backward")
@pytest.mark.slow
def test_a_newcomer_with_other_settings_is_not_let_in(run: Launch) -> None:
    """It alone ends: its plans would not be those of the others."""
    other = """
import os
from elaswave_plugin.config import ElasticConfig
given = ElasticConfig.of_the_job
if os.environ["ELASWAVE_INCARNATION"] != "0":
    ElasticConfig.of_the_job = lambda self: {**given(self), "dataflow": "reroute"}
"""
    spec = replace(BACK, steps=200, kills=("2@3:backward",), awaits=(), sabotage=other)
    spec = replace(spec, failing=(2,))
    survived = run(spec)
    check_survived(survived)
    assert (
        "dataflow is 'auto' for the job and 'reroute' for the worker that joins" in survived.output
    )
    assert entered(survived) == [] and last_ranks(survived) == [0, 1, 3]


@proves(Kind.RETURN, Promise.GOES_ON, victim="2 2.1 2.2", moment="3:backward 0:startup 0:startup")
@pytest.mark.slow
def test_a_slot_that_keeps_dying_at_one_step_is_given_up(run: Launch) -> None:
    """A broken device: what is started in the place of the lost worker dies before it is built."""
    kills = ("2@3:backward", "2.1@0:startup", "2.2@0:startup")
    survived = run(replace(BACK, steps=80, kills=kills, awaits=()))
    check_survived(survived)
    (given_up,) = survived.events("respawn_given_up")
    assert given_up["reason"].startswith("3 trainers died at step 3: see what they have printed")
    assert "worker 2 is not started again: 3 trainers died at step 3" in survived.output
    assert entered(survived) == []
