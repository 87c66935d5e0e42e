"""The fault matrix of TP x PP x DP jobs: single losses, all pairs, and pairs with their memory."""

import itertools
from dataclasses import replace

from tests.fault_matrix import FaultMatrix, Runs
from tests.faults.harness import (
    PRELOAD,
    JobSpec,
    Outcome,
    check_equal,
    check_survived,
    max_relative_difference,
)
from tests.faults.matrix import write_text
from tests.proofs import Promise

PHASES = ("forward", "backward", "reduce", "optimizer")
TP2_PP2_DP2 = JobSpec(
    nproc=8,
    options=(
        "--tensor-model-parallel-size=2",
        "--pipeline-model-parallel-size=2",
        "--sequence-parallel",
        "--calculate-per-token-loss",
    ),
)
PP2_DP2 = JobSpec(options=("--pipeline-model-parallel-size=2",))
PP4_DP2 = JobSpec(
    nproc=8,
    options=(
        "--pipeline-model-parallel-size=4",
        "--num-layers=4",
        "--calculate-per-token-loss",
        "--bf16",
    ),
)
PP2_VPP2_DP2 = JobSpec(
    options=(
        "--pipeline-model-parallel-size=2",
        "--num-virtual-stages-per-pipeline-rank=2",
        "--num-layers=4",
        "--calculate-per-token-loss",
    ),
)
REROUTE = ("--elaswave-dataflow=reroute",)
RESIZE = ("--elaswave-dataflow=resize", "--calculate-per-token-loss", "--micro-batch-size=2")
# In TP2 x PP2 x DP2 these share a state between them: it is lost with the memory of both.
ONLY_COPIES = ((0, 2), (1, 3), (4, 6), (5, 7))


def resized(spec: JobSpec) -> JobSpec:
    """The same job with micro-batches of two samples, which are cut anew after a loss."""
    return replace(
        spec,
        global_batch=2 * spec.global_batch,
        consistency="fast",
        options=(*spec.options, *RESIZE),
    )


def single_losses() -> list[JobSpec]:
    """Every slot in every phase; both meet both dataflows."""
    return [
        replace(
            TP2_PP2_DP2,
            kills=(f"{slot}@3:{phase}",),
            options=TP2_PP2_DP2.options + (REROUTE if (slot + index) % 2 else ()),
        )
        for slot, (index, phase) in itertools.product(range(8), enumerate(PHASES))
    ]


def cases() -> tuple[JobSpec, ...]:
    """Every case of the matrix, in order."""
    # The rest of a TP group is free and runs nothing, so that both of one group die at once.
    pairs = [
        replace(TP2_PP2_DP2, lost_trainers=(first, second))
        if first // 2 == second // 2
        else replace(TP2_PP2_DP2, kills=(f"{first}@2:{phase}", f"{second}@2:{phase}"))
        for (first, second), phase in zip(
            itertools.combinations(range(8), 2), itertools.cycle(PHASES), strict=False
        )
    ]
    with_memory = [
        replace(TP2_PP2_DP2, nodes=8, lost_nodes=pair)
        for pair in itertools.combinations(range(8), 2)
    ]
    pipelines = [
        replace(spec, kills=(f"{slot}@2:{phase}",))
        for spec in (PP2_DP2, PP4_DP2, PP2_VPP2_DP2)
        for slot, phase in itertools.product(range(spec.nproc), PHASES)
    ]
    cut = [
        replace(resized(TP2_PP2_DP2), kills=(f"{slot}@3:{phase}",))
        for slot, phase in itertools.product(range(8), PHASES)
    ]
    return (*single_losses(), *pairs, *with_memory, *pipelines, *cut)


def promise(spec: JobSpec) -> str:
    """Say what a case has to fulfil."""
    if RESIZE[0] in spec.options:
        return Promise.PLANNED
    return Promise.STOPS if spec.lost_nodes in ONLY_COPIES else Promise.EQUAL


def check(run: Outcome, runs: Runs) -> None:
    """Raise AssertionError where a run does not keep its promise."""
    kept = promise(run.spec)
    if kept == Promise.PLANNED:
        check_resized(run, twin=runs.twin(run.spec), undisturbed=runs.reference(run.spec))
    elif kept == Promise.STOPS:
        check_stopped(run)
    else:
        check_equal(run, runs.reference(replace(run.spec, options=undisturbed(run.spec))))


def check_resized(
    run: Outcome, *, twin: Outcome, undisturbed: Outcome, within: float = 1e-6
) -> None:
    """Micro-batches were cut; bit-equal to the twin, close to the run that nothing disturbs."""
    for one in (run, twin):
        check_survived(one)
        assert {event["dataflow"] for event in one.events("recovered")} == {"resize"}
    assert run.trace() == twin.trace()
    assert max_relative_difference(run, undisturbed) < within
    # Negative control: the sums are really made in another order.
    assert run.trace() != undisturbed.trace()


def undisturbed(spec: JobSpec) -> tuple[str, ...]:
    """The options of the reference: nothing is dealt anew in it."""
    return tuple(option for option in spec.options if option not in REROUTE)


def check_stopped(run: Outcome) -> None:
    """The state of one stage and tp position is gone with all its copies."""
    first, _ = run.spec.lost_nodes
    stage, tp = divmod(first, 4)
    assert run.returncode == 1, run.output[-4000:]
    assert "state was lost with all its copies" in run.output
    assert f"stage {stage} tp {tp}: all shards" in run.output
    assert "Traceback" not in run.output
    assert not run.orphans


MATRIX = FaultMatrix(
    framework="hybrid",
    cases=cases(),
    fields=("nproc", "nodes", "kills", "lost_trainers", "lost_nodes", "options"),
    preload=PRELOAD,
    promise=promise,
    check=check,
    prepare=write_text,
)
