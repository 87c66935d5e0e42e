#!/usr/bin/env bash
# Once NumPy has seen a tensor, even in a copy, its storage cannot be resized any more; DLPack does not do that.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
cat >"$folder/show.py" <<'PY'
import gc
import warnings

import numpy as np
import torch

warnings.simplefilter("ignore")
print("torch", torch.__version__, "numpy", np.__version__)
WAYS = {
    "np.from_dlpack(tensor)": np.from_dlpack,
    "tensor.tolist()": torch.Tensor.tolist,
    "tensor.numpy()": torch.Tensor.numpy,
    "tensor[:1].numpy()": lambda tensor: tensor[:1].numpy(),
    "np.array(tensor), a copy": np.array,
}
seen = {}
for way, look in WAYS.items():
    tensor = torch.zeros(8)
    look(tensor)
    gc.collect()  # whatever it gave is gone
    storage = tensor.untyped_storage()
    try:
        storage.resize_(0)  # as an offload frees memory
        seen[way] = "resized"
    except RuntimeError as error:
        seen[way] = f"RuntimeError: {str(error).splitlines()[0]}"
    print(f"resize_(0) behind {way}: {seen[way]}")
fixed = "RuntimeError: Trying to resize storage that is not resizable"
assert [*seen.values()] == ["resized"] * 2 + [fixed] * 3
PY
"$folder/venv/bin/python" "$folder/show.py"
