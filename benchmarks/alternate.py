"""Runs a training script with a part of the plugin on and off in turn, for measurements only.

    elaswave run ... benchmarks/alternate.py snapshots|consistency|partial_sums SCRIPT ARGUMENTS...

The part changes every ten steps of the running job, at the same step on every worker, so that
both sides of the comparison see the same machine. A job that is measured so survives no loss.
"""

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.framework import Framework, StepReport
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.observer.blocks import is_on
from elaswave_plugin.recovery.state_keeper import StateKeeper
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.tracking.events import read_lines

ALTERNATED = ("snapshots", "consistency")
# Of DeepSpeed's jobs alone; and what a step's copies of one worker were.
PARTIAL_SUMS, COPIED = "partial_sums", "partial_sums_copied"
CPU_EVENT = "cpu_time"
NORM = "get_grad_norm_fp32"


def alternate_snapshots() -> None:
    """Have this process seal nothing and wait for no copy in off-blocks."""
    seal, await_copies = StateKeeper.seal, StateKeeper.await_copies
    # The state of step 0 is sealed in any case, by itself.
    completed, sealed_step = 0, 0

    def seal_in_turn(state: StateKeeper, framework: Framework, step: int) -> None:
        nonlocal completed, sealed_step
        completed = step
        if is_on(step - 1):
            seal(state, framework, step)
            sealed_step = step

    def await_in_turn(state: StateKeeper) -> None:
        if is_on(completed) and sealed_step == completed:
            await_copies(state)

    replaced: Any = StateKeeper
    replaced.seal, replaced.await_copies = seal_in_turn, await_in_turn


def alternate_consistency() -> None:
    """Have the norm exact in on-blocks, Megatron's own in off-blocks; the job is in exact mode."""
    # Here, since the other part is alternated in jobs without Megatron-Core too.
    from elaswave_plugin.adapters.megatron.compat.patches import elastic_patches

    record = next(one for one in elastic_patches(exact=True).records if one.target.endswith(NORM))
    if record.point is record.hook:
        raise ConfigurationError(
            f"Megatron-Core has the hook {record.point.place}, and {record.target} is replaced for "
            "this measurement; take the diffs back with `elaswave patch revert`"
        )
    owner, name = record.locate()
    native = getattr(owner, name)
    bind = Worker.bind

    def bind_and_watch(worker: Worker, framework: Framework, **options: Any) -> None:
        exact = getattr(owner, name)
        if exact is native:
            raise ConfigurationError(
                "consistency is 'fast' in a job that alternates it; run it with 'exact'"
            )

        def norm_in_turn(*args: Any, **more: Any) -> float:
            norm: float = (exact if is_on(worker.completed) else native)(*args, **more)
            return norm

        setattr(owner, name, norm_in_turn)
        bind(worker, framework, **options)

    replaced: Any = Worker
    replaced.bind = bind_and_watch


def alternate_partial_sums() -> None:
    """Have this process copy its shard of the gradient sums behind each micro-batch but the last.

    In on-blocks, in ZeRO 2 and 3: into shared memory, with a checksum.
    """
    import torch
    import xxhash

    from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob

    copies: list[torch.Tensor] = []
    spent_s = 0.0

    def backward_in_turn(job: Any, *given: Any, **named: Any) -> Any:
        nonlocal spent_s
        result = backward(job, *given, **named)
        step = job._engine.global_steps
        if not is_on(step):
            return result
        if job._engine.is_gradient_accumulation_boundary():
            elements, told_s, spent_s = sum(one.numel() for one in copies), spent_s, 0.0
            what = {"elements": elements, "seconds": told_s}
            job._worker.events.emit(COPIED, slot=job._worker.slot, step=step, **what)
        else:
            began_s = time.thread_time()
            shard = shard_of(job._engine.optimizer)
            if not copies:
                copies.extend(torch.empty_like(one) for one in shard)
                for copy in copies:
                    copy.share_memory_()  # type: ignore[no-untyped-call]
            for copy, one in zip(copies, shard, strict=True):
                copied: Any = copy.copy_(one).numpy()
                xxhash.xxh3_64_intdigest(copied)
            spent_s += time.thread_time() - began_s
        return result

    replaced: Any = EngineJob
    backward, replaced._backward = EngineJob._backward, backward_in_turn


def shard_of(optimizer: Any) -> list[Any]:
    """Return what a ZeRO optimizer has added up so far of its own shard, in tensors."""
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        return [optimizer.grad_partitions_flat_buffer]
    return [one for group in optimizer.all_grad_tensors.values() for one in group or ()]


def record_cpu_times() -> None:
    """Note the CPU seconds of trainer and agent after every step, in events.jsonl.

    Those of the agent once a node, by the worker of the first place.
    """
    complete = GuardedSteps.complete
    agent = _AgentClock()

    def complete_and_note(steps: GuardedSteps, report: StepReport) -> None:
        complete(steps, report)
        worker = steps.worker
        worker.events.emit(
            CPU_EVENT,
            slot=worker.slot,
            step=worker.completed - 1,
            trainer_s=time.process_time(),
            agent_s=agent.seconds(worker.events.path),
        )

    replaced: Any = GuardedSteps
    replaced.complete = complete_and_note


def main(argv: list[str]) -> None:
    """WHAT SCRIPT ARGUMENTS...: run the script with WHAT on and off in turn."""
    what, script, *arguments = argv
    parts = {
        "snapshots": alternate_snapshots,
        "consistency": alternate_consistency,
        PARTIAL_SUMS: alternate_partial_sums,
    }
    if what not in parts:
        raise SystemExit(f"alternate: WHAT is {what!r}, wanted one of {', '.join(parts)}")
    parts[what]()
    record_cpu_times()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


class _AgentClock:
    """The CPU time of the node's agent, for one of the node's workers."""

    def __init__(self) -> None:
        self._clock: int | None = None

    def seconds(self, events: Path | None) -> float:
        """Its seconds so far; 0 for the workers that do not tell them."""
        if os.environ["LOCAL_RANK"] != "0" or events is None:
            return 0.0
        if self._clock is None:
            pid = os.getpid()
            started = [e for e in read_lines(events) if e["kind"] == "worker_started"]
            (agent_pid,) = [e["agent_pid"] for e in started if e["pid"] == pid]
            self._clock = _cpu_clock_of(agent_pid)
        return time.clock_gettime(self._clock)


def _cpu_clock_of(pid: int) -> int:
    """The clock of a whole process's CPU time, as clock_getcpuclockid(3) makes it on Linux."""
    return (~pid << 3) | 2


if __name__ == "__main__":
    main(sys.argv[1:])
