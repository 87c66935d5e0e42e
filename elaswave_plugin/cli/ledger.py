"""Every patch record of every adapter in one list, with when it is applied."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import NamedTuple

from elaswave_plugin.adapters.patching import PatchRecord


class Entry(NamedTuple):
    """A record and the jobs that apply it."""

    record: PatchRecord
    applied: str

    @property
    def needs_checkout(self) -> bool:
        """True if the target is in Megatron-LM's repository only, not in megatron-core."""
        return self.record.target.startswith(("megatron.training.", "megatron.legacy."))


def read_ledger() -> tuple[Entry, ...]:
    """All entries; Megatron's where it can be imported, the others whether or not they are there.

    Imports torch and Megatron-Core.
    """
    return (*(_of_megatron() if find_spec("megatron") else ()), *_of_deepspeed(), *_of_scripts())


def _of_megatron() -> Iterable[Entry]:
    from elaswave_plugin.adapters.megatron.compat.cpu_patches import cpu_patches
    from elaswave_plugin.adapters.megatron.compat.patches import elastic_patches
    from elaswave_plugin.adapters.megatron.step.cut_dropout import cut_patches
    from elaswave_plugin.adapters.megatron.step.weight_gradients import WeightGradients

    yield from (Entry(record, "no GPU") for record in cpu_patches().records)
    always = {record.target for record in elastic_patches(exact=False).records}
    for record in elastic_patches(exact=True).records:
        yield Entry(record, "elastic" if record.target in always else "elastic, exact")
    yield from (
        Entry(record, "elastic, after a loss under resize") for record in cut_patches().records
    )
    yield from (
        Entry(record, "elastic, while backwards are split")
        for record in WeightGradients().patches.records
    )


def _of_deepspeed() -> Iterable[Entry]:
    from elaswave_plugin.adapters.deepspeed.compat import patches as of_deepspeed

    for patches, applied in (
        (of_deepspeed.launch_patches(), "elastic"),
        (of_deepspeed.deepspeed_patches(), "elastic"),
        (of_deepspeed.destruction_patches(None), "elastic"),
        (of_deepspeed.newcomer_patches(), "elastic, started again"),
        (of_deepspeed.detached_patches(), "elastic, started again, ZeRO-3"),
        (of_deepspeed.stage_patches(None), "elastic, with --reserve"),
        (of_deepspeed.accelerate_patches(None), "elastic, Accelerate"),
    ):
        yield from (Entry(record, applied) for record in patches.records)


def _of_scripts() -> Iterable[Entry]:
    if not find_spec("megatron"):
        return
    from elaswave_plugin.adapters.megatron.compat.cpu_patches import cpu_patches
    from elaswave_plugin.adapters.megatron_lm.cpu_patches import lm_cpu_patches
    from elaswave_plugin.adapters.megatron_lm.hooks import Hooks
    from elaswave_plugin.adapters.megatron_lm.patches import lm_patches

    known = {record.target for record in cpu_patches().records}
    for record in lm_cpu_patches().records:
        if record.target not in known:
            yield Entry(record, "no GPU, Megatron-LM")
    for record in lm_patches(Hooks(lambda config: None)).records:
        yield Entry(record, "elastic, Megatron-LM")
