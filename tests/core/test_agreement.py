"""The agreement as text: scripts of events in, messages and views out (golden/*.txt).

A script holds commands ("> ...") and, below each, what it caused. To write the outputs anew after a
change of behaviour, and then review the difference: ELASWAVE_REGENERATE_GOLDEN=1 pytest tests/core
"""

import os
from pathlib import Path

import pytest

from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.testing import Cluster

GOLDEN = Path(__file__).parent / "golden"
REGENERATE = "ELASWAVE_REGENERATE_GOLDEN"


def play(script: str) -> str:
    """The script with its outputs written anew."""
    cluster = Cluster((0,), Timeouts())
    out: list[str] = []
    for line in script.splitlines():
        if line.startswith("> nodes"):
            cluster = Cluster(
                tuple(map(int, line.split()[2:])),
                Timeouts(join_timeout_s=60, quiesce_timeout_s=10, quorum_wait_s=5),
            )
            out.append(line)
        elif line.startswith(">"):
            cluster.lines = []
            cluster.do(line[1:].strip())
            out += [line, *cluster.lines]
        elif not line.startswith("  "):
            out.append(line)
    return "\n".join(out) + "\n"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_golden_script(path: Path) -> None:
    script = path.read_text()
    played = play(script)
    if os.environ.get(REGENERATE):
        path.write_text(played)
    assert played == script


def test_there_are_golden_scripts() -> None:
    assert len(list(GOLDEN.glob("*.txt"))) >= 10


def test_all_may_be_told_to_end_before_the_job_has_begun() -> None:
    """Each slot is given up at once, the leader's first: the last agent sees nobody that leads."""
    cluster = Cluster((0, 1), Timeouts())
    cluster.do("start")
    for slot in (0, 1):
        cluster.tell(slot, "leave", "it was told to end by SIGTERM", cluster.now_s)
        cluster.run()
    assert not any(agreement.seats for agreement in cluster.alive.values())
