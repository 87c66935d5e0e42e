"""The memory that `elaswave doctor LAUNCH` predicts, of models whose size is published."""

from pathlib import Path
from typing import Any

import pytest

from elaswave_plugin.cli.launch_files import read_launch
from elaswave_plugin.cli.launch_memory import Memory, memory_of
from elaswave_plugin.cli.main import run_command

# As the papers have them: GPT-3 175B; Llama 3 8B; Mixtral 8x7B.
GPT_3: dict[str, Any] = {
    **{"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96},
    **{"vocab_size": 50257, "max_position_embeddings": 2048, "bf16": True},
}
LLAMA_3: dict[str, Any] = {
    **{"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 128256},
    **{"group_query_attention": True, "num_query_groups": 8, "ffn_hidden_size": 14336},
    **{"swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True, "bf16": True},
    **{"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True},
}
MIXTRAL = {**LLAMA_3, "vocab_size": 32000, "num_experts": 8}


def predicted(arguments: dict[str, Any], workers: int, nodes: int = 1) -> Memory:
    """The prediction, of a launch that tells enough."""
    memory = memory_of(arguments, workers=workers, nodes=nodes)
    assert isinstance(memory, Memory), memory
    return memory


@pytest.mark.parametrize(
    ("arguments", "millions"),
    [(GPT_3, 174_600), (LLAMA_3, 8_030), (MIXTRAL, 46_703)],
    ids=["gpt-3", "llama-3", "mixtral"],
)
def test_the_parameters_are_those_of_the_model(arguments: dict[str, Any], millions: int) -> None:
    assert predicted(arguments, 8).parameters / 1e6 == pytest.approx(millions, rel=1e-3)


def test_snapshots_are_two_of_a_shard_and_two_more_where_another_node_has_a_copy() -> None:
    one, two = predicted(LLAMA_3, 8), predicted(LLAMA_3, 16, nodes=2)
    assert one.snapshots == pytest.approx(2 * 12 * 8.03e9 / 8, rel=1e-3)
    assert one.snapshots_of_node == 8 * one.snapshots
    assert two.snapshots == pytest.approx(one.snapshots, rel=1e-6)


def test_a_loss_leaves_the_state_to_the_others() -> None:
    memory = predicted(LLAMA_3, 8)
    assert memory.state == pytest.approx(12 * 8.03e9 / 8, rel=1e-3)
    assert memory.state_later == pytest.approx(12 * 8.03e9 / 7, rel=1e-3)
    assert memory.recut == memory.state
    halved = predicted({**LLAMA_3, "bf16": None}, 8)
    assert halved.state == pytest.approx(8 * 8.03e9 / 8, rel=1e-3)


def test_gradients_apart_are_those_of_the_contributions_of_a_step() -> None:
    """8 replicas of 8 micro-batches, one lost: its sum, six early terms, a seventh of each."""
    memory = predicted({**LLAMA_3, "micro_batch_size": 1, "global_batch_size": 64}, 8)
    of_buffer, two_buckets = 4 * 8.03e9, 2 * 4 * 40e6
    assert memory.contributions == pytest.approx(of_buffer + two_buckets, rel=1e-3)
    few = predicted({**LLAMA_3, "micro_batch_size": 8, "global_batch_size": 64}, 8)
    assert few.contributions == pytest.approx(of_buffer / 7 + two_buckets, rel=1e-3)


def test_sums_stand_by_copies_of_a_shard_and_a_redo_takes_one_gradient_buffer() -> None:
    memory = predicted(LLAMA_3, 8)
    assert memory.redone == pytest.approx(4 * 8.03e9, rel=1e-3)
    assert memory.kept == pytest.approx(memory.redone / 8, rel=1e-6)
    for none in (
        predicted({**LLAMA_3, "elaswave_consistency": "fast"}, 8),
        predicted({**LLAMA_3, "num_virtual_stages_per_pipeline_rank": 2}, 8),
        predicted(MIXTRAL, 8),
    ):
        assert none.kept == none.redone == 0


def test_tensor_and_pipeline_parallelism_cut_the_model() -> None:
    cut = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 8}
    memory = predicted({**GPT_3, **cut}, 64)
    assert memory.replicas == 2
    assert memory.parameters == pytest.approx(predicted(GPT_3, 1).parameters, rel=0.01)
    assert memory.snapshots < predicted(GPT_3, 2).snapshots / 28


@pytest.mark.parametrize(
    ("arguments", "workers", "says"),
    [
        ({**LLAMA_3, "vocab_size": None}, 8, "does not tell --vocab-size"),
        (LLAMA_3, 0, "the number of workers"),
        ({**LLAMA_3, "tensor_model_parallel_size": 3}, 8, "no multiple of TP 3 x PP 1"),
    ],
)
def test_what_is_not_told_is_named(arguments: dict[str, Any], workers: int, says: str) -> None:
    said = memory_of(arguments, workers=workers)
    assert isinstance(said, str) and says in said


@pytest.mark.parametrize(
    ("launcher", "workers", "nodes"),
    [
        ("torchrun --nproc-per-node 8 --nnodes 2", 16, 2),
        ("torchrun --nproc_per_node=4", 4, 1),
        ("torchrun --nproc-per-node gpu", 0, 1),
        ("python", 0, 1),
    ],
)
def test_the_workers_are_those_of_the_launcher(
    launcher: str, workers: int, nodes: int, tmp_path: Path
) -> None:
    path = tmp_path / "launch.sh"
    path.write_text(f"{launcher} pretrain_gpt.py --num-layers 2\n")
    launch = read_launch(path)
    assert (launch.workers, launch.nodes) == (workers, nodes)


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "launch.sh"
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 126"
    path.write_text(f"torchrun --nproc-per-node 2 pretrain_gpt.py {model}\n")
    for more in ([], ["--workers", "4"]):
        run_command(["doctor", str(path), *more])
    said = " ".join(capsys.readouterr().out.split())
    assert "counted for 2 workers, 2 replicas" in said
    assert "counted for 4 workers, 4 replicas" in said
