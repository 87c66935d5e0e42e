"""Scripts that change a step's state by themselves: equal after losses and returns, or refused."""

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elaswave_plugin.observer.observer import audit_samples, losses_of
from tests.faults import own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived
from tests.faults.hybrid_matrix import PP2_DP2, TP2_PP2_DP2
from tests.faults.test_join import LATER, last_ranks
from tests.faults.test_layer_moves import cuts_after
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# A worker is lost in a backward pass, comes back, and another one is lost.
LOSES = JobSpec(nproc=3, steps=10, global_batch=6)
LOST = ("1@2:backward", "0@6:optimizer")
BACK = {"respawn": 10, "awaits": ((4, 1), (8, 2))}
SCRIPTS = {
    "frozen weights": own_scripts.FREEZES,
    "draws in forward_step": own_scripts.MASKS,
    "draws in __getitem__": own_scripts.AUGMENTS,
    "a table of the first pass": own_scripts.TABLES,
    "noise on gradients": own_scripts.NOISES,
    "a learning rate of its own": own_scripts.SETS_LR,
    "clamped weights": own_scripts.CLAMPS,
    "longer sequences by the step": own_scripts.WARMS_UP,
    "collectives between steps": own_scripts.MEETS,
    "an optimizer within the bound one": own_scripts.NESTED,
    "a teacher that drops out": own_scripts.TEACHES,
}


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize("name", sampled(SCRIPTS))
def test_a_script_of_ones_own_is_equal(
    run: Launch, reference: Reference, tmp_path: Path, name: str
) -> None:
    script = own_scripts.write(tmp_path, *SCRIPTS[name])
    spec = replace(LOSES, script=script, kills=LOST, **BACK)
    check_equal(run(spec), reference(spec))


@proves(Kind.RETURN, Promise.EQUAL, victim="1 0", moment="2:backward 6:forward")
def test_a_step_that_skips_its_update_is_equal_and_is_redone(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """Both kills are in such a step, whose redo finds the moments on their way."""
    script = own_scripts.write(tmp_path, *own_scripts.SKIPS)
    spec = replace(LOSES, script=script, kills=("1@2:backward", "0@6:forward"), **BACK)
    check_equal(run(spec), reference(spec))


# A worker is lost at the end of a step without an update, which another one has not come to yet.
DIES_WITHOUT_UPDATE = """
import os, signal, time
from elaswave_plugin.recovery.state_keeper import StateKeeper
begin, times = StateKeeper.begin_update, []
def late(self):
    step = self._member.progress_page.sample(slot=0).step
    if step == 2 and self._member.slot in (1, 2) and not times:
        times.append(step)
        time.sleep(0.3)  # nothing is waited for: worker 0 is to be in the barrier by then
        if self._member.slot == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            self._member.check()
            time.sleep(0.01)
        raise AssertionError("nobody was lost")
    begin(self)
StateKeeper.begin_update = late
"""


@proves(Kind.RETURN, Promise.EQUAL)
def test_a_step_without_an_update_is_redone_by_all_alike(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.SKIPS)
    spec = replace(LOSES, script=script)
    survived = run(replace(spec, sabotage=DIES_WITHOUT_UPDATE))
    assert survived.trace() == reference(spec).trace()
    assert [event["slot"] for event in survived.events("worker_exited")][:1] == [1]
    assert len(survived.events("view_committed")) == 2 and not survived.orphans


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize(
    # A scale with which steps are applied: else nobody comes to a kill in the optimizer.
    "precision",
    sampled([(("--bf16",),), (("--fp16", "--initial-loss-scale=4096"),)]),
)
def test_weights_of_16_bits_that_the_body_changes(
    run: Launch, reference: Reference, tmp_path: Path, precision: tuple[str, ...]
) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.CLAMPS)
    spec = replace(LOSES, script=script, kills=LOST, options=precision, **BACK)
    check_equal(run(spec), reference(spec))


