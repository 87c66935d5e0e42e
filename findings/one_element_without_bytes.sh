#!/usr/bin/env bash
# A tensor of one element is contiguous with any stride, and view(torch.uint8) wants stride one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0
cat >"$folder/show.py" <<'PY'
import torch


def told(tensor):
    try:
        return tensor.view(torch.uint8).tolist()
    except RuntimeError as error:
        return f"RuntimeError: {error}"


print("torch", torch.__version__)
one = torch.tensor(3.5).expand(1)
print("is_contiguous():", one.is_contiguous(), "stride():", one.stride())
assert one.is_contiguous() and one.stride() == (0,)
copies = {
    "contiguous()": one.contiguous(),
    "clone()": one.clone(),
    "reshape(-1)": one.reshape(-1),
    "flatten()": one.flatten(),
}
for name, made in copies.items():
    said = told(made)
    print(f"{name}: stride {made.stride()}, its bytes: {said}")
    assert made.stride() == (0,) and "must be 1" in said, name
print("as_strided((1,), (1,)), its bytes:", told(one.as_strided((1,), (1,))))
assert told(one.as_strided((1,), (1,))) == [0, 0, 96, 64]
PY
"$folder/venv/bin/python" -W ignore "$folder/show.py"
