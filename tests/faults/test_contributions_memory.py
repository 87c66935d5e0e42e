"""A step after a loss, exact mode: the memory that contributions take beside the gradients."""

from statistics import median

from benchmarks.size_probe import STEP_EVENT
from tests.faults.conftest import Launch
from tests.faults.harness import JobSpec
from tests.proofs import Kind, Promise, proves

HIDDEN, LAYERS, STEPS, LOSS = 256, 6, 10, 4
PARAMETERS = LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN) + (384 + 128 + 2) * HIDDEN
PROBE = f"""
from benchmarks.size_probe import Probe
Probe({STEPS + 1}).watch()
"""


# A copy of the gradients for each contribution, held until the step is reduced.
COPIES = """
from elaswave_plugin.adapters.megatron.sums.reduction import GradientReduction
send_off, drop, copies = GradientReduction._send_off, GradientReduction.drop, []
def send_a_copy_off(reduction, bucket, departure):
    copies.append(bucket.grad_data.clone())
    send_off(reduction, bucket, departure)
def drop_all(reduction):
    copies.clear()
    drop(reduction)
GradientReduction._send_off, GradientReduction.drop = send_a_copy_off, drop_all
"""


def extra_bytes(run: Launch, sabotage: str) -> float:
    """The memory of a step after the loss beyond a healthy one's, and beyond its larger state."""
    done = run(
        JobSpec(
            steps=STEPS,
            global_batch=32,
            options=(
                *("--hidden-size", str(HIDDEN), "--num-layers", str(LAYERS)),
                *("--ddp-bucket-size", "250000"),
            ),
            kills=(f"2@{LOSS}:backward",),
            dump="last",
            sabotage=PROBE + sabotage,
        )
    )
    assert done.returncode == 0, done.output[-3000:]
    assert len(done.events("fault_fired")) == 1
    # The first two steps of a layout touch memory for the first time.
    before, after = (
        median(one["peak_bytes"] for one in done.events(STEP_EVENT) if one["step"] in steps)
        for steps in (range(2, LOSS), range(LOSS + 3, STEPS))
    )
    # Of a parameter: moments, and two snapshots with its master.
    return float(after - before - (8 + 2 * 12) * PARAMETERS * (1 / 3 - 1 / 4))


@proves(Kind.KILL, Promise.GOES_ON, victim="2", moment="4:backward")
def test_no_copy_of_the_gradients_is_kept_for_a_contribution(run: Launch) -> None:
    """Eight micro-batches a replica: each survivor adds two or three of the lost one's to its own.

    The sum of the lost replica's shard, terms that come before their turn, two buckets.
    """
    assert extra_bytes(run, "") < 1.5 * 4 * PARAMETERS


@proves(Kind.SABOTAGE, Promise.SEEN, victim="2", moment="4:backward")
def test_a_copy_for_each_contribution_is_seen(run: Launch) -> None:
    assert extra_bytes(run, COPIES) > 2 * 4 * PARAMETERS
