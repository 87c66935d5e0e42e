"""Commands that sentences print do what the sentences say, run as they are printed."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elaswave_plugin.cli.main import run_command
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.launch.node_job import connect_zygote
from tests.agent.jobs import TRAINER, Job, environment

START_S = 60.0


def test_the_line_of_a_job_shows_it_and_lets_a_node_join(tmp_path: Path) -> None:
    with Job(tmp_path, 1).start("--reserve=1") as job:
        show, join = re.findall("`elaswave (.*?)`", job.said("the job: `"))
        assert run_command(shlex.split(show)) == 0
        words = shlex.split(join.replace("SCRIPT ARGS", str(TRAINER)))
        job.launch(command=[str(Path(sys.executable).with_name("elaswave")), *words])
        assert job.one("detached", 1)["slot"] == 1
        job.tell(0, "step 1")
        job.all("commit", [0, 1], epoch=2)
        assert job.finish([0, 1]) == 0
        assert job.code(1) == 0


def test_the_zygote_that_a_refusal_names_is_one(tmp_path: Path) -> None:
    path = tmp_path / "zygote.sock"
    with pytest.raises(ConfigurationError) as refused:
        connect_zygote(path, environment())
    (command,) = re.findall("`python (.*)`", str(refused.value))
    words = shlex.split(command.replace("PATH", str(path)))
    with subprocess.Popen([sys.executable, *words], env=environment()) as zygote:
        try:
            deadline_s = time.monotonic() + START_S
            while not path.exists():
                assert zygote.poll() is None and time.monotonic() < deadline_s
                time.sleep(0.05)  # a socket's file has no event
            connect_zygote(path, environment()).close()
        finally:
            zygote.kill()
