"""Every setting that the Megatron adapter does not carry is refused by its name."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from elaswave_plugin.adapters.megatron.unsupported import check_grid, check_growth, check_supported
from elaswave_plugin.adapters.megatron_settings import DDP, EXPERTS, MODEL, OPTIMIZER, settings
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError

SIZES = (
    "context_parallel_size",
    "expert_model_parallel_size",
)
DDP_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("use_distributed_optimizer", False),
    ("use_megatron_fsdp", True),
    ("num_distributed_optimizer_instances", 2),
    ("nccl_ub", True),
    ("reduce_scatter_with_fp32_accumulation", True),
)
MODEL_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("mtp_num_layers", 1),
    ("cuda_graph_impl", "local"),
    ("delay_wgrad_compute", True),
    ("fp8", "e4m3"),
    ("fp4", "e2m1"),
    ("quant_recipe", "of each layer"),
    ("use_kitchen", True),
    ("symmetric_ar_type", "two_shot"),
    ("cpu_offloading", True),
    ("fine_grained_activation_offloading", True),
    ("tp_comm_overlap", True),
    ("defer_embedding_wgrad_compute", True),
    ("variable_seq_lengths", True),
    ("pipeline_model_parallel_layout", "Et|tL"),
)
LATER_SETTINGS: tuple[tuple[str, str, Any], ...] = (
    ("ddp_config", "param_name_patterns_for_fp32_local_accumulation", ("all",)),
    ("config", "gtp_weight_remat_size", 2),
    ("config", "use_transformer_engine_op_fuser", True),
    ("config", "moe_router_force_biased", 0.5),
    ("config", "moe_paged_stash", True),
)
OPTIMIZER_SETTINGS = ("use_precision_aware_optimizer", "optimizer_cuda_graph")
# Each with what is shown of it, where that is not the value.
EXPERT_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("moe_router_load_balancing_type", "global_aux_loss", ""),
    ("moe_router_load_balancing_type", ["aux_loss", "global_aux_loss"], "global_aux_loss"),
    ("expert_tensor_parallel_size", 2, ""),
    ("moe_token_dispatcher_type", "flex", ""),
    ("moe_grouped_gemm", True, ""),
    ("moe_latent_size", 8, ""),
    ("moe_shared_expert_overlap", True, ""),
    ("overlap_moe_expert_parallel_comm", True, ""),
    ("moe_enable_routing_replay", True, ""),
    ("moe_router_force_load_balancing", True, ""),
)


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The parallel sizes that parallel_state answers, all 1 unless a test changes them."""
    found = dict.fromkeys(SIZES, 1)
    for name in SIZES:
        getter = f"get_{name.removesuffix('_size')}_world_size"
        assert callable(getattr(parallel_state, getter))
        monkeypatch.setattr(parallel_state, getter, lambda name=name: found[name])
    return found


def made_model() -> Any:
    """A DDP model without its groups and buffers, only with what is looked at."""
    model = object.__new__(DistributedDataParallel)
    vars(model)["_modules"] = {}
    vars(model)["ddp_config"] = DistributedDataParallelConfig(use_distributed_optimizer=True)
    vars(model)["config"] = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
    )
    vars(model)["buffers"] = [SimpleNamespace(param_dtype=torch.float32)]
    return model


def made_optimizer(inner: Any = None, **changes: Any) -> Any:
    """A distributed optimizer without its shards."""
    optimizer = object.__new__(DistributedOptimizer)
    parameters = [torch.nn.Parameter(torch.ones(1))]
    optimizer.optimizer = inner or torch.optim.AdamW(parameters)
    optimizer.config = OptimizerConfig(optimizer="adam", lr=1.0)
    for name, value in changes.items():
        assert hasattr(optimizer.config, name), f"Megatron-Core has no setting {name}"
        setattr(optimizer.config, name, value)
    return optimizer


def is_carried(chunks: list[Any], optimizer: Any) -> bool:
    """Return whether a job of these, the optimizer's own chunks, is let through."""
    (only,) = getattr(optimizer, "chained_optimizers", [optimizer])
    only.model_chunks = chunks
    return check_supported(chunks, optimizer) is only


