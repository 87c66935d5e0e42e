"""The size of a growing batch is put back with everything else, with the wheel's own calculator."""

import argparse

from megatron.core import num_microbatches_calculator as calculator

from elaswave_plugin.adapters.megatron_lm.batch_size import global_batch_sizes
from elaswave_plugin.adapters.megatron_lm.side_state import SideState
from tests.adapters.megatron_lm.harness import needs_scripts

pytestmark = needs_scripts


def consume(args: argparse.Namespace, samples: int) -> int:
    """As train() does before a step; returns the micro-batches of a replica."""
    args.consumed_train_samples = samples
    calculator.update_num_microbatches(samples)
    count: int = calculator.get_num_microbatches()
    return count


def test_every_size_is_known_before_the_job_is_joined(args: argparse.Namespace) -> None:
    assert global_batch_sizes(args) == (4, 8, 12)
    args.rampup_batch_size = None
    assert global_batch_sizes(args) == (12,)


def test_a_step_back_is_one_to_the_smaller_batch(args: argparse.Namespace) -> None:
    state = SideState()
    assert consume(args, 4) == 2
    before = state.keep()
    assert consume(args, 8) == 4
    state.put_back(before)
    assert calculator.get_num_microbatches() == 2
    assert calculator.get_current_global_batch_size() == 4
    assert calculator.get_current_running_global_batch_size() == 4


def test_a_worker_that_comes_later_begins_with_the_batch_of_the_others(
    args: argparse.Namespace,
) -> None:
    """Its train() compares the batch with what it finds, and saves where they differ."""
    state = SideState()
    consume(args, 16)
    told = state.shared(state.keep())
    consume(args, 0)
    state.put_back(told)
    assert calculator.get_num_microbatches() == 6
    assert consume(args, args.consumed_train_samples) == 6
