"""The losses of routers in the log: each micro-batch once, whoever ran it and how often."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import (
    get_moe_layer_wise_logging_tracker,
    save_to_aux_losses_tracker,
)

from elaswave_plugin.adapters.megatron_lm import router_losses
from elaswave_plugin.adapters.megatron_lm.router_losses import RouterLosses, Rows
from tests.adapters.megatron_lm.harness import needs_scripts

pytestmark = needs_scripts
LAYERS = 2


def rows(**layers: float) -> dict[str, Rows]:
    """The rows of one worker, of micro-batches "kN_LAYER" at the first tp position."""
    return {
        "z_loss": {
            (0, int(name[1])): torch.tensor([value, 0.0] if name[2:] == "_0" else [0.0, value])
            for name, value in layers.items()
        }
    }


def test_a_micro_batch_that_proves_who_has_come_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stages with a layer each, two micro-batches; the second one is run twice in both."""
    losses = RouterLosses(num_layers=LAYERS, num_replicas=1)
    stages = [rows(k0_0=1.0, k1_0=2.0), rows(k0_1=3.0, k1_1=4.0), rows(k1_0=2.0), rows(k1_1=4.0)]
    monkeypatch.setattr(router_losses, "gathered", lambda own: [(one, set()) for one in stages])
    losses.agree(2)
    assert losses._totals["z_loss"].tolist() == [3.0, 7.0]


def test_a_pass_that_was_interrupted_in_a_router_leaves_nothing() -> None:
    losses = RouterLosses(num_layers=LAYERS, num_replicas=1)
    save_to_aux_losses_tracker("z_loss", torch.tensor(5.0), 1, LAYERS)
    losses.begin()
    assert not get_moe_layer_wise_logging_tracker()["z_loss"]["values"].any()
