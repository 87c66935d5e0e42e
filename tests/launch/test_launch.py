"""`elaswave run`: its options, refusals, signals, several nodes, and nothing left behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from elaswave_plugin.agent.peers import rendezvous
from elaswave_plugin.agent.peers.rendezvous import listen_at, own_host
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.launch.launch import parse_run_args
from elaswave_plugin.launch.options import script_settings
from elaswave_plugin.launch.own_zygote import OwnZygote
from tests.agent.jobs import LAUNCH, TRAINER, WAIT_S, Job, environment
from tests.config.files import config_of
from tests.idle import within
from tests.ports import free_port
from tests.proofs import Kind, Promise, proves


def run(*argv: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, *argv],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


# ---- the command line ---------------------------------------------------------------------------


def test_torchruns_spellings_are_understood(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.touch()
    for nproc, port in (
        ("--nproc-per-node", "--master-port"),
        ("--nproc_per_node", "--master_port"),
    ):
        spec = parse_run_args(
            [
                f"{nproc}=8",
                "--nnodes",
                "2",
                "--node_rank=1",
                port,
                "29500",
                str(script),
                "--x",
                "-m",
            ]
        )
        assert (spec.nproc_per_node, spec.nnodes, spec.node_rank) == (8, 2, 1)
        assert (spec.master_port, spec.script, spec.args) == (29500, str(script), ("--x", "-m"))
        assert not spec.module
    spec = parse_run_args(["--standalone", "--preload", "torch,numpy", "-m", "pkg.mod", "--y"])
    assert spec.module and spec.preload == ("torch", "numpy") and spec.args == ("--y",)


def test_the_scripts_own_settings_reach_its_agent(tmp_path: Path) -> None:
    words = ["-m", "x", "--elaswave-quiesce-timeout-s=7", "--elaswave-dir", str(tmp_path)]
    spec = parse_run_args(words)
    assert spec.timeouts.quiesce_timeout_s == 7 and spec.run_dir == tmp_path
    spec = parse_run_args(["--quiesce-timeout-s=8", "--dir=elsewhere", *words])
    assert spec.timeouts.quiesce_timeout_s == 8 and spec.run_dir == Path("elsewhere").absolute()


@pytest.mark.parametrize("head", ["", "[elaswave]\n"], ids=["top", "table"])
def test_the_scripts_configuration_file_reaches_its_agent(tmp_path: Path, head: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f'{head}quiesce_timeout_s = 7.5\ndir = "{tmp_path}/run"\n')
    words = ["-m", "x", f"--elaswave-config={file}"]
    spec = parse_run_args(words)
    assert spec.timeouts.quiesce_timeout_s == 7.5 and spec.run_dir == tmp_path / "run"
    config = config_of(file)
    assert (config.quiesce_timeout_s, config.dir) == (7.5, spec.run_dir)
    spec = parse_run_args([*words, "--elaswave-quiesce-timeout-s=6", "--elaswave-dir=/other"])
    assert spec.timeouts.quiesce_timeout_s == 6 and spec.run_dir == Path("/other")
    spec = parse_run_args(["--quiesce-timeout-s=8", "--dir=/third", *words])
    assert spec.timeouts.quiesce_timeout_s == 8 and spec.run_dir == Path("/third")
    settings = script_settings(words, {"ELASWAVE_DIR": "/fourth"})
    assert (settings.quiesce_timeout_s, settings.run_dir) == (7.5, tmp_path / "run")


BAD_FILES = [
    (None, "cannot be read: No such file or directory"),
    ("a = = 1", "is no TOML"),
    ("quiesce_timeout_s = -1", "key 'quiesce_timeout_s': '-1' is no positive number of seconds"),
    ("dir = 3", "key 'dir' is 3, wanted a path"),
]


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(("text", "complaint"), BAD_FILES, ids=[c for _, c in BAD_FILES])
def test_a_bad_configuration_file_is_refused(
    tmp_path: Path, text: str | None, complaint: str
) -> None:
    file = tmp_path / "job.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        parse_run_args(["-m", "x", f"--elaswave-config={file}"])


BAD = [
    (("nowhere.py",), "script 'nowhere.py' is no file"),
    (("--nproc-per-node=0", "s.py"), "--nproc-per-node is 0, wanted >= 1"),
    (("--nproc-per-node=two", "s.py"), "invalid int value: 'two'"),
    (("--nnodes=0", "s.py"), "--nnodes is '0', wanted at least one node"),
    (("--nnodes=2", "--node-rank=2", "--master-port=5", "s.py"), "--node-rank is 2, wanted 0..1"),
    (("--nnodes=2", "s.py"), "--master-port is not set"),
    (("--master-port=70000", "s.py"), "--master-port is 70000"),
    (("--standalone", "--nnodes=2", "s.py"), "--standalone means one node"),
    (("--no-such-option", "s.py"), "unknown option before the script: '--no-such-option'"),
    ((), "required: script"),
    (("--quiesce-timeout-s=-1", "s.py"), "'-1' is no positive number of seconds"),
    (("--heartbeat-timeout-s=1.9", "s.py"), "--heartbeat-timeout-s is 1.9, wanted 2 or more: a"),
    (("s.py", "--elaswave-quiesce-timeout-s=x"), "--elaswave-quiesce-timeout-s: 'x'"),
    (("--dir=s.py", "s.py"), "s.py' is a file; name a folder of yours (--elaswave-dir)"),
    (("s.py", "--elaswave-dir=s.py/run"), "s.py' is a file; name a folder of yours"),
    (("--dir=/proc/1/run", "s.py"), "the run directory is '/proc/1/run', and '/proc/1' cannot"),
    (("--zygote=nowhere", "s.py"), "--zygote is nowhere, where no zygote answers"),
    (
        ("--master-addr=192.0.2.1", "--master-port=29500", "s.py"),
        "cannot listen at 192.0.2.1:29500",
    ),
]


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(("argv", "complaint"), BAD, ids=[complaint for _, complaint in BAD])
def test_bad_input_is_one_sentence_and_exit_code_2(
    tmp_path: Path, argv: tuple[str, ...], complaint: str
) -> None:
    (tmp_path / "s.py").write_text("raise SystemExit('must not run')")
    done = run(*argv, cwd=tmp_path)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        ("mkdir -p run/events.jsonl", "run/events.jsonl' cannot be written (Is a directory)"),
        ("mkdir -p run/steps.jsonl", "run/steps.jsonl' cannot be written (Is a directory)"),
        ("mkdir -p run/agent-0.json", "agent-0.json' cannot be written (Is a directory)"),
        ("ln -s run run", "run' cannot be written (File exists); name a folder"),
        ("ulimit -f 0", "cannot be written (File too large); name a folder of yours"),
    ],
    ids=["events", "steps", "address", "loop", "full"],
)
@pytest.mark.parametrize("torchruns", [False, True], ids=["run", "worker"])
def test_a_run_directory_that_cannot_be_opened_is_one_sentence(
    tmp_path: Path, make: str, complaint: str, torchruns: bool
) -> None:
    (tmp_path / "s.py").write_text("raise SystemExit('must not run')")
    command = ["-c", LAUNCH, "--dir=run"]
    worker = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if torchruns:
        command = ["-m", "elaswave_plugin.run"]
        worker |= {"MASTER_PORT": str(free_port()), "ELASWAVE_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        ["bash", "-c", f'{make}; exec "$@"', "bash", sys.executable, *command, "s.py"],
        cwd=tmp_path,
        env=environment(**worker),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("raise SystemExit('must not run')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(f"--master-port={port}", "s.py", cwd=tmp_path)
    assert done.returncode == 2
    assert f"cannot listen at 127.0.0.1:{port} (Address already in use)" in done.stderr


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_second_job_in_the_folder_of_a_running_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("raise SystemExit('must not run')")
    worker = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env = environment(**worker, MASTER_PORT=str(free_port()), ELASWAVE_DIR=str(tmp_path / "run"))
    with Job(tmp_path, 2).start() as job:
        done = run(f"--dir={job.run_dir}", "s.py", cwd=tmp_path)
        under_torchrun = subprocess.run(
            [sys.executable, "-m", "elaswave_plugin.run", "s.py"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert len(list(job.run_dir.glob("agent-*.json"))) == 1, "the running job's"
        assert job.finish([0, 1]) == 0
    for refused in (done, under_torchrun):
        assert refused.returncode == 2
        assert re.search(
            r"a job is running in '.*/run': its agent of node 0 \(pid [0-9]+\) answers",
            refused.stderr,
        )
        assert refused.stderr.count("\n") == 1


@proves(Kind.NOTHING, Promise.GOES_ON)
def test_what_a_killed_job_has_left_does_not_refuse_the_next(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        for node, where in enumerate((address, f"127.0.0.1:{free_port()}")):
            left = {"node": node, "pid": 1, "address": where}
            (tmp_path / "run" / f"agent-{node}.json").write_text(json.dumps(left))
        with Job(tmp_path, 2).start() as job:
            assert job.finish([0, 1]) == 0


def test_a_spec_made_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigurationError, match="--nproc-per-node is -1"):
        parse_run_args(["--nproc-per-node=-1", "-m", "x"])


# ---- what scripts see ---------------------------------------------------------------------------


def test_a_script_finds_torchruns_environment(tmp_path: Path) -> None:
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "NODE_RANK",
        "MASTER_ADDR",
    ]
    (tmp_path / "s.py").write_text(
        "import json, os, sys\n"
        f"seen = [os.environ[n] for n in {names}]\n"
        "sys.stdout.write(json.dumps([seen, sys.argv[1:], int(os.environ['MASTER_PORT']) > 0,\n"
        "    os.environ['ELASWAVE_DIR']]) + '\\n')\n"
    )
    done = run("--nproc-per-node=2", "--dir=out", "s.py", "--a", "b c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = sorted(json.loads(line) for line in done.stdout.splitlines())
    rest = [["--a", "b c"], True, str(tmp_path / "out")]
    assert lines == [
        [[str(rank), str(rank), "2", "2", "0", "0", "127.0.0.1"], *rest] for rank in range(2)
    ]
    events = (tmp_path / "out/events.jsonl").read_text()
    kinds = [json.loads(line)["kind"] for line in events.splitlines()]
    assert kinds[0] == "job_started" and kinds[-1] == "job_ended"


@proves(Kind.RAISE, Promise.STOPS)
def test_a_script_that_fails_at_once_gives_its_own_exit_code(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import sys; sys.exit(7)")
    assert run("--nproc-per-node=2", "s.py", cwd=tmp_path).returncode == 7


@proves(Kind.RAISE, Promise.STOPS)
def test_a_worker_that_ends_before_it_joins_does_not_hang_the_others(tmp_path: Path) -> None:
    with Job(tmp_path / "job", 2) as job:
        (tmp_path / "s.py").write_text(
            "import os, runpy\n"
            "if os.environ['RANK'] == '0':\n"
            "    runpy.run_module('tests.agent.tiny_trainer', run_name='__main__')\n"
        )
        job.launch(
            command=[sys.executable, "-c", LAUNCH, "--nproc-per-node=2", str(tmp_path / "s.py")]
        )
        assert job.code() == 1
    assert job.output().count("worker 1 has ended, and elaswave never attached") == 1
    assert "worker 1 ended before it joined the job" in job.output()


# ---- signals ------------------------------------------------------------------------------------


@proves(Kind.SIGNAL, Promise.CLEAN)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    with Job(tmp_path, 3).start() as job:
        job.launchers[0].send_signal(number)
        assert job.code() == 128 + number
        assert job.left(WAIT_S) == []
        last = job.output().splitlines()[-1]
        assert last == f"elaswave: ended by {number.name} (exit code {128 + number})"


@proves(Kind.SIGNAL, Promise.CLEAN)
def test_a_signal_while_the_others_are_awaited_ends_everything(tmp_path: Path) -> None:
    with Job(tmp_path, 4) as job:
        job.launch("--nproc-per-node=2", "--nnodes=2", f"--master-port={free_port()}")
        for report in job.all("started", [0, 1]):
            job.watch(report["pid"])
        job.launchers[0].terminate()
        assert job.code() == 128 + signal.SIGTERM
        assert job.left(WAIT_S) == []
        assert "Traceback" not in job.output()


@proves(Kind.SIGNAL, Promise.CLEAN)
def test_a_trainer_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True)\n"
        "while True:\n    signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "s.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pidfd = os.pidfd_open(int(process.stdout.readline()))
        process.terminate()
        assert process.wait(WAIT_S) == 128 + signal.SIGTERM
        os.close(pidfd)


@proves(Kind.UNDEAD, Promise.CLEAN)
def test_a_zygote_that_is_stuck_in_the_kernel_holds_no_launcher_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A process outlives SIGKILL while a driver or a file system hangs."""

    def wait(timeout: float | None = None) -> int:
        assert timeout is not None, "this would wait for ever"
        raise subprocess.TimeoutExpired("zygote", timeout)

    zygote = OwnZygote(Mock(), [], {}, 1, on_new=Mock())
    zygote._process = Mock(pid=7, wait=wait)
    zygote.end()
    assert zygote._process is None
    said = "elaswave: the zygote (pid 7) does not die of SIGKILL: left behind\n"
    assert capsys.readouterr().err == said


