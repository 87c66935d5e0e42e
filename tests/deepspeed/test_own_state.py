"""State that a script changes beside the weights comes back in a redo, or is refused by name."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.convoys import Convoy, convoys
from tests.deepspeed import hf_runs
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.deepspeed.test_join import entered
from tests.faults.harness import Outcome, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

OWN = EngineSpec(script=str(SCRIPTS / "own_state.py"), nproc=3, global_batch=12, steps=9)
CARRIED = ("statistics", "kept teacher", "kept average", "draws", "rates", "clamps")
# Those whose loss does not depend on who shares a worker, without draws.
AS_UNDISTURBED = ("kept average", "rates", "clamps")


# What a script sets once, above engine(batch), by a variable that no plugin sees.
ONCE = ("weights once", "rate once", "buffer once")


def of(mode: str, **more: Any) -> EngineSpec:
    """A job of the script in a mode; no scheduler sets what the loop does."""
    settings = {} if mode in ("statistics", "kept average") else {"scheduler": None}
    return replace(OWN, options=(f"--mode={mode}",), settings=json.dumps(settings), **more)


def held(run: Outcome) -> dict[str, Any]:
    """Read what each rank had at the end beside the weights."""
    files = sorted(run.directory.glob("state-*.json"))
    return {path.name: json.loads(path.read_text()) for path in files}


# A kill whose step some have completed already, and one inside of a step: of two workers where both
# are in one job, and with ZeRO 0 each alone.
KILLS = {
    0: ("1@3:snapshot", "1@3:backward"),
    1: ("1@3:snapshot", "2@3:backward"),
    2: ("2@3:snapshot", "1@3:backward"),
}


def struck(modes: Iterable[str]) -> list[Any]:
    """Convoys of the kills of each stage and mode."""
    cases = [(stage, mode, kill) for mode in modes for stage in KILLS for kill in KILLS[stage]]
    return convoys(cases, lambda stage, mode, kill: of(mode, stage=stage, kills=(kill,)))


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "mode", "kill"), struck(CARRIED))
def test_a_step_that_is_redone_finds_what_it_found(
    convoy: Convoy, twin: Twin, reference: Launch, stage: int, mode: str, kill: str
) -> None:
    killed, planned = convoy.run, twin(convoy.planned)

    def whole() -> None:
        check_survived(killed)
        check_survived(planned)
        assert len(held(killed)) == killed.spec.nproc - len(killed.spec.kills)
        assert held(killed) == held(planned)
        if mode in AS_UNDISTURBED:
            assert max_relative_difference(killed, reference(of(mode, stage=stage))) <= 1e-5

    convoy.check(planned.trace(), whole)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "mode", "kill"), struck(ONCE))
def test_what_is_set_once_stays_set_in_a_redo(
    convoy: Convoy, twin: Twin, reference: Launch, stage: int, mode: str, kill: str
) -> None:
    """The loop does not set it again, as its own variable says that it has."""
    killed, undisturbed = convoy.run, reference(of(mode, stage=stage))

    def whole() -> None:
        check_survived(killed)
        assert max_relative_difference(killed, undisturbed) <= 1e-5
        assert max_relative_difference(undisturbed, reference(of("plain", stage=stage))) > 1e-2

    convoy.check(twin(convoy.planned).trace(), whole)


MET_BEFORE_ITS_PASS = """
import time
from elaswave_plugin.step_state.step_state import StepState
enter = StepState.enter_passes
def enter_later(self):
    worker, deadline_s = self._worker, time.monotonic() + 60
    while worker.slot == 0 and worker.completed == 3 and worker.view.epoch == 1:
        worker.member.check()
        assert time.monotonic() < deadline_s, "nobody is lost"
        time.sleep(0.005)
    enter(self)
StepState.enter_passes = enter_later
"""


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="3:backward")
@pytest.mark.parametrize("mode", sampled(ONCE))
def test_what_is_set_once_stays_set_where_a_loss_comes_before_the_pass(
    run: Launch, twin: Twin, mode: str
) -> None:
    """Worker 0 has set it, and has begun no pass with it."""
    spec = of(mode, stage=0, kills=("1@3:backward",), sabotage=MET_BEFORE_ITS_PASS)
    killed, planned = run(spec), twin(run(replace(spec, sabotage="")))
    check_survived(planned)
    assert len(killed.events("fault_fired")) == 1
    assert killed.trace() == planned.trace()


@proves(Kind.KILL, Promise.CLOSE)
@pytest.mark.parametrize("kill", sampled(["1@3:backward", "0@3:snapshot"]))
def test_what_a_callback_sets_at_the_begin_of_a_step_stays_set(
    run: Launch, reference: Launch, kill: str
) -> None:
    """The Trainer calls it once, and its step is redone."""
    spec = hf_runs.spec_of(nproc=3, global_batch=6, stage=0, options=("--shrink",))
    killed = run(replace(spec, kills=(kill,)))
    check_survived(killed)
    assert max_relative_difference(killed, reference(spec)) <= 1e-5


@proves(Kind.RETURN, Promise.CLOSE, victim="0", moment="4:backward")
@pytest.mark.parametrize("mode", sampled(ONCE))
@pytest.mark.parametrize("stage", sampled([0, 1, 2]))
def test_who_comes_back_does_not_set_it_alone(
    run: Launch, reference: Launch, stage: int, mode: str
) -> None:
    """Its variable says that it has not: it finds what the others find, and says so from then."""
    killed = run(of(mode, stage=stage, respawn=5, kills=("0@4:backward",), changes=("+0@6",)))
    check_survived(killed)
    assert entered(killed) == [(0, 1, 6)]
    ranks = held(killed)
    assert ranks["state-0.json"] == ranks["state-1.json"] == ranks["state-2.json"]
    assert max_relative_difference(killed, reference(of(mode, stage=stage))) <= 1e-5


@proves(Kind.RETURN, Promise.PLANNED, victim="0", moment="3:backward")
@pytest.mark.parametrize("mode", sampled(["statistics", "kept average"]))
def test_rank_0_comes_back_with_what_the_others_keep(run: Launch, twin: Twin, mode: str) -> None:
    killed = run(of(mode, respawn=5, kills=("0@3:backward",), changes=("+0@6",)))
    check_survived(killed)
    assert entered(killed) == [(0, 1, 6)]
    planned = twin(killed)
    assert killed.trace() == planned.trace()
    assert len(held(killed)) == 3
    assert held(killed) == held(planned)


@proves(Kind.SABOTAGE, Promise.SEEN, victim="0", moment="3:backward")
def test_an_average_that_nobody_keeps_is_another(run: Launch, twin: Twin) -> None:
    """The comparison above can fail: no plugin sees such an object."""
    killed = run(of("average", respawn=5, kills=("0@3:backward",), changes=("+0@6",)))
    check_survived(killed)
    ranks = held(killed)
    assert ranks["state-0.json"] != ranks["state-1.json"]


REFUSED = {
    "counts": (0, "the forward pass changes the model's buffer 'seen', which is not carried"),
    "teacher": (1, "the weight 'teacher.blocks.0.norm.weight' is not trained, and was changed"),
}


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize("mode", REFUSED)
def test_what_cannot_come_back_is_refused(run: Launch, mode: str) -> None:
    num_steps, words = REFUSED[mode]
    refused = run(of(mode))
    assert refused.returncode == 2, refused.output[-4000:]
    assert sum(words in line for line in refused.output.splitlines()) == 1
    assert "Traceback" not in refused.output
    assert {record["step"] for record in refused.files.steps} == set(range(num_steps))
    assert not refused.orphans
