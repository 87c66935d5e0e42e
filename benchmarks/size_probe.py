"""Runs a Megatron-Core script and notes what seals cost, what a step allocates, how fast memory is.

    elaswave run ... benchmarks/size_probe.py STEPS SCRIPT ARGUMENTS...

The notes are events of the run: one a step, and one at its end with this machine's bandwidths.
"""

import ctypes
import mmap
import runpy
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from elaswave_plugin.framework import StepReport
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.recovery.state_keeper import StateKeeper
from elaswave_plugin.snapshot.snapshot_pool import CHUNK_BYTES, SnapshotPool

STEP_EVENT, BANDWIDTH_EVENT = "size_step", "size_bandwidth"
GATHERED_BYTES = 64 << 20
SAMPLED_EVERY_S = 0.002
_MALLINFO2 = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
    *("fsmblks", "uordblks", "fordblks", "keepcost"),
)


class MallocInfo(ctypes.Structure):
    """The answer of mallinfo2(3), of all arenas."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO2)


class MemoryInUse:
    """The bytes that malloc has handed out in this process, and their peak."""

    def __init__(self) -> None:
        self._info = ctypes.CDLL(None).mallinfo2
        self._info.restype = MallocInfo
        self.peak = 0
        threading.Thread(target=self._sample, name="size-probe", daemon=True).start()

    def now(self) -> int:
        """Bytes in use, those of mapped blocks too."""
        found = self._info()
        in_use = int(found.uordblks) + int(found.hblkhd)
        self.peak = max(self.peak, in_use)
        return in_use

    def _sample(self) -> None:
        while True:
            self.now()
            time.sleep(SAMPLED_EVERY_S)


class Probe:
    """The seals of one worker, and the memory that its steps take."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._memory = MemoryInUse()
        self._begin_bytes = 0
        self._training_s = self._beside_s = 0.0
        self._nested = 0

    def watch(self) -> None:
        """Stand before the seals and the steps of this process."""
        keeper: Any = StateKeeper
        keeper.seal = self._on_training_thread(keeper.seal)
        keeper.finish_seal = self._on_training_thread(keeper.finish_seal)
        pool: Any = SnapshotPool
        steps: Any = GuardedSteps
        begin_seal, begin, complete = pool.begin_seal, steps.begin, steps.complete

        def begin_seal_and_time(one: SnapshotPool, **how: Any) -> Callable[[], Any]:
            seal = begin_seal(one, **how)

            def timed() -> Any:
                began_s = time.thread_time()
                try:
                    return seal()
                finally:
                    self._beside_s += time.thread_time() - began_s

            return timed

        def begin_and_note(one: GuardedSteps) -> None:
            begin(one)
            self._memory.peak = 0
            self._begin_bytes = self._memory.now()

        def complete_and_note(one: GuardedSteps, report: StepReport) -> None:
            self._memory.now()
            grown = self._memory.peak - self._begin_bytes
            complete(one, report)
            self._note(one, grown)

        pool.begin_seal = begin_seal_and_time
        steps.begin, steps.complete = begin_and_note, complete_and_note

    def _on_training_thread(self, method: Callable[..., None]) -> Callable[..., None]:
        @wraps(method)
        def timed(*args: Any) -> None:
            self._nested += 1
            began_s = time.thread_time()
            try:
                method(*args)
            finally:
                self._nested -= 1
                if not self._nested:
                    self._training_s += time.thread_time() - began_s

        return timed

    def _note(self, steps: GuardedSteps, grown: int) -> None:
        worker = steps.worker
        worker.events.emit(
            STEP_EVENT,
            slot=worker.slot,
            step=worker.completed - 1,
            epoch=worker.view.epoch,
            training_thread_s=self._training_s,
            beside_s=self._beside_s,
            grown_bytes=grown,
        )
        self._training_s = self._beside_s = 0.0
        if worker.completed == self._steps:
            worker.state.finish_seal()
            shard = [part.detach().reshape(-1) for part in steps._framework.read_shard()]
            worker.events.emit(BANDWIDTH_EVENT, slot=worker.slot, **bandwidths(shard))


def bandwidths(shard: list[torch.Tensor]) -> dict[str, float]:
    """Plain copies, hashes and gathers of all workers at once, in bytes a second, and the bytes.

    ``plain_s``: processor time of one copy and hash of the shard, into memory that is there.
    """
    num_bytes = sum(4 * part.numel() for part in shard)
    space = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.float32)
    space.fill_(1.0)
    dist.barrier()
    began_s, began_cpu_s = time.monotonic(), time.thread_time()
    torch.cat(shard, out=space)
    copied_s = time.monotonic()
    view = memoryview(space.view(torch.uint8).numpy())  # type: ignore[arg-type]
    for start in range(0, num_bytes, CHUNK_BYTES):
        xxhash.xxh3_64_intdigest(view[start : start + CHUNK_BYTES])
    hashed_s, plain_s = time.monotonic(), time.thread_time() - began_cpu_s
    width = dist.get_world_size()
    mine = torch.ones(GATHERED_BYTES // 4 // width)
    everyone = torch.empty(width * mine.numel())
    dist.barrier()
    gathering_s = time.monotonic()
    dist.all_gather_into_tensor(everyone, mine)
    gathered_s = time.monotonic()
    return {
        "shard_bytes": num_bytes,
        "plain_s": plain_s,
        "copy": num_bytes / (copied_s - began_s),
        "hash": num_bytes / (hashed_s - copied_s),
        "gather": 4 * everyone.numel() / (gathered_s - gathering_s),
    }


def main(argv: list[str]) -> None:
    """STEPS SCRIPT ARGUMENTS...: run the script, and note."""
    steps, script, *arguments = argv
    Probe(int(steps)).watch()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
