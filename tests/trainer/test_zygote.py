"""Trainers forked by a zygote are like freshly started ones, and end with their guardians."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from elaswave_plugin.trainer import zygote as zygote_module
from tests.agent.jobs import LAUNCH, WAIT_S, Job, environment
from tests.idle import Deadline
from tests.ports import free_port
from tests.proofs import Kind, Promise, proves

START_S = 30.0

LOOK = """
import json, os, sys
here = {name: value for name, value in os.environ.items() if name not in IGNORED}
fds = {}
for name in os.listdir("/proc/self/fd"):
    try:
        fds[name] = os.readlink(f"/proc/self/fd/{name}").split(":")[0]
    except OSError:
        pass  # the listing's own
own = {os.environ[name] for name in ("ELASWAVE_JOB_SECRET_FD", "ELASWAVE_PROGRESS_FD")}
own |= set(os.environ["ELASWAVE_SNAPSHOT_FDS"].split(","))
seen = {
    "argv": sys.argv,
    "cwd": os.getcwd(),
    "name": __name__,
    "file": __file__,
    "main_is_me": sys.modules["__main__"].__dict__ is globals(),
    "package": __package__,
    "path": sys.path,
    "environment": here,
    "other_fds": sorted(set(fds) - own - {"0", "1", "2"}),
    "memory": sorted(fds[fd] for fd in own),
    "stdin": os.readlink("/proc/self/fd/0"),
    "write_through": [sys.stdout.write_through, sys.stderr.write_through],
    "signals": [str(__import__("signal").getsignal(n)) for n in (2, 15, 1, 13)],
}
with open(os.environ["SEEN"], "w") as file:
    json.dump(seen, file, default=str)
print("to stdout")
sys.stderr.write("to stderr\\n")  # in one piece: others write there as well
ENDING
"""
IGNORED = (
    "SEEN",
    "ELASWAVE_AGENT",
    "ELASWAVE_JOB_SECRET_FD",
    "ELASWAVE_PROGRESS_FD",
    "ELASWAVE_SNAPSHOT_FDS",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A zygote that outlives several runs, started in a place that has nothing to do with them."""
    folder = tmp_path_factory.mktemp("zygote")
    process = start_zygote(folder)
    yield folder / "z.sock"
    process.terminate()
    assert process.wait(WAIT_S) == 0
    assert not (folder / "z.sock").exists()


