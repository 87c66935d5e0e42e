"""The only place that touches private tables of torch.distributed; checks the torch version."""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elaswave_plugin.errors import ConfigurationError

BACKEND = "elaswave"
_LOWEST = (2, 11)
_HIGHEST = (2, 15)
# Each private place that we read or edit, and its type: torch may move any of them.
_KNOWN: tuple[tuple[str, Any], ...] = (
    ("torch.distributed:Backend._plugins", dict),
    ("torch.distributed:Backend.backend_list", list),
    ("torch.distributed:Backend.backend_type_map", dict),
    ("torch.distributed:Backend.backend_capability", dict),
    ("torch.distributed:Backend.register_backend", Callable),
    ("torch.distributed:ProcessGroup._register_backend", Callable),
    ("torch.distributed:ProcessGroup._set_default_backend", Callable),
    ("torch.distributed.distributed_c10d:_world.pg_group_ranks", dict),
    ("torch.distributed.distributed_c10d:_world.pg_coalesce_state", dict),
    ("torch.distributed.distributed_c10d:_get_default_group", Callable),
    ("torch.distributed.distributed_c10d:_check_p2p_op_list", Callable),
    ("torch.distributed.distributed_c10d:batch_isend_irecv", Callable),
    ("torch._C._distributed_c10d:_set_global_rank", Callable),
    ("torch._C._distributed_c10d:HashStore", Callable),
    ("torch._C:Future._set_unwrap_func", Callable),
)


def check_torch(version: str = torch.__version__) -> None:
    """Raise ConfigurationError when this torch, or one of its tables, is not as we know it."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not _LOWEST <= (int(found[1]), int(found[2])) <= _HIGHEST:
        raise ConfigurationError(
            f"torch is {version}, but the process groups of elaswave_plugin know the tables of "
            "torch 2.11 to 2.15 only: install one of these"
        )
    for place, wanted in _KNOWN:
        there = _found(place)
        if not isinstance(there, wanted):
            raise ConfigurationError(
                f"{place} of torch {version} is {there!r}, wanted {wanted.__name__}: what the "
                "process groups of elaswave_plugin edit is not as they know it; install "
                "torch 2.13.0, which the tests run"
            )


def _found(place: str) -> Any:
    """Return what stands at "module:name.name"; None where nothing does."""
    module, _, path = place.partition(":")
    there: Any = import_module(module)
    for name in path.split("."):
        there = getattr(there, name, None)
    return there


def register_backend(create: Callable[[Any, Any], Any]) -> None:
    """Make `create(options, backend_options)` the maker of groups of backend "elaswave"."""
    if BACKEND.upper() in dist.Backend._plugins:
        raise ConfigurationError(
            f'the backend "{BACKEND}" is registered already: uninstall() the other table first'
        )
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    _self_recording().add(BACKEND)


def unregister_backend() -> None:
    """Take the backend "elaswave" out of torch's tables again."""
    backend: Any = dist.Backend
    backend._plugins.pop(BACKEND.upper(), None)
    backend.backend_type_map.pop(BACKEND, None)
    backend.backend_capability.pop(BACKEND, None)
    if BACKEND in backend.backend_list:
        backend.backend_list.remove(BACKEND)
    if hasattr(backend, BACKEND.upper()):
        delattr(backend, BACKEND.upper())
    _self_recording().discard(BACKEND)


def _self_recording() -> set[str]:
    """Backends to which torch 2.15 attaches no flight recorder: that asks for a native one."""
    return getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())


class LocalStore(dist.Store):  # type: ignore[name-defined,misc]
    """A store in this process's memory: torch wants one, our groups never use it.

    A native group would wait in it for its other members, and is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Remember it."""
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        """Return what was set here; ConfigurationError for what another process would set."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Count on."""
        count = int(self._values.get(key, b"0")) + value
        self._values[key] = str(count).encode()
        return count

    def check(self, keys: list[str]) -> bool:
        """Return whether all of them were set here."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Raises ConfigurationError for what another process would set."""
        if not self.check(keys):
            raise ConfigurationError(
                "a group of torch's own is made (gloo, nccl), which cannot lose a member: leave "
                "out its backend, as in torch.distributed.new_group(ranks)"
            )

    def delete_key(self, key: str) -> bool:
        """Forget it; whether it was set."""
        return self._values.pop(key, None) is not None

    def set_timeout(self, timeout: Any) -> None:
        """Nothing waits."""


def imagine_world(rank: int, size: int) -> None:
    """Make WORLD one of ``size`` in which this process is ``rank`` and meets no other.

    Torch's own fake group answers: every call returns at once, and no data comes.
    """
    import_module("torch.testing._internal.distributed.fake_pg")
    store: Any = torch._C._distributed_c10d.HashStore
    dist.init_process_group(dist.Backend.FAKE, store=store(), rank=rank, world_size=size)


def wrap_backend(backend: Any, store: Any, rank: int, size: int, *, kind: str, device: str) -> Any:
    """A process group that knows one native backend, with the c10d calls under all their names."""
    group: Any = dist.ProcessGroup(store, rank, size)
    backend_type = getattr(dist.ProcessGroup.BackendType, kind)
    group._set_default_backend(backend_type)
    group._register_backend(torch.device(device), backend_type, backend)
    return group


def route_batches(batch_of: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Let `batch_of(group, tensor)` choose the runner of batch_isend_irecv; returns the undo.

    Torch coalesces a batch for its own class of groups only, and a native group may wait for ever
    when it gets sends and receives one by one.
    """
    modules: tuple[Any, ...] = (c10d, dist)
    original = c10d.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: list[Any]) -> Any:
        c10d._check_p2p_op_list(p2p_op_list)
        first = p2p_op_list[0]
        run = batch_of(first.group or c10d._get_default_group(), first.tensor)
        return original(p2p_op_list) if run is None else run(p2p_op_list)

    def undo() -> None:
        for module in modules:
            if module.batch_isend_irecv is batch_isend_irecv:
                module.batch_isend_irecv = original

    for module in modules:
        module.batch_isend_irecv = batch_isend_irecv
    return undo


class _Ranks(dict[int, int]):
    """Global ranks of a group; to list them is to ask for its size."""

    def __init__(self, group: Any, members: Sequence[int]) -> None:
        super().__init__({rank: place for place, rank in enumerate(members)})
        self._group = group

    def keys(self) -> Any:
        """Those that `get_process_group_ranks` returns."""
        self._group.size()
        return super().keys()


def update_ranks(ranks: Mapping[Any, Sequence[int]], world: Any) -> None:
    """Give each group of c10d its global ranks in group-rank order."""
    world_tables: Any = c10d._world
    for group, members in ranks.items():
        if group in world_tables.pg_group_ranks:
            world_tables.pg_group_ranks[group] = _Ranks(group, members)
    if world is not None and world_tables.default_pg is world:
        set_global_rank: Any = torch._C._distributed_c10d._set_global_rank
        set_global_rank(world.rank())


def forget_coalescing(groups: Sequence[Any]) -> None:
    """Drop what an interrupted coalescing block of these groups had collected."""
    state: Any = c10d._world.pg_coalesce_state
    for group in groups:
        state.pop(group, None)


def fail_future(future: Any, error: BaseException) -> None:
    """set_exception for a BaseException too, which torch's own refuses."""

    def raise_error(_: object) -> None:
        raise error

    future._set_unwrap_func(raise_error)
    future.set_result(error)
