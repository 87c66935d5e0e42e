"""python -m tests.explore [--states N] [--seconds S]: enumerates small jobs.

Each job gets an equal share of the time that is left. Exit code 1 where a rule does not hold, with
the path to it.
"""

import argparse
import sys
import time

from tests.explore.search import Broken, explore

# The node of each worker, and how many faults a path may have.
JOBS = (((0, 1), 2), ((0, 1, 2), 2), ((0, 1, 1), 2), ((0, 0, 1), 2), ((0, 1), 3), ((0, 1, 2), 3))


def main() -> int:
    """Explore all jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=10**9, help="of each job at most")
    parser.add_argument("--seconds", type=float, default=180.0, help="for all jobs together")
    args = parser.parse_args()
    until_s = time.monotonic() + args.seconds
    for number, (nodes, faults) in enumerate(JOBS):
        began_s = time.monotonic()
        share_s = (until_s - began_s) / (len(JOBS) - number)
        try:
            found = explore(nodes, faults=faults, most_states=args.states, most_s=share_s)
        except Broken as error:
            print(f"nodes {nodes}, {faults} faults: {error}", file=sys.stderr)
            return 1
        print(
            f"nodes {nodes}, {faults} faults: {found.states} states, {found.at_rest} at rest,"
            f" longest path {found.depth}, {'all' if found.is_complete else 'cut off'},"
            f" faults tried {found.faults}, {time.monotonic() - began_s:.0f} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
