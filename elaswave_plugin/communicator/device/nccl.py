"""NCCL groups for GPU tensors: whether they can be used here, and how one is made and ended."""

import hashlib
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.communicator.device.communicator import Inner, LinkStore
from elaswave_plugin.communicator.device.ordered_sums import CombineKernels
from elaswave_plugin.communicator.groups import algorithms as run
from elaswave_plugin.communicator.groups import c10d_tables
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.links.operation import Group, Operation, Steps
from elaswave_plugin.core.layout.device_groups import obstacle, shrink_is_safe, uses_nccl
from elaswave_plugin.errors import ConfigurationError

# Who is lost is decided by the agents, and the doorbell ends what is in flight. So torch's
# watchdog may neither end an operation nor the process.
WATCHDOG_SWITCHES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_PROPAGATE_ERROR",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
)
_OFF = "0"
_WATCHDOG_TIMEOUT_DAYS = 365
_SHRINK_ABORT = 1
_IDENTITY_BYTES = 128


def silence_watchdog(environ: MutableMapping[str, str]) -> list[str]:
    """Set what ProcessGroupNCCL reads when it is made; the answer names what was set otherwise."""
    changed = [
        f"{name} is {_OFF} instead of {environ[name]}"
        for name in WATCHDOG_SWITCHES
        if environ.get(name, _OFF) != _OFF
    ]
    environ.update(dict.fromkeys(WATCHDOG_SWITCHES, _OFF))
    return changed


class StreamMark:
    """Complete when everything is that the current stream holds now."""

    def __init__(self) -> None:
        make: Any = torch.cuda.Event
        self._event = make()
        self._event.record()

    def is_completed(self) -> bool:
        """Return whether the stream has come this far."""
        return bool(self._event.query())

    is_success = is_completed

    def wait(self) -> bool:
        """The current stream goes on behind it."""
        self._event.wait()
        return True

    def exception(self) -> None:
        """None: see NcclGroup.failed."""

    def result(self) -> list[torch.Tensor]:
        """Empty: the caller has the tensors."""
        return []


