"""A worker that has just come proves itself: its first loss is that of a worker that was there.

Its weights are compared by digests at its entry. What its script does with them only a pass shows:
one of its micro-batches is run once more by another replica, and the losses are compared before the
update (`core/recovery_plan/plan.py` chooses the worker).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from elaswave_plugin.adapters.megatron.compat import rng
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow
from elaswave_plugin.core.recovery_plan.plan import EntryCheck, entry_checks
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.errors import ConfigurationError, ElasWaveError
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.step_state.step_state import digest_of


def compare_losses(
    worker: Worker,
    flow: Dataflow | PipelineFlow,
    told: Sequence[int],
    again: Callable[[tuple[int, ...]], Sequence[int]],
) -> None:
    """Compare the first losses of those that have just come; collective over WORLD where any has.

    ``told``: digests of what this worker's passes reported, noted by ``tell_losses``;
    ``again(micro-batches)`` runs these forward and returns theirs.
    Where they differ, raises ConfigurationError on a worker that has come, which leaves with it,
    and EpochChanged on the others. Not where the job's first step has shown that bits differ.
    """
    if worker.job_constants.get("inexact", False):
        return
    came = [int(name.partition(".")[0]) for name in worker.untried]
    checks = entry_checks(flow, came) if came else ()
    if not checks:
        return
    table = torch.zeros(len(checks), 2, dtype=torch.int64)
    for row, check in zip(table, checks, strict=True):
        if worker.slot in check.repeaters:
            with rng.undone_draws():
                repeated = again(check.microbatches)
            if worker.slot == check.repeater:
                row[1] = digest_of_reports(repeated)
        if worker.slot == check.reporter:
            row[0] = digest_of_reports(told[: len(check.microbatches)])
    dist.all_reduce(table)
    for row, check in zip(table.tolist(), checks, strict=True):
        if row[0] != row[1]:
            _send_away(worker, check)


def tell_losses(
    told: list[int], forward_step: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """Call a forward step, whose loss function appends the digest of what it reports to ``told``.

    At once: Megatron-Core then divides the loss in place by the number of micro-batches of the
    call, and in NVIDIA's own loop what is reported is that tensor.
    """
    output, loss_function = forward_step(*args, **kwargs)

    def told_loss(*values: Any, **named: Any) -> Any:
        outputs = loss_function(*values, **named)
        told.append(digest_of_reports([outputs[-1]]))
        return outputs

    return output, told_loss


def _send_away(worker: Worker, check: EntryCheck) -> None:
    if worker.slot in check.newcomers:
        raise ConfigurationError(
            "this worker came later, and the loss of its first micro-batch is not the one that "
            f"worker {check.repeater} computes for it: a variable of the script, or an object "
            "beside the model, has changed since the job began; give it to "
            "elaswave_plugin.keep(name, object), or make it follow from job.iteration"
        )
    # Their leaving interrupts this.
    dist.barrier()
    raise ElasWaveError(f"{check} gave another loss, and no worker left for it")


def digest_of_reports(reports: Sequence[Any]) -> int:
    """Return 63 bits of the losses of some micro-batches, in whatever form a script has them."""
    digest = xxhash.xxh3_64()
    for value in _values(reports):
        told = digest_of(value) if isinstance(value, torch.Tensor) else repr(value)
        digest.update(f"{told};".encode())
    return digest.intdigest() >> 1


def _values(value: Any) -> Iterator[Any]:
    """Tensors and plain values in whatever form a script reports its losses."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _values(value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _values(one)
    else:
        yield value
