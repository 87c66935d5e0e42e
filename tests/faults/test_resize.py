"""Losses with resized micro-batches: every stage cuts the samples of a round evenly anew.

Parts of other sizes are rounded otherwise: bit for bit a run is its twin's equal, in which the same
worker leaves as planned.
"""

from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import (
    JobSpec,
    Outcome,
    check_equal,
    check_survived,
    max_relative_difference,
)
from tests.faults.hybrid_matrix import (
    PHASES,
    PP2_DP2,
    PP2_VPP2_DP2,
    TP2_PP2_DP2,
    check_resized,
    resized,
)
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# Three replicas of two samples: two survivors run three samples each, a micro-batch and a half.
PP2_DP3 = replace(PP2_DP2, nproc=6, global_batch=6)


def killed(spec: JobSpec, run: Launch, reference: Reference, *, within: float = 1e-6) -> Outcome:
    """A run with its kills, checked against its twin and the run that nothing disturbs."""
    survived = run(spec)
    changes = tuple(kill.split(":")[0] for kill in spec.kills)
    twin = run(replace(spec, kills=(), changes=changes))
    check_resized(survived, twin=twin, undisturbed=reference(spec), within=within)
    return survived


def cut_pieces(run: Outcome) -> set[tuple[int, int]]:
    """Sample intervals of the last layout that are no whole micro-batches of two samples."""
    stages = run.events("recovered")[-1]["pieces"]
    pieces = {(start, stop) for stage in stages for one in stage for _, start, stop in one}
    return {(start, stop) for start, stop in pieces if start % 2 or stop % 2}


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("slot", "phase"),
    sampled([(1, "backward"), (4, "forward"), (0, "optimizer"), (5, "reduce")]),
)
def test_a_micro_batch_is_cut_between_two_workers(
    run: Launch, reference: Reference, slot: int, phase: str
) -> None:
    spec = replace(resized(PP2_DP3), kills=(f"{slot}@3:{phase}",))
    survived = killed(spec, run, reference)
    assert cut_pieces(survived) == {(0, 3), (3, 6), (6, 9), (9, 12)}


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize(("slot", "phase"), list(enumerate(PHASES)))
def test_a_pipeline_with_cut_micro_batches(
    run: Launch, reference: Reference, slot: int, phase: str
) -> None:
    killed(replace(resized(PP2_DP2), kills=(f"{slot}@3:{phase}",)), run, reference)


@proves(Kind.KILLS, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        # The rest of the first group is free, and forms one with that of the second.
        ("2@2:backward", "6@4:forward"),
        ("7@3:reduce",),
    ],
    ids=" ".join,
)
def test_tensor_parallel_stages_with_cut_micro_batches(
    run: Launch, reference: Reference, kills: tuple[str, ...]
) -> None:
    killed(replace(resized(TP2_PP2_DP2), kills=kills), run, reference)


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="3:backward")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "options"),
    [
        (replace(PP2_VPP2_DP2, nproc=6, global_batch=6), ()),
        (JobSpec(nproc=8, options=("--pipeline-model-parallel-size=4", "--num-layers=4")), ()),
        (PP2_DP3, ("--recompute-granularity=full", "--eval-interval=2")),
        (PP2_DP3, ("--num-layers=6",)),
        (
            JobSpec(nproc=6, global_batch=6, options=("--tensor-model-parallel-size=2",)),
            ("--sequence-parallel",),
        ),
    ],
    ids=["interleaved", "deep", "recomputed", "layers move", "no pipeline"],
)
def test_cut_micro_batches_under_an_option(
    run: Launch, reference: Reference, base: JobSpec, options: tuple[str, ...]
) -> None:
    spec = resized(base)
    killed(
        replace(spec, kills=("1@3:backward",), options=(*spec.options, *options)), run, reference
    )


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:backward")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_auto_cuts_micro_batches_in_fast_mode_only(run: Launch, reference: Reference) -> None:
    """Only if steps get shorter: three micro-batches of two survivors are cut, six are dealt."""
    spec = resized(replace(PP2_DP3, global_batch=3))
    spec = replace(
        spec, kills=("1@3:backward",), options=(*spec.options, "--elaswave-dataflow=auto")
    )
    killed(spec, run, reference)
    even = run(replace(spec, global_batch=2 * spec.global_batch))
    assert {event["dataflow"] for event in even.events("recovered")} == {"redeal"}
    exact = run(replace(spec, consistency="exact"))
    check_equal(exact, reference(exact.spec))
    assert "resize" not in {event["dataflow"] for event in exact.events("recovered")}


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="3:backward")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--bf16",), ("--fp16", "--initial-loss-scale=4096")], ids=["bf16", "fp16"]
)
def test_cut_micro_batches_in_16_bits(
    run: Launch, reference: Reference, options: tuple[str, ...]
) -> None:
    """Rounded to 8 or 11 bits, other sums differ by as much; the twin is equal all the same."""
    spec = resized(PP2_DP3)
    spec = replace(spec, kills=("1@3:backward",), options=(*spec.options, *options))
    killed(spec, run, reference, within=5e-3)


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1", moment="3:backward")
@pytest.mark.slow
def test_without_cut_masks_the_losses_differ(run: Launch, reference: Reference) -> None:
    """A negative control: a sample that is dropped otherwise is seen."""
    spec = replace(
        resized(PP2_DP3),
        kills=("1@3:backward",),
        sabotage="""
from elaswave_plugin.adapters.cut_draws import CutDraws
CutDraws.know = lambda draws, parts: None
""",
    )
    survived = run(spec)
    check_survived(survived)
    assert max_relative_difference(survived, reference(resized(PP2_DP3))) > 1e-4


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("options", "consistency", "sentence"),
    [
        (("--calculate-per-token-loss",), "exact", "dataflow is resize and consistency is exact"),
        ((), "fast", "micro-batches cannot be cut here: without calculate_per_token_loss"),
        (
            ("--calculate-per-token-loss", "--elaswave-loss=samples"),
            "fast",
            "micro-batches cannot be cut here: loss is samples",
        ),
    ],
    ids=["exact", "mean losses", "said to be means"],
)
def test_what_cannot_be_cut_is_one_sentence(
    run: Launch, options: tuple[str, ...], consistency: str, sentence: str
) -> None:
    options = (*PP2_DP2.options, "--elaswave-dataflow=resize", *options)
    refused = run(JobSpec(options=options, consistency=consistency))
    assert refused.returncode == 2
    assert sentence in refused.output and "Traceback" not in refused.output
    assert not refused.orphans
