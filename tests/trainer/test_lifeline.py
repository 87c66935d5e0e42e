"""The end of a process: what it printed is out, also where it ends at once."""

import subprocess
import sys

import pytest

from tests.agent.jobs import WAIT_S, environment

PRINT = "import sys; print('last words'); sys.stderr.write('and these'); "
EXITS = {
    "exit_at_once": "from elaswave_plugin.ipc.process_tree import exit_at_once; exit_at_once(0)",
    "a link that stays broken": (
        "from unittest.mock import Mock\n"
        "from elaswave_plugin.trainer.broken_links import BrokenLinks\n"
        "links = BrokenLinks(Mock(slot=1), returns=False)\n"
        "while True: links.report(0, 'broken', silent=False, epoch=1, step=0)"
    ),
    "a planned departure": (
        "from unittest.mock import MagicMock, patch\n"
        "from elaswave_plugin.loops.guarded_steps import GuardedSteps\n"
        "worker = MagicMock(slot=1, completed=3)\n"
        "worker.config.changes.return_value = [MagicMock(slot=1, step=3, arrives=False)]\n"
        "worker.view.ranks, worker.state.remembered_steps = (0, 1), 2\n"
        "worker.placement.shard_group_of.return_value = None\n"
        "worker.member.signals.of_script = None\n"
        "steps = GuardedSteps(worker, MagicMock(), on_commit=print, on_recovered=print)\n"
        "with patch('torch.distributed.barrier'): steps.begin()\n"
        "sys.exit('it has not left')"
    ),
}


@pytest.mark.parametrize("how", EXITS)
def test_what_was_printed_is_out(how: str) -> None:
    """A pipe is buffered where the interpreter was not started with -u."""
    ended = subprocess.run(
        [sys.executable, "-c", PRINT + EXITS[how]],
        env=environment(PYTHONUNBUFFERED=""),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "last words\n", "and these")


def test_an_output_that_nobody_reads_holds_no_end_up() -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; sys.stdin.readline(); " + PRINT + EXITS["exit_at_once"],
        ],
        env=environment(PYTHONUNBUFFERED=""),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