def check_refused(model: Any, optimizer: Any, *words: str) -> None:
    """Assert a refusal of one sentence that holds the words and says what to do."""
    with pytest.raises(ConfigurationError) as caught:
        check_supported([model], optimizer)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and re.search("change it to attach|set |carries .*: ", message)


def test_deterministic_mode_is_carried_with_torchs_own_switch() -> None:
    model, optimizer = made_model(), made_optimizer()
    model.config.deterministic_mode = True
    check_refused(model, optimizer, "carries it with torch.use_deterministic_algorithms")
    torch.use_deterministic_algorithms(True)
    try:
        assert is_carried([model], optimizer)
    finally:
        torch.use_deterministic_algorithms(False)


def test_control_a_carried_job_is_let_through() -> None:
    optimizer = made_optimizer()
    assert is_carried([made_model()], optimizer)
    assert is_carried([made_model(), made_model()], optimizer)
    chained = SimpleNamespace(chained_optimizers=[optimizer])
    assert is_carried([made_model()], chained)


@pytest.mark.parametrize("name", SIZES)
def test_another_kind_of_parallelism_is_refused(name: str, sizes: dict[str, int]) -> None:
    sizes[name] = 2
    check_refused(made_model(), made_optimizer(), f"{name} is 2", "carries 1")


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        *(("ddp_config", name, value) for name, value in DDP_SETTINGS),
        *(("config", name, value) for name, value in MODEL_SETTINGS),
    ],
)
def test_a_setting_of_the_model_is_refused(owner: str, name: str, value: Any) -> None:
    model = made_model()
    assert hasattr(getattr(model, owner), name), f"Megatron-Core has no setting {name}"
    setattr(getattr(model, owner), name, value)
    model.config.pipeline_model_parallel_size = 3
    check_refused(model, made_optimizer(), f"{name} is {value}")


def test_sequences_of_several_lengths_are_carried_where_no_stage_tells_another() -> None:
    model = made_model()
    model.config.variable_seq_lengths = True
    assert is_carried([model], made_optimizer())


@pytest.mark.parametrize(("owner", "name", "value"), LATER_SETTINGS)
def test_a_setting_of_later_versions_is_refused(owner: str, name: str, value: Any) -> None:
    model = made_model()
    setattr(getattr(model, owner), name, value)
    check_refused(model, made_optimizer(), f"{name} is {value}")


@pytest.mark.parametrize(("name", "value", "shown"), EXPERT_SETTINGS)
def test_a_setting_of_experts_is_refused(name: str, value: Any, shown: str) -> None:
    model, optimizer = made_model(), made_optimizer()
    model.config.num_moe_experts = 4
    assert is_carried([model], optimizer)
    assert hasattr(model.config, name), f"Megatron-Core has no setting {name}"
    setattr(model.config, name, value)
    check_refused(model, optimizer, name, shown or f"{name} is {value}")
    # A dense model has no experts to which it applies.
    model.config.num_moe_experts = None
    assert is_carried([model], optimizer)


def test_parameters_of_two_dtypes_are_refused() -> None:
    model = made_model()
    model.buffers.append(SimpleNamespace(param_dtype=torch.bfloat16))
    check_refused(model, made_optimizer(), "torch.bfloat16 and torch.float32", "one dtype")


def test_every_setting_of_the_table_is_among_these() -> None:
    of_model = [(*DDP_SETTINGS, *MODEL_SETTINGS), EXPERT_SETTINGS]
    tested = [{row[0] for row in rows} for rows in of_model]
    later = {name for _, name, _ in LATER_SETTINGS}
    in_table = [
        {one.name for one in settings() if one.of in owners}
        for owners in ((DDP, MODEL), (EXPERTS,), (OPTIMIZER,))
    ]
    assert tested[0] | later | {*SIZES} >= in_table[0] >= tested[0] | later
    assert tested[1] == in_table[1] and {*OPTIMIZER_SETTINGS} == in_table[2]


