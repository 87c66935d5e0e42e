#!/usr/bin/env bash
# The fused AdamW of torch on a CPU gives an element other bits where its tensor ends elsewhere; the others do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy
cat >"$folder/show.py" <<'PY'
import torch

NUMEL, WIDTHS, STEPS = 10_000, (3, 7, 13), 3


def updated(width, **how):
    """Weights and moments of all elements, which lie in so many tensors."""
    dice = torch.Generator().manual_seed(5)
    size = -(-NUMEL // width)
    parts = [torch.nn.Parameter(one.clone()) for one in torch.randn(NUMEL, generator=dice).split(size)]
    optimizer = torch.optim.AdamW(parts, 1e-3, **how)
    for _ in range(STEPS):
        for one, gradient in zip(parts, torch.randn(NUMEL, generator=dice).split(size)):
            one.grad = gradient.clone()
        optimizer.step()
    states = [{"weight": one.detach(), **optimizer.state[one]} for one in parts]
    return {name: torch.cat([one[name] for one in states]) for name in ("weight", "exp_avg", "exp_avg_sq")}


def differing(**how):
    """By number of tensors: how many elements of each kind have other bits than in one tensor."""
    whole = updated(1, **how)
    return {
        width: {name: int((one != whole[name]).sum()) for name, one in updated(width, **how).items()}
        for width in WIDTHS
    }


print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
loop, fused = differing(foreach=False), differing(fused=True)
print("for-loop, elements that differ by number of tensors:", loop)
print("fused, elements that differ by number of tensors:", fused)
assert not any(count for one in loop.values() for count in one.values())
assert any(count for one in fused.values() for count in one.values())
PY
"$folder/venv/bin/python" "$folder/show.py"
