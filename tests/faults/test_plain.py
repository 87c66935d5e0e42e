"""The example without --elaswave: the same verbs, plain data parallelism, the same losses."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import two_models
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import SCRIPT, JobSpec, losses_of
from tests.faults.own_scripts import write
from tests.proofs import Kind, Promise, proves

# Draws are keyed with the plugin, and a rank's own without it.
NO_DROPOUT = ("--attention-dropout=0", "--hidden-dropout=0")
SPEC = JobSpec(nproc=2, steps=4, global_batch=4, options=NO_DROPOUT)
WITHOUT = """\
    for name in [one for one in vars(args) if one.startswith("elaswave")]:
        setattr(args, name, None)
    job = elaswave.attach(args)
"""
AS_DICT = "{'lm loss': torch.stack([total.detach(), tokens.detach()])}"
REDUCED = """\
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    torch.distributed.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
    reported = {"lm loss": (total / tokens).detach()}
"""
# What a script may write otherwise: (what is replaced, by what).
OTHERWISE = {
    "as it is": ("", ""),
    "losses as a dict": ("(float(total), float(tokens))", AS_DICT),
    "Megatron's num_microbatches": (
        "(train_batches), **",
        "(train_batches), num_microbatches=2, **",
    ),
    "reduced in loss_func": ("    reported = (float(total), float(tokens))\n", REDUCED),
}


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.parametrize(("old", "new"), OTHERWISE.values(), ids=OTHERWISE.keys())
def test_without_the_plugin_the_losses_are_the_same(
    run: Launch, reference: Reference, tmp_path: Path, old: str, new: str
) -> None:
    attach, text = "    job = elaswave.attach(args)  # [elastic] 3\n", SCRIPT.read_text()
    assert text.count(attach) == 1 and text.count(old or attach) == 1
    script = tmp_path / "train_gpt.py"
    script.write_text(text.replace(attach, WITHOUT).replace(old or new, new))
    done = run(replace(SPEC, script=str(script)))
    assert done.returncode == 0, done.output[-4000:]
    assert not done.orphans
    printed = [float(loss) for loss in re.findall(r"step +\d+ \| loss ([0-9.]+)", done.output)]
    wanted = losses_of(reference(SPEC).files)
    assert printed == pytest.approx([wanted[step] for step in range(SPEC.steps)], abs=2e-6)


@proves(Kind.NOTHING, Promise.SAME)
def test_without_the_plugin_two_models_have_the_same_losses(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    attach = ("    job = elaswave.attach(args)  # [elastic] 3\n", WITHOUT)
    changes = two_models.ACTOR_AND_CRITIC
    with_it, without = tmp_path / "with", tmp_path / "without"
    with_it.mkdir()
    without.mkdir()
    wanted = losses_of(reference(replace(SPEC, script=write(with_it, *changes))).files)
    done = run(replace(SPEC, script=write(without, attach, *changes)))
    assert done.returncode == 0, done.output[-4000:]
    printed = [float(loss) for loss in re.findall(r"step +\d+ \| loss ([0-9.]+)", done.output)]
    assert printed == pytest.approx([wanted[step] for step in range(SPEC.steps)], abs=2e-6)