HYBRID = replace(PP2_DP2, steps=10, kills=("1@2:backward",), respawn=10, awaits=((5, 1),))
DATA_PARALLEL = replace(LOSES, kills=("1@2:backward",), respawn=10, awaits=((5, 1),))


@proves(Kind.RETURN, Promise.SENT_AWAY)
@pytest.mark.parametrize("spec", sampled([DATA_PARALLEL, HYBRID]), ids=lambda spec: f"{spec.nproc}")
def test_who_comes_back_and_does_something_else_is_sent_away(
    run: Launch, reference: Reference, tmp_path: Path, spec: JobSpec
) -> None:
    """Its weights are those of the others, and a variable of its script is not."""
    script = own_scripts.write(tmp_path, *own_scripts.TURNS_UP)
    survived = run(replace(spec, script=script))
    assert survived.returncode == 0, survived.output[-4000:]
    assert survived.trace() == reference(replace(spec, script=script)).trace()
    assert [event["slot"] for event in survived.events("entered")] == [1]
    assert 1 not in survived.events("view_committed")[-1]["ranks"]
    assert survived.output.count("the loss of its first micro-batch is not the one") == 1


def averages(run: Outcome) -> dict[str, list[float]]:
    """Read what each worker that was there at the end had, by its rank at the launch."""
    files = sorted(run.directory.glob("average-*"))
    return {path.name: json.loads(path.read_text()) for path in files}