@proves(Kind.SIGNAL, Promise.CLEAN)
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with Job(tmp_path, 4).start() as job:
        job.launchers[0].kill()
        assert job.left(WAIT_S) == []


# ---- several nodes ------------------------------------------------------------------------------


def test_a_trainer_is_told_where_the_others_reach_it(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        job.launch("--nproc-per-node=2", "--master-addr=127.0.0.2", f"--master-port={free_port()}")
        started = job.all("started", [0, 1])
        assert [report["host"] for report in started] == ["127.0.0.2", "127.0.0.2"]


def test_the_own_address_is_that_of_the_way_to_node_0() -> None:
    with listen_at("127.0.0.2", 0) as listener:
        assert own_host("elsewhere", 1, listener=listener, timeout_s=1) == "127.0.0.2"
    with listen_at("", 0) as listener:
        assert own_host("127.0.0.1", 1, listener=listener, timeout_s=1) == "127.0.0.1"
    assert own_host("127.0.0.1", 1, listener=None, timeout_s=1) == "127.0.0.1"
    with pytest.raises(ConfigurationError, match=r"the address of node 0 is 'nowhere\.invalid'"):
        own_host("nowhere.invalid", 1, listener=None, timeout_s=0.1)


def test_a_machine_that_calls_itself_127_0_1_1_is_reached_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Debian's /etc/hosts has it for the name by which torchrun calls node 0."""
    known, resolve = {"node-0": "127.0.1.1", "node-1": "127.0.0.1"}, socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: resolve(known.get(host, host), *rest, **more),
    )
    ways = {"node-0": "127.0.1.1", "192.0.2.1": "10.0.0.7", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(rendezvous, "_way_to", lambda host, port: ways[host])
    with listen_at("node-0", 0, several=True) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
        found = own_host("node-0", 1, listener=listener, timeout_s=1, several=True)
        assert found == "10.0.0.7"
    # One machine alone shows itself to nobody.
    assert own_host("node-0", 1, listener=None, timeout_s=1) == "127.0.1.1"
    for told in ("127.0.0.1", "localhost"):
        with listen_at(told, 0, several=True) as listener:
            found = own_host(told, 1, listener=listener, timeout_s=1, several=True)
            assert found == "127.0.0.1"


@proves(Kind.KILLS, Promise.GOES_ON, victim="1")
def test_two_nodes_lose_a_trainer_each(tmp_path: Path) -> None:
    with Job(tmp_path, 4) as job:
        job.start("--quorum-wait-s=0.3", nodes=2)
        said = f"with 2 nodes the loss of node 0 ({socket.gethostname()}) cannot be survived"
        assert said in job.output(0)
        job.kill(1)
        reports = job.all("commit", [0, 2, 3], epoch=2)
        assert {r["reason"] for r in reports} == {"worker 1 (node 0) exited: killed by SIGKILL"}
        job.kill(2)
        reports = job.all("commit", [0, 3], epoch=3)
        assert {r["reason"] for r in reports} == {"worker 2 (node 1) exited: killed by SIGKILL"}
        assert job.finish([0, 3]) == 0
        assert job.code(1) == 0
        assert job.left(WAIT_S) == []


@proves(Kind.NODE, Promise.GOES_ON)
def test_of_two_nodes_the_lower_one_survives_the_loss_of_the_other(tmp_path: Path) -> None:
    with Job(tmp_path, 4) as job:
        job.start("--quorum-wait-s=0.3", nodes=2)
        job.launchers[1].kill()
        assert job.one("commit", 0, epoch=2)["ranks"] == [0, 1]
        assert job.finish([0, 1]) == 0
        assert job.left(WAIT_S) == []


@proves(Kind.NODE, Promise.STOPS)
def test_of_two_nodes_the_other_one_stops(tmp_path: Path) -> None:
    with Job(tmp_path, 4) as job:
        job.start("--quorum-wait-s=0.3", nodes=2)
        job.launchers[0].kill()
        assert job.code(1) == 1
        assert job.left(WAIT_S) == []
    assert "only 1 of 2 nodes can be reached, which is no majority" in job.output(1)


@proves(Kind.NODE, Promise.GOES_ON)
@pytest.mark.parametrize("node", [0, 2])
def test_of_three_nodes_two_go_on(tmp_path: Path, node: int) -> None:
    with Job(tmp_path, 6) as job:
        job.start("--quorum-wait-s=0.3", nodes=3)
        assert "cannot be survived" not in job.output(0)
        job.launchers[node].kill()
        rest = [slot for slot in range(6) if slot // 2 != node]
        ranks = [report["ranks"] for report in job.all("commit", rest, epoch=2)]
        assert all(sorted(order) == rest and order == ranks[0] for order in ranks)
        for slot in rest:
            job.tell(slot, "finish")
        assert [job.code(other) for other in range(3) if other != node] == [0, 0]
        assert job.left(WAIT_S) == []


@pytest.fixture
def cable() -> Iterator[list[list[str]]]:
    """Two network namespaces, 10.99.0.1 and 10.99.0.2: for each the words that enter it."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("network namespaces need root, unshare, nsenter and ip")
    hold = ["unshare", "-n", "sh", "-c", "echo ready; read line"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen(hold, text=True, **pipes) as one,
        subprocess.Popen(hold, text=True, **pipes) as other,
    ):
        ready = [holder.stdout.readline() for holder in (one, other) if holder.stdout]
        if ready != ["ready\n"] * 2:
            pytest.skip("network namespaces are not permitted here")
        enter = [["nsenter", "-t", str(holder.pid), "-n"] for holder in (one, other)]
        commands = [(0, f"ip link add cable type veth peer name cable netns {other.pid}")]
        for node in range(2):
            commands += [
                (node, f"ip addr add 10.99.0.{node + 1}/24 dev cable"),
                (node, "ip link set cable up"),
                (node, "ip link set lo up"),
            ]
        for node, command in commands:
            subprocess.run([*enter[node], *command.split()], check=True, timeout=10)
        yield enter


@proves(Kind.NOTHING, Promise.GOES_ON, victim="1")
def test_two_machines_reach_each_other(tmp_path: Path, cable: list[list[str]]) -> None:
    with Job(tmp_path, 2) as job:
        for node, enter in enumerate(cable):
            job.launch(
                command=[
                    *enter,
                    *(sys.executable, "-c", LAUNCH, f"--dir={job.run_dir}", "--nnodes=2"),
                    *(f"--node-rank={node}", "--master-addr=10.99.0.1", "--master-port=29500"),
                    str(TRAINER),
                ]
            )
        started = job.all("started", [0, 1])
        assert [report["host"] for report in started] == ["10.99.0.1", "10.99.0.2"]
        job.reports += started
        job.joined()
        job.kill(1)
        inventory = job.one("commit", 0, epoch=2)["inventory"]
        own = next(r for r in inventory if r["owner"] == 1 and not r["is_copy"])
        assert own["holder_address"].startswith("10.99.0.2:")
        job.tell(0, f"fetch {own['holder_address']} 1 0 1")
        assert job.one("fetched", 0)["equal"]
        assert job.finish([0]) == 0


@proves(Kind.NODE, Promise.STOPS)
@pytest.mark.parametrize("victim", [0, 1], ids=["where all meet", "on another node"])
def test_an_agent_that_ends_before_the_nodes_have_met_keeps_nobody_waiting(
    tmp_path: Path, victim: int
) -> None:
    """The third node never comes; both others would wait for it for ten minutes."""
    port = free_port()
    with Job(tmp_path, 6) as job:
        for node in range(2):
            place = (f"--node-rank={node}", "--nnodes=3", f"--master-port={port}")
            job.launch(*place, "--nproc-per-node=2")
        for report in job.all("started", range(4)):  # an agent starts its trainers first
            job.pids[report["slot"]] = report["pid"]
        launcher = psutil.Process(job.launchers[victim].pid)
        (agent,) = (one for one in launcher.children() if one.pid not in job.pids.values())
        agent.kill()
        with within(10):
            assert [job.code(node) for node in range(2)] == [1, 1], job.outputs()
        assert "ended before the job began" in job.output(victim)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_limit_of_processes_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("raise SystemExit('must not run')")
    code = (
        "import encodings.idna, os, resource, shutil, sys\n"
        "from elaswave_plugin.launch.launch import main\n"
        "if not os.getuid():\n"  # whom no limit holds
        "    os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    tmp_path.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, "--nproc-per-node=3", "s.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert (
        "may start no more processes or threads" in done.stderr
        and "`ulimit -u` is 1" in done.stderr
    )
    assert done.stderr.count("\n") == 1


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_loopback_that_is_down_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("raise SystemExit('must not run')")
    apart = ["unshare", "-n"] if not os.getuid() else ["unshare", "-rn"]
    if subprocess.run([*apart, "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("no network namespace may be made here")
    for launcher in (["-c", LAUNCH, "--nproc-per-node=2"], ["-m", "elaswave_plugin.run"]):
        worker = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        done = subprocess.run(
            [*apart, sys.executable, *launcher, "s.py"],
            cwd=tmp_path,
            env=environment(**worker, **meeting),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2, done.stderr
        assert "cannot reach its own address 127.0.0.1" in done.stderr
        assert "`ip link set lo up`" in done.stderr and done.stderr.count("\n") == 1
