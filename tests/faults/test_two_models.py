"""Several models with their optimizers in one step: a GAN, actor and critic, through losses."""

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.tracking.state_dump import hash_state
from tests.faults import own_scripts, two_models
from tests.faults.conftest import Grown, Launch, Reference
from tests.faults.harness import JobSpec, check_equal, check_survived
from tests.faults.own_scripts import Change, write
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# Two are lost, one of them rank 0, and both come back.
LOSES = JobSpec(nproc=3, steps=10, global_batch=6)
BACK = {"respawn": 10, "awaits": ((4, 1), (8, 2))}
TWICE = replace(LOSES, reads=2)
# The generator's passes leave gradients in a discriminator that is not frozen, which Megatron-Core
# does not carry where it reduces gradients within a backward pass.
NO_OVERLAP = replace(TWICE, options=("--no-overlap-grad-reduce",))
JOBS: dict[str, tuple[JobSpec, tuple[Change, ...]]] = {
    "GAN": (TWICE, two_models.GAN),
    "GAN, not frozen": (NO_OVERLAP, two_models.gan(freezes=False)),
    "actor and critic": (LOSES, two_models.ACTOR_AND_CRITIC),
    "two critics and a late actor": (LOSES, two_models.LATE_ACTOR),
    "each through the other": (NO_OVERLAP, two_models.CROSSED),
    "actor and critic, bf16": (replace(LOSES, options=("--bf16",)), two_models.ACTOR_AND_CRITIC),
    "actor in fp16, critic in fp32": (
        replace(LOSES, options=("--fp16", "--initial-loss-scale=4294967296")),
        two_models.MIXED,
    ),
}
KILLS = {
    "backward, optimizer": ("1@2:backward", "0@6:optimizer"),
    "forward, gather": ("0@2:forward", "2@6:gather"),
    "snapshot, reduce": ("2@2:snapshot", "0@6:reduce"),
}
# In CI each script in one precision, and each pair of phases.
CASES = [(name, kills) for name in JOBS for kills in KILLS]


@proves(Kind.KILLS, Promise.EQUAL)
@pytest.mark.parametrize(("name", "kills"), sampled(CASES))
def test_two_models_of_one_step_are_equal(
    run: Launch, reference: Reference, tmp_path: Path, name: str, kills: str
) -> None:
    spec, changes = JOBS[name]
    spec = replace(spec, script=write(tmp_path, *changes))
    check_equal(run(replace(spec, kills=KILLS[kills], **BACK)), reference(spec))


@proves(Kind.RETURN, Promise.SENT_AWAY, victim="1", moment="2:backward")
def test_who_comes_back_with_another_critic_is_sent_away(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """A variable that only passes of the second model use: the first loss of each is proved."""
    changes = (*own_scripts.TURNS_UP, *two_models.ACTOR_AND_CRITIC)
    spec = replace(LOSES, script=write(tmp_path, *changes))
    survived = run(replace(spec, kills=("1@2:backward",), respawn=10, awaits=((5, 1),)))
    assert survived.returncode == 0, survived.output[-4000:]
    assert survived.trace() == reference(spec).trace()
    assert [event["slot"] for event in survived.events("entered")] == [1]
    assert 1 not in survived.events("view_committed")[-1]["ranks"]
    assert survived.output.count("the loss of its first micro-batch is not the one") == 1


# A worker dies where a step of the GAN is for so many times in a phase: its generator's part.
DIES_LATE = """
import os, signal
from elaswave_plugin.recovery.phases import Phases
enter, seen = Phases.enter, []
def die(self, phase):
    if (self._slot, self.step, phase) == ({slot}, 3, {phase!r}):
        seen.append(phase)
        if len(seen) == {times}:
            self._events.emit("died_late", phase=phase)
            os.kill(os.getpid(), signal.SIGKILL)
    enter(self, phase)
Phases.enter = die
"""
# Two micro-batches a worker: in the third backward pass, and the second update.
LATE = [(0, "optimizer", 2), (1, "backward", 3), (2, "gather", 2), (1, "optimizer", 2)]


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(("slot", "phase", "times"), sampled(LATE))
def test_one_model_is_updated_and_the_other_is_not(
    run: Launch, reference: Reference, tmp_path: Path, slot: int, phase: str, times: int
) -> None:
    """The update that was made is taken back, and both are made again; who is lost comes back."""
    spec = replace(TWICE, script=write(tmp_path, *two_models.GAN))
    sabotage = DIES_LATE.format(slot=slot, phase=phase, times=times)
    survived = run(replace(spec, sabotage=sabotage, respawn=10, awaits=((6, 1),)))
    assert [event["phase"] for event in survived.events("died_late")] == [phase]
    assert [event["slot"] for event in survived.events("entered")] == [slot]
    check_equal(survived, reference(spec))


@proves(Kind.SABOTAGE, Promise.SEEN)
def test_both_models_are_compared(reference: Reference, tmp_path: Path) -> None:
    """The hashes above are of every weight and moment of both."""
    undisturbed = reference(replace(TWICE, script=write(tmp_path, *two_models.GAN)))
    names = dict(hash_state(undisturbed.directory, 9).by_name)
    of_each = [[name for name in names if name.endswith(f"(model {n})")] for n in (0, 1)]
    # Batch norm has two weights, dropout has none.
    assert [*map(len, of_each)] == [6, 4] and len(names) == 10
    before = dict(hash_state(undisturbed.directory, 8).by_name)
    assert all(names[name] != before[name] for name in names)


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="4:backward")
def test_fast_mode_is_its_twin(run: Launch, tmp_path: Path) -> None:
    script = write(tmp_path, *two_models.ACTOR_AND_CRITIC)
    spec = replace(LOSES, script=script, consistency="fast")
    killed, twin = run(replace(spec, kills=("1@4:backward",))), run(replace(spec, changes=("1@4",)))
    check_survived(killed)
    check_survived(twin)
    assert killed.trace() == twin.trace()


