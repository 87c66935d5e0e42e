"""The memory of a sample is measured in the running job, and no plan exceeds the limit."""

import re
from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal
from tests.faults.test_layer_moves import PP2, cuts_after
from tests.proofs import Kind, Promise, proves

# Of the tests' jobs; a row of the vocabulary and a head's scores are float32, as all else.
HIDDEN, SEQUENCE, HEADS, VOCABULARY = 64, 32, 4, 384


@proves(Kind.KILL, Promise.EQUAL, victim="0", moment="6:backward")
def test_bytes_in_flight_are_those_that_one_can_count(run: Launch, reference: Reference) -> None:
    """Saved for the backward pass of one sample, as Megatron-Core's local layers do it."""
    survived = run(replace(PP2, steps=8, kills=("0@6:backward",)))
    check_equal(survived, reference(replace(PP2, steps=8)))
    hidden, norm = 4 * SEQUENCE * HIDDEN, 2 * 4 * SEQUENCE
    attention = (
        2 * hidden + norm  # what the norm takes and gives
        + 3 * hidden  # queries, keys and values
        + 3 * 4 * HEADS * SEQUENCE**2 + SEQUENCE**2  # softmax, dropout, its result; causal mask
        + 2 * hidden  # what the projection takes, and the dropout behind it
    )  # fmt: skip
    mlp = 2 * hidden + norm + 2 * 4 * hidden + hidden  # four times as wide inside, before and after
    front = 2 * 8 * SEQUENCE + hidden  # tokens and positions, and the dropout
    # Whoever holds most counts: of the last stage's two layers, half of the norm behind them.
    layer = attention + mlp + (hidden + norm) / 2
    behind = hidden + 4 * SEQUENCE * VOCABULARY + (1 + 8) * SEQUENCE  # logits; masked labels
    recovered = survived.events("recovered")
    assert [event["layer_times_s"]["held_bytes"] for event in recovered] == (
        [[front, layer, behind]] * 3
    )


@proves(Kind.KILL, Promise.EQUAL, victim="0", moment="3:backward")
@pytest.mark.slow
def test_layers_that_would_not_fit_stay(run: Launch, reference: Reference) -> None:
    """Three layers and a head: 2.1 MB of state, 0.66 MB for a sample; `test_layer_moves` moves."""
    limit = f"--elaswave-memory-limit-gib={2.6e6 / 2**30}"
    survived = run(replace(PP2, options=(*PP2.options, limit), kills=("0@3:backward",)))
    check_equal(survived, reference(PP2))
    assert cuts_after(survived) == [[0, 2, 4]]
    # Without what samples hold it would fit.
    more = f"--elaswave-memory-limit-gib={3.6e6 / 2**30}"
    moved = run(replace(PP2, options=(*PP2.options, more), kills=("0@3:backward",)))
    assert cuts_after(moved) == [[0, 1, 4]]


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_limit_below_the_launch_is_refused(run: Launch) -> None:
    refused = run(JobSpec(options=(*PP2.options, "--elaswave-memory-limit-gib=0.001")))
    assert refused.returncode == 2
    assert "memory_limit_gib is 0.001, and weights, gradients and optimizer" in refused.output


@proves(Kind.KILL, Promise.STOPS, victim="2", moment="3:backward")
def test_a_loss_whose_state_would_not_fit_is_not_taken_on(run: Launch) -> None:
    """Each of two workers would keep 12 bytes an element, of three 10.7."""
    spec = JobSpec(nproc=3, global_batch=6)
    small = run(replace(spec, options=("--elaswave-memory-limit-gib=0.0001",)))
    assert small.returncode == 2
    (needed,) = re.findall(r"state of a worker take (\S+) GiB at launch", small.output)
    limit = f"--elaswave-memory-limit-gib={float(needed) * 1.06}"
    ended = run(replace(spec, options=(limit,), kills=("2@3:backward",)))
    assert ended.returncode == 1 and not ended.orphans, ended.output[-3000:]
    says = "weights, gradients and optimizer state of each of 2 workers take"
    assert ended.output.count(says) == 1 and "Traceback" not in ended.output
    assert [view["ranks"] for view in ended.events("view_committed")] == [[0, 1, 2], [0, 1]]
