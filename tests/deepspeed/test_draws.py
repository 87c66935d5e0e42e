"""Draws: keyed by the samples of a share: a redone step draws as its planned twin does."""

from dataclasses import replace

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EngineSpec, check_recovered
from tests.faults.harness import check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

DROPOUT = ("--dropout=0.1",)
# A running stream, seeded once and not put back, instead of a key for every share.
RUNNING = """
import torch
from elaswave_plugin.step_state.engine_parts import Generators
Generators.put_back = lambda self, kept: None
seed, seeded = torch.manual_seed, []
def once(number):
    if not seeded:
        seeded.append(seed(number))
    return seeded[0]
torch.manual_seed = once
"""
# Those who stay draw nothing before the one whose departure is planned has left.
AWAITING = """
import time
from elaswave_plugin.loops.guarded_steps import GuardedSteps
begin = GuardedSteps.begin
def begin_and_wait(self):
    begin(self)
    due = [one.slot for one in self._changes if one.step == self.worker.completed]
    while set(due) & set(self.worker.view.ranks):
        self.worker.member.check()
        time.sleep(0.01)
GuardedSteps.begin = begin_and_wait
"""


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kills"),
    sampled(
        [
            (1, ("2@3:backward",)),
            (2, ("0@3:gather",)),
            (3, ("1@3:forward",)),
            (1, ("3@1:snapshot", "0@4:reduce")),
        ]
    ),
)
def test_with_dropout_a_loss_keeps_the_losses(
    run: Launch, twin: Twin, reference: Launch, stage: int, kills: tuple[str, ...]
) -> None:
    spec = EngineSpec(stage=stage, options=DROPOUT, kills=kills)
    killed, undisturbed = run(spec), reference(spec)
    check_recovered(killed, twin=twin(killed), reference=undisturbed)
    plain = reference(replace(spec, options=())).trace()
    assert all(undisturbed.trace()[step] != plain[step] for step in plain)


@proves(Kind.SABOTAGE, Promise.SEEN, victim="2", moment="3:gather")
def test_a_running_stream_is_seen(run: Launch, twin: Twin) -> None:
    """Negative control: survivors have drawn for the step that they redo."""
    sabotage = RUNNING + AWAITING
    spec = EngineSpec(options=DROPOUT, kills=("2@3:gather",), sabotage=sabotage)
    running = run(spec)
    check_survived(running)
    assert running.trace() != twin(spec).trace()
