"""A survivor whose larger share does not fit gets a smaller one, and is not lost."""

from dataclasses import replace

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EngineSpec, check_recovered
from tests.deepspeed.hf_runs import check_tapes, spec_of
from tests.faults.harness import Outcome
from tests.proofs import Kind, Promise, proves

SHORT = 1
SPEC = EngineSpec(nproc=3, steps=6, global_batch=24, accumulation=1, kills=("2@3:backward",))


def room_for(samples: int, slots: tuple[int, ...] = (SHORT,)) -> str:
    """Torch's allocator finds no memory for a larger pass that is kept for its backward."""
    return f"""
import os, torch
look_up = torch.nn.Embedding.forward
def within(self, tokens):
    kept = tokens.dim() == 2 and self.training and torch.is_grad_enabled()
    if kept and len(tokens) > {samples} and int(os.environ["ELASWAVE_SLOT"]) in {slots}:
        torch.empty(1 << 50, dtype=torch.uint8)
    return look_up(self, tokens)
torch.nn.Embedding.forward = within
"""


def check_relieved(run: Outcome, *, tried: tuple[int, ...], step: int = 3) -> None:
    """This survivor ran out as often as it had more than it has room for, and none was lost."""
    told = run.events("out_of_memory")
    assert [(one["slot"], one["step"]) for one in told] == [(SHORT, step)] * (len(tried) - 1)
    _, lost, *again = run.events("view_committed")
    assert "worker 2 (node 0) exited: killed" in lost["reason"]
    for view, one in zip(again, told, strict=True):
        assert view["ranks"] == lost["ranks"] == [0, 1]
        assert view["reason"] == one["evidence"]
    assert not run.events("hang_found")
    # The samples of every attempt at the step that were served to it, and of the steps behind it.
    mine = [line for line in run.files.ledger if line["slot"] == SHORT]
    alone = [len(line["samples"]) for line in mine if line["epoch"] >= lost["epoch"]]
    assert alone == [*tried[:-1], *[tried[-1]] * (len(alone) - len(tried) + 1)]


@proves(Kind.OUT_OF_MEMORY, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "tried"), [(0, (12, 10)), (1, (12, 10, 9, 8)), (2, (12, 10)), (3, (12, 10))]
)
def test_a_survivor_that_runs_out_of_memory_gets_fewer_samples(
    run: Launch, twin: Twin, reference: Launch, stage: int, tried: tuple[int, ...]
) -> None:
    spec = replace(SPEC, stage=stage, sabotage=room_for(tried[-1]))
    relieved = run(spec)
    check_recovered(relieved, twin=twin(relieved), reference=reference(spec))
    check_relieved(relieved, tried=tried)


@proves(Kind.OUT_OF_MEMORY, Promise.PLANNED)
def test_a_trainer_follows_that(run: Launch, twin: Twin, reference: Launch) -> None:
    options = ("--batch-size=8", "--accumulation=1")
    spec = spec_of("2@3:backward", nproc=3, global_batch=24, accumulation=1, options=options)
    spec = replace(spec, sabotage=room_for(10))
    relieved = run(spec)
    check_recovered(relieved, twin=twin(relieved), reference=reference(spec))
    check_relieved(relieved, tried=(12, 10))
    check_tapes(relieved, reference(spec), survivors=2)


@proves(Kind.OUT_OF_MEMORY, Promise.STOPS)
def test_where_nobody_has_room_the_job_ends_once(run: Launch) -> None:
    ended = run(replace(SPEC, sabotage=room_for(11, slots=(0, SHORT))))
    assert ended.returncode == 1 and not ended.orphans, ended.output[-3000:]
    says = "an iteration has 24 samples, and the 2 workers that are left have memory for 20"
    assert ended.output.count(says) == 1 and "Traceback" not in ended.output
    assert f"{1 << 50} bytes wanted, " in ended.output
    assert {one["slot"] for one in ended.events("out_of_memory")} == {0, SHORT}
    # Nobody was lost for it.
    assert ended.events("view_committed")[-1]["ranks"] == [0, 1]


@proves(Kind.SABOTAGE, Promise.SEEN, victim="2", moment="3:backward")
def test_without_an_answer_the_survivor_is_lost(run: Launch) -> None:
    off = "from elaswave_plugin.recovery.relief import Relief; Relief.step = lambda self, do: do()"
    lost = run(replace(SPEC, sabotage=f"{room_for(10)}\n{off}\n"))
    assert lost.returncode == 0, lost.output[-3000:]
    assert [one["ranks"] for one in lost.events("view_committed")] == [[0, 1, 2], [0, 1], [0]]
