"""Runs a Megatron-Core script and notes what seals cost, what a step allocates, how fast memory is.

    elaswave run ... benchmarks/size_probe.py STEPS SCRIPT ARGUMENTS...

The notes are events of the run: one a step, and one at its end with this machine's bandwidths.
"""

import ctypes
import mmap
import re
import runpy
import sys
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
from elaswave_plugin.values.plain import bytes_of

STEP_EVENT, BANDWIDTH_EVENT = "size_step", "size_bandwidth"
GATHERED_BYTES = 64 << 20
# mallopt(3): larger blocks are mapped, so that what is freed is the kernel's again at once.
M_MMAP_THRESHOLD, MAPPED_FROM_BYTES = -3, 1 << 20
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes() -> int:
    """The most memory of this process since that was reset, that of its snapshots included."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


class Probe:
    """The seals of one worker, and the memory that its steps take."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._training_s = self._beside_s = 0.0
        self._nested = 0

    def watch(self) -> None:
        """Stand before the seals and the steps of this process."""
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
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
            _RESET.write_text("5")

        def complete_and_note(one: GuardedSteps, report: StepReport) -> None:
            peak = peak_bytes()
            complete(one, report)
            self._note(one, peak)

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

    def _note(self, steps: GuardedSteps, peak: int) -> None:
        worker = steps.worker
        worker.events.emit(
            STEP_EVENT,
            slot=worker.slot,
            step=worker.completed - 1,
            epoch=worker.view.epoch,
            training_thread_s=self._training_s,
            beside_s=self._beside_s,
            peak_bytes=peak,
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
    view = bytes_of(space)
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
