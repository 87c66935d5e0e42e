"""Workers under an agent, started by torchrun: `-m elaswave_plugin.run`, and PYTHON_EXEC."""

import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elaswave_plugin.ipc.address_file import read_addresses
from elaswave_plugin.launch.python_exec import worker_program
from tests.agent import jobs
from tests.agent.jobs import TRAINER, Job, environment
from tests.ports import free_port
from tests.proofs import Kind, Promise, proves

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun imports torch before it starts anything."""
    monkeypatch.setattr(jobs, "WAIT_S", 60.0)


def torchrun(*words: str, nproc: int, port: int | None = None) -> list[str]:
    where = (
        ["--standalone"] if port is None else ["--master-addr=127.0.0.1", f"--master-port={port}"]
    )
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={nproc}",
        *where,
        *words,
    ]


def wrapper(folder: Path) -> Path:
    """Write what an installed `elaswave-python` is."""
    path = folder / "elaswave-python"
    path.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "from elaswave_plugin.launch.python_exec import main\nsys.exit(main())\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@proves(Kind.KILL, Promise.GOES_ON, victim="0")
@pytest.mark.parametrize("way", ["module", "python_exec"])
def test_torchrun_does_not_see_the_loss_of_a_trainer(tmp_path: Path, way: str) -> None:
    run_dir = str(tmp_path / "job" / "run")
    env = {"ELASWAVE_DIR": run_dir}
    if way == "python_exec":
        env["PYTHON_EXEC"] = str(wrapper(tmp_path))
    port = free_port() if way == "python_exec" else None
    with Job(tmp_path / "job", 3, **env) as job, socket.socket() as taken:
        words = ["-m", "elaswave_plugin.run", str(TRAINER)]
        if port is not None:
            words = [str(TRAINER)]
            taken.bind(("127.0.0.1", port + 1))  # the agents take the next one
        job.launch(command=torchrun(*words, nproc=3, port=port))
        job.joined()
        job.kill(0)
        reports = job.all("commit", [1, 2], epoch=2)
        assert {tuple(r["ranks"]) for r in reports} == {(1, 2)}
        assert job.finish([1, 2]) == 0, job.output()
        assert job.left(60.0) == []


def test_mpiruns_variables_are_read(tmp_path: Path) -> None:
    """They are read if those of torchrun are missing; a script finds torchrun's."""
    port = free_port()
    with Job(tmp_path / "job", 3, TINY_RESPAWN="1") as job:
        for rank in range(3):
            of_mpirun = {
                **{"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": rank},
                **{"SIZE": 3, "LOCAL_SIZE": 3},
            }
            env = [f"OMPI_COMM_WORLD_{name}={value}" for name, value in of_mpirun.items()]
            env += ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}", f"ELASWAVE_DIR={job.run_dir}"]
            words = [sys.executable, "-m", "elaswave_plugin.run", str(TRAINER)]
            job.launch(command=["env", *env, *words])
        job.joined()
        job.kill(1)
        job.all("commit", [0, 2], epoch=2)
        detached = job.one("detached", 1)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        assert [detached["env"][name] for name in names] == ["1", "1", "3", "3"]
        assert job.finish([0, 2]) == 0
        job.launchers[1].terminate()


def test_sruns_variables_are_read(tmp_path: Path) -> None:
    """Of two tasks on node 0 and one on node 1, as Slurm 22.05 sets them."""
    port = free_port()
    with Job(tmp_path / "job", 3, TINY_RESPAWN="1") as job:
        for rank, (node, place) in enumerate([(0, 0), (0, 1), (1, 0)]):
            of_srun = {
                **{"PROCID": rank, "NTASKS": 3, "LOCALID": place, "NODEID": node},
                **{"JOB_ID": 7, "STEP_ID": 0, "STEP_TASKS_PER_NODE": "2,1"},
            }
            env = [f"SLURM_{name}={value}" for name, value in of_srun.items()]
            env += ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}", f"ELASWAVE_DIR={job.run_dir}"]
            words = [sys.executable, "-m", "elaswave_plugin.run", str(TRAINER)]
            job.launch(command=["env", *env, *words])
        job.joined()
        job.kill(1)
        job.all("commit", [0, 2], epoch=2)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        detached = job.one("detached", 1)
        assert [detached["env"][name] for name in names] == ["1", "1", "3", "2", "0"]
        assert job.finish([0, 2]) == 0
        job.launchers[1].terminate()


@proves(Kind.JOIN, Promise.GOES_ON)
@pytest.mark.slow
def test_a_job_of_torchrun_grows(tmp_path: Path) -> None:
    run_dir = tmp_path / "job" / "run"
    env = {"ELASWAVE_DIR": str(run_dir), "ELASWAVE_RESERVE": "1"}
    with Job(tmp_path / "job", 2, **env) as job:
        words = ["-m", "elaswave_plugin.run", str(TRAINER)]
        job.launch(command=torchrun(*words, nproc=2, port=free_port()))
        job.joined()
        job.launch(f"--join={read_addresses(run_dir)[0]}")
        detached = job.one("detached", 2)
        names = ("RANK", "WORLD_SIZE", "ELASWAVE_RESERVE")
        assert [detached["env"][name] for name in names] == ["1", "2", "1"]
        for slot in (0, 1):
            job.tell(slot, "step 1")
        reports = job.all("commit", [0, 1, 2], epoch=2)
        assert {tuple(report["ranks"]) for report in reports} == {(0, 1, 2)}
        assert job.finish([0, 1, 2]) == 0, job.output()
        assert job.code(1) == 0


