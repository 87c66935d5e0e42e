"""A recovery by its phases: what the loss of a worker costs, from detection to the redone step."""

from benchmarks.gpu.device import Device
from benchmarks.gpu.jobs import equals, prepared
from benchmarks.gpu.notes import Notes
from elaswave_plugin.config import Kill

STEPS, LOSS_STEP = 12, 6
MOMENTS = ((2, "forward"), (1, "backward"), (3, "optimizer"))


def measure(device: Device, notes: Notes) -> None:
    """Kill a worker of a Megatron-Core job in each of three moments (a stand-in: one)."""
    with prepared(device, "host", "megatron", steps=STEPS) as jobs:
        reference = jobs.run("reference")
        for slot, phase in MOMENTS[:1] if device.is_stand_in else MOMENTS:
            kill = Kill(slot=slot, step=LOSS_STEP, phase=phase)
            summary = jobs.summary(jobs.run(phase, kills=[kill]), reference, [kill])
            good = summary["kills"][0]["fired"] and len(summary["recoveries"]) == 1
            notes.check(f"killed in {phase}: one recovery, same bits", good and equals(summary))
            for recovery in summary["recoveries"]:
                seconds = recovery["phases_s"]
                parts = ", ".join(f"{name} {1e3 * one:.0f}" for name, one in seconds.items())
                notes.say(f"killed in {phase}: {1e3 * recovery['mttr_s']:.0f} ms ({parts})")
                notes.figure(phase, {"mttr_s": recovery["mttr_s"], "phases_s": seconds})
        notes.figure("median_step_s", summary["median_step_s"])