def start_zygote(folder: Path, preload: str = "json,decimal") -> "subprocess.Popen[str]":
    """Wait for the socket: the zygote's own folder tells when it appears."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "elaswave_plugin.trainer.zygote",
            f"--socket={folder / 'z.sock'}",
            f"--preload={preload}",
        ],
        env=environment(FROM_THE_ZYGOTE="1"),
        cwd=folder,
        text=True,
        stderr=subprocess.PIPE,
    )
    deadline = START_S
    while not (folder / "z.sock").exists():
        pidfd = os.pidfd_open(process.pid)
        ended = select.select([pidfd], [], [], 0.05)[0]
        os.close(pidfd)
        deadline -= 0.05
        assert not ended and deadline > 0, process.stderr and process.stderr.read()
    return process


def look(
    tmp_path: Path, name: str, *options: str, ending: str = "", module: bool = False
) -> tuple[dict[str, Any], int, str, str]:
    """Run a script that writes down what it sees; that, the exit code, its stdout and stderr."""
    tmp_path.mkdir(exist_ok=True)
    text = LOOK.replace("IGNORED", repr(IGNORED)).replace("ENDING", ending)
    (tmp_path / "look.py").write_text(text)
    seen = tmp_path / f"seen-{name}"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            LAUNCH,
            *options,
            *(["-m", "look"] if module else ["look.py"]),
            "--x",
            "two words",
        ],
        env=environment(SEEN=str(seen), FROM_THE_LAUNCHER="yes"),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # Our own lines, of which one names a port, are none of the trainer's.
    lines = done.stderr.splitlines(keepends=True)
    stderr = "".join(line for line in lines if not line.startswith("elaswave: "))
    return json.loads(seen.read_text()), done.returncode, done.stdout, stderr


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_a_forked_trainer_sees_what_a_fresh_one_sees(
    tmp_path: Path, zygote: Path, module: bool
) -> None:
    fresh = look(tmp_path, "exec", module=module)
    assert fresh[1:] == (0, "to stdout\n", "to stderr\n")
    assert fresh[0]["other_fds"] == []
    for name, option in (("zygote", f"--zygote={zygote}"), ("preload", "--preload=json,decimal")):
        forked = look(tmp_path, name, option, module=module)
        for what, value in fresh[0].items():
            assert forked[0][what] == value, what
        assert forked[1:] == fresh[1:]


@proves(Kind.RAISE, Promise.SAME)
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("def f():\n    raise ValueError('as told')\nf()", 1),
        ("sys.exit(3)", 3),
        ("sys.exit('words')", 1),
        ("import atexit\natexit.register(print, 'at exit')", 0),
        ("import threading\nthreading.Timer(0.1, print, ['from a thread']).start()", 0),
        ("os.kill(os.getpid(), 9)", 75),
    ],
    ids=["raise", "code", "words", "atexit", "thread", "kill"],
)
def test_a_forked_trainer_ends_as_a_fresh_one_does(
    tmp_path: Path, zygote: Path, ending: str, code: int
) -> None:
    fresh = look(tmp_path, "exec", ending=ending)
    forked = look(tmp_path, "zygote", f"--zygote={zygote}", ending=ending)
    assert forked[1:] == fresh[1:]
    assert forked[1] == code


@proves(Kind.KILL, Promise.GOES_ON, victim="0")
def test_a_job_from_a_zygote_survives_a_loss(tmp_path: Path, zygote: Path) -> None:
    for attempt in range(2):
        with Job(tmp_path / str(attempt), 3, f"--zygote={zygote}").start() as job:
            job.kill(0)
            assert {r["reason"] for r in job.all("commit", [1, 2], epoch=2)} == {
                "worker 0 (node 0) exited: killed by SIGKILL"
            }
            assert job.finish([1, 2]) == 0
            assert job.left(WAIT_S) == []


@proves(Kind.NODE, Promise.CLEAN, victim="1")
def test_a_forked_trainer_dies_with_its_guardian(tmp_path: Path, zygote: Path) -> None:
    with Job(tmp_path, 3, f"--zygote={zygote}").start(nodes=3) as job:
        job.kill_node(1)
        job.all("commit", [0, 2], epoch=2)
        assert job.ended(job.pids[1])
        assert job.finish([0, 2]) == 0


@proves(Kind.SIGNAL, Promise.CLEAN)
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path, zygote: Path) -> None:
    for name, option in (("z", f"--zygote={zygote}"), ("p", "--preload=json")):
        with Job(tmp_path / name, 3, option).start() as job:
            job.launchers[0].kill()
            assert job.left(WAIT_S) == []


@proves(Kind.ZYGOTE, Promise.STOPS)
def test_the_job_ends_when_its_zygote_is_killed(tmp_path: Path) -> None:
    process = start_zygote(tmp_path)
    with Job(tmp_path / "job", 2, f"--zygote={tmp_path / 'z.sock'}").start() as job:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)
        assert job.code() == 1
        assert job.left(WAIT_S) == []
    assert "gone with what had forked it" in job.output()


def zygote_of(job: Job, node: int = 0) -> psutil.Process:
    """The zygote that a launcher has started for itself; it has its name once it is executed."""
    launcher, deadline = psutil.Process(job.launchers[node].pid), Deadline(WAIT_S)
    while True:
        children = launcher.children()
        found = [one for one in children if "zygote" in " ".join(one.cmdline())]
        if found:
            (zygote,) = found
            return zygote
        assert deadline.left_s(), f"no zygote among {children}"
        time.sleep(0.01)  # nothing tells that a process has been executed


@proves(Kind.ZYGOTE, Promise.NOBODY_LOST)
def test_the_workers_of_a_nodes_own_zygote_go_on_without_it(tmp_path: Path) -> None:
    """As where the kernel ends it for lack of memory; how it ended is said."""
    with Job(tmp_path, 2, "--preload=json").start() as job:
        zygote = zygote_of(job)
        zygote.kill()
        line = job.said(f"the zygote (pid {zygote.pid}) ended: killed by SIGKILL; the workers")
        assert "that it had forked go on, and another one is started for others" in line
        assert zygote_of(job).pid != zygote.pid
        for slot in range(2):
            job.tell(slot, "seal 1")
        job.all("copied", range(2), step=1)
        assert job.finish(range(2)) == 0
    assert "the job goes on" not in job.output()


@proves(Kind.ZYGOTE, Promise.GOES_ON, victim="1")
def test_a_trainer_starts_without_its_zygote_when_that_is_gone(tmp_path: Path) -> None:
    """The zygote ends after a trainer of it has, and before the next one: nobody looks then."""
    with Job(tmp_path, 2, f"--master-port={free_port()}", TINY_RESPAWN="10") as job:
        for node, options in enumerate(((), ("--preload=json",))):
            job.launch("--nproc-per-node=1", "--nnodes=2", f"--node-rank={node}", *options)
        job.joined()
        zygote = zygote_of(job, 1)
        job.kill(1)
        job.one("commit", 0, epoch=2)
        zygote.kill()
        assert job.ended(job.pids[1])
        started = job.one("started", 1)
        job.watch(started["pid"])
        assert zygote_of(job, 1).pid != zygote.pid
        assert started["parent"] == job.launchers[1].pid
        assert job.one("detached", 1)
        assert job.finish([0]) == 0
        assert job.left(WAIT_S) == []
    assert "Traceback" not in job.outputs()


@proves(Kind.ZYGOTE, Promise.GOES_ON)
@pytest.mark.parametrize("forks", [0, 1])
def test_a_guardians_own_zygote_that_cannot_fork_says_so(forks: int) -> None:
    """Neither the process between the two, nor, in that one, the trainer."""
    code = (
        "import os, signal, socket\n"
        "from elaswave_plugin.ipc.wire import encode, receive_frame\n"
        "from elaswave_plugin.trainer.zygote import Zygote\n"
        "ours, theirs = socket.socketpair()\n"
        "fork, done = os.fork, []\n"
        "def fork_some():\n"
        f"    if len(done) == {forks}: raise BlockingIOError('as told')\n"
        "    done.append(1)\n"
        "    return fork()\n"
        "os.fork = fork_some\n"
        "ours.sendall(encode({'script': 's.py'}))\n"
        "zygote = Zygote(None, [theirs], guardian_pid=os.getpid())\n"
        "print(zygote._read(zygote._guardians[0]), receive_frame(ours, 10)['error'], flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = "None fork failed: there is no room for another process\n"
    assert (done.stdout, done.returncode) == (said, 0), done.stderr


@proves(Kind.ZYGOTE, Promise.GOES_ON)
def test_a_zygote_that_cannot_fork_outlives_whoever_asked(tmp_path: Path) -> None:
    """The others' trainers live on with it."""
    code = (
        "import os, signal, socket\n"
        "from elaswave_plugin.ipc.wire import encode\n"
        "from elaswave_plugin.trainer.zygote import Zygote\n"
        "ours, theirs = socket.socketpair()\n"
        "def fork():\n"
        "    ours.close()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    raise BlockingIOError('as told')\n"
        "os.fork = fork\n"
        "ours.sendall(encode({'script': 's.py'}))\n"
        "print(Zygote(None, [theirs]).serve())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("None\n", 0), done.stderr


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_preload_that_does_not_exist_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        job.launch("--nproc-per-node=2", "--preload=json,no_such_module")
        assert job.code() == 2
    sentence = "--preload names 'no_such_module', which cannot be imported (ModuleNotFoundError: "
    assert job.output().count(sentence) == 1
    assert "Traceback" not in job.output()


PYTHON_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, name="loader", daemon=True).start()
"""
# A child that computed in parallel itself would wait for ever for the threads of its parent.
NATIVE_THREAD = """
import torch
torch.set_num_threads(2)
torch.ones(2_000_000).add_(1)
"""


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("code", "why"),
    [
        (PYTHON_THREAD, "importing started threads (loader)"),
        (NATIVE_THREAD, "importing started threads of C code ("),
    ],
    ids=["of Python", "of C code"],
)
def test_a_preload_that_starts_a_thread_is_refused(tmp_path: Path, code: str, why: str) -> None:
    (tmp_path / "threaded.py").write_text(code)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "elaswave_plugin.trainer.zygote",
            f"--socket={tmp_path / 'z.sock'}",
            "--preload=threaded",
        ],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert why in done.stderr
    assert not (tmp_path / "z.sock").exists()


def test_a_preload_asks_for_gpus_without_initialising_cuda(tmp_path: Path) -> None:
    """Frameworks ask torch.cuda.is_available() at import, which initialises CUDA by default."""
    asks = "import torch\nassert torch.cuda._nvml_based_avail(), 'CUDA would be initialised'\n"
    (tmp_path / "asks.py").write_text(asks)
    words = ["--socket", str(tmp_path / "z.sock"), "--preload", "asks,does_not_exist"]
    done = subprocess.run(
        [sys.executable, "-m", "elaswave_plugin.trainer.zygote", *words],
        env={**environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "does_not_exist" in done.stderr
    assert "asks'" not in done.stderr


@pytest.mark.parametrize(("is_bad", "gpus"), [(False, 1), (True, 1), (True, 0)])
def test_cuda_that_no_child_can_use_is_seen(
    monkeypatch: pytest.MonkeyPatch, is_bad: bool, gpus: int
) -> None:
    """By torch's word in a child; a stand-in for it on machines without a GPU."""
    here = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: is_bad and os.getpid() != here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert zygote_module._lost_cuda() is (is_bad and gpus > 0)