@proves(Kind.RETURN, Promise.EQUAL)
def test_an_average_that_the_script_keeps(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """Without a return slot 0's would be missing; with one, it is the others'."""
    script = own_scripts.write(tmp_path, *own_scripts.AVERAGES)
    spec = replace(LOSES, script=script, kills=LOST, **BACK)
    survived, undisturbed = run(spec), reference(spec)
    check_equal(survived, undisturbed)
    assert len(averages(undisturbed)) == 3
    assert averages(survived) == averages(undisturbed)


@proves(Kind.SABOTAGE, Promise.SEEN)
def test_an_average_that_nobody_keeps_is_another(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """The comparison above can fail: no plugin sees such an object."""
    unkept = own_scripts.without_keep(own_scripts.AVERAGES)
    spec = replace(LOSES, script=own_scripts.write(tmp_path, *unkept), kills=LOST, **BACK)
    assert averages(run(spec)) != averages(reference(spec))


FAST = replace(LOSES, consistency="fast")
REFUSED = {
    "a buffer of a TP group": (
        own_scripts.COUNTS,
        "changes the model's buffer '0.module.seen', which is not carried",
        0,
        replace(LOSES, nproc=4, global_batch=8, options=("--tensor-model-parallel-size=2",)),
    ),
    "a buffer that is no average, in fast mode": (
        own_scripts.NORMALIZES,
        "changes the model's buffer '0.module.normalized.mean', which is not carried",
        0,
        FAST,
    ),
    "a buffer that the loop changes as well as passes": (
        (*own_scripts.COUNTS, own_scripts.in_body("        model[0].module.seen.zero_()\n")),
        "the script changes the model's buffer '0.module.seen' outside of forward passes",
        1,
        LOSES,
    ),
    "moments that the loop's body changes": (
        own_scripts.RESETS_MOMENTS,
        "the loop's body changes the optimizer's moments between two steps",
        4,
        LOSES,
    ),
    "weights that each replica moves by its own gradients": (
        own_scripts.climbs("p.main_grad"),
        "train_step has changed weights since its last call of forward_backward",
        0,
        LOSES,
    ),
    "an optimizer that is not bound": (
        own_scripts.SECOND,
        "an optimizer that is not bound (SGD) steps in this job",
        0,
        LOSES,
    ),
    "frozen weights of each worker": (
        own_scripts.FREEZES_EACH,
        "weights that are not trained",
        0,
        LOSES,
    ),
}


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize("name", REFUSED)
def test_what_nobody_could_bring_back_is_refused(run: Launch, tmp_path: Path, name: str) -> None:
    changes, words, num_steps, spec = REFUSED[name]
    refused = run(replace(spec, script=own_scripts.write(tmp_path, *changes)))
    assert refused.returncode == 2, refused.output[-4000:]
    assert sum(words in line for line in refused.output.splitlines()) == 1
    assert "Traceback" not in refused.output
    assert {record["step"] for record in refused.files.steps} == set(range(num_steps))
    assert not refused.orphans


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(("kill", "cuts"), [("0@3:backward", [0, 1, 4]), ("2@3:body", [0, 3, 4])])
def test_frozen_weights_move_with_their_layers(
    run: Launch, reference: Reference, tmp_path: Path, kill: str, cuts: list[int]
) -> None:
    """Each layer has other ones, and is trained in parts; whoever comes back has them, too."""
    script = own_scripts.write(tmp_path, *own_scripts.FREEZES_BY_LAYER)
    options = (*PP2_DP2.options, "--num-layers=4", "--elaswave-move-layers=always")
    spec = replace(PP2_DP2, steps=10, options=options, script=script)
    survived = run(replace(spec, respawn=10, kills=(kill,), awaits=((6, 1),)))
    check_equal(survived, reference(spec))
    assert cuts_after(survived) == [cuts, [0, 2, 4]]


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("kill", ["1@3:body", "1@3:optimizer"])
@pytest.mark.parametrize("layout", ["dp3", "pp2-dp2"])
@pytest.mark.parametrize("number", sampled([1, 2]))
def test_a_layer_that_is_frozen_later_stays_frozen(
    run: Launch, reference: Reference, tmp_path: Path, layout: str, kill: str, number: int
) -> None:
    """The stage of worker 1 is left with layer 1, and layer 2 moves."""
    script = own_scripts.write(tmp_path, *own_scripts.freezes_later(number))
    spec, layers = (LOSES, 2) if layout == "dp3" else (PP2_DP2, 4)
    options = (*spec.options, f"--num-layers={layers}", "--no-overlap-grad-reduce")
    spec = replace(spec, options=options, script=script)
    survived = run(replace(spec, kills=(kill,)))
    check_equal(survived, reference(spec))
    assert layout == "dp3" or cuts_after(survived) == [[0, 1, 4]]


@proves(Kind.KILL, Promise.EQUAL, victim="0", moment="3:backward")
def test_a_layer_that_is_frozen_whole_keeps_all_layers(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """Only the first stage knows of it by itself."""
    script = own_scripts.write(tmp_path, *own_scripts.FREEZES_FIRST)
    spec = replace(PP2_DP2, options=(*PP2_DP2.options, "--num-layers=4"), script=script)
    survived = run(replace(spec, kills=("0@3:backward",)))
    check_equal(survived, reference(spec))
    assert cuts_after(survived) == [[0, 2, 4]]


@proves(Kind.RETURN, Promise.EQUAL, victim="6 7", moment="3:forward 3:forward")
def test_frozen_weights_are_those_of_the_place_that_a_newcomer_is_given(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """A pair is lost; the first that is back has no place, the second makes a pair with it."""
    script = own_scripts.write(tmp_path, *own_scripts.FREEZES_BY_LAYER)
    spec = replace(
        TP2_PP2_DP2,
        steps=12,
        options=(*TP2_PP2_DP2.options, "--num-layers=4"),
        script=script,
    )
    pair = {"kills": ("6@3:forward", "7@3:forward"), "sabotage": LATER.format(slot=7)}
    survived = run(replace(spec, respawn=10, awaits=((6, 1), (8, 2)), **pair))
    check_equal(survived, reference(spec))
    assert last_ranks(survived) == list(range(8))


# A worker dies on its way to a call in the loop's body, before step 3; others wait for it there.
DIES_BETWEEN = """
import os, signal, time
import torch.distributed as dist
from elaswave_plugin.loops.loop_body import LoopBody
from elaswave_plugin.communicator.links.link_table import LinkTable
call, opened, body = dist.{name}, LoopBody.open, []
def opening(self):
    body.append(self)
    return opened(self)
def dying(*args, **kwargs):
    inside = body and body[-1]._worker.links.body is not None
    if inside and (body[-1]._worker.slot, body[-1]._worker.completed) == (1, 3):
        time.sleep(0.3)  # nothing is waited for: the others are to be in the call by then
        body[-1]._worker.events.emit("died_between", call="{name}")
        os.kill(os.getpid(), signal.SIGKILL)
    return call(*args, **kwargs)
LoopBody.open, dist.{name} = opening, dying
"""


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize("name", ["barrier", "all_reduce", "broadcast"])
def test_a_call_between_steps_is_made_again(
    run: Launch, reference: Reference, tmp_path: Path, name: str
) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.MEETS)
    spec = replace(LOSES, script=script)
    survived = run(replace(spec, sabotage=DIES_BETWEEN.format(name=name)))
    assert [event["call"] for event in survived.events("died_between")] == [name]
    check_equal(survived, reference(spec))


@proves(Kind.WRONG_SCRIPT, Promise.NAMED)
def test_another_call_between_steps_ends_with_the_line_to_write(
    run: Launch, tmp_path: Path
) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.GATHERS)
    sabotage = DIES_BETWEEN.format(name="all_gather_object")
    ended = run(replace(LOSES, script=script, sabotage=sabotage))
    assert ended.events("died_between") and ended.returncode == 2, ended.output[-3000:]
    assert ended.output.count("in the body of job.train's loop") == 1
    assert "job.run(function, phase=" in ended.output and "Traceback" not in ended.output
    assert not ended.orphans


def buffers_of(run: Outcome, rank: int) -> dict[str, Any]:
    """The buffers that this rank had at the end."""
    values: dict[str, Any] = json.loads((run.directory / f"buffers-{rank}").read_text())
    assert values["module.normalized.norm.running_mean"]
    return values


def evaluations(run: Outcome) -> list[str]:
    """Its lines about evaluations, each once."""
    return sorted({line for line in run.output.splitlines() if "validation loss" in line})


EVALUATES = ("--eval-interval=3", "--eval-iters=2")
WITH_BUFFERS = {
    "and come back": replace(LOSES, kills=LOST, options=EVALUATES, **BACK),
    "in the first step": replace(LOSES, kills=("1@0:backward",), options=EVALUATES),
    "two of them, one in an evaluation": replace(
        LOSES, kills=("0@4:forward", "1@6:evaluation"), options=EVALUATES
    ),
    "recomputed": replace(
        LOSES,
        kills=("0@4:backward",),
        options=(*EVALUATES, "--recompute-granularity=full"),
    ),
    "bf16": replace(LOSES, kills=("2@4:optimizer",), options=(*EVALUATES, "--bf16")),
}


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize("name", sampled(WITH_BUFFERS))
def test_buffers_that_passes_change_stay_with_their_replica(
    run: Launch, reference: Reference, tmp_path: Path, name: str
) -> None:
    """Batch norm, running means, power iterations: the bits of the undisturbed run."""
    script = own_scripts.write(tmp_path, *own_scripts.NORMALIZES)
    spec = replace(WITH_BUFFERS[name], script=script)
    survived, undisturbed = run(spec), reference(spec)
    check_equal(survived, undisturbed)
    assert len(evaluations(survived)) == 3
    assert evaluations(survived) == evaluations(undisturbed)
    assert buffers_of(undisturbed, 0) != buffers_of(undisturbed, 1)
    assert buffers_of(survived, 0) == buffers_of(undisturbed, 0)


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="4:backward")
def test_running_statistics_are_averaged_in_fast_mode(run: Launch, tmp_path: Path) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.RUNNING_MEANS)
    spec = replace(FAST, script=script, options=EVALUATES)
    killed, twin = run(replace(spec, kills=("1@4:backward",))), run(replace(spec, changes=("1@4",)))
    check_survived(killed)
    check_survived(twin)
    assert killed.trace() == twin.trace()
    assert len(evaluations(killed)) == 3
    assert evaluations(killed) == evaluations(twin)
    assert buffers_of(killed, 0) == buffers_of(twin, 0) == buffers_of(killed, 1)


