"""The returns of workers to a run, by its files: their cost, and how long others stood still."""

from elaswave_plugin.observer.run import Record, RunFiles, first_step_done_s


def joins_of(run: RunFiles) -> list[Record]:
    """Return one record a worker that came back.

    `beside_s`: from its start until it was built; `stall_s`: the longest stand-still of a worker
    that let it in; `time_to_full_s`: from the end of the last one that worked on its slot until
    all workers had completed a step with it; `bytes`: of state that it fetched.
    """
    worked = {record["pid"] for record in run.steps}
    recovered, exited = run.of_kind("recovered"), run.of_kind("worker_exited")
    joins = []
    for event in run.of_kind("entered"):
        slot, epoch = event["slot"], event["epoch"]
        ends = [e["time_s"] for e in exited if e["slot"] == slot and e["pid"] in worked]
        empty_since_s = max((end for end in ends if end < event["time_s"]), default=None)
        stalls = [e["pause_s"] for e in recovered if e["epoch"] == epoch and e["slot"] != slot]
        own = [e for e in recovered if (e["epoch"], e["slot"]) == (epoch, slot)]
        full_s = first_step_done_s(run, epoch)
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
