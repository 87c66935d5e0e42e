"""Models that gather their weights in forward passes: in loops of the job, and of a script."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints.reader import differences, read_checkpoint
from tests.faults import own_loop, own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.own_scripts import Change
from tests.faults.test_own_loop import PP2, SEED, VERBS, spec_of
from tests.proofs import Kind, Promise, proves

_DDP, _SAVE = (
    "        grad_reduce_in_fp32=True,\n",
    "    dist_checkpointing.save(state, str(path))\n",
)
_STATE = "    state = {\n        name: chunk.module.sharded"
_BUILD = "def state_to_save(model, optimizer, scheduler):\n"
# As Megatron-LM does it: no forward pass gathers while a checkpoint is made.
GATHERS: tuple[Change, ...] = (
    (_DDP, _DDP + "        overlap_param_gather=True,\n"),
    (_BUILD, "MODEL = []\n\n\n" + _BUILD + "    MODEL[:] = model\n"),
    (_STATE, "    for chunk in model:\n        chunk.disable_forward_pre_hook()\n" + _STATE),
    (_SAVE, _SAVE + "    for chunk in MODEL:\n        chunk.enable_forward_pre_hook()\n"),
)
WRITE = {"own": own_loop.write, "verbs": own_scripts.write}


def saving(write: str, folder: Path, name: str, kill: str, **more: object) -> JobSpec:
    """The job that saves after every other step, and loses a worker."""
    options = (*VERBS.options, SEED, f"--save={folder / name}", "--save-interval=2")
    script = WRITE[write](folder, *GATHERS)
    spec = replace(spec_of(0, "data"), script=script, options=options, kills=(kill,))
    return replace(spec, **more)  # type: ignore[arg-type]


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("kill", ["1@2:forward", "0@4:save"])
@pytest.mark.parametrize("write", WRITE)
def test_a_loss_and_checkpoints(
    run: Launch, reference: Reference, tmp_path: Path, write: str, kill: str
) -> None:
    whole: Outcome = run(saving(write, tmp_path, "whole", kill).undisturbed())
    check_equal(run(saving(write, tmp_path, "struck", kill)), whole)
    if write == "own":
        # Bits are those of a model that gathers behind its update.
        check_equal(whole, reference(VERBS))
    for step in (2, 4, 6):
        found = (read_checkpoint(tmp_path / n / f"iter_{step:07d}") for n in ("whole", "struck"))
        assert differences(*found) == []


@proves(Kind.RETURN, Promise.EQUAL, victim="0", moment="2:optimizer")
@pytest.mark.parametrize("sizes", [(), PP2], ids=["data parallel", "stages"])
def test_it_comes_back(
    run: Launch, reference: Reference, tmp_path: Path, sizes: tuple[str, ...]
) -> None:
    spec = saving("own", tmp_path, "saved", "0@2:optimizer", respawn=1, changes=("+0@4",))
    back = run(replace(spec, options=(*spec.options, *sizes)))
    check_equal(back, reference(replace(VERBS, options=(*VERBS.options, *sizes))))
    assert len(back.events("entered")) == 1


# A pass of a pipeline whose stages are unequally wide must wait for no worker of its own stage.
NONE_IN_A_PASS = """
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group
from elaswave_plugin.adapters.megatron.step.ragged_pipeline import RaggedPipeline
forward, start, inside = RaggedPipeline._forward, Group.start_param_sync, []
def passing(self, *args):
    inside.append(None)
    forward(self, *args)
    inside.pop()
def gathering(self, *args, **more):
    assert not inside, "a forward pass gathers weights"
    start(self, *args, **more)
RaggedPipeline._forward, Group.start_param_sync = passing, gathering
"""


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:forward")
def test_no_pass_waits_for_a_worker_of_its_stage(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    spec = saving("own", tmp_path, "none", "1@2:forward", sabotage=NONE_IN_A_PASS)
    options = (*VERBS.options, SEED, *PP2)
    struck = run(replace(spec, options=options))
    check_equal(struck, reference(replace(VERBS, options=(*VERBS.options, *PP2))))
