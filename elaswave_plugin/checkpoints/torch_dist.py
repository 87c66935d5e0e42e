"""Finds out whether a checkpoint in Megatron-Core's torch_dist format can be read."""

import itertools
import json
import math
import pickle
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from elaswave_plugin.checkpoints.archives import archive_flaw, outline

_SHARD = re.compile(r"(?P<key>.*)/shard_[\d.]+_(?P<lengths>\d+(\.\d+)*)")
_RERUNS = re.compile(r"rerun_state_machine_state/shard_\d+_(?P<width>\d+)")
METADATA, CONFIG, COMMON = ".metadata", "metadata.json", "common.pt"


def flaw_of(folder: Path) -> str | None:
    """Say what keeps a checkpoint from being read, naming the file; None where it is whole.

    Each chunk of each tensor that ``.metadata`` declares has an entry of its size, the chunks fill
    their tensors, an object in shards has all of them, and each file is as long as its entries. No
    data is read. Needs torch. Source: torch/distributed/checkpoint/filesystem.py,
    megatron/core/dist_checkpointing (``ShardedObject.unique_key`` and ``mapping.py``).
    """
    config = folder / CONFIG
    if not config.is_file():
        return f"{config} is missing"
    try:
        json.loads(config.read_text())
    except ValueError:
        return f"{config} is no JSON"
    metadata = _read_metadata(folder)
    if isinstance(metadata, str):
        return metadata
    common = folder / COMMON
    # From Megatron-Core 0.19 on the common state is an entry like the others.
    if not any(name.startswith("common_state") for name in metadata.state_dict_metadata):
        if not common.is_file():
            return f"{common} is missing"
        if (flaw := archive_flaw(common)) is not None:
            return flaw
    return (
        _missing_entry(metadata, folder)
        or _missing_shard(metadata, folder)
        or _other_width(metadata, folder)
        or _wrong_size(metadata, folder)
    )


def _read_metadata(folder: Path) -> Any:
    """The metadata, or a sentence why not."""
    file = folder / METADATA
    if not file.is_file():
        return f"{file} is missing"
    try:
        return pickle.loads(file.read_bytes())
    except Exception as error:  # a truncated pickle may raise anything
        return f"{file} cannot be read: {type(error).__name__}: {error}"


def _missing_entry(metadata: Any, folder: Path) -> str | None:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    where = folder / METADATA
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            if MetadataIndex(name) not in metadata.storage_data:
                return f"{where} has no entry of {name}"
            continue
        filled = 0
        for chunk in described.chunks:
            entry = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            elements = math.prod(chunk.sizes)
            if entry is None:
                return f"{where} has no entry of {name} at {tuple(chunk.offsets)}"
            if entry.length < elements * described.properties.dtype.itemsize:
                return (
                    f"{where} has {entry.length} bytes of {name} at {tuple(chunk.offsets)}, too few"
                    f" for {tuple(chunk.sizes)} of {described.properties.dtype}"
                )
            filled += elements
        if filled != math.prod(described.size):
            return f"{where} has {filled} elements of {name}, wanted {math.prod(described.size)}"
    return None


def _missing_shard(metadata: Any, folder: Path) -> str | None:
    """The names of shards say how many there are, along each axis."""
    for name in metadata.state_dict_metadata:
        if (named := _SHARD.fullmatch(name)) is None:
            continue
        axes = [range(int(length)) for length in named["lengths"].split(".")]
        for offsets in itertools.product(*axes):
            one = f"{named['key']}/shard_{'.'.join(map(str, offsets))}_{named['lengths']}"
            if one not in metadata.state_dict_metadata:
                return f"{folder / METADATA} has no {one}"
    return None


def _other_width(metadata: Any, folder: Path) -> str | None:
    """Megatron-LM asks for the rerun machine's state of as many ranks as the arguments say."""
    common = folder / COMMON
    written = [n for name in metadata.state_dict_metadata if (n := _RERUNS.fullmatch(name))]
    if not written or not common.is_file():
        return None
    said = getattr(outline(common).get("args"), "world_size", None)
    if said is None or said == int(written[0]["width"]):
        return None
    return f"{common} says {said} workers, and {folder / METADATA} has {written[0][0]}"


def _wrong_size(metadata: Any, folder: Path) -> str | None:
    lengths: defaultdict[str, int] = defaultdict(int)
    for entry in metadata.storage_data.values():
        lengths[entry.relative_path] += entry.length
    for name, wanted in sorted(lengths.items()):
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if (seen := file.stat().st_size) != wanted:
            return f"{file} has {seen} bytes, wanted {wanted}"
    return None
