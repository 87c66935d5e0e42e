"""The job's first step is run once more, dealt otherwise: what is no promise of bits is found."""

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.observer.observer import audit_samples
from tests.faults import own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived
from tests.faults.hybrid_matrix import PP2_DP2, PP2_VPP2_DP2, TP2_PP2_DP2
from tests.faults.test_negative_controls import SABOTAGE
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

THREE = JobSpec(nproc=3, steps=4, global_batch=6)
# A device whose kernels may not repeat: a CPU stands in for a GPU.
ON_GPU = (
    "from elaswave_plugin.adapters import repeated_layer; "
    "repeated_layer.may_differ = lambda module: True"
)
OFF = ("--elaswave-rehearse-first-step=off",)
CONTINUE = ("--elaswave-rehearse-first-step=continue",)


def rehearsed(run: Outcome) -> list[tuple[int, str, bool]]:
    """Step, deal and verdict, as every worker of the launch tells them."""
    told = run.events("first_step_rehearsed")
    by_slot = {
        slot: [(e["step"], e["dealt"], e["equal"]) for e in told if e["slot"] == slot]
        for slot in range(run.spec.nproc)
    }
    assert all(one == by_slot[0] for one in by_slot.values()), by_slot
    return by_slot[0]


EQUAL = {
    "data parallel": (THREE, (), 1, "otherwise"),
    "buffers that passes change": (THREE, own_scripts.NORMALIZES, 1, "otherwise"),
    "two updates": (THREE, own_scripts.UPDATES_TWICE, 2, "otherwise"),
    "passes without gradients": (THREE, own_scripts.PASSES, 2, "otherwise"),
    "draws": (THREE, own_scripts.MASKS, 1, "otherwise"),
    "one replica": (replace(THREE, nproc=1), (), 1, "as before"),
    "stages": (PP2_DP2, (), 1, "otherwise"),
    "interleaved stages": (PP2_VPP2_DP2, (), 1, "otherwise"),
    "stages and tensors": (TP2_PP2_DP2, (), 1, "otherwise"),
}


@proves(Kind.NOTHING, Promise.EQUAL)
@pytest.mark.parametrize("name", sampled([*EQUAL]))
def test_a_step_that_is_run_twice_leaves_no_trace(
    run: Launch, reference: Reference, tmp_path: Path, name: str
) -> None:
    spec, changes, calls, dealt = EQUAL[name]
    spec = replace(spec, script=own_scripts.write(tmp_path, *changes), steps=4)
    twice, once = reference(spec), run(replace(spec, options=(*spec.options, *OFF)))
    assert (twice.returncode, once.returncode) == (0, 0), twice.output[-4000:]
    assert twice.trace() == once.trace()
    assert rehearsed(twice) == calls * [(0, dealt, True)]
    assert not once.events("first_step_rehearsed")
    assert consumed(twice) == consumed(once)


def consumed(run: Outcome) -> list[tuple[int, int, list[int]]]:
    """Step, micro-batch and samples, as the ledger has them."""
    return sorted((line["step"], line["k"], line["samples"]) for line in run.files.ledger)


DIFFERENT = {
    "a count of passes": (own_scripts.COUNTS_PASSES, THREE, "the loss of micro-batch 0, which"),
    "a generator of its own": (
        own_scripts.DRAWS_BY_ITSELF,
        THREE,
        "the loss of micro-batch 0, which",
    ),
    "a gradient": (
        own_scripts.UNSTEADY_GRADIENT,
        THREE,
        "the reduced gradient of decoder.final_layernorm.weight differs",
    ),
    "kernels of the only replica": (
        own_scripts.UNSTEADY_GRADIENT,
        replace(THREE, nproc=1),
        "was run twice, and the reduced gradient of decoder.final_layernorm.weight differs",
    ),
    "a gradient of one stage": (
        own_scripts.UNSTEADY_GRADIENT,
        PP2_VPP2_DP2,
        "the reduced gradient of decoder.final_layernorm.weight differs",
    ),
}


@proves(Kind.WRONG_SCRIPT, Promise.TOLD)
@pytest.mark.parametrize("name", sampled([*DIFFERENT]))
def test_what_differs_is_named_before_the_update(run: Launch, tmp_path: Path, name: str) -> None:
    changes, spec, words = DIFFERENT[name]
    stopped = run(replace(spec, script=own_scripts.write(tmp_path, *changes)))
    assert stopped.returncode == 2, stopped.output[-4000:]
    (line,) = [line for line in stopped.output.splitlines() if words in line]
    assert "the job stops: worker" in line and "step 0, the first of this job, was run" in line
    assert "Traceback" not in stopped.output
    assert not stopped.files.steps and not stopped.orphans


@proves(Kind.WRONG_SCRIPT, Promise.TOLD)
@pytest.mark.parametrize("name", ["running draws", "order of workers"])
def test_what_breaks_exactness_is_found_before_a_loss(run: Launch, name: str) -> None:
    stopped = run(JobSpec(sabotage=SABOTAGE[name]))
    assert stopped.returncode == 2, stopped.output[-4000:]
    assert "step 0, the first of this job, was run by other workers" in stopped.output
    assert not stopped.files.steps


