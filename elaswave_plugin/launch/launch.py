"""`elaswave run`: one node of a job, by its rank, by the job's address, or by the job's name."""

import sys
from collections.abc import Sequence

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.process_tree import explained_process_limit
from elaswave_plugin.launch.node_job import run_job
from elaswave_plugin.launch.options import LaunchSpec, parse_run_args
from elaswave_plugin.launch.shared_job import run_shared_job
from elaswave_plugin.launch.standard_streams import fill_closed_streams

__all__ = ["LaunchSpec", "main", "parse_run_args", "run_job"]


def main(argv: Sequence[str]) -> int:
    """`elaswave run ARGV`; bad input is one sentence on stderr and exit code 2."""
    fill_closed_streams()
    try:
        spec = parse_run_args(argv)
        with explained_process_limit():
            return run_job(spec) if spec.shared is None else run_shared_job(spec, spec.shared)
    except ConfigurationError as error:
        print(f"elaswave run: {error}", file=sys.stderr)
        return 2
