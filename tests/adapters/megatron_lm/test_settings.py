"""Settings that launch scripts have: the job says what it adjusts, and no number differs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    NO_EVALUATION,
    TP2_PP2,
    ScriptSpec,
    needs_repository,
    printed,
)
from tests.adapters.megatron_lm.test_kill import check_same
from tests.adapters.megatron_lm.test_without_plugin import NO_DROPOUT, check_close, without_plugin
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(300)]

LOGS = ("--log-params-norm", "--log-energy", "--log-straggler")
READERS = ("--num-workers", "2")
PROFILE = (
    *("--profile", "--use-pytorch-profiler", "--profile-ranks", "1", "2"),
    *("--profile-step-start", "1", "--profile-step-end", "4", "--tensorboard-dir", "{data}/traces"),
)
# What is switched off, whatever it needs elsewhere.
OFF = ("--check-weight-hash-across-dp-replicas-interval", "2")
# Sums of what was divided before, as NCCL's mean is one.
MEANS = ("--ddp-average-in-collective",)
_SAVES = ("--save", "checkpoints", "--save-interval", "2")
# The same, each with what Megatron-LM itself asks for beside it.
SWITCHED_OFF = {
    "nccl_ub": ("--use-nccl-ub",),
    "async_save": ("--async-save", "--use-persistent-ckpt-worker", *_SAVES),
    "non_persistent": (
        *("--save", "checkpoints", "--save-interval", "4"),
        *("--non-persistent-save-interval", "2", "--non-persistent-ckpt-type", "global"),
    ),
    "tp_comm_overlap": (
        *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--tp-comm-overlap"),
    ),
    "defer_embedding_wgrad": (
        *("--pipeline-model-parallel-size", "2", "--defer-embedding-wgrad-compute"),
    ),
    "gather_with_step": (
        *("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        *("--overlap-param-gather-with-optimizer-step", "--ckpt-format", "torch"),
    ),
    "shared_experts": (
        *("--num-experts", "4", "--moe-router-load-balancing-type", "none"),
        *("--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear"),
        *("--moe-shared-expert-intermediate-size", "64", "--moe-shared-expert-overlap"),
    ),
}
# As if the machine had a counter of energy: one joule a call.
COUNTS_ENERGY = """
import itertools
from megatron.core import energy_monitor
energy_monitor.has_nvml = True
joules = itertools.count(1000, 1000)
energy_monitor.EnergyMonitor._get_energy = lambda self: next(joules)
for name in ("setup", "shutdown"):
    setattr(energy_monitor.EnergyMonitor, name, lambda self: None)
"""


def spec(*more: str, **changes: object) -> ScriptSpec:
    """A launch with more options."""
    return replace(ScriptSpec(options=(*NO_EVALUATION, *more)), **changes)  # type: ignore[arg-type]


@proves(Kind.KILL, Promise.LOGGED, victim="2", moment="2:backward")
@pytest.mark.parametrize("base", [(), ("--bf16",), TP2_PP2], ids=["fp32", "bf16", "tp_pp"])
def test_logs_of_norm_energy_and_slow_workers_end_no_job(
    run: Launch, reference: Launch, base: tuple[str, ...]
) -> None:
    """Worker 2 leaves its stage with fewer replicas, and one worker without a place."""
    nproc = 8 if base == TP2_PP2 else 4
    logging = spec(*LOGS, *base, nproc=nproc, steps=4, kills=("2@2:backward",))
    check_same(run, reference, logging, alive=nproc - 1)
    norms = [re.search(r"params norm: ([\d.]+)", line) for line in printed(reference(logging))]
    assert len(norms) == 4 and all(found and float(found[1]) > 1 for found in norms)


@proves(Kind.KILL, Promise.EQUAL, victim="2", moment="3:backward")
@pytest.mark.parametrize("base", [(), TP2_PP2], ids=["dp", "tp_pp"])
def test_processes_read_ahead_the_samples_that_the_worker_reads(
    run: Launch, reference: Launch, base: tuple[str, ...]
) -> None:
    nproc = 8 if base == TP2_PP2 else 4
    ahead = spec(*READERS, *base, nproc=nproc, steps=6, kills=("2@3:backward",))
    check_same(run, reference, ahead, alive=nproc - 1)
    assert reference(ahead).trace() == reference(spec(*base, nproc=nproc, steps=6)).trace()


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.slow
@pytest.mark.parametrize("base", [(), ("--bf16",), TP2_PP2], ids=["fp32", "bf16", "tp_pp"])
def test_the_norm_is_that_of_the_script_without_the_plugin(
    reference: Launch, script: Path, data: Path, tmp_path: Path, base: tuple[str, ...]
) -> None:
    logging = spec(
        *NO_DROPOUT, "--log-params-norm", *base, nproc=8 if base == TP2_PP2 else 4, steps=3
    )
    plain = without_plugin(logging, script=script, data=data, folder=tmp_path / "plain")
    check_close(printed(reference(logging)), plain)


@proves(Kind.KILL, Promise.LOGGED, victim="1", moment="3:backward")
def test_energy_is_counted_once_though_a_line_is_logged_again(run: Launch) -> None:
    counting = spec("--log-energy", sabotage=COUNTS_ENERGY, kills=("1@3:backward",))
    done = run(counting)
    assert done.returncode == 0, done.output[-4000:]
    assert len(done.events("fault_fired")) == 1
    assert "Total training energy" in done.output


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:backward")
def test_a_profiler_goes_on_with_its_worker(run: Launch, reference: Launch, data: Path) -> None:
    check_same(run, reference, spec(*PROFILE, kills=("1@2:backward",)), alive=3)
    assert list((data / "traces").glob("*.pt.trace.json"))


@proves(Kind.NOTHING, Promise.SAME, victim="1", moment="2:backward")
def test_what_is_switched_off_is_said_in_one_line(run: Launch, reference: Launch) -> None:
    off = spec(*OFF, *MEANS, kills=("1@2:backward",))
    check_same(run, reference, off, alive=3)
    said = [line for line in reference(off).output.splitlines() if "adjusted: " in line]
    assert len(said) == 1
    assert OFF[0] in said[0] and MEANS[0] not in said[0]
    # The same numbers as without them.
    assert reference(off).trace() == reference(spec()).trace()


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_a_job_whose_setting_is_switched_off_survives_a_loss(
    run: Launch, reference: Launch, name: str
) -> None:
    """Not run: delay_wgrad_compute and log_max_attention_logit, for want of Transformer Engine."""
    check_same(run, reference, spec(*SWITCHED_OFF[name], kills=("1@2:backward",)), alive=3)