class NcclGroup:
    """One ProcessGroupNCCL as a process group of its own."""

    waits_on_host = False

    def __init__(self, backend: Any, store: Any, rank: int, size: int) -> None:
        self._backend = backend
        self._store = store
        self._apart: Any = None
        self.calls = c10d_tables.wrap_backend(
            backend, store, rank, size, kind="NCCL", device="cuda"
        )

    @property
    def failed(self) -> bool:
        """True if the watchdog has seen an error."""
        return str(self._backend.get_error().name) != "SUCCESS"

    def connect(self) -> None:
        """All members through one communicator, which sends outside of blocks use then as well."""
        self._backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))

    def mark(self) -> StreamMark:
        """Torch's synchronous calls run on the current stream and answer None."""
        return StreamMark()

    @contextmanager
    def apart(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """A stream of the group's own, which is behind what the current one holds now."""
        cuda: Any = torch.cuda
        if self._apart is None:
            self._apart = cuda.Stream()
        self._apart.wait_stream(cuda.current_stream())
        for tensor in tensors:
            tensor.record_stream(self._apart)  # the caller may let go of it before it is used
        with cuda.stream(self._apart):
            yield

    def shrink(self, excluded: Sequence[int]) -> Inner:
        """The group without these ranks; the parent is left for the caller to abort."""
        backend = self._backend.shrink(list(excluded), _SHRINK_ABORT)
        return NcclGroup(backend, self._store, backend.rank(), backend.size())

    def abort(self) -> None:
        """End the kernels in flight and release the communicator."""
        self._backend.abort()
        if self._apart is not None:
            # What follows such a kernel there writes into the caller's memory.
            self._apart.synchronize()

    def close(self) -> None:
        """Release the communicator together with all members."""
        self._backend.shutdown()


class NcclMaker:
    """Makes ProcessGroupNCCL. No device is bound, so NCCL itself connects on first use only."""

    device_type = "cuda"

    def __init__(self, environ: MutableMapping[str, str], devices: Mapping[int, str]) -> None:
        """Sets the watchdog's variables in `environ`, which has to be that of the process.

        `devices`: those of the workers at launch, by slot.
        """
        self.devices = dict(devices)
        self.combine = CombineKernels()
        self.overridden = silence_watchdog(environ)
        version: Any = torch.cuda.nccl.version
        self.shrinks = shrink_is_safe(tuple(version()))

    def make(self, store: LinkStore, name: str, rank: int, size: int) -> Inner:
        """A new group whose members find each other through our links."""
        torch_distributed: Any = dist
        nccl = torch_distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(days=_WATCHDOG_TIMEOUT_DAYS)
        prefixed = torch_distributed.PrefixStore(name, store)
        return NcclGroup(nccl(prefixed, rank, size, options), prefixed, rank, size)


def maker_for(
    links: LinkTable,
    members: Sequence[int],
    setting: str,
    environ: MutableMapping[str, str],
    *,
    timeout_s: float,
    launched_on: Mapping[int, str],
) -> NcclMaker | None:
    """Choose the maker for GPU tensors, alike on all members; None: they go through host memory.

    Collective over `members` (slots) where torch has NCCL, which is then to be so for all.  The
    lowest slot says on stderr what was chosen when a GPU is there.  A worker that builds beside the
    job takes what the job has chosen: NCCL, where its workers were `launched_on` devices. Raises
    ConfigurationError.
    """
    if setting == "host":
        return None
    if links.detached:
        return _maker_of_the_job(links.slot, launched_on, environ)
    if not dist.is_nccl_available():
        if setting == "nccl":
            raise ConfigurationError(
                "gpu_engine is nccl, but this torch is built without NCCL: install a build with "
                "CUDA, or set gpu_engine to auto or host"
            )
        if torch.cuda.is_available():
            _say(links, members, "GPU tensors go through host memory: this torch has no NCCL")
        return None
    devices = exchange(links, members, local_device(), timeout_s=timeout_s)
    if not uses_nccl(setting, devices):
        if any(devices.values()):
            _say(links, members, f"GPU tensors go through host memory: {obstacle(devices)}")
        return None
    maker = NcclMaker(environ, devices)
    note = "".join(f"; {change}" for change in maker.overridden)
    _say(links, members, f"GPU tensors go through NCCL{note}")
    return maker


def _maker_of_the_job(
    slot: int, launched_on: Mapping[int, str], environ: MutableMapping[str, str]
) -> NcclMaker | None:
    if not launched_on:
        return None
    if not dist.is_nccl_available():
        raise ConfigurationError(
            "the GPU tensors of this job go through NCCL, and this worker's torch is built without"
            " it: install the build that the others have"
        )
    why_not = obstacle({**launched_on, slot: local_device()})
    if why_not:
        raise ConfigurationError(
            f"the GPU tensors of this job go through NCCL, where worker {slot} cannot take part:"
            f" {why_not}"
        )
    return NcclMaker(environ, launched_on)


def local_device() -> str:
    """The current CUDA device, named alike in all processes; "" for none."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def exchange(
    links: LinkTable, members: Sequence[int], identity: str, *, timeout_s: float
) -> dict[int, str]:
    """Gather all members' identities by slot. Collective, over the links."""
    slots = tuple(members)
    digest = hashlib.blake2b(b"devices of the workers", digest_size=8).digest()
    group = Group(
        number=int.from_bytes(digest, "big"),
        label="devices of the workers",
        members=slots,
        rank=slots.index(links.slot),
    )
    outs = [bytearray(_IDENTITY_BYTES) for _ in slots]
    ours = memoryview(identity.encode().ljust(_IDENTITY_BYTES, b"\0"))

    def body(op: Operation) -> Steps:
        yield from run.all_gather(op, [memoryview(out) for out in outs], ours)

    operation = Operation(links, group, "all_gather", timeout_s=timeout_s)
    links.run(operation, body)
    links.wait(operation)
    return {slot: out.rstrip(b"\0").decode() for slot, out in zip(slots, outs, strict=True)}


def _say(links: LinkTable, members: Sequence[int], text: str) -> None:
    if links.slot == min(members):
        print(f"elaswave: {text}", file=sys.stderr, flush=True)
