"""A slow worker of a DeepSpeed job is named, and gets fewer samples, for a while, if asked for."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from elaswave_plugin.core.planner.slow import SHORTEST
from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import FP32_BOUND, EngineSpec
from tests.deepspeed.hf_runs import check_tapes, spec_of
from tests.deepspeed.test_pipeline import PP2_DP2
from tests.faults.harness import Outcome, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves

SLOW, SLOW_FROM, LEVEL_FROM = 1, 2, 16
SPEC = EngineSpec(nproc=3, steps=52, global_batch=24, accumulation=1, dump="last")
# Each sample takes so long, on one worker three times that for some steps; it sleeps, so that a
# busy processor is no slow worker.
SLOWED = f"""
import os, time, torch
from elaswave_plugin.loops.guarded_steps import GuardedSteps
begin_step, look_up, now = GuardedSteps.begin, torch.nn.Embedding.forward, [0]
def note(self):
    begin_step(self)
    now[:] = [self.worker.completed]
def slowly(self, tokens):
    found = look_up(self, tokens)
    if tokens.dim() == 2 and self.training:
        is_slow = os.environ["ELASWAVE_SLOT"] == "{SLOW}" and {SLOW_FROM} <= now[0] < {LEVEL_FROM}
        time.sleep(len(tokens) * 0.006 * (3 if is_slow else 1))
    return found
GuardedSteps.begin, torch.nn.Embedding.forward = note, slowly
"""


def samples_of(run: Outcome) -> list[Counter[int]]:
    """The samples that each worker trained on in each step."""
    found = [Counter[int]() for _ in range(run.spec.steps)]
    for line in run.files.ledger:
        found[line["step"]][line["slot"]] += len(line["samples"])
    return found


@proves(Kind.SLOW, Promise.CLOSE)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_slow_worker_gets_fewer_samples_and_gets_them_back(run: Launch, stage: int) -> None:
    spec = replace(SPEC, stage=stage)
    slowed = run(replace(spec, slow_workers="act", sabotage=SLOWED))
    check_survived(slowed)
    assert max_relative_difference(slowed, run(spec)) < FP32_BOUND
    named, over = slowed.events("slow_worker"), slowed.events("slow_worker_over")
    assert {event["slot"] for event in (*named, *over)} == {SLOW}
    assert SLOW_FROM < named[0]["step"] <= SLOW_FROM + SHORTEST + 1
    assert re.match(r"takes \d+\.\d\dx as long", named[0]["evidence"])
    _, less, *_, back = slowed.events("view_committed")
    assert less["reason"].startswith(f"less work for what is slow: worker {SLOW} (")
    assert back["reason"].startswith("no worker is slow any more")
    begins = {event["epoch"]: event["restored_step"] for event in slowed.events("recovered")}
    first, last = begins[less["epoch"]], begins[back["epoch"]]
    for step, counts in enumerate(samples_of(slowed)):
        assert sum(counts.values()) == spec.global_batch
        assert (counts[SLOW] < 8) == (first <= step < last), (step, counts)


@proves(Kind.SLOW, Promise.CLOSE)
def test_a_trainer_follows(run: Launch) -> None:
    """The record of its callbacks is that of a run in which nobody is slow."""
    options = ("--batch-size=8", "--accumulation=1")
    spec = spec_of(nproc=3, steps=24, global_batch=24, accumulation=1, options=options)
    slowed = run(replace(spec, slow_workers="act", sabotage=SLOWED))
    check_survived(slowed)
    reference = run(spec)
    assert max_relative_difference(slowed, reference) < FP32_BOUND
    assert slowed.events("view_committed")[1]["reason"].startswith("less work for what is slow")
    check_tapes(slowed, reference, survivors=3)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_pipeline_is_not_timed(run: Launch) -> None:
    refused = run(replace(PP2_DP2, slow_workers="act"))
    assert refused.returncode == 2, refused.output[-3000:]
    assert "slow_workers is 'act', and passes of DeepSpeed's pipelines are" in refused.output


@proves(Kind.SLOW, Promise.SAME)
def test_a_slow_worker_is_only_named_by_default(run: Launch) -> None:
    spec = replace(SPEC, steps=14)
    slowed = run(replace(spec, sabotage=SLOWED))
    check_survived(slowed)
    assert slowed.trace() == run(spec).trace()
    (named,) = slowed.events("slow_worker")
    assert named["slot"] == SLOW and len(slowed.events("view_committed")) == 1
