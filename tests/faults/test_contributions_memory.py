"""A step after a loss, exact mode: the memory that contributions take beside the gradients."""

from statistics import median

import pytest

from benchmarks.size_probe import STEP_EVENT
from elaswave_plugin.cli.launch_memory import Memory, memory_of
from tests.faults.conftest import Launch
from tests.faults.harness import JobSpec, Outcome
from tests.proofs import Kind, Promise, proves

HIDDEN, LAYERS, STEPS, LOSS = 256, 6, 10, 4
PARAMETERS = LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN) + (384 + 128 + 2) * HIDDEN
MODEL = {
    **{"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 4},
    **{"max_position_embeddings": 128, "make_vocab_size_divisible_by": 1},
}
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


def struck(run: Launch, phase: str, sabotage: str) -> Outcome:
    """A job that loses a worker in a phase, with notes of what its steps take."""
    done = run(
        JobSpec(
            steps=STEPS,
            global_batch=32,
            options=(
                *("--hidden-size", str(HIDDEN), "--num-layers", str(LAYERS)),
                *("--ddp-bucket-size", "250000"),
            ),
            kills=(f"2@{LOSS}:{phase}",),
            dump="last",
            sabotage=PROBE + sabotage,
        )
    )
    assert done.returncode == 0, done.output[-3000:]
    assert len(done.events("fault_fired")) == 1
    return done


def peak_bytes(run: Outcome, *steps: int) -> float:
    """The median over these steps and all workers."""
    return float(
        median(one["peak_bytes"] for one in run.events(STEP_EVENT) if one["step"] in steps)
    )


def extra_bytes(run: Launch, sabotage: str) -> float:
    """The memory of a step after the loss beyond a healthy one's, and beyond its larger state."""
    done = struck(run, "backward", sabotage)
    # The first two steps of a layout touch memory for the first time.
    before, after = (peak_bytes(done, *steps) for steps in (range(2, LOSS), range(LOSS + 3, STEPS)))
    # Of a parameter: moments, and two snapshots with its master.
    return after - before - (8 + 2 * 12) * PARAMETERS * (1 / 3 - 1 / 4)


@proves(Kind.KILL, Promise.GOES_ON, victim="2", moment="4:backward")
def test_no_copy_of_the_gradients_is_kept_for_a_contribution(run: Launch) -> None:
    """Eight micro-batches a replica: each survivor adds two or three of the lost one's to its own.

    The sum of the lost replica's shard, terms that come before their turn, two buckets.
    """
    assert extra_bytes(run, "") < 1.5 * 4 * PARAMETERS


@proves(Kind.SABOTAGE, Promise.SEEN, victim="2", moment="4:backward")
def test_a_copy_for_each_contribution_is_seen(run: Launch) -> None:
    assert extra_bytes(run, COPIES) > 2 * 4 * PARAMETERS


# Whether a redo's own gradient buffer is there while a bucket is reduced.
ROOMS = """
from elaswave_plugin.adapters.megatron.sums.reduction import GradientReduction
fold = GradientReduction._fold
def noted(reduction, number):
    kept = reduction.kept
    kept._worker.events.emit("folded", has_room=kept.room is not None)
    fold(reduction, number)
GradientReduction._fold = noted
"""


@proves(Kind.KILL, Promise.GOES_ON, victim="2", moment="4:optimizer")
def test_a_redo_beside_kept_sums_gives_its_gradient_buffer_back(run: Launch) -> None:
    """Before shards are copied; it is what `elaswave doctor` counts for a redo."""
    done = struck(run, "optimizer", ROOMS)
    stood = [one["microbatches"] for one in done.events("sums_kept")]
    assert all(map(len, stood)) and len(stood) == 3
    folded = done.events("folded")
    assert folded and not any(one["has_room"] for one in folded)
    told = memory_of({**MODEL, "vocab_size": 384}, workers=4)
    assert isinstance(told, Memory) and told.redone == pytest.approx(4 * PARAMETERS, rel=0.02)