def test_all_refusals_are_said_at_once() -> None:
    model = made_model()
    model.config.fp8, model.ddp_config.nccl_ub = "e4m3", True
    check_refused(model, made_optimizer(), "2 settings are refused", "(1) nccl_ub is", "(2) fp8 is")


def test_what_switches_nothing_on_is_not_refused() -> None:
    model = made_model()
    model.config.mtp_num_layers = 0
    assert is_carried([model], made_optimizer())


def test_a_model_that_is_no_ddp_is_refused() -> None:
    check_refused(torch.nn.Linear(1, 1), made_optimizer(), "the model is Linear")


def test_what_only_data_parallel_jobs_carry_is_refused() -> None:
    config = made_model().config
    config.finalize_model_grads_func = finalize_model_grads
    check_grid(config)
    config.finalize_model_grads_func = None
    check_grid(config)  # the loop does it itself
    config.pipeline_model_parallel_size = 2
    for other, name in ((lambda model, num_tokens: None, "<lambda>"), (None, "None")):
        config.finalize_model_grads_func = other
        with pytest.raises(ConfigurationError, match=f"finalize_model_grads_func is {name}"):
            check_grid(config)


def test_two_interleaved_stages_need_overlapped_messages() -> None:
    model = made_model()
    model.config.pipeline_model_parallel_size = 2
    model.config.virtual_pipeline_model_parallel_size = 2
    check_refused(model, made_optimizer(), "overlap_p2p_comm with 2 interleaved stages is False")
    model.config.overlap_p2p_comm = True
    optimizer = made_optimizer()
    assert is_carried([model], optimizer)


@pytest.mark.parametrize("option", ["fused", "amsgrad", "capturable"])
def test_a_variant_of_adam_is_refused(option: str) -> None:
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], **{option: True})
    check_refused(made_model(), made_optimizer(inner), f"{option} of AdamW is True", "False")


def test_another_inner_optimizer_is_refused() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    check_refused(made_model(), made_optimizer(inner), "the inner optimizer is SGD", "Adam")


@pytest.mark.parametrize("name", OPTIMIZER_SETTINGS)
def test_an_optimizer_that_keeps_its_state_otherwise_is_refused(name: str) -> None:
    optimizer = made_optimizer()
    setattr(optimizer.config, name, True)
    check_refused(made_model(), optimizer, f"{name} is True")


def test_an_optimizer_that_is_not_one_distributed_one_is_refused() -> None:
    plain = object.__new__(FP32Optimizer)
    check_refused(made_model(), plain, "the optimizer is FP32Optimizer")
    two = SimpleNamespace(chained_optimizers=[made_optimizer(), made_optimizer()])
    check_refused(made_model(), two, "DistributedOptimizer, DistributedOptimizer")


@pytest.mark.parametrize(
    ("config", "job", "wanted"),
    [
        ({}, {"model_parallel": (2, 1)}, "whole tensor parallel group of 2: use a multiple of 2"),
        ({}, {"width": 1}, "data parallel size 1 cannot grow.*launch at least 2 workers"),
        ({"dataflow": "reroute"}, {}, "dataflow is 'reroute'.*set dataflow to auto"),
        ({}, {"width": 7, "model_parallel": (1, 2)}, "up to 9 replicas for 8.*of at most 2 or"),
        ({"snapshots": False}, {}, "snapshots are off.*turn snapshots on, or leave --reserve out"),
        (
            {},
            {"width": 6},
            "6 replicas and a --reserve of 3 workers make stages of up to 9 replicas",
        ),
    ],
)
def test_a_job_that_cannot_grow_is_refused(
    config: dict[str, Any], job: dict[str, Any], wanted: str
) -> None:
    sizes: dict[str, Any] = {"width": 4, "model_parallel": (1, 1), "num_microbatches": 8} | job
    with pytest.raises(ConfigurationError, match=f"(?s){wanted}"):
        check_growth(ElasticConfig(**config), 3, **sizes)
    check_growth(ElasticConfig(**config), 0, **sizes)
    for model_parallel in ((1, 1), (3, 2)):
        check_growth(ElasticConfig(), 3, width=4, model_parallel=model_parallel, num_microbatches=8)
