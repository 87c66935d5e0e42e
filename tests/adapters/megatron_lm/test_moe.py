"""An unmodified pretrain_gpt.py with a mixture of experts loses a worker: nothing changes."""

from dataclasses import replace

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import TP2_PP2, ScriptSpec, needs_repository, printed
from tests.adapters.megatron_lm.test_kill import check_same

pytestmark = needs_repository

EXPERTS = (
    *("--num-experts", "4", "--disable-bias-linear", "--moe-router-topk", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-z-loss-coeff", "1e-3"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
)
DP4 = ScriptSpec(options=(*ScriptSpec().options, *EXPERTS))
TP2_PP2_DP2 = replace(DP4, nproc=8, steps=5, options=(*DP4.options, *TP2_PP2))


def test_a_worker_of_a_data_parallel_job(run: Launch, reference: Launch) -> None:
    spec = replace(DP4, kills=("1@3:backward",))
    check_same(run, reference, spec, alive=3)
    for line in printed(reference(spec)):
        assert "load_balancing_loss: " in line and "z_loss: " in line


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["0@2:forward", "7@2:backward", "6@3:optimizer"])
def test_a_worker_of_tp_pp_dp(run: Launch, reference: Launch, kill: str) -> None:
    """Its last rank prints; after the loss that is another one, which may have no place."""
    check_same(run, reference, replace(TP2_PP2_DP2, kills=(kill,)), alive=7)