@proves(Kind.SIGNAL, Promise.CLEAN)
def test_nothing_is_left_when_torchrun_is_killed(tmp_path: Path) -> None:
    with Job(tmp_path / "job", 2, ELASWAVE_DIR=str(tmp_path / "job" / "run")) as job:
        words = ["-m", "elaswave_plugin.run", "-m", "tests.agent.tiny_trainer"]
        job.launch(command=torchrun(*words, nproc=2, port=free_port()))
        job.joined()
        job.launchers[0].kill()
        assert job.left(60.0) == []


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_bad_input_under_torchrun_is_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elaswave_plugin.run"]
    worker = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, env, complaint in (
            (["nowhere.py"], worker, "script 'nowhere.py' is no file"),
            (
                [str(TRAINER), "--elaswave-dir", str(TRAINER)],
                worker,
                "tiny_trainer.py' is a file; name a folder of yours",
            ),
            ([str(TRAINER)], {}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
            (
                [str(TRAINER)],
                {**worker, "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
                "run: GROUP_RANK not set, and WORLD_SIZE is 16 where LOCAL_WORLD_SIZE is 8",
            ),
            (["--what", "x.py"], worker, "unknown option before the script: '--what'"),
            ([str(TRAINER)], {**worker, "RANK": "x"}, "has no numbers"),
            (
                [str(TRAINER)],
                {**worker, "ELASWAVE_RESERVE": "-1"},
                "run: ELASWAVE_RESERVE is '-1', wanted a number of workers, 0 or more",
            ),
            (
                [str(TRAINER)],
                {**worker, "MASTER_PORT": "65535"},
                "run: MASTER_PORT is 65535, wanted",
            ),
            (
                [f"--elaswave-control-port={port}", str(TRAINER)],
                worker,
                f"cannot listen at 127.0.0.1:{port} (Address already in use)",
            ),
        ):
            done = subprocess.run(
                [*command, *words],
                env=environment(**env),
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
            assert complaint in done.stderr


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_one_node_number_in_two_containers_is_a_sentence(tmp_path: Path) -> None:
    """As `srun` has it that starts each worker in a container of its own."""
    enter = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*enter, "true"], capture_output=True, timeout=10).returncode:
        pytest.skip("PID namespaces are not permitted here")
    worker = {
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    }
    # One that says nothing, however soon the job is refused.
    (tmp_path / "s.py").write_text("import time; time.sleep(60)")
    command = [sys.executable, "-m", "elaswave_plugin.run", str(tmp_path / "s.py")]
    processes = [
        subprocess.Popen(
            [*words, *command],
            env=environment(**worker, RANK=str(rank)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, words in enumerate(([], enter))
    ]
    try:
        said = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [2, 2], said
    for lines in said:
        assert lines.count("\n") == 1
        assert "workers 0 and 1 are both on one node, and in two containers" in lines


def of_one_node(rank: int, port: int, **more: str) -> dict[str, str]:
    """The environment of a task, one of two on one node."""
    of_the_job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    worker = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    return environment(**{**of_the_job, **worker, **more})


def test_each_worker_is_given_the_rank_that_its_launcher_adds(tmp_path: Path) -> None:
    """As DeepSpeed's launcher does it, which takes our module for the script."""
    (tmp_path / "s.py").write_text("import os, sys; print(os.environ['RANK'], *sys.argv[1:])")
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "elaswave_plugin.run", f"--local_rank={rank}", "s.py", "--x"],
            env=of_one_node(rank, port),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        # Each prints where its launcher expects it.
        said = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert said == ["0 --local_rank=0 --x\n", "1 --local_rank=1 --x\n"]
    assert [process.returncode for process in processes] == [0, 0]


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_two_first_tasks_of_a_node_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("raise SystemExit('must not run')")
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "elaswave_plugin.run", f"--elaswave-control-port={own}", "s.py"],
            env=of_one_node(rank, port, LOCAL_RANK="0"),
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate((free_port(), free_port()))
    ]
    try:
        deadline_s = time.monotonic() + 60
        while not (ended := [one for one in processes if one.poll() is not None]):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        (refused,) = ended
        said = refused.communicate(timeout=60)[1]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert refused.returncode == 2 and said.count("\n") == 1
    assert "give each task of a node a LOCAL_RANK of its own" in said


def test_the_wrapper_is_python_for_everything_else(tmp_path: Path) -> None:
    python = str(wrapper(tmp_path))
    (tmp_path / "s.py").write_text("import sys; print(sys.argv, sys.flags.optimize)")
    for words in (["-c", "print(1)"], ["-O", "s.py", "-m", "x"], ["-m", "platform"], ["--version"]):
        ours, plain = (
            subprocess.run(
                [which, *words],
                env=environment(),
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
            )
            for which in (python, sys.executable)
        )
        assert (ours.stdout, ours.returncode) == (plain.stdout, plain.returncode)


def test_which_command_lines_are_a_workers() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = dict.fromkeys(names, "1")
    program = worker_program(["-u", "-X", "dev", "s.py", "-c", "y"], env)
    assert program is not None
    assert (program.options, program.script) == (("-u", "-X", "dev"), "s.py")
    assert (program.module, program.args) == (False, ("-c", "y"))
    program = worker_program(["-u", "-m", "pkg.mod", "--z"], env)
    assert program is not None
    assert (program.module, program.script, program.args) == (True, "pkg.mod", ("--z",))
    for words in (["-c", "print()"], ["-"], [], ["-u"], ["-V"], ["-m"]):
        assert worker_program(words, env) is None
    assert worker_program(["s.py"], {}) is None
    assert worker_program(["s.py"], {**env, "ELASWAVE_AGENT": "127.0.0.1:1"}) is None
