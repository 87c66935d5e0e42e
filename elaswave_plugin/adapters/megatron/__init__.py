"""Megatron-Core in an elastic job: what a training script imports.

parser = elaswave.add_arguments(parser)
job = elaswave.attach(args)
"""

import argparse
import sys

import torch

from elaswave_plugin.adapters.megatron.arguments import read_sizes, take_sizes
from elaswave_plugin.adapters.megatron.compat.cpu_patches import cpu_patches
from elaswave_plugin.adapters.megatron.compat.patches import elastic_patches
from elaswave_plugin.adapters.megatron.compat.whole_saves import WholeSaves
from elaswave_plugin.adapters.megatron.job import ElasticJob
from elaswave_plugin.adapters.megatron.plain import PlainJob
from elaswave_plugin.adapters.megatron.world import check_no_world, leave_start_to_script
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.command_line import add_arguments, from_namespace
from elaswave_plugin.trainer.fatal import ends_in_a_sentence
from elaswave_plugin.words import check_options

__all__ = ["Job", "add_arguments", "attach"]

Job = PlainJob


def _parser() -> argparse.ArgumentParser:
    """Of our options alone, among whatever else the script reads."""
    return argparse.ArgumentParser(add_help=False, allow_abbrev=False)


@ends_in_a_sentence
def attach(args: argparse.Namespace | None = None, **sizes: int) -> Job:
    """Join the job when ``args`` has --elaswave, else return the same verbs without the plugin.

    A script without a parser gives the numbers by name, and its command line has our options:
    ``attach(global_batch_size=8, micro_batch_size=1, seed=1)``.
    Reads global_batch_size, micro_batch_size, seed and, where there are, the sizes of tensor and
    pipeline model parallelism, as Megatron-LM's arguments name them. Comes before
    ``torch.distributed.init_process_group``.
    On a machine without GPU the CPU patch records are applied in both cases; ``finish`` undoes all
    records. Bad input ends the process with one sentence and exit code 2, here and in the job's
    other verbs.
    """
    leave_start_to_script()
    check_options(sys.argv[1:])
    if args is None:
        args, _ = add_arguments(_parser()).parse_known_args()
    take_sizes(args, sizes)
    numbers = read_sizes(args)
    config = from_namespace(args)
    patches = PatchSet([]) if torch.cuda.is_available() else cpu_patches()
    if config is None:
        job = PlainJob(numbers, patches=patches)
    else:
        check_no_world()
        saves = WholeSaves()
        elastic = elastic_patches(exact=config.consistency == "exact", saves=saves)
        patches = PatchSet([*patches.records, *elastic.records])
        patches.check()  # before the others are waited for
        job = ElasticJob(config, numbers, patches=patches, saves=saves)
    patches.apply()
    return job
