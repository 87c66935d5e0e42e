"""`torchrun ... -m elaswave_plugin.run script.py args`: a worker's task under a launcher.

The launcher (torchrun, or any other that sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
GROUP_RANK, or Open MPI's or Slurm's names of them) starts this in the worker's place; it starts the
trainer and outlives it. The first task of a node is the node's guardian, the others serve it.
"""

import argparse
import itertools
import os
import re
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from elaswave_plugin.agent.common import AgentSpec
from elaswave_plugin.agent.guarded_trainers import ForkServer, Starter
from elaswave_plugin.agent.guardian import EXIT_CRASHED
from elaswave_plugin.agent.notice_file import NOTICE_FILE, check_notice_file
from elaswave_plugin.agent.peers.rendezvous import (
    RendezvousSpec,
    listen_at,
    own_host,
)
from elaswave_plugin.errors import (
    EXIT_REQUEUE,
    AgreementError,
    ConfigurationError,
)
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.environment import QUIESCE, RESERVE, Program, read_reserve
from elaswave_plugin.ipc.process_tree import die_with_parent, explained_process_limit
from elaswave_plugin.ipc.secret import SECRET_FILE, Secret, left_to_user
from elaswave_plugin.launch.job_secret import agreed_secret, check_required
from elaswave_plugin.launch.node_job import GuardedNode, connect_zygote
from elaswave_plugin.launch.options import (
    LaunchParser,
    ScriptSettings,
    add_timeouts,
    allow_descriptors,
    check_environment,
    check_run_dir,
    open_run_dir,
    read_timeouts,
    refuse_second_job,
    script_settings,
)
from elaswave_plugin.launch.standard_streams import fill_closed_streams, relayed_output
from elaswave_plugin.launch.task import Task, be_task, meeting_name, tasks_of_node
from elaswave_plugin.words import check_options, variable

