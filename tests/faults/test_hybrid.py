"""Losses in TP x PP x DP jobs: every stage goes on as wide as it still is, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.convoys import Convoy, convoys
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import (
    JobSpec,
    Outcome,
    check_equal,
    check_survived,
    max_relative_difference,
)
from tests.faults.hybrid_matrix import (
    ONLY_COPIES,
    PP2_DP2,
    PP2_VPP2_DP2,
    PP4_DP2,
    REROUTE,
    TP2_PP2_DP2,
    check_stopped,
    single_losses,
)
from tests.faults.test_fp16 import FP16
from tests.faults.test_outside_a_step import saved_tensors
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled


# With two of the four TP groups, as many as there are stages are left.
@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    "spec",
    convoys(single_losses(), lambda spec: spec, most=2, victim=lambda kill: kill.slot // 2),
    ids=lambda spec: spec.kills[0],
)
def test_any_worker_of_tp_pp_dp(convoy: Convoy, reference: Reference, spec: JobSpec) -> None:
    undisturbed = reference(TP2_PP2_DP2)
    convoy.check(undisturbed.trace(), lambda: check_equal(convoy.run, undisturbed))
    (kill,) = convoy.own
    assert len(convoy.recovered) == 7 - convoy.run.spec.kills.index(kill)
    if REROUTE[0] in spec.options:
        assert {event["dataflow"] for event in convoy.recovered} == {"reroute"}


@proves(Kind.KILLS, Promise.EQUAL)
@pytest.mark.parametrize(
    "kills",
    sampled(
        [
            (("1@2:forward", "3@4:backward"),),
            (("4@3:backward", "7@3:optimizer"),),
            (("2@3:reduce", "5@3:forward"),),
        ]
    ),
    ids=" ".join,
)
def test_two_workers_of_tp_pp_dp(run: Launch, reference: Reference, kills: tuple[str, ...]) -> None:
    """Of the same tp position, of the two groups of a stage, of two stages."""
    spec = replace(TP2_PP2_DP2, kills=kills)
    check_equal(run(spec), reference(spec))


@proves(Kind.KILLS, Promise.EQUAL, victim="0 1")
def test_a_whole_tp_group(run: Launch, reference: Reference) -> None:
    spec = replace(TP2_PP2_DP2, lost_trainers=(0, 1))
    check_equal(run(spec), reference(spec))


@proves(Kind.NODE, Promise.EQUAL, victim="0 3")
def test_the_state_of_a_stage_survives_in_copies(run: Launch, reference: Reference) -> None:
    spec = replace(TP2_PP2_DP2, nodes=8, lost_nodes=(0, 3))
    check_equal(run(spec), reference(spec))


@proves(Kind.COPIES, Promise.STOPS)
def test_a_shard_and_its_only_copy_are_named(run: Launch) -> None:
    check_stopped(run(replace(TP2_PP2_DP2, nodes=8, lost_nodes=ONLY_COPIES[1])))


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("options", [(), REROUTE], ids=["redeal", "reroute"])
@pytest.mark.parametrize("kill", sampled(["0@3:backward", "3@2:forward"]))
def test_a_pipeline_with_mean_losses(
    run: Launch, reference: Reference, kill: str, options: tuple[str, ...]
) -> None:
    survived = run(replace(PP2_DP2, kills=(kill,), options=PP2_DP2.options + options))
    check_equal(survived, reference(PP2_DP2))


@proves(Kind.KILLS, Promise.EQUAL, victim="1 2", moment="1:backward 3:reduce")
def test_both_stages_lose_a_replica_one_after_the_other(run: Launch, reference: Reference) -> None:
    spec = replace(PP2_DP2, kills=("1@1:backward", "2@3:reduce"))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("kill", sampled(["0@2:reduce", "5@3:backward"]))
def test_a_deep_pipeline_in_bf16(run: Launch, reference: Reference, kill: str) -> None:
    spec = replace(PP4_DP2, kills=(kill,))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    "kill",
    sampled(["0@3:forward", "1@2:reduce", "2@3:backward", "3@3:optimizer"]),
)
def test_interleaved_stages(run: Launch, reference: Reference, kill: str) -> None:
    spec = replace(PP2_VPP2_DP2, kills=(kill,))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL, victim="0", moment="2:backward")
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), REROUTE], ids=["redeal", "reroute"])
def test_a_deep_interleaved_pipeline_loses_its_first_worker(
    run: Launch, reference: Reference, options: tuple[str, ...]
) -> None:
    """Its order holds more samples at launch than one without interleaving ever does."""
    interleaved = ("--num-virtual-stages-per-pipeline-rank=2", "--num-layers=8")
    deep = replace(PP4_DP2, options=(*PP4_DP2.options, *interleaved))
    spec = replace(deep, kills=("0@2:backward",), options=(*deep.options, *options))
    check_equal(run(spec), reference(deep))


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="4:evaluation")
def test_recomputation_and_evaluation(run: Launch, reference: Reference) -> None:
    options = (*PP2_DP2.options, "--recompute-granularity=full", "--eval-interval=2")
    spec = replace(PP2_DP2, options=options, kills=("1@4:evaluation",))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.WHOLE, victim="1", moment="3:forward")
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", [(), FP16], ids=["fp32", "fp16"])
def test_a_checkpoint_after_a_loss_holds_nothing_of_a_free_worker(
    run: Launch, tmp_path: Path, precision: tuple[str, ...]
) -> None:
    """Worker 0 has no place after the loss of 1, and is rank 0, which saves what all have alike.

    With fp16 that is the loss scale too, which changes at steps that overflow.
    """
    tp2_dp2 = ("--tensor-model-parallel-size=2", "--sequence-parallel", "--save-interval=2")

    def saved(name: str, *kills: str) -> Outcome:
        save = (*tp2_dp2, *precision, f"--save={tmp_path / name}")
        return run(JobSpec(options=save, kills=kills))

    killed = saved("killed", "1@3:forward")
    check_equal(killed, saved("undisturbed"))
    assert sorted(killed.events("view_committed")[-1]["ranks"]) == [0, 2, 3]
    for iteration in ("iter_0000004", "iter_0000006"):
        left, right = (
            saved_tensors(tmp_path / name / iteration) for name in ("killed", "undisturbed")
        )
        assert len(left) > 20 and left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
        common = [
            torch.load(tmp_path / name / iteration / "common.pt", weights_only=False)
            for name in ("killed", "undisturbed")
        ]
        assert repr(common[0]) == repr(common[1])


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="3:backward")
def test_fast_mode_is_its_twin(run: Launch, reference: Reference) -> None:
    spec = replace(PP2_DP2, consistency="fast")
    survived = run(replace(spec, kills=("1@3:backward",)))
    check_survived(survived)
    twin = run(replace(spec, changes=("1@3",)))
    check_survived(twin)
    assert survived.trace() == twin.trace()
    assert max_relative_difference(survived, reference(spec)) < 1e-6


@proves(Kind.KILLS, Promise.STOPS, victim="0 2 3 4 6")
def test_fewer_tp_groups_than_stages_end_the_job_with_the_reason(run: Launch) -> None:
    stopped = run(replace(TP2_PP2_DP2, lost_trainers=(0, 2, 3, 4, 6)))
    assert stopped.returncode == 1
    assert "1 whole TP group of 2 left for 2 stages" in stopped.output
    assert "Traceback" not in stopped.output
    assert not stopped.orphans


FORGET_THE_OTHER_STAGE = """
from elaswave_plugin.adapters.megatron.step import ragged_pipeline
ragged_pipeline.add_other_stage = lambda *args, **options: None
"""


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1", moment="3:backward")
def test_without_the_exchange_of_tied_embeddings_the_runs_differ(
    run: Launch, reference: Reference
) -> None:
    """A negative control: the comparison sees a wrong gradient."""
    spec = replace(PP2_DP2, kills=("1@3:backward",), sabotage=FORGET_THE_OTHER_STAGE)
    # The job's own first step finds it before anybody is lost.
    stopped = run(spec)
    assert stopped.returncode == 2 and not stopped.files.steps
    assert "the reduced gradient of embedding.word_embeddings.weight differs" in stopped.output
    off = (*PP2_DP2.options, "--elaswave-rehearse-first-step=off")
    survived = run(replace(spec, options=off))
    check_survived(survived)
    trace, wanted = survived.trace(), reference(PP2_DP2).trace()
    assert [step for step in wanted if trace[step] != wanted[step]] == [3, 4, 5]


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("options", "nproc", "sentence"),
    [
        (("--pipeline-model-parallel-size=3",), 4, "do not factor into tp 1 x pp 3 x dp"),
        (("--elaswave-dataflow=reroute",), 4, "dataflow is reroute, which is for pipeline"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Launch, options: tuple[str, ...], nproc: int, sentence: str
) -> None:
    refused = run(JobSpec(nproc=nproc, options=options))
    assert refused.returncode == 2
    assert sentence in refused.output and "Traceback" not in refused.output
    assert not refused.orphans