def said_by(run: Outcome) -> dict[int, list[dict[str, Any]]]:
    """By step, what each worker that was there answered."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(run.directory.glob("said-*")):
        for line in path.read_text().splitlines():
            said = json.loads(line)
            steps.setdefault(said["iteration"], []).append(said)
    return steps


def places(said: Iterable[dict[str, Any]]) -> list[tuple[int, int]]:
    """Stage and TP rank of each who would save its part of the model: of whom replica 0 is."""
    return sorted((one["stage"], one["tp"]) for one in said if one["replica"] == 0)


TP2_DP2 = JobSpec(options=("--tensor-model-parallel-size=2",))
LOSSES_OF_GROUPS = {
    "TP2 DP2, rank 0": (TP2_DP2, "0@2:backward"),
    "TP2 DP2, the last rank": (TP2_DP2, "3@2:backward"),
    "TP2 PP2 DP2": (TP2_PP2_DP2, "1@2:optimizer"),
}


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("name", sampled(LOSSES_OF_GROUPS))
def test_a_worker_without_a_place_is_neither_first_nor_last(
    run: Launch, reference: Reference, tmp_path: Path, name: str
) -> None:
    """Scripts ask who is first, and have that one save: old weights, or two write one file."""
    spec, kill = LOSSES_OF_GROUPS[name]
    spec = replace(spec, script=own_scripts.write(tmp_path, *own_scripts.ANSWERS))
    survived, undisturbed = run(replace(spec, kills=(kill,))), reference(spec)
    check_equal(survived, undisturbed)
    wanted, found = said_by(undisturbed), said_by(survived)
    for step in range(2, spec.steps):
        by_rank = {said["rank"]: said for said in found[step]}
        assert sorted(by_rank) == list(range(spec.nproc - 1))
        free = [said for said in found[step] if said["replica"] < 0]
        assert len(free) == 1 and all(map(math.isnan, free[0]["weights"]))
        assert not free[0]["first"] and not free[0]["last"]
        assert 0 < free[0]["rank"] < spec.nproc - 2
        assert places(found[step]) == places(wanted[step])
        of = {(one["stage"], one["tp"]): one["weights"] for one in wanted[step]}
        placed = [said for said in found[step] if said["replica"] >= 0]
        assert all(said["weights"] == of[said["stage"], said["tp"]] for said in placed)


SEVERAL_CALLS = {
    "passes": own_scripts.PASSES,
    "updates": own_scripts.UPDATES_TWICE,
    "climbs": own_scripts.climbs("p"),
}


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize("name", SEVERAL_CALLS)
def test_a_step_of_several_calls_reads_on_and_is_redone_from_its_first(
    run: Launch, reference: Reference, tmp_path: Path, name: str
) -> None:
    script = own_scripts.write(tmp_path, *SEVERAL_CALLS[name])
    spec = replace(LOSES, reads=2, script=script, kills=LOST, **BACK)
    check_equal(run(spec), reference(spec))


@proves(Kind.RESUME, Promise.EQUAL, victim="1 0", moment="4:backward 6:optimizer")
@pytest.mark.parametrize("place", own_scripts.PLACES)
@pytest.mark.parametrize("precision", sampled(["", "--bf16"]))
def test_a_run_that_is_resumed_is_the_one_that_went_on(
    run: Launch, reference: Reference, tmp_path: Path, place: str, precision: str
) -> None:
    """A worker that comes back loads nothing, if the script loads in job.run."""
    options = (precision,) if precision else ()
    save = (f"--save={tmp_path}", "--save-interval=4")
    whole = reference(replace(LOSES, options=(*save, *options)))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    script = own_scripts.write(tmp_path, *own_scripts.resumes(tmp_path, 4, place=place))
    spec = replace(LOSES, script=script, options=options, kills=("1@4:backward", "0@6:optimizer"))
    back = {"respawn": 10, "awaits": ((5, 1), (8, 2))} if place == "in job.run" else {}
    survived = run(replace(spec, **back))
    assert survived.returncode == 0, survived.output[-4000:]
    assert len(survived.events("fault_fired")) == 2 and not survived.orphans
    assert len(survived.events("entered")) == (2 if back else 0)
    assert survived.trace() == {step: one for step, one in whole.trace().items() if step >= 4}
    assert audit_samples(survived.files, batches=spec.batches) == (0, 0)


@proves(Kind.RESUME, Promise.EQUAL, victim="1", moment="6:backward")
@pytest.mark.slow
@pytest.mark.parametrize("size", [14, 12], ids=["amid a pass", "where one begins"])
def test_a_run_that_is_resumed_in_a_later_pass_is_the_one_that_went_on(
    run: Launch, tmp_path: Path, size: int
) -> None:
    loader = own_scripts.reads_passes(size)
    spec = replace(LOSES, script=own_scripts.write(tmp_path, loader))
    whole = run(replace(spec, options=(f"--save={tmp_path}", "--save-interval=4")))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    resumes = own_scripts.resumes(tmp_path, 4, place="in job.run")
    script = own_scripts.write(tmp_path, loader, *resumes)
    survived = run(replace(spec, script=script, kills=("1@6:backward",)))
    assert survived.returncode == 0, survived.output[-4000:]
    assert len(survived.events("fault_fired")) == 1 and not survived.orphans
    assert survived.trace() == {step: one for step, one in whole.trace().items() if step >= 4}
    assert "samples: 0 lost, 0 repeated" in survived.output


@proves(Kind.RESUME, Promise.EQUAL, victim="1", moment="6:backward")
def test_a_run_that_is_resumed_by_fewer_reads_the_samples_that_were_left(
    run: Launch, tmp_path: Path
) -> None:
    whole = run(replace(LOSES, options=(f"--save={tmp_path}", "--save-interval=4")))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    script = own_scripts.write(tmp_path, *own_scripts.resumes(tmp_path, 4, place="after bind"))
    fewer = run(replace(LOSES, script=script, nproc=2, kills=("1@6:backward",)))
    assert fewer.returncode == 0 and len(fewer.events("fault_fired")) == 1, fewer.output[-4000:]
    first = min(sample for line in fewer.files.ledger for sample in line["samples"])
    assert first == 4 * LOSES.global_batch
    assert audit_samples(fewer.files, batches=LOSES.batches) == (0, 0)
    losses, before = losses_of(fewer.files), losses_of(whole.files)
    assert [*losses] == [4, 5, 6, 7, 8, 9]
    assert [*losses.values()] == pytest.approx([before[step] for step in losses], rel=1e-6)


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("line", "words"),
    sampled(
        [
            ("start_step=11", "job.bind got start_step=11, wanted a step from 0 to train_iters"),
            ("start_step=4, consumed_samples=25", "consumed_samples=25, wanted a multiple of the"),
            ("start_step=-1", "start_step=-1"),
            ("start_step=4, consumed_samples=-6", "consumed_samples=-6"),
        ]
    ),
)
def test_a_start_that_no_run_has_is_refused(
    run: Launch, tmp_path: Path, line: str, words: str
) -> None:
    bind = "train_iters=args.train_iters)"
    script = own_scripts.write(tmp_path, (bind, bind.replace(")", f", {line})")))
    refused = run(replace(LOSES, script=script))
    assert refused.returncode == 2, refused.output[-4000:]
    assert sum(words in text for text in refused.output.splitlines()) == 1
    assert "Traceback" not in refused.output and not refused.orphans
