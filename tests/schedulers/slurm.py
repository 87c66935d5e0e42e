"""A real Slurm on this host: munged, slurmctld and one slurmd a node, in a folder of its own."""

import contextlib
import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.idle import Deadline
from tests.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "srun")
READY_S, COMMAND_S, END_S = 60.0, 20.0, 10.0
# Between SIGTERM and SIGKILL for who is preempted.
GRACE_S = 60
POLL_S = 0.1
USABLE = ("idle", "mixed", "allocated")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

# No accounting, no cgroups, no task plugin: all of it would need more than a folder. linuxproc
# finds the processes of a step by their parents: trainers lead process groups of their own.
CONFIGURATION = """
ClusterName=elaswave-tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SlurmdTimeout=5
MessageTimeout=5
SchedulerParameters=sched_interval=1,max_batch_requeue=1000
ReturnToService=2
KillWait={kill_wait}
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


class Slurm:
    """Starts it on the way into a block, and leaves no process and no folder behind."""

    def __init__(self, nodes: int = 4, cpus: int = 2, kill_wait_s: int = 10) -> None:
        """``cpus``: of each node, whatever this host has; ``kill_wait_s``: scancel's patience."""
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.folder = Path()
        self._cpus = cpus
        self._kill_wait_s = kill_wait_s
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        """Start all of it; raises RuntimeError where it is not installed or does not come up."""
        missing = [name for name in PROGRAMS if self._which(name) is None]
        if missing:
            raise RuntimeError(
                f"no {', '.join(missing)} on this machine: these tests run a real Slurm;"
                " `apt-get install slurm-wlm munge` as root installs it"
            )
        # Not a folder of pytest's: munged wants one that all can enter.
        self.folder = Path(tempfile.mkdtemp(prefix="elaswave-slurm-"))
        try:
            self._configure()
            self._start_munged()
            self._start("slurmctld", "slurmctld", "-D")
            for name in self.nodes:
                self._start_node(name)
            self._wait(self._all_idle, READY_S, "nodes that are idle")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it, with all jobs; raises RuntimeError where a process of it is left."""
        self._close()

    def submit(self, script: str, *, output: Path) -> int:
        """Queue a batch script (its text); returns the job's number."""
        words = ("sbatch", "--parsable", f"--chdir={output.parent}", f"--output={output}")
        return int(self._tell(*words, "--open-mode=append", text=script))

    def submit_file(
        self,
        script: Path,
        *arguments: str,
        options: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
    ) -> int:
        """Queue a script, which is not changed, in a folder; ``env``: beside this process's own."""
        words = ("sbatch", "--parsable", *options, str(script), *arguments)
        # A script finds its folder in SLURM_SUBMIT_DIR, which is where sbatch was called.
        return int(self._tell(*words, folder=folder, **env))

    def shown(self, job: int | str) -> dict[str, str]:
        """Return the fields of `scontrol show job`; "5_1" is a task of an array."""
        text = self._tell("scontrol", "show", "job", "--oneliner", str(job))
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def state(self, job: int | str) -> str:
        """Such as RUNNING or COMPLETED."""
        return self.shown(job)["JobState"]

    def exit_code(self, job: int | str) -> int:
        """The exit code of the batch script; 128+n where signal n has ended it."""
        code, _, number = self.shown(job)["ExitCode"].partition(":")
        return 128 + int(number) if int(number) else int(code)

    def wait_for(self, job: int | str, *states: str, limit_s: float) -> str:
        """Wait until the job has one of these states; returns which."""
        self._wait(lambda: self.state(job) in states, limit_s, f"job {job} in {states}")
        return self.state(job)

    def wait_for_node(self, name: str, state: str, *, limit_s: float) -> None:
        """Wait until slurmctld says of a node that it is "idle", "down" or the like."""
        self._wait(lambda: self.node_state(name) == state, limit_s, f"{name} to be {state}")

    def node_state(self, name: str) -> str:
        """Such as "idle", "down" or, with a job on it, "mixed"."""
        # "*": it does not answer.
        return self._states()[name].rstrip("*")

    def lose_node(self, name: str) -> float:
        """Kill a node's slurmd, its slurmstepds and all processes of its steps, as a crash does.

        Returns when all of them stood still (time.time), just before they are killed.
        """
        daemon = self._daemons.pop(name)
        # slurmd first: it would report what ends.
        daemon.kill()
        daemon.wait(END_S)
        # All stand still first: a slurmstepd would report the end of its script, and srun have the
        # step killed, which Slurm then does to the task that it has started here again.
        frozen = self._processes_on(name)
        for process in frozen:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        stopped_s = time.time()
        # The youngest first: the end of a parent wakes up the stopped group that it leaves behind.
        for process in sorted(frozen, key=lambda one: (one.create_time(), one.pid), reverse=True):
            self._kill_all(partial(_running, [process]))
        self._kill_all(lambda: self._processes_on(name))
        return stopped_s

    def bring_back(self, name: str) -> None:
        """Start the slurmd of a lost node again, and wait until the node can be used."""
        self._start_node(name)
        # A job that waits for a node may be on it before anybody has looked.
        self._wait(lambda: self.node_state(name) in USABLE, READY_S, f"{name} to be used")

    def preempt(self, name: str, until: Path) -> int:
        """Queue a job that has to have this node, and keeps it until a file is there."""
        text = f"#!/bin/bash\nuntil [ -e {until} ]; do sleep 0.1; done\n"
        options = ("--partition=urgent", "--exclusive", f"--nodelist={name}", "--time=10")
        words = ("sbatch", "--parsable", *options, "--output=/dev/null")
        return int(self._tell(*words, text=text))

    def minutes(self, job: int) -> int:
        """Return for how many whole minutes a job has run."""
        hours, minutes, _ = self.shown(job)["RunTime"].split(":")
        return 60 * int(hours) + int(minutes)

    def allow(self, job: int, minutes: int) -> None:
        """Give a job another time limit."""
        self._tell("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def cancel(self, job: int | str, *options: str) -> None:
        """Have `scancel` end a job, or one task of an array; with `--signal` it signals that."""
        self._tell("scancel", *options, str(job))

    def suspend(self, job: int) -> None:
        """Have `scontrol suspend` stop all processes of a job."""
        self._tell("scontrol", "suspend", str(job))

    def resume(self, job: int) -> None:
        """Have a suspended job go on."""
        self._tell("scontrol", "resume", str(job))

    def processes(self, job: int, *, node: str | None = None) -> list[psutil.Process]:
        """The batch script of a job and the tasks of its steps, with all that they have started."""
        found = {
            child.pid: child
            for stepd in self._stepds(node)
            if f"[{job}." in " ".join(stepd.cmdline())
            for child in stepd.children(recursive=True)
        }
        tasks = self._tasks(node)
        found |= {one.pid: one for one, number in tasks.items() if number == str(job)}
        return [process for process in found.values() if _is_running(process)]

    def log(self) -> str:
        """The last lines of slurmctld's log."""
        path = self.folder / "slurmctld.log"
        return path.read_text()[-3000:] if path.exists() else ""

    @property
    def _conf(self) -> str:
        return str(self.folder / "slurm.conf")

    @property
    def _env(self) -> dict[str, str]:
        """For daemons and clients: these tests may run in a job of another Slurm."""
        env = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
        return {**env, "PATH": self._path(), "SLURM_CONF": self._conf}

    def _path(self) -> str:
        return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

    def _which(self, name: str) -> str | None:
        return shutil.which(name, path=self._path())

    def _configure(self) -> None:
        self.folder.chmod(0o755)
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir(mode=0o755)
        for name in self.nodes:
            (self.folder / "spool" / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        user = pwd.getpwuid(os.getuid()).pw_name
        text = CONFIGURATION.format(
            folder=self.folder,
            host=host,
            user=user,
            port=free_port(),
            grace=GRACE_S,
            kill_wait=self._kill_wait_s,
        )
        for name in self.nodes:
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1"
            text += f" Port={free_port()} CPUs={self._cpus} State=UNKNOWN\n"
        Path(self._conf).write_text(text)

    def _start_munged(self) -> None:
        home = self.folder / "munge"
        (home / "key").write_bytes(secrets.token_bytes(64))
        (home / "key").chmod(0o600)
        places = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
        places |= {"log-file": "log", "seed-file": "seed"}
        words = [f"--{option}={home / name}" for option, name in places.items()]
        self._start("munged", "munged", "--foreground", "--force", *words)
        self._wait((home / "socket").exists, READY_S, "munged's socket")

    def _start_node(self, name: str) -> None:
        self._start(name, "slurmd", "-D", "-N", name)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._env,
                cwd=self.folder,
                # Ctrl-C is for the tests, which end it in order.
                start_new_session=True,
            )

    def _tell(self, *command: str, text: str = "", folder: Path | None = None, **env: str) -> str:
        ended = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            env={**self._env, **env},
            cwd=folder,
        )
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)}: {ended.stderr or ended.stdout}")
        return ended.stdout.strip()

    def _states(self) -> dict[str, str]:
        lines = self._tell("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def _all_idle(self) -> bool:
        for name, daemon in self._daemons.items():
            if daemon.poll() is not None:
                raise RuntimeError(f"{name} has ended: {(self.folder / f'{name}.out').read_text()}")
        # slurmctld answers a moment after its start.
        with contextlib.suppress(RuntimeError):
            return [*self._states().values()] == ["idle"] * len(self.nodes)
        return False

    def _wait(self, reached: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline = Deadline(limit_s)
        while not reached():
            if not deadline.left_s():
                raise TimeoutError(f"waited {limit_s:g} s for {what}; slurmctld: {self.log()}")
            time.sleep(POLL_S)

    def _stepds(self, node: str | None) -> list[psutil.Process]:
        """The slurmstepds of a node (None: of all), which the log of its slurmd gives away.

        They have left its process group, and written their titles over their environment.
        """
        logs = {str(self.folder / f"slurmd-{name}.log") for name in self.nodes}
        logs = logs if node is None else {str(self.folder / f"slurmd-{node}.log")}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # some end meanwhile
                if process.name() == "slurmstepd":
                    opened = {file.path for file in process.open_files()}
                    found += [process] if opened & logs else []
        return found

    def _tasks(self, node: str | None) -> dict[psutil.Process, str]:
        """All processes that say that a job of this Slurm has started them, and its number."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                env = process.environ()
                is_ours = env.get("SLURM_CONF") == self._conf and "SLURM_JOB_ID" in env
                if is_ours and node in (None, env.get("SLURMD_NODENAME")):
                    found[process] = env["SLURM_JOB_ID"]
        return found

    def _processes_on(self, node: str | None) -> list[psutil.Process]:
        """The slurmstepds of a node (None: of all), and all that runs below these."""
        found: set[psutil.Process] = set()
        for process in (*self._stepds(node), *self._tasks(node)):
            with contextlib.suppress(psutil.Error):
                # Below: where a title has taken the place of the environment.
                found |= {process, *process.children(recursive=True)}
        return [process for process in found if _is_running(process)]

    def _kill_all(self, found: Callable[[], list[psutil.Process]]) -> None:
        """Kill until none is found any more: one may start another meanwhile.

        All stand still first: none is to see another one's end, and to act on it.
        """
        deadline = Deadline(END_S)
        while left := found():
            for end in (psutil.Process.suspend, psutil.Process.kill):
                for process in left:
                    with contextlib.suppress(psutil.Error):
                        end(process)
            if not deadline.left_s():
                raise RuntimeError(f"processes that do not end: {left}")
            time.sleep(0.01)

    def _close(self) -> None:
        daemons, self._daemons = self._daemons, {}
        if "slurmctld" in daemons:  # first: it starts again what ends
            self._end(daemons["slurmctld"])
        self._kill_all(lambda: self._processes_on(None))
        for daemon in daemons.values():
            self._end(daemon)
        shutil.rmtree(self.folder)

    def _end(self, daemon: "subprocess.Popen[bytes]") -> None:
        """End a daemon and its own children, such as the one that runs slurmctld's scripts."""
        if daemon.poll() is None:
            children = psutil.Process(daemon.pid).children(recursive=True)
            daemon.kill()
            daemon.wait(END_S)
            self._kill_all(partial(_running, children))


def _running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if _is_running(process)]


def _is_running(process: psutil.Process) -> bool:
    """Tell whether a process has not ended, whoever may still have to take note of its end."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
