"""Mixtures of experts, all on every replica: after a loss the bits of the undisturbed run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.faults.conftest import Grown, Launch, Reference
from tests.faults.harness import JobSpec, check_equal, check_survived, max_relative_difference
from tests.faults.hybrid_matrix import PP2_DP2, PP2_VPP2_DP2, TP2_PP2_DP2
from tests.faults.test_growth import GROWS
from tests.faults.test_layer_moves import cuts_after
from tests.faults.test_outside_a_step import saved_tensors
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

EXPERTS = ("--num-experts=4", "--disable-bias-linear")
BIAS = ("--moe-router-enable-expert-bias", "--moe-router-score-function=sigmoid")
LOSSES = ("--moe-aux-loss-coeff=0.01", "--moe-z-loss-coeff=0.001", "--moe-input-jitter-eps=0.01")
MOE = (*EXPERTS, *BIAS, *LOSSES)
TP2 = ("--tensor-model-parallel-size=2", "--sequence-parallel")
PP2_FOUR_LAYERS = replace(PP2_DP2, options=(*PP2_DP2.options, "--num-layers=4"))


def with_experts(spec: JobSpec, *options: str) -> JobSpec:
    return replace(spec, options=(*spec.options, *(options or MOE)))


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    "kill",
    sampled(["0@3:forward", "1@3:backward", "2@2:reduce", "3@4:optimizer"]),
)
def test_any_phase_of_a_data_parallel_job(run: Launch, reference: Reference, kill: str) -> None:
    spec = replace(with_experts(JobSpec()), kills=(kill,))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    "kill", sampled(["6@3:backward", "0@2:forward", "3@3:reduce", "5@3:optimizer"])
)
def test_any_worker_of_tp_pp_dp(run: Launch, reference: Reference, kill: str) -> None:
    spec = replace(with_experts(TP2_PP2_DP2), kills=(kill,))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:backward")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (*EXPERTS, *BIAS, "--moe-router-load-balancing-type=none", "--bf16"),
        (*EXPERTS, *LOSSES, "--moe-router-load-balancing-type=seq_aux_loss", "--fp16"),
        (*EXPERTS, "--moe-router-load-balancing-type=sinkhorn", "--moe-router-topk=1"),
        (*EXPERTS, *LOSSES, "--moe-expert-capacity-factor=1"),
        (
            *(*EXPERTS, *LOSSES, "--moe-expert-capacity-factor=1"),
            "--moe-pad-expert-input-to-capacity",
        ),
        (*MOE, "--moe-shared-expert-intermediate-size=32", "--moe-ffn-hidden-size=64"),
        (*MOE, "--recompute-granularity=full"),
        (*MOE, "--recompute-granularity=selective", "--recompute-modules", "moe"),
        (*MOE, "--calculate-per-token-loss"),
        (*MOE, "--moe-layer-freq=2"),
    ],
    ids=lambda options: options[-1].strip("-"),
)
def test_settings_of_experts(run: Launch, reference: Reference, options: tuple[str, ...]) -> None:
    spec = replace(with_experts(JobSpec(), *options), kills=("1@3:backward",))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:backward")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (*EXPERTS, *LOSSES, "--moe-router-load-balancing-type=seq_aux_loss"),
        (*EXPERTS, *LOSSES, "--moe-expert-capacity-factor=1"),
        (*MOE, "--moe-shared-expert-intermediate-size=32"),
        (*MOE, "--recompute-granularity=selective", "--recompute-modules", "moe"),
    ],
    ids=lambda options: options[-1].strip("-"),
)
def test_settings_of_experts_with_tp(
    run: Launch, reference: Reference, options: tuple[str, ...]
) -> None:
    spec = replace(with_experts(JobSpec(), *TP2, *options), kills=("1@3:backward",))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL, victim="2", moment="3:backward")
@pytest.mark.slow
def test_interleaved_stages_of_experts(run: Launch, reference: Reference) -> None:
    spec = replace(with_experts(PP2_VPP2_DP2), kills=("2@3:backward",))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.CLOSE, victim="6", moment="3:backward")
@pytest.mark.slow
def test_experts_in_fast_mode(run: Launch, reference: Reference) -> None:
    """Close as dense models are, until a sum of another order sends a token to another expert."""
    spec = replace(with_experts(TP2_PP2_DP2), consistency="fast", kills=("6@3:backward",))
    survived = run(spec)
    check_survived(survived)
    assert max_relative_difference(survived, reference(spec)) < 1e-6


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_experts_see_whole_microbatches(run: Launch) -> None:
    spec = with_experts(PP2_DP2, *MOE, "--elaswave-dataflow=resize", "--micro-batch-size=2")
    refused = run(replace(spec, global_batch=16, consistency="fast"))
    assert refused.returncode == 2
    assert "micro-batches cannot be cut here: the routers" in refused.output


@proves(Kind.KILL, Promise.EQUAL, victim="6", moment="3:backward")
@pytest.mark.slow
def test_weight_gradients_of_experts_go_apart(run: Launch, reference: Reference) -> None:
    spec = with_experts(TP2_PP2_DP2)
    split = with_experts(spec, "--elaswave-split-backward=always")
    check_equal(run(replace(split, kills=("6@3:backward",))), reference(spec))


@proves(Kind.KILLS, Promise.EQUAL, victim="0 2", moment="1:backward 3:backward")
@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_experts_at_another_tp_position(run: Launch, reference: Reference, dispatcher: str) -> None:
    """Both survivors come from tp position 1; tokens go to experts by the position of each."""
    options = (*TP2, *MOE, f"--moe-token-dispatcher-type={dispatcher}")
    spec = JobSpec(options=options, kills=("0@1:backward", "2@3:backward"))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("kills", [("0@3:backward",), ("1@1:backward", "2@3:reduce")])
def test_layers_of_experts_move(run: Launch, reference: Reference, kills: tuple[str, ...]) -> None:
    spec = replace(with_experts(PP2_FOUR_LAYERS), kills=kills)
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert cuts_after(survived) == [[0, 1, 4], [0, 2, 4]][: len(kills)]


@proves(Kind.KILL, Promise.EQUAL, victim="0", moment="3:backward")
@pytest.mark.slow
def test_layers_of_unlike_kinds_stay(run: Launch, reference: Reference) -> None:
    """Of experts every other one: each stage has both kinds, and no spec of another's layers."""
    spec = replace(
        with_experts(PP2_FOUR_LAYERS, *MOE, "--moe-layer-freq=2"), kills=("0@3:backward",)
    )
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert cuts_after(survived) == [[0, 2, 4]]


