"""In a worker: a picture of all that can be reached from the engine, written when it leaves.

A picture has paths and values: sizes, ranks, shapes, dtypes, members of groups. Numbers with a
fraction and the content of tensors are left out, since they have trained.
"""

import functools
import json
import types
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Objects of these packages are walked into; of others only the type is in the picture.
PACKAGES = ("deepspeed", "train_deepspeed", "torch.nn", "torch.optim", "__main__")
LARGEST_NUMBER = 1 << 40  # above are ids and addresses


def leaf(value: Any) -> Any:
    """Return the picture of a value that is not walked into; None where it is walked into."""
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, int):
        return value if abs(value) < LARGEST_NUMBER else "id"
    if isinstance(value, float | torch.dtype | torch.device | torch.Size):
        return "float" if isinstance(value, float) else str(value)
    if isinstance(value, dist.ProcessGroup):
        return ["group", dist.get_process_group_ranks(value), dist.get_rank(value)]
    return None


def items_of(mapping: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a mapping by their keys; where these are objects or ids, by their position.

    Hooks are named by their functions, since a new layout registers DeepSpeed's again, after ours.
    """
    counts: Counter[str] = Counter()
    for position, (key, one) in enumerate([*mapping.items()]):
        name = str(position)
        if isinstance(one, types.FunctionType):
            name = f"{one.__qualname__} {counts[one.__qualname__]}"
            counts[one.__qualname__] += 1
        yield (key if isinstance(key, str) else f"[{name}]"), one


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a container or object, by name."""
    if isinstance(value, Mapping):
        yield "#", len(value)
        yield from items_of(value)
    elif isinstance(value, list | tuple | deque):
        yield "#", len(value)
        yield from ((str(position), one) for position, one in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, types.FunctionType):
        shard_groups = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for name, shard_group in shard_groups:
            yield f"<{name}>", shard_group.cell_contents
        yield "defaults", value.__defaults__
    else:
        if isinstance(value, torch.Tensor):
            yield "shape", value.shape
            yield "dtype", value.dtype
        yield from sorted(getattr(value, "__dict__", {}).items())


def walked_into(value: Any) -> bool:
    """Return whether the picture has the parts of a value."""
    if isinstance(value, Mapping | list | tuple | deque | functools.partial | torch.Tensor):
        return True
    if isinstance(value, types.MethodType | types.FunctionType):
        return (value.__module__ or "").startswith(PACKAGES)
    return not isinstance(value, type) and type(value).__module__.startswith(PACKAGES)


def picture(roots: Mapping[str, Any]) -> dict[str, Any]:
    """All leaves below the roots, breadth first, every object once."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    queue = deque(roots.items())
    while queue:
        path, value = queue.popleft()
        simple = leaf(value)
        if simple is not None:
            found[path] = simple
        elif not walked_into(value):
            found[path] = type(value).__name__
        elif isinstance(value, tuple) or id(value) not in seen:
            seen[id(value)] = value
            queue.extend((f"{path}/{name}", one) for name, one in children(value))
    return found


def roots_of(engine: Any) -> dict[str, Any]:
    """Return the objects at which the walk begins."""
    from deepspeed.utils import groups

    return {
        "optimizer": engine.optimizer,
        "module": engine.module,
        "scheduler": engine.lr_scheduler,
        "engine": engine,
        "groups": {name: value for name, value in vars(groups).items() if name.startswith("_")},
    }


def watch(folder: str) -> None:
    """Have every job of this process write its picture before it leaves: FOLDER/walk-RANK.json."""
    from elaswave_plugin.adapters.deepspeed.engine.attached import AttachedEngine

    leave = AttachedEngine.leave

    def look_and_leave(job: AttachedEngine) -> None:
        if not job._left:
            place = Path(folder, f"walk-{dist.get_rank()}.json")
            place.write_text(json.dumps(picture(roots_of(job._engine))))
        leave(job)

    AttachedEngine.leave = look_and_leave  # type: ignore[method-assign]
