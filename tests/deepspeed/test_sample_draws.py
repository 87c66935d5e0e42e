"""Draws by sample: losses of workers change the numbers of no sample, in any loop and stage."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from elaswave_plugin.config import STEP_PHASES
from elaswave_plugin.tracking.state_dump import dumped_steps, parts_in
from tests.deepspeed import hf_runs
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, SCRIPTS, EngineSpec
from tests.faults.harness import Outcome, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

LOOPS = ("engine", "accelerate", "trainer")
KINDS = ("sdpa", "eager", "lora", "recomputed", "functional", "collated")
STAGES = range(4)
# Of losses and norms; of weights, by the norm of their difference.
BOUND = 1e-5
# The gradient of the keys' bias is nothing but rounding, which Adam makes as large as any other.
ROUNDING = ("attn.c_attn.bias",)
TOLD = "in which no dimension is that of the samples"
# A share draws as one micro-batch, whatever it is made up of.
BY_SHARE = (
    "from elaswave_plugin.adapters import cut_draws;"
    " cut_draws.CutDraws.is_cut = property(lambda self: False)"
)


def spec_of(
    stage: int, loop: str, kind: str, *phases: str, sabotage: str = "", size: int = 2
) -> EngineSpec:
    """A job of four workers that loses one in each phase, in three steps at most."""
    options = (f"--loop={loop}", f"--kind={kind}", f"--batch-size={size}", "--accumulation=2")
    made = {} if loop == "engine" else {"optimizer": None}
    return EngineSpec(
        stage=stage,
        steps=5,
        global_batch=8 * size,
        script=str(SCRIPTS / "draws.py"),
        options=options,
        settings=json.dumps({"scheduler": None, **made}),
        kills=tuple(f"{(stage + at) % 4}@{1 + at}:{phase}" for at, phase in enumerate(phases)),
        sabotage=sabotage,
    )


def cover() -> list[tuple[int, str, str, tuple[str, ...]]]:
    """Every pair of stage, loop, kind and phase."""
    cases = []
    for stage, (number, kind) in itertools.product(STAGES, enumerate(KINDS)):
        first = 3 * (stage + number)
        phases = tuple(STEP_PHASES[(first + at) % len(STEP_PHASES)] for at in range(3))
        cases.append((stage, LOOPS[(stage + 2 * number) % len(LOOPS)], kind, phases))
    return cases


def test_the_cover_has_every_pair() -> None:
    each = [(*case[:3], phase) for case in cover() for phase in case[3]]
    axes = (STAGES, LOOPS, KINDS, STEP_PHASES)
    for (one, some), (other, others) in itertools.combinations(enumerate(axes), 2):
        assert {(case[one], case[other]) for case in each} == {*itertools.product(some, others)}


def whole(stages: range) -> list[Any]:
    """Every stage, loop, kind and phase together, for `make matrix` alone."""
    parts = (STEP_PHASES[:3], STEP_PHASES[3:5], STEP_PHASES[5:])
    cases = itertools.product(stages, LOOPS, ("sdpa", "lora", "recomputed"), parts)
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def norms(run: Outcome) -> dict[int, float]:
    """The norm of the gradients of each step; none where DeepSpeed computes none."""
    return {one["step"]: one["grad_norm"] for one in run.files.steps if one["grad_norm"]}


def check_norms(run: Outcome, reference: Outcome) -> None:
    ours, theirs = norms(run), norms(reference)
    assert ours.keys() == theirs.keys()
    for step, norm in theirs.items():
        assert ours[step] == pytest.approx(norm, rel=BOUND), step


def check_weights(run: Outcome, reference: Outcome) -> None:
    ours, theirs = (masters(one.directory) for one in (run, reference))
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        apart = np.linalg.norm(ours[name] - values) / np.linalg.norm(values)
        assert name.endswith(ROUNDING) or apart <= BOUND, (name, apart)


def apart(run: Outcome, reference: Outcome) -> float:
    """The norm of the difference of all weights over the norm of those of the reference."""
    ours, theirs = (masters(one.directory) for one in (run, reference))
    names = [name for name in theirs if not name.endswith(ROUNDING)]
    flat, wanted = (np.concatenate([each[name] for name in names]) for each in (ours, theirs))
    return float(np.linalg.norm(flat - wanted) / np.linalg.norm(wanted))


def masters(directory: Path) -> dict[str, np.ndarray]:
    """The weights of the last step, by name."""
    return parts_in(directory, dumped_steps(directory)[-1], "master")


@proves(Kind.KILLS, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "loop", "kind", "phases"), [*sampled(cover()), *whole(STAGES)])
def test_losses_keep_the_draws_of_every_sample(
    run: Launch,
    twin: Twin,
    reference: Launch,
    stage: int,
    loop: str,
    kind: str,
    phases: tuple[str, ...],
) -> None:
    spec = spec_of(stage, loop, kind, *phases)
    killed, undisturbed = run(spec), reference(spec)
    for one in (killed, undisturbed, twin(killed)):
        check_survived(one)
    assert killed.trace() == twin(killed).trace()
    assert max_relative_difference(killed, undisturbed) <= FP32_BOUND
    check_norms(killed, undisturbed)
    check_weights(killed, undisturbed)
    assert "a pass draws numbers" not in killed.output


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "kill"), sampled([(2, "1@1:reduce"), (1, "3@2:gather")]))
def test_in_bf16_a_loss_is_as_far_as_another_order_of_sums(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str
) -> None:
    """The grain of 16 bits: a job of other micro-batches that loses nobody is as far away."""
    base = ("--bf16", "--use-cpu")
    options = (*base, "--batch-size=2", "--accumulation=2")
    spec = hf_runs.spec_of(kill, stage=stage, bf16=True, global_batch=16, options=options)
    killed, undisturbed = run(spec), reference(spec)
    check_survived(killed)
    assert killed.trace() == twin(killed).trace()
    others = (("--batch-size=1", "--accumulation=4"), ("--batch-size=4", "--accumulation=1"))
    orders = [apart(reference(replace(spec, options=(*base, *one))), undisturbed) for one in others]
    found = apart(killed, undisturbed)
    assert BOUND < found < 2 * max(orders), (found, orders)


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1", moment="1:backward")
@pytest.mark.parametrize(("loop", "kind"), sampled([*itertools.product(LOOPS, KINDS[::2])]))
def test_draws_of_a_share_are_seen(run: Launch, reference: Launch, loop: str, kind: str) -> None:
    """Negative control."""
    spec = spec_of(1, loop, kind, "backward", sabotage=BY_SHARE)
    killed = run(spec)
    check_survived(killed)
    assert max_relative_difference(killed, reference(spec)) > 10 * BOUND


@proves(Kind.KILL, Promise.PLANNED, victim="2", moment="1:backward")
def test_one_draw_for_all_samples_is_told_in_the_first_step(
    run: Launch, twin: Twin, reference: Launch
) -> None:
    spec = spec_of(2, "engine", "together", "backward")
    killed, undisturbed = run(spec), reference(spec)
    for one in (killed, undisturbed, twin(killed)):
        check_survived(one)
        assert one.output.count(f"numbers of the shape (), {TOLD}") == 1
    assert killed.trace() == twin(killed).trace()
    # Behind it, the others are those of each sample; it is another number for some of them.
    assert BOUND < max_relative_difference(killed, undisturbed) < 1e-2
