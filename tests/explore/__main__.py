"""python -m tests.explore [--states N] [--seconds S]: enumerates small jobs, and their beginnings.

Each job gets an equal share of the time that is left, as has its founding by names, or by a folder.
Exit code 1 where a rule does not hold, with the path to it.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

from tests.explore.folder import explore_folder
from tests.explore.naming import explore_names
from tests.explore.search import Broken, Found, explore

# The number of faults of a path in which three names found a job.
NAMES = (0, 1)
# Nodes that see one folder, the least of them that can begin, and the faults of a path.
FOLDERS = (("ab", 1, 0), ("abc", 2, 0), ("ab", 1, 1))
# The node of each worker, and how many faults a path may have.
JOBS = (((0, 1), 2), ((0, 1, 2), 2), ((0, 1, 1), 2), ((0, 0, 1), 2), ((0, 1), 3), ((0, 1, 2), 3))


def main() -> int:
    """Explore all jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=10**9, help="of each job at most")
    parser.add_argument("--seconds", type=float, default=180.0, help="for all jobs together")
    args = parser.parse_args()
    until_s = time.monotonic() + args.seconds
    searches: list[tuple[str, int, Callable[..., Found]]] = [
        *(("three names", faults, explore_names) for faults in NAMES),
        *(
            (
                f"{least} of {len(names)} nodes with a folder",
                faults,
                partial(explore_folder, names, least),
            )
            for names, least, faults in FOLDERS
        ),
        *((f"nodes {nodes}", faults, partial(explore, nodes)) for nodes, faults in JOBS),
    ]
    for number, (what, faults, search) in enumerate(searches):
        began_s = time.monotonic()
        share_s = (until_s - began_s) / (len(searches) - number)
        try:
            found = search(faults=faults, most_states=args.states, most_s=share_s)
        except Broken as error:
            print(f"{what}, {faults} faults: {error}", file=sys.stderr)
            return 1
        print(
            f"{what}, {faults} faults: {found.states} states, {found.at_rest} at rest,"
            f" longest path {found.depth}, {'all' if found.is_complete else 'cut off'},"
            f" faults tried {found.faults}, {time.monotonic() - began_s:.0f} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