@proves(Kind.LEAVE, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("base", [JobSpec(), TP2_PP2_DP2], ids=["dp", "tp_pp"])
def test_a_worker_leaves_as_told(run: Launch, reference: Reference, base: JobSpec) -> None:
    spec = replace(with_experts(base), changes=("1@3",))
    check_equal(run(spec), reference(spec))


@proves(Kind.JOIN, Promise.EQUAL)
@pytest.mark.slow
def test_a_job_of_experts_grows(grown: Grown) -> None:
    grown(replace(GROWS, options=MOE))


@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
@pytest.mark.parametrize("base", sampled([JobSpec(), PP2_FOUR_LAYERS]))
def test_a_worker_comes_back(run: Launch, reference: Reference, base: JobSpec) -> None:
    spec = replace(
        with_experts(base), steps=10, respawn=1, kills=("1@2:backward",), awaits=((5, 1),)
    )
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert [event["slot"] for event in survived.events("entered")] == [1]


@proves(Kind.KILL, Promise.WHOLE, victim="0", moment="3:backward")
@pytest.mark.slow
def test_a_checkpoint_after_a_move_holds_the_biases(run: Launch, tmp_path: Path) -> None:
    def saved(name: str, *kills: str) -> dict[str, torch.Tensor]:
        save = ("--save-interval=5", f"--save={tmp_path / name}")
        made = run(replace(with_experts(PP2_FOUR_LAYERS, *MOE, *save), kills=kills))
        assert made.returncode == 0, made.output[-4000:]
        return saved_tensors(tmp_path / name / "iter_0000005")

    moved, undisturbed = saved("moved", "0@3:backward"), saved("undisturbed")
    assert moved.keys() == undisturbed.keys() and any("expert_bias" in name for name in moved)
    assert all(torch.equal(moved[name], undisturbed[name]) for name in moved)


FORGET = """
from elaswave_plugin.adapters.megatron.state.expert_bias import ExpertBiases
import torch
write = ExpertBiases.write
def forget(self, values):
    {}
ExpertBiases.write = forget
"""
FORGET_THE_BIASES = FORGET.format("write(self, None)")
KEEP_THE_COUNTS = FORGET.format("""
    from elaswave_plugin.adapters.megatron.state.expert_bias import routers
    kept = [r.local_tokens_per_expert.clone() for r in routers(self._chunks)]
    write(self, values)
    for router, counts in zip(routers(self._chunks), kept):
        router.local_tokens_per_expert.copy_(counts)
""")


@proves(Kind.SABOTAGE, Promise.SEEN)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "kill"),
    [(FORGET_THE_BIASES, "3@4:snapshot"), (KEEP_THE_COUNTS, "3@4:reduce")],
    ids=["biases", "counts"],
)
def test_without_what_the_routers_keep_the_bits_are_others(
    run: Launch, reference: Reference, sabotage: str, kill: str
) -> None:
    """A negative control, where the biases of the lost step were changed, or its tokens counted."""
    spec = replace(with_experts(JobSpec(), *MOE, "--num-experts=16"), kills=(kill,))
    check_equal(run(spec), reference(spec))
    survived = run(replace(spec, sabotage=sabotage))
    check_survived(survived)
    assert survived.trace() != reference(spec).trace()


COUNT_IN_16_BITS = FORGET.format("""
    from elaswave_plugin.adapters.megatron.state.expert_bias import routers
    write(self, values)
    for router in routers(self._chunks):
        router.local_tokens_per_expert = router.local_tokens_per_expert.to(torch.bfloat16)
""")
# Every expert gets about half of 256 tokens a micro-batch: more than bf16 counts one by one.
MANY_TOKENS = ("--num-experts=16", "--moe-router-topk=8", "--seq-length=256", "--bf16")


@proves(Kind.SABOTAGE, Promise.SEEN, victim="3", moment="2:backward")
@pytest.mark.slow
def test_tokens_counted_in_16_bits_would_depend_on_who_counts_them(
    run: Launch, reference: Reference
) -> None:
    spec = replace(with_experts(JobSpec(), *MOE, *MANY_TOKENS), kills=("3@2:backward",))
    check_equal(run(spec), reference(spec))
    rounded = replace(spec, sabotage=COUNT_IN_16_BITS)
    survived = run(rounded)
    check_survived(survived)
    assert survived.trace() != reference(rounded).trace()
