"""Reads every chunk of a torch_dist checkpoint by its index, without a line of the product."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Every entry of a checkpoint by name; a tensor is put together from its chunks.

    Raises whatever reading a damaged one raises; AssertionError for a chunk of another shape, and
    for a tensor whose chunks do not fill it.
    """
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    # From Megatron-Core 0.19 on the common state is an entry like the others.
    is_entry = any(name.startswith("common_state/") for name in metadata.state_dict_metadata)
    found: dict[str, Any] = {} if is_entry else {"common.pt": _load(folder / "common.pt")}
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            found[name] = _entry(folder, metadata, MetadataIndex(name))
            continue
        whole = torch.zeros(described.size, dtype=described.properties.dtype)
        seen = torch.zeros(described.size, dtype=torch.bool)
        for chunk in described.chunks:
            data = _entry(folder, metadata, MetadataIndex(name, chunk.offsets))
            assert data.shape == chunk.sizes, (name, chunk, data.shape)
            place = tuple(
                slice(start, start + size)
                for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            whole[place], seen[place] = data, True
        assert bool(seen.all()), f"{name} has holes"
        found[name] = whole
    return found


def differences(ours: Any, theirs: Any, name: str = "") -> list[str]:
    """List the names at which two contents differ, tensors bit for bit."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        return [] if same and torch.equal(_bits(ours), _bits(theirs)) else [name]
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            found
            for key in sorted({*ours, *theirs}, key=str)
            for found in differences(ours.get(key), theirs.get(key), f"{name}/{key}")
        ]
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return [name]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [found for n, pair in pairs for found in differences(*pair, f"{name}/{n}")]
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return [] if np.array_equal(ours, theirs) else [name]
    if isinstance(ours, io.BytesIO) and isinstance(theirs, io.BytesIO):
        return differences(_load(ours), _load(theirs), name)
    if hasattr(ours, "__dict__") and not isinstance(ours, type) and type(ours) is type(theirs):
        return differences(vars(ours), vars(theirs), name)
    return [] if type(ours) is type(theirs) and bool(ours == theirs) else [name]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1)


def _entry(folder: Path, metadata: Any, index: MetadataIndex) -> Any:
    entry = metadata.storage_data[index]
    with (folder / entry.relative_path).open("rb") as file:
        file.seek(entry.offset)
        return _load(io.BytesIO(file.read(entry.length)))


def _load(file: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False)