@proves(Kind.RETURN, Promise.CLOSE, victim="1 2", moment="2:backward 6:forward")
def test_a_job_that_goes_on_is_fast_for_those_who_come_back_too(
    run: Launch, tmp_path: Path
) -> None:
    """Gradients differ from run to run: whoever comes back is not sent away for it."""
    script = own_scripts.write(tmp_path, *own_scripts.UNSTEADY_GRADIENT)
    spec = replace(THREE, script=script, steps=8, options=CONTINUE, respawn=10)
    survived = run(replace(spec, kills=("1@2:backward", "2@6:forward"), awaits=((4, 1),)))
    check_survived(survived)
    assert rehearsed(survived) == [(0, "otherwise", False)]
    assert [event["slot"] for event in survived.events("entered")] == [1]
    assert survived.output.count("the job goes on in fast mode: bits are not promised") == 1


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="0:reduce")
def test_a_worker_that_is_lost_while_the_step_is_rehearsed(
    run: Launch, reference: Reference
) -> None:
    """Its redo is none, and neither is a step of whoever comes back."""
    spec = replace(THREE, kills=("1@0:reduce",), steps=6, respawn=10, awaits=((3, 1),))
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert not survived.events("first_step_rehearsed")


@proves(Kind.NOTHING, Promise.EQUAL)
def test_a_resumed_job_rehearses_its_own_first_step(run: Launch, tmp_path: Path) -> None:
    whole = run(replace(THREE, options=(f"--save={tmp_path}", "--save-interval=2")))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    script = own_scripts.write(tmp_path, *own_scripts.resumes(tmp_path, 2, place="in job.run"))
    resumed = run(replace(THREE, script=script))
    assert resumed.returncode == 0, resumed.output[-4000:]
    assert resumed.trace() == {step: one for step, one in whole.trace().items() if step >= 2}
    assert rehearsed(resumed) == [(2, "otherwise", True)]
    assert audit_samples(resumed.files, batches=THREE.batches) == (0, 0)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_fast_mode_has_no_bits_to_rehearse(run: Launch) -> None:
    fast = run(replace(THREE, consistency="fast"))
    assert fast.returncode == 0 and not fast.events("first_step_rehearsed")
    refused = run(replace(THREE, consistency="fast", options=CONTINUE))
    assert refused.returncode == 2, refused.output[-4000:]
    assert "rehearse_first_step is continue and consistency is fast" in refused.output


def repeated(run: Outcome) -> list[tuple[int, bool]]:
    """Step and verdict of the layer that every worker has run twice alike."""
    told = run.events("layer_repeated")
    assert sorted({e["slot"] for e in told}) == ([*range(run.spec.nproc)] if told else [])
    return sorted({(e["step"], e["equal"]) for e in told})


@proves(Kind.NOTHING, Promise.EQUAL)
@pytest.mark.parametrize("spec", sampled([THREE, TP2_PP2_DP2]))
def test_a_layer_that_is_run_twice_leaves_no_trace(
    run: Launch, reference: Reference, tmp_path: Path, spec: JobSpec
) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.REPEATING_KERNEL)
    spec = replace(spec, script=script, steps=4)
    on_cpu, on_gpu = reference(spec), run(replace(spec, sabotage=ON_GPU))
    assert on_gpu.returncode == 0, on_gpu.output[-4000:]
    assert on_gpu.trace() == on_cpu.trace()
    assert (repeated(on_gpu), repeated(on_cpu)) == ([(0, True)], [])


@proves(Kind.WRONG_SCRIPT, Promise.TOLD)
@pytest.mark.parametrize("spec", sampled([THREE, TP2_PP2_DP2]))
def test_a_layer_that_does_not_repeat_ends_the_job_and_names_the_switch(
    run: Launch, tmp_path: Path, spec: JobSpec
) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.UNSTEADY_KERNEL)
    stopped = run(replace(spec, script=script, sabotage=ON_GPU))
    assert stopped.returncode == 2, stopped.output[-4000:]
    (line,) = [line for line in stopped.output.splitlines() if "the job stops" in line]
    assert "the first of this job, worker 0 ran twice, on the same input, layer " in line
    assert "with torch.use_deterministic_algorithms(True) they do repeat: set it, and" in line
    assert "Traceback" not in stopped.output
    assert repeated(stopped) == [(0, False)]
    assert not stopped.files.steps and not stopped.orphans


@proves(Kind.KILL, Promise.CLOSE, victim="1", moment="2:backward")
def test_a_job_whose_layers_do_not_repeat_goes_on_in_fast_mode(run: Launch, tmp_path: Path) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.UNSTEADY_KERNEL)
    spec = replace(THREE, script=script, sabotage=ON_GPU, options=CONTINUE)
    survived = run(replace(spec, kills=("1@2:backward",)))
    check_survived(survived)
    assert (repeated(survived), rehearsed(survived)) == ([(0, False)], [])
    assert survived.output.count("the job goes on in fast mode: bits are not promised") == 1
