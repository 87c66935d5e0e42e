"""Layers that normalise a sample by the others of its micro-batch, and what is cut of theirs."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn import BatchNorm1d, InstanceNorm1d, LayerNorm, Module, Sequential, SyncBatchNorm

from elaswave_plugin.adapters.batch_layers import batch_layers


@pytest.mark.parametrize(
    ("layer", "trains", "is_one"),
    [
        (BatchNorm1d(4), True, True),
        (BatchNorm1d(4).eval(), True, False),
        (BatchNorm1d(4, track_running_stats=False).eval(), True, True),
        (BatchNorm1d(4).eval(), False, True),
        (SyncBatchNorm(4), True, False),
        (InstanceNorm1d(4), True, False),
        (LayerNorm(4), True, False),
    ],
)
def test_batch_norm_is_one_unless_it_is_kept_in_evaluation(
    layer: Module, trains: bool, is_one: bool
) -> None:
    model = Sequential(layer)
    model.training = trains
    assert batch_layers(model) == ([f"0 ({type(layer).__name__})"] if is_one else [])


def test_a_micro_batch_of_megatron_core_with_batch_norm_is_not_cut() -> None:
    pytest.importorskip("megatron.core")
    from elaswave_plugin.adapters.megatron.unsupported import why_whole_pieces

    def why(layer: Module) -> str | None:
        chunk: Any = Sequential(layer)
        chunk.config = SimpleNamespace(
            num_moe_experts=None,
            calculate_per_token_loss=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        return why_whole_pieces([chunk])

    assert "normalises a sample" in (why(BatchNorm1d(4)) or "")
    assert why(LayerNorm(4)) is None