@proves(Kind.JOIN, Promise.EQUAL)
def test_a_worker_beyond_the_launch_gets_both(grown: Grown, tmp_path: Path) -> None:
    script = write(tmp_path, *two_models.ACTOR_AND_CRITIC)
    grown(replace(LOSES, script=script, launcher=("--reserve=1",), awaits=((4, 1),)))


_SECOND = two_models.BIND_SECOND
# What does not train needs one worker.
ALONE = replace(LOSES, nproc=1, global_batch=2)
REFUSED: dict[str, tuple[JobSpec, tuple[Change, ...], str]] = {
    "the same model": (
        ALONE,
        ((_SECOND, _SECOND.replace("second, of_second", "model, of_second")),),
        "job.bind got a model that is bound already: call it once for each model",
    ),
    "the same optimizer": (
        ALONE,
        ((_SECOND, _SECOND.replace("second, of_second,", "second, optimizer,")),),
        "job.bind got an optimizer that is bound already, with another model",
    ),
    "the other's optimizer": (
        ALONE,
        ((two_models.BOUND, two_models.BOUND.replace("optimizer,", "of_second,")),),
        "the optimizer was made for another model than the one that it is bound with",
    ),
    "weights of the other": (
        ALONE,
        two_models.SHARES,
        "job.bind got a model that shares 12 trained weights with one that is bound already",
    ),
    "another length": (
        ALONE,
        ((_SECOND, _SECOND.replace("args.train_iters", "7")),),
        "job.bind got train_iters=7, and train_iters=10 with the model before",
    ),
    "in the first step": (
        ALONE,
        ((_SECOND, ""), ("    def train_step():\n", f"    def train_step():\n    {_SECOND}")),
        "job.bind is called behind job.train, by when the state of all models is sealed",
    ),
    "behind a save": (
        ALONE,
        ((_SECOND, '    job.run(lambda: None, phase="save")\n' + _SECOND),),
        "job.bind is called behind job.run, by when the state of all models is sealed",
    ),
    "with tensor parallelism": (
        replace(LOSES, nproc=4, global_batch=8, options=("--tensor-model-parallel-size=2",)),
        (),
        "job.bind is called for a second model, and tensor_model_parallel_size is 2",
    ),
    "a model that is not bound": (
        ALONE,
        ((_SECOND, ""),),
        "forward_backward trains a model that is not bound",
    ),
    "gradients of another's passes": (
        replace(ALONE, reads=2, options=NO_OVERLAP.options),
        two_models.UPDATES_LATE,
        "a model is updated whose gradients were reduced before forward_backward trained another",
    ),
}


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_bound_or_trained_is_refused(run: Launch, tmp_path: Path, name: str) -> None:
    spec, changes, words = REFUSED[name]
    base = two_models.gan(freezes=False) if spec.reads == 2 else two_models.ACTOR_AND_CRITIC
    refused = run(replace(spec, script=write(tmp_path, *base, *changes)))
    assert refused.returncode == 2, refused.output[-4000:]
    assert sum(words in line for line in refused.output.splitlines()) == 1
    assert "Traceback" not in refused.output
    assert not refused.files.steps and not refused.orphans
