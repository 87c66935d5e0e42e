"""The returns of workers to a run, by its files: their cost, and how long others stood still."""

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]


def joins_from(
    *,
    entered: Sequence[Record],
    recovered: Sequence[Record],
    exited: Sequence[Record],
    steps: Sequence[Record],
) -> list[Record]:
    """One record a worker that came back, from the events of these kinds and the steps.

    `beside_s`: from its start until it was built; `stall_s`: the longest stand-still of a worker
    that let it in; `time_to_full_s`: from the end of the last one that worked on its slot until
    all workers had completed a step with it; `bytes`: of state that it fetched.
    """
    worked = {record["pid"] for record in steps}
    joins = []
    for event in entered:
        slot, epoch = event["slot"], event["epoch"]
        ends = [e["time_s"] for e in exited if e["slot"] == slot and e["pid"] in worked]
        empty_since_s = max((end for end in ends if end < event["time_s"]), default=None)
        stalls = [e["pause_s"] for e in recovered if e["epoch"] == epoch and e["slot"] != slot]
        own = [e for e in recovered if (e["epoch"], e["slot"]) == (epoch, slot)]
        full_s = _first_step_s(steps, epoch)
        joins.append(
            {
                "epoch": epoch,
                "slot": slot,
                "incarnation": event["incarnation"],
                "step": event["step"],
                "beside_s": event["beside_s"],
                "stall_s": max(stalls, default=None),
                "time_to_full_s": (
                    None if full_s is None or empty_since_s is None else full_s - empty_since_s
                ),
                # The optimizer state follows, behind the first step.
                "bytes": (own or [event])[-1]["fetched_bytes"],
            }
        )
    return joins


def _first_step_s(steps: Sequence[Record], epoch: int) -> float | None:
    """Return when the last worker had completed the first step of an epoch."""
    of_epoch = [record for record in steps if record["epoch"] == epoch]
    first = min((record["step"] for record in of_epoch), default=None)
    return max((r["time_s"] for r in of_epoch if r["step"] == first), default=None)
