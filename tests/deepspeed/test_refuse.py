"""Settings that are not carried are refused by name, before anything is built."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from elaswave_plugin.adapters.deepspeed.attach import elastic_config, initialize
from elaswave_plugin.adapters.deepspeed.compat.unsupported import (
    check_configuration,
    check_engine,
    check_pipelines,
    check_shares,
    check_stages,
)
from elaswave_plugin.adapters.deepspeed_settings import REMOVED, problems
from elaswave_plugin.errors import ConfigurationError
from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.deepspeed.hf_runs import spec_of
from tests.deepspeed.test_pipeline import PP2_DP2
from tests.faults.test_bad_input import check_refused
from tests.proofs import Kind, Promise, proves

MODEL = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("option", ["amsgrad", "capturable"])
def test_a_variant_of_adam_is_refused(option: str) -> None:
    engine = SimpleNamespace(basic_optimizer=torch.optim.Adam(MODEL.parameters(), **{option: True}))
    with pytest.raises(ConfigurationError, match=f"^{option} is set in Adam"):
        check_engine(engine)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, "offload_optimizer.ratio"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device is"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights"),
        (
            {"zero_optimization": {"round_robin_gradients": True, "parameter_alignment": True}},
            "round_robin_gradients and parameter_alignment",
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, "1-bit"),
        ({"optimizer": {"type": "Muon"}}, "Muon"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op is 'sum'"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency"),
        ({"comet": {"enabled": True}}, "comet"),
        (
            {
                "compression_training": {
                    "weight_quantization": {"shared_parameters": {"enabled": 1}}
                }
            },
            "compression_training was removed from DeepSpeed",
        ),
        # Of these two DeepSpeed takes none, and says so whatever they switch off.
        ({"compression_training": {}}, "compression_training was removed from DeepSpeed"),
        ({"amp": {"enabled": False}}, "amp was removed from DeepSpeed"),
        ({"zero_optimization": {"mics_shard_size": 4}}, "mics_shard_size was removed"),
        ({"checkpoint": {"use_node_local_storage": True}}, "use_node_local_storage"),
        ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint.writer"),
        ({"datastates_ckpt": {}}, "datastates_ckpt"),
        ({"elasticity": {"enabled": False}}, "elasticity was removed"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients"),
    ],
)
def test_a_setting_that_is_not_carried_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        check_configuration(config, model=MODEL, mpu=None)


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
def test_a_model_that_has_an_engine_already_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    def unreached(**arguments: Any) -> None:
        raise AssertionError("it is refused before")

    with pytest.raises(SystemExit) as ended:
        initialize(unreached, {"elaswave": {"enabled": True}}, {"model": MODEL}, [MODEL])
    assert ended.value.code == 2
    assert "the model has an engine without an optimizer already" in capsys.readouterr().err


def test_what_was_removed_is_what_deepspeed_refuses() -> None:
    from deepspeed.runtime import config

    of_zero = (f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS)
    assert {*REMOVED} == {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS, *of_zero}


def pipeline(*axes: str) -> Any:
    """A PipelineModule of which only the topology is there."""
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import ProcessTopology

    module = PipelineModule.__new__(PipelineModule)
    torch.nn.Module.__init__(module)
    module._topo = ProcessTopology(axes=list(axes), dims=[2] * len(axes))
    return module


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_an_mpu_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match="mpu"):
        check_configuration({}, model=MODEL, mpu=object())


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_other_meshes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"mesh_param is \(2, 2\)"):
        check_configuration({}, model=MODEL, mpu=None, mesh_param=(2, 2))
    from deepspeed.runtime.tensor_parallel import init_utils

    monkeypatch.setattr(init_utils, "_TP_MODEL_INIT_ARGS", None)
    init_utils.record_tp_model_init_args(2, torch.float32, None, None)
    with pytest.raises(ConfigurationError, match="tp_model_init"):
        check_configuration({}, model=MODEL, mpu=None)


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("boundary", "engine.set_gradient_accumulation_boundary(False) was called"),
        ("loss", "engine.step was called after no engine.backward(loss)"),
        ("scale", "engine.step was called after no engine.backward(loss)"),
        ("batch", "engine.set_train_batch_size was called with 16"),
    ],
)
def test_a_loop_that_could_not_be_redone_is_refused_in_its_first_step(
    run: Launch, what: str, named: str
) -> None:
    script = str(SCRIPTS / "own_accumulation.py")
    refused = run(EngineSpec(script=script, stage=2, options=(f"--what={what}",)))
    assert refused.returncode == 2
    assert named in refused.output
    assert "Traceback" not in refused.output and not refused.files.steps


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize("spec", [EngineSpec(), spec_of()], ids=["own", "trainer"])
def test_steps_without_a_seal_are_refused_in_loops_that_are_not_ours(
    run: Launch, spec: EngineSpec
) -> None:
    refused = run(replace(spec, interval=3))
    assert refused.returncode == 2, refused.output[-4000:]
    assert "snapshot_interval is 3, and the loop is the script's own" in refused.output
    assert "Traceback" not in refused.output and not refused.files.steps
    assert not refused.orphans


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_of_pipelines_ragged_ones_are_refused_with_the_reason() -> None:
    check_configuration({}, model=pipeline("pipe", "data"), mpu=None)
    with pytest.raises(ConfigurationError, match="axes pipe, data, model"):
        check_configuration({}, model=pipeline("pipe", "data", "model"), mpu=None)
    check_stages({"elaswave": {"move_layers": "never"}})
    with pytest.raises(ConfigurationError, match="a pipeline that loses a worker is lost"):
        check_stages({"elaswave": {"move_layers": "always"}})


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_iterations_that_are_too_small_for_a_reserve_are_refused() -> None:
    check_shares(4, width=4, num_samples=8)
    wanted = "4 workers and a --reserve of 5 .* has 8 samples.*at most 4, .*dataloader_drop_last"
    with pytest.raises(ConfigurationError, match=wanted):
        check_shares(5, width=4, num_samples=8)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("axes", "reserve", "wanted"),
    [
        (("pipe", "data"), 3, "--reserve is 3, .* a whole pipeline of 2 stages .* a multiple of 2"),
        (("pipe", "data"), 14, "a --reserve of 14 workers share 8 micro-batches .* at most 12"),
        (("data", "pipe"), 2, "the axes data, pipe, wanted pipe, data"),
    ],
)
def test_pipelines_that_cannot_join_are_refused(
    axes: tuple[str, ...], reserve: int, wanted: str
) -> None:
    check_pipelines(12, module=pipeline("pipe", "data"), width=2, num_microbatches=8)
    check_pipelines(0, module=pipeline("data", "pipe"), width=2, num_microbatches=8)
    with pytest.raises(ConfigurationError, match=wanted):
        check_pipelines(reserve, module=pipeline(*axes), width=2, num_microbatches=8)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.slow
def test_half_a_pipeline_does_not_join(run: Launch) -> None:
    refused = run(replace(PP2_DP2, launcher=("--reserve=1",)))
    check_refused(refused, "--reserve is 1, and workers that join get work", "use a multiple of 2")


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.slow
def test_one_worker_does_not_grow(run: Launch) -> None:
    refused = run(EngineSpec(nproc=1, launcher=("--reserve=1",)))
    check_refused(refused, "launched with data parallel size 1 cannot grow", "at least 2 workers")


def test_what_is_carried_passes() -> None:
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
    }
    check_configuration(config, model=MODEL, mpu=None)
    # As DeepSpeed reads it, which is off.
    check_configuration({"zero_optimization": {"cpu_offload": "false"}}, model=MODEL, mpu=None)
    check_configuration({"zero_optimization": True}, model=MODEL, mpu=None)


class Engine:
    """The attributes of an engine that say which optimizer it has."""

    has_moe_layers = False
    module = MODEL

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.basic_optimizer = self.optimizer = optimizer

    def zero_optimization_stage(self) -> int:
        return 1


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_mixtures_of_experts_are_refused_by_name() -> None:
    engine = Engine(torch.optim.AdamW(MODEL.parameters()))
    engine.has_moe_layers = True
    with pytest.raises(ConfigurationError, match="the model has MoE layers"):
        check_engine(engine)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_other_optimizers_are_refused_by_name() -> None:
    """A FusedAdam that is not DeepSpeed's counts its steps elsewhere."""
    kind = type("FusedAdam", (torch.optim.SGD,), {"__module__": "apex.optimizers.fused_adam"})
    with pytest.raises(ConfigurationError, match="FusedAdam of apex"):
        check_engine(Engine(kind(MODEL.parameters(), lr=0.1)))
    check_engine(Engine(torch.optim.AdamW(MODEL.parameters())))


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize("kind", ["BF16_Optimizer", "FP16_Optimizer"])
def test_wrappers_with_other_masters_are_refused_by_name(kind: str) -> None:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    engine = Engine(torch.optim.AdamW(MODEL.parameters()))
    wrapper = {"BF16_Optimizer": BF16_Optimizer, "FP16_Optimizer": FP16_Optimizer}[kind]
    engine.optimizer = wrapper.__new__(wrapper)
    with pytest.raises(ConfigurationError, match=kind):
        check_engine(engine)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_limit_that_the_agents_were_not_told_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"elaswave": {"quiesce_timeout_s": 9}}
    monkeypatch.setenv("ELASWAVE_QUIESCE_TIMEOUT_S", "30.0")
    with pytest.raises(
        ConfigurationError, match=r"is 9 for the script, and the agents were told 30: .* set"
    ):
        elastic_config(config)
    monkeypatch.setenv("ELASWAVE_QUIESCE_TIMEOUT_S", "9.0")
    settings = elastic_config(config)
    assert settings is not None and settings.quiesce_timeout_s == 9


def test_a_limit_in_bytes_is_for_megatron_core() -> None:
    (found,) = problems({"elaswave": {"memory_limit_gib": 3.0}})
    assert found.startswith("elaswave.memory_limit_gib is 3.0, ")
    assert not [*problems({"elaswave": {}})]
