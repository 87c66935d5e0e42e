#!/usr/bin/env bash
# Megatron-Core divides a micro-batch's loss in place: a report that shares its storage shrinks too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 megatron-core==0.16.1
cat >"$folder/show.py" <<'PY'
import megatron.core
import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.transformer import TransformerConfig

config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)


def loss_func(output):
    loss = output.mean()
    return loss, {"detached": loss.detach(), "cloned": loss.detach().clone()}


def reported(num_microbatches):
    """What every schedule appends for one of so many micro-batches, whose loss is 8."""
    reports = []
    forward_step_calc_loss(
        torch.nn.Identity(),
        torch.full((2,), 8.0),
        loss_func,
        config,
        None,
        False,
        num_microbatches,
        reports,
        cp_group_size=1,
        is_last_stage=True,
    )
    return {name: float(value) for name, value in reports[0].items()}


print("torch", torch.__version__, "megatron-core", megatron.core.__version__)
one, four = reported(1), reported(4)
print("of 1 micro-batch: ", one)
print("of 4 micro-batches:", four)
print("A loss that is reported as loss.detach() is divided by the number of micro-batches.")
assert one == {"detached": 8.0, "cloned": 8.0}, one
assert four == {"detached": 2.0, "cloned": 8.0}, four
PY
"$folder/venv/bin/python" -W ignore "$folder/show.py"
