"""Made-up run directories: four workers, twelve samples a step, slot 2 killed in step 3.

A hybrid one has two stages of two replicas: slots 0 and 1, slots 2 and 3.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elaswave_plugin.core.layout.layout import launch_layout
from elaswave_plugin.core.planner.pipeline_flow import flow_of
from elaswave_plugin.observer.run import Record, RunFiles
from elaswave_plugin.tracking.events import EventLog
from elaswave_plugin.tracking.state_dump import PARTS

STEPS, GLOBAL_BATCH, KILL_STEP, KILLED = 6, 12, 3, 2
NAMES = (("decoder.bias", 5), ("embedding.weight", 12))
PHASES = {"agree": 0.01, "edit": 0.002, "move": 0.02, "rebind": 0.003, "verify": 0.004}
HYBRID = launch_layout(tp=1, pp=2, dp=2, num_layers=4)
NUM_MICROBATCHES = GLOBAL_BATCH // 2
Change = Callable[[str, dict[str, Any]], dict[str, Any] | None]


def run_of(*, steps: Sequence[Record] = (), **events: Sequence[Record]) -> RunFiles:
    """A run with these lines of steps and, by kind, these events."""
    told = [{**one, "kind": kind} for kind, ones in events.items() for one in ones]
    return RunFiles(directory=Path(), events=tuple(told), steps=tuple(steps), ledger=())


def same(name: str, record: dict[str, Any]) -> dict[str, Any] | None:
    """Change nothing."""
    return record


def make_run(
    folder: Path,
    *,
    killed: bool,
    hybrid: bool = False,
    change: Change = same,
) -> Path:
    """Write a run; `change` may alter or drop (None) each record of "events", "steps", "ledger"."""
    logs = {name: EventLog(folder / f"{name}.jsonl") for name in ("events", "steps", "ledger")}

    def put(name: str, **record: Any) -> None:
        changed = change(name, record)
        if changed is not None:
            logs[name].write(changed)

    def event(kind: str, time_s: float, **fields: Any) -> None:
        put("events", time_s=time_s, kind=kind, **fields)

    slots = [0, 1, 2, 3]
    for slot in slots:
        pids = {"pid": 1000 + slot, "agent_pid": 100 + slot}
        event("worker_started", 0.0, slot=slot, node=0, **pids)
    event("view_committed", 0.5, epoch=1, ranks=slots, reason="start", by=0)
    for slot in slots:
        sizes = {"num_microbatches": NUM_MICROBATCHES, "micro_batch_size": 2}
        event("attached", 0.6, slot=slot, settings={"dataflow": "redeal"}, **sizes)
    epoch, clock_s = 1, 1.0
    for step in range(STEPS):
        attempts = [(1, slots)]
        if killed and step == KILL_STEP:
            attempts.append((2, [0, 1, 3]))
        for epoch_of_attempt, members in attempts if step == KILL_STEP else [(epoch, slots)]:
            epoch, slots = epoch_of_attempt, members
            _ledger(put, step, epoch, slots)
            if killed and step == KILL_STEP and epoch == 1:
                _kill(event, clock_s, layout_change() if hybrid else {})
                clock_s += 0.25
                continue
            clock_s += 0.1 if len(slots) == 4 else 0.125
            _steps(put, step, epoch, slots, clock_s)
    for log in logs.values():
        log.close()
    return folder


def layout_change(processors: int = 4) -> dict[str, Any]:
    """Return what the survivors of a hybrid run report of its change of layout."""
    after = HYBRID.without([KILLED])
    flow = flow_of(layout=after, num_microbatches=NUM_MICROBATCHES, micro_batch_size=2)
    return {
        "layout_before": HYBRID.to_json(),
        "layout_after": after.to_json(),
        "dataflow": flow.policy,
        "pieces": flow.pieces,
        "windows": flow.windows,
        "processors": processors,
    }


def make_alternated(folder: Path, *, steps: int, on_s: float, off_s: float) -> Path:
    """Write a run of two workers in blocks of ten, slot 1 the slower one; only its steps matter."""
    for name in ("events", "ledger"):
        EventLog(folder / f"{name}.jsonl").close()
    with EventLog(folder / "steps.jsonl") as log:
        for step in range(steps):
            slowest_s = on_s if step // 10 % 2 == 0 else off_s
            if step < 2 or step % 10 == 0:
                slowest_s = 99.0  # must not count
            for slot, step_s in ((0, slowest_s / 2), (1, slowest_s)):
                log.write({"slot": slot, "epoch": 1, "step": step, "step_s": step_s, "loss": 1.0})
    return folder


def write_state(folder: Path, *, workers: int, epoch: int = 1, flip: bool = False) -> Path:
    """Write a dump cut over `workers`; `flip` changes the lowest bit of one element."""
    target = folder / "state" / f"step-{STEPS - 1:05d}"
    target.mkdir(parents=True, exist_ok=True)
    for slot in range(workers):
        pieces = {}
        for name, total in NAMES:
            start, stop = total * slot // workers, total * (slot + 1) // workers
            for index, part in enumerate(PARTS):
                data = (np.arange(total) * 0.1 + index).astype(np.float32)
                if flip and name == "decoder.bias" and part == "exp_avg":
                    data.view(np.uint32)[-1] ^= 1
                pieces[f"{name}|{part}|{start}"] = data[start:stop]
        np.savez(target / f"slot-{slot}.npz", **pieces)
        head = {"epoch": epoch, "step": STEPS - 1, "slot": slot, "numel": dict(NAMES)}
        (target / f"slot-{slot}.json").write_text(json.dumps(head))
    return target


def _ledger(put: Callable[..., None], step: int, epoch: int, slots: list[int]) -> None:
    for k in range(GLOBAL_BATCH // 2):
        samples = [step * GLOBAL_BATCH + 2 * k, step * GLOBAL_BATCH + 2 * k + 1]
        put("ledger", slot=slots[k % len(slots)], epoch=epoch, step=step, k=k, samples=samples)


def _steps(
    put: Callable[..., None], step: int, epoch: int, slots: list[int], clock_s: float
) -> None:
    loss = 5.0 / (step + 1)
    for slot in slots:
        put(
            "steps",
            slot=slot,
            pid=1000 + slot,
            epoch=epoch,
            step=step,
            loss=loss,
            loss_hex=loss.hex(),
            grad_norm=1.5,
            lr=0.001,
            tokens=1200,
            step_s=0.1 if len(slots) == 4 else 0.125,
            num_microbatches=6,
            time_s=clock_s + slot / 1000,
        )


def _kill(event: Callable[..., None], now_s: float, more: dict[str, Any]) -> None:
    fault = {"slot": KILLED, "pid": 1000 + KILLED}
    event("fault_fired", now_s, step=KILL_STEP, phase="backward", at_s=now_s, **fault)
    reason = f"worker {KILLED} (node 0) exited: killed by SIGKILL"
    event("worker_exited", now_s + 0.001, status=-9, evidence="killed by SIGKILL", **fault)
    event("view_proposed", now_s + 0.002, epoch=2, reason=reason)
    event("view_committed", now_s + 0.012, epoch=2, ranks=[0, 1, 3], reason=reason, by=0)
    for slot in (0, 1, 3):
        event(
            "recovered",
            now_s + 0.25 + 0.12,
            slot=slot,
            epoch=2,
            reason=reason,
            restored_step=KILL_STEP,
            mttr_s=0.36,
            phases_s={**PHASES, "replay": 0.1 + slot / 100},
            bytes_moved=304,
            newcomers=[],
            pause_s=0.26,
            after_step=KILL_STEP,
            **more,
        )
