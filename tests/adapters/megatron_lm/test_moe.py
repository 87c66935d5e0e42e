"""An unmodified pretrain_gpt.py with a mixture of experts loses a worker: nothing changes."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import TP2_PP2, ScriptSpec, needs_repository, printed
from tests.adapters.megatron_lm.test_join import BACK, EVERY_FOURTH, check_back
from tests.adapters.megatron_lm.test_kill import check_same
from tests.adapters.megatron_lm.test_without_plugin import NO_DROPOUT, check_close, without_plugin
from tests.proofs import Kind, Promise, proves

pytestmark = needs_repository

EXPERTS = (
    *("--num-experts", "4", "--disable-bias-linear", "--moe-router-topk", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-z-loss-coeff", "1e-3"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
)
DP4 = ScriptSpec(options=(*ScriptSpec().options, *EXPERTS))
TP2_PP2_DP2 = replace(DP4, nproc=8, steps=5, options=(*DP4.options, *TP2_PP2))


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:backward")
def test_a_worker_of_a_data_parallel_job(run: Launch, reference: Launch) -> None:
    spec = replace(DP4, kills=("1@3:backward",))
    check_same(run, reference, spec, alive=3)
    for line in printed(reference(spec)):
        assert "load_balancing_loss: " in line and "z_loss: " in line


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("kill", ["0@2:forward", "7@2:backward", "6@3:optimizer"])
def test_a_worker_of_tp_pp_dp(run: Launch, reference: Launch, kill: str) -> None:
    """Its last rank prints; after the loss that is another one, which may have no place."""
    check_same(run, reference, replace(TP2_PP2_DP2, kills=(kill,)), alive=7)


@proves(Kind.RETURN, Promise.EQUAL, victim="2", moment="3:backward")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lost_worker_comes_back(run: Launch, reference: Launch) -> None:
    """With the biases, and with the losses of routers since the last line of the log."""
    options = (*DP4.options, *EVERY_FOURTH)
    check_back(run, reference, replace(BACK, options=options, kills=("2@3:backward",)), 2)


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("model_parallel", [(), TP2_PP2], ids=["dp", "tp_pp"])
def test_without_a_fault_the_log_is_that_without_the_plugin(
    reference: Launch, script: Path, data: Path, tmp_path: Path, model_parallel: tuple[str, ...]
) -> None:
    spec = replace(DP4, options=(*DP4.options, *NO_DROPOUT, *model_parallel))
    plain = without_plugin(spec, script=script, data=data, folder=tmp_path / "run")
    check_close(printed(reference(spec)), plain)
