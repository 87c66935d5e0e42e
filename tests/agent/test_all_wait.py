"""The worker that all wait for is named with its line of Python, also before it attaches."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_plugin.ipc import stack_line
from elaswave_plugin.ipc.progress_page import PROGRESS_FD, ProgressPage, create_page
from elaswave_plugin.ipc.stack_line import where_is
from tests.agent.jobs import TRAINER, Job, environment

STUCK_S = 14


def test_who_builds_for_long_before_it_attaches_is_named_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, runpy, sys, time\n"
        "def build_index():\n"
        f"    end_s = time.monotonic() + {STUCK_S}\n"
        "    while time.monotonic() < end_s: pass\n"
        "if os.environ['RANK'] == '1': build_index()\n"
        f"runpy.run_path({str(TRAINER)!r}, run_name='__main__')\n"
    )
    with Job(tmp_path, 3) as job:
        job.launch("--nproc-per-node=3", str(script))
        job.joined()
        assert job.finish(range(3)) == 0
    said = "all others wait for worker 1 (node 0), for 1"
    assert job.output().count(said) == 1, job.output()
    assert re.search(r"s: not attached yet, in script.py:\d in build_index", job.output())
    (event,) = job.events("all_wait")
    assert event["slots"] == [1] and 10 <= event["waited_s"] < STUCK_S


@pytest.fixture
def stuck(tmp_path: Path) -> Path:
    """A script with a second thread, stuck in C with the interpreter's lock."""
    (tmp_path / "stuck.py").write_text(
        "import os, re, threading\n"
        "from elaswave_plugin.ipc.stack_line import offer_stack\n"
        "offer_stack(os.environ)\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "pattern = re.compile(r'(a+)+$')\n"
        "def match_for_ever():\n"
        "    print('stuck', flush=True)\n"
        "    pattern.match('a' * 60 + 'b')\n"
        "match_for_ever()\n"
    )
    return tmp_path / "stuck.py"


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_line.shutil, "which", lambda *_, **__: None)


def test_py_spy_says_the_line_of_a_process_that_offers_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\ndef reads():\n    input()\nprint(1, flush=True)\nreads()\n")
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        assert where_is(process.pid, 0) == "script.py:3 in reads"
        process.communicate(b"\n")
        assert process.returncode == 0


@pytest.mark.usefixtures("without_py_spy")
def test_the_line_of_one_that_is_stuck_in_c_is_found(stuck: Path) -> None:
    fd = create_page()
    page = ProgressPage(fd)
    process = subprocess.Popen(
        [sys.executable, str(stuck)],
        env=environment(**{PROGRESS_FD: str(fd)}),
        pass_fds=[fd],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "stuck\n"
        assert page.stack_fd
        # Twice: it goes on as before.
        for _ in range(2):
            line = where_is(process.pid, page.stack_fd)
            assert line is not None and re.match("stuck.py:[78] in match_for_ever", line)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        page.close()
        os.close(fd)


@pytest.mark.usefixtures("without_py_spy")
def test_a_process_that_offers_no_stack_gets_no_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert where_is(process.pid, 0) is None
        assert where_is(process.pid, 1) is None
        assert process.poll() is None
        process.communicate(b"\n")
        assert process.returncode == 0
