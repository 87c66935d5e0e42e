#!/usr/bin/env bash
# A torch optimizer over Megatron-Core's DistributedDataParallel changes no weight, and says nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 megatron-core==0.16.1
cat >"$folder/show.py" <<'PY'
import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

if not torch.cuda.is_available():
    # Its buffers lie on the device that is current.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda: None
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
parallel_state.initialize_model_parallel()
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)


class Net(MegatronModule):
    def __init__(self):
        super().__init__(config)
        self.linear = torch.nn.Linear(8, 8, device=torch.cuda.current_device())

    def forward(self, rows):
        return self.linear(rows)


net = Net()
model = DistributedDataParallel(config, DistributedDataParallelConfig(), net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
weight = net.linear.weight
before = weight.detach().clone()
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 8, device=weight.device)).sum().backward()
    model.finish_grad_sync()
    optimizer.step()
changed = not torch.equal(before, weight)
print("torch", torch.__version__, "megatron-core", megatron.core.__version__)
print("weight.grad:", weight.grad, "| sum of weight.main_grad:", float(weight.main_grad.sum()))
print("three steps of torch.optim.Adam have changed the weight:", changed)
print("Gradients are in main_grad alone; only get_megatron_optimizer's optimizers read them.")
assert weight.grad is None and float(weight.main_grad.sum()) and not changed
PY
"$folder/venv/bin/python" -W ignore "$folder/show.py"