_OF_OPEN_MPI = (
    ("RANK", "OMPI_COMM_WORLD_RANK"),
    ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
_OF_SLURM = (
    ("RANK", "SLURM_PROCID"),
    ("WORLD_SIZE", "SLURM_NTASKS"),
    ("LOCAL_RANK", "SLURM_LOCALID"),
    ("GROUP_RANK", "SLURM_NODEID"),
)
# Of the step, and of the allocation where that is not set: as "2(x3),1".
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
# Those above are salloc's shell and the like (slurm.h): one process, of whatever number of tasks.
_LAST_STEP_OF_SRUN = 0xFFFFFFF0


def torchrun_names(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with torchrun's names too, where it has another launcher's.

    Raises ConfigurationError where Slurm's numbers are none.
    """
    found = {**{ours: env[name] for ours, name in _OF_OPEN_MPI if name in env}, **env}
    return {**_of_slurm(found), **found}


def _of_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """Name what Slurm says of this task, if it is srun that has started it.

    A batch script has SLURM_PROCID and SLURM_NTASKS too, but no step. A launcher that a step has
    started has ranks of its own, which Slurm's would contradict.
    """
    if not _is_step_of_srun(env) or any(name not in env for _, name in _OF_SLURM):
        return {}
    found = {ours: env[name] for ours, name in _OF_SLURM}
    if any(env.get(name, found[name]) != found[name] for name in ("RANK", "WORLD_SIZE")):
        return {}
    for name in _TASKS_PER_NODE:
        if name in env:
            width = _tasks_of_node(name, env[name], env["SLURM_NODEID"])
            return {**found, "LOCAL_WORLD_SIZE": width}
    return found


def _is_step_of_srun(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) <= _LAST_STEP_OF_SRUN


def _tasks_of_node(name: str, text: str, node: str) -> str:
    """Read the number of a node's tasks, the third node's of "2(x2),1" being 1."""
    counts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    place = int(node) if node.isdecimal() else -1
    for count in counts:
        if count is None or place < 0:
            break
        place -= int(count[2] or 1)
        if place < 0:
            return count[1]
    raise ConfigurationError(
        f"{name} is {text!r} and SLURM_NODEID {node!r}, wanted numbers such as '2(x3),1' and 3"
    )


_WANTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Of the DeepSpeed launcher on one node, by the variables that it sets (launcher/launch.py).
UNHEARD = (
    "the `deepspeed` command passes SIGTERM and SIGUSR1 on to nobody: to end the job with a last"
    " checkpoint, signal all of its processes, or `elaswave drain --node 0 DIR`"
)
# What launchers set alike for all workers of a job, and otherwise for other jobs.
_NAMES_OF_A_JOB = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"),
)
# MASTER_PORT is often a port that was free by chance: its neighbour need not be.
_PORTS_TRIED = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise one worker; bad input is one sentence on stderr and exit code 2."""
    fill_closed_streams()
    options = sys.argv[1:] if argv is None else argv
    try:
        parsed = _parser().read(options)
        program = Program(script=parsed.script, args=tuple(parsed.args), module=parsed.module)
        with relayed_output():
            return supervise(program, os.environ, options=parsed)
    except ConfigurationError as error:
        print(f"elaswave_plugin.run: {error}", file=sys.stderr)
        return 2


def supervise(
    program: Program,
    env: Mapping[str, str],
    *,
    options: argparse.Namespace | None = None,
) -> int:
    """Run `program` as the worker that `env` describes, to the end of the job.

    ``options``: those of the command line, where there is one; what they do not say is that of the
    environment, the reserve always. Raises ConfigurationError where the environment describes no
    worker, an option or a variable is nearly ours, a port is taken, the notice file is there
    already, or the run directory is another job's or cannot be made.
    """
    check_environment(env)
    check_options(program.args)
    env = torchrun_names(env)
    settings = script_settings(program.args, env)
    timeouts = read_timeouts(options, env, quiesce_timeout_s=settings.quiesce_timeout_s)
    port = getattr(options, "elaswave_control_port", None)
    rendezvous = _rendezvous(env, port, timeouts.start_s, settings)
    allow_descriptors(rendezvous.world_size + rendezvous.reserve)
    _check(program, settings)
    several = rendezvous.width != rendezvous.world_size
    check_required(env, alone=not several, required=settings.require_secret)
    trainer_env = {
        **env,
        RESERVE: str(rendezvous.reserve),
        variable(QUIESCE): str(timeouts.agreement.quiesce_timeout_s),
    }
    if settings.run_dir is not None:
        trainer_env["ELASWAVE_DIR"] = str(settings.run_dir)
    # The DeepSpeed launcher puts it before what it takes for the script; a script expects it.
    local_rank = getattr(options, "local_rank", None)
    first_args = () if local_rank is None else (f"--local_rank={local_rank}",)
    spec = AgentSpec(
        rendezvous=rendezvous,
        host="",
        program=program,
        envs=(trainer_env,),
        first_args=(first_args,),
        run_dir=None if settings.run_dir is None else str(settings.run_dir),
        notice_file=env.get(NOTICE_FILE),
        timeouts=timeouts.agreement,
        heartbeat=timeouts.heartbeat,
    )
    zygote = getattr(options, "elaswave_zygote", None) or env.get("ELASWAVE_ZYGOTE")
    if env.get("CROSS_SIZE") == "1" and "GROUP_RANK" not in env and env.get("RANK") == "0":
        say(UNHEARD)
    die_with_parent(os.getppid())
    try:
        with explained_process_limit():
            return _serve(spec, zygote, several=several)
    except AgreementError as error:
        say(f"the job does not start: {error}")
        return EXIT_REQUEUE
    except ConfigurationError:
        raise
    except Exception:
        traceback.print_exc()
        return EXIT_CRASHED


def _serve(spec: AgentSpec, zygote: str | None, *, several: bool) -> int:
    """Be the guardian of this node, or a task that serves it; returns the job's exit code.

    `spec`: as of a node that has this task's worker alone.
    """
    rendezvous = spec.rendezvous
    meeting, wait_s = meeting_name(rendezvous.job, rendezvous.node), rendezvous.timeout_s
    (slot,), (env,), (first_args,) = rendezvous.slots, spec.envs, spec.first_args
    if _place(env, rendezvous):
        return be_task(meeting, slot, env, first_args, wait_s)
    if rendezvous.node == 0:
        refuse_second_job(None if spec.run_dir is None else Path(spec.run_dir))
    if spec.notice_file:
        check_notice_file(spec.notice_file)
    # What cannot be is told before anybody is waited for.
    listener = _listen(rendezvous, several=several) if rendezvous.node == 0 else None
    host = own_host(
        rendezvous.host,
        rendezvous.ports[0],
        listener=listener,
        timeout_s=wait_s,
        several=several,
    )
    with tasks_of_node(meeting, slot, rendezvous.width - 1, wait_s) as tasks:
        slots = (slot, *(task.slot for task in tasks))
        spec = replace(
            spec,
            host=host,
            rendezvous=replace(rendezvous, slots=slots),
            envs=(env, *(task.env for task in tasks)),
            first_args=(first_args, *(task.args for task in tasks)),
        )
        code = _guard(spec, tasks, zygote, listener)
        for task in tasks:
            task.tell({"exit": code})
    return code


def _place(env: Mapping[str, str], rendezvous: RendezvousSpec) -> int:
    """The number of this task on its node."""
    (slot,) = rendezvous.slots
    text = env.get("LOCAL_RANK", str(slot % rendezvous.width))
    if not text.isdecimal():
        raise ConfigurationError(f"LOCAL_RANK is {text!r}, wanted a number, 0 or more")
    return int(text)


def _guard(
    spec: AgentSpec, tasks: Sequence[Task], zygote: str | None, listener: socket.socket | None
) -> int:
    """Be the guardian of a node whose tasks a launcher has started, in the first of them."""
    rendezvous, env = spec.rendezvous, spec.envs[0]
    run_dir = None if spec.run_dir is None else Path(spec.run_dir)
    secret = agreed_secret(
        env,
        run_dir,
        node=rendezvous.node,
        host=rendezvous.host,
        ports=rendezvous.ports,
        job=rendezvous.job,
        timeout_s=rendezvous.timeout_s,
    )
    spec = replace(spec, rendezvous=replace(rendezvous, secret=secret))

    def hand_on(place: int, number: int) -> None:
        guarded.signals.append(number)
        guarded.guardian.send_signal(number, place)

    guarded = GuardedNode(spec, env, listener, on_signal=partial(hand_on, 0))
    starters: list[Starter | None] = [
        None,
        *(one.starter(guarded.reactor, partial(hand_on, n)) for n, one in enumerate(tasks, 1)),
    ]
    if zygote:  # the tasks fork nothing, and hand signals on
        starters = [ForkServer(guarded.reactor, connect_zygote(zygote, one)) for one in spec.envs]
    with left_to_user(secret):
        return guarded.run(starters)


def _check(program: Program, settings: ScriptSettings) -> None:
    """Raise ConfigurationError where there is no such script, or no run directory can be made."""
    if not program.module and not Path(program.script).is_file():
        raise ConfigurationError(
            f"script {program.script!r} is no file; give the path of a script, or -m and a module"
        )
    check_run_dir(settings.run_dir)
    open_run_dir(settings.run_dir)


def _parser() -> LaunchParser:
    parser = LaunchParser(
        prog="elaswave_plugin.run",
        description="Supervise one worker of a job that torchrun started.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--elaswave-control-port",
        type=int,
        help="port of the agents (the first free one above MASTER_PORT)",
    )
    add_timeouts(parser)
    parser.add_argument("--elaswave-zygote", help="socket of a running zygote that forks workers")
    parser.add_argument("--local_rank", "--local-rank", help="handed on to the script")
    parser.add_argument("-m", "--module", action="store_true", help="run SCRIPT as python -m does")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser


def _rendezvous(
    env: Mapping[str, str], control_port: int | None, start_s: float, settings: ScriptSettings
) -> RendezvousSpec:
    """Describe the meeting; its secret is to be replaced by the job's."""
    missing = [name for name in _WANTED if name not in env]
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} not set: start this with torchrun, with mpirun and"
            " `-x MASTER_ADDR=HOST -x MASTER_PORT=PORT`, with srun and these two exported, or use"
            " `elaswave run` without any of them"
        )
    reserve = read_reserve(env)
    # torchrun's name of the node's rank, and the DeepSpeed launcher's.
    node = env.get("GROUP_RANK", env.get("CROSS_RANK"))
    # The DeepSpeed launcher's name of the node's width.
    width = env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE"))
    width = env["WORLD_SIZE"] if width is None and env["WORLD_SIZE"] == "1" else width
    if width is None or (node is None and env["WORLD_SIZE"] != width):
        raise ConfigurationError(
            f"GROUP_RANK not set, and WORLD_SIZE is {env['WORLD_SIZE']} where LOCAL_WORLD_SIZE is"
            f" {env.get('LOCAL_WORLD_SIZE', 'not set')}: set GROUP_RANK to the number of this"
            " worker's node, such as SLURM_NODEID, or LOCAL_WORLD_SIZE where there is one node"
        )
    try:
        port = control_port or int(env.get("ELASWAVE_CONTROL_PORT", 0))
        first = int(env["MASTER_PORT"]) + 1
        rendezvous = RendezvousSpec(
            node=int(node or 0),
            slots=(int(env["RANK"]),),
            world_size=int(env["WORLD_SIZE"]),
            host=env["MASTER_ADDR"],
            ports=(port,) if port else tuple(range(first, min(first + _PORTS_TRIED, 1 << 16))),
            job="/".join([str(os.getuid()), *(env.get(name, "") for name in _NAMES_OF_A_JOB)]),
            timeout_s=start_s,
            secret=Secret.new(),
            hands_out=not env.get(SECRET_FILE) and not settings.require_secret,
            reserve=reserve,
            width=int(width),
        )
    except ValueError as error:
        raise ConfigurationError(f"the launcher's environment has no numbers: {error}") from error
    if not rendezvous.ports:
        raise ConfigurationError(
            f"MASTER_PORT is {env['MASTER_PORT']}, wanted at most 65534: the agents use a "
            "port above it, or the one of --elaswave-control-port"
        )
    return rendezvous


def _listen(rendezvous: RendezvousSpec, *, several: bool) -> socket.socket:
    """Listen on the address of node 0; on all addresses where that is not one of this machine's.

    Raises ConfigurationError where no port of `rendezvous` is free.
    """
    for port, host in itertools.product(rendezvous.ports, (rendezvous.host, "")):
        try:
            return listen_at(host, port, several=several)
        except OSError as error:
            complaint = error.strerror
    raise ConfigurationError(
        f"cannot listen at {rendezvous.where} ({complaint}): "
        "choose another port with --elaswave-control-port"
    )
