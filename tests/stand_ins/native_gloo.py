"""Runs the example over native groups, as on GPUs that NCCL connects: gloo's, on CPU tensors.

    elaswave run ... native_gloo.py ARGUMENTS OF examples/train_gpt.py

Every worker says that it has a device of its own, and gets groups of gloo for it. What is made,
what is called on it first and what is aborted goes to native.jsonl in the folder of the run.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
sys.path.insert(0, str(ROOT))

from elaswave_plugin.communicator.device import nccl  # noqa: E402
from elaswave_plugin.communicator.device.communicator import Inner, LinkStore  # noqa: E402
from tests.communicator.native_groups import GlooMaker  # noqa: E402


class Log:
    """A line for each thing that happens to native groups; lines of a few bytes stay whole."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def write(self, **what: object) -> None:
        os.write(self._file, f"{json.dumps(what)}\n".encode())


class Watched:
    """The calls of a native group, each logged when it is made for the first time."""

    def __init__(self, calls: Any, log: Callable[[str], None]) -> None:
        self._calls, self._log = calls, log
        self._seen: set[str] = set()

    def __getattr__(self, call: str) -> Any:
        if call not in self._seen:
            self._seen.add(call)
            self._log(call)
        return getattr(self._calls, call)


class LoggedGroup:
    """A native group whose calls and abort are logged."""

    waits_on_host = True

    def __init__(self, inner: Any, log: Callable[[str], None]) -> None:
        self._inner, self._log = inner, log
        self.calls = Watched(inner.calls, log)

    @property
    def failed(self) -> bool:
        return bool(self._inner.failed)

    def connect(self) -> None:
        self._inner.connect()

    def mark(self) -> Any:
        return self._inner.mark()

    def apart(self, tensors: Sequence[Any]) -> AbstractContextManager[None]:
        apart: AbstractContextManager[None] = self._inner.apart(tensors)
        return apart

    def shrink(self, excluded: Sequence[int]) -> Inner:
        inner: Inner = self._inner.shrink(excluded)
        return inner

    def abort(self) -> None:
        self._log("abort")
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()


class LoggingMaker(GlooMaker):
    """Stands for NcclMaker."""

    overridden = ()

    def __init__(self, environ: Mapping[str, str], devices: Mapping[int, str]) -> None:
        super().__init__()
        self.devices = dict(devices)
        self._events = Log(Path(environ["ELASWAVE_DIR"]) / "native.jsonl")

    def make(self, store: LinkStore, name: str, rank: int, size: int) -> Inner:
        slot = store._links.slot

        def log(what: str) -> None:
            self._events.write(slot=slot, pid=os.getpid(), group=name, size=size, what=what)

        log("make")
        return LoggedGroup(super().make(store, name, rank, size), log)


if __name__ == "__main__":
    replaced: Any = nccl
    replaced.NcclMaker = LoggingMaker
    replaced.local_device = lambda: f"the device of {os.environ['RANK']}"
    c10d: Any = dist
    c10d.is_nccl_available = lambda: True
    sys.argv[0] = str(SCRIPT)
    sys.path[0] = str(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")
