"""The command line of `elaswave run`: torchrun's option names, checked before anything starts."""

import argparse
import contextlib
import json
import os
import resource
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from elaswave_plugin.agent.notice_file import NOTICE_FILE, check_notice_file
from elaswave_plugin.core.agreement.timeouts import Heartbeat, Timeouts
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.address_file import Address, read_addresses
from elaswave_plugin.ipc.environment import (
    AGENT,
    HOST,
    INCARNATION,
    JOB_SECRET_FD,
    QUIESCE,
    RESERVE,
    SLOT,
    SNAPSHOT_FDS,
    read_reserve,
)
from elaswave_plugin.ipc.progress_page import PROGRESS_FD
from elaswave_plugin.ipc.requests import request
from elaswave_plugin.ipc.secret import SECRET_FILE, Secret, named_secrets, secret_at
from elaswave_plugin.launch.job_secret import REQUIRE
from elaswave_plugin.launch.shared_options import (
    SharedJob,
    add_shared_options,
    node_range,
    seconds,
    shared_job,
)
from elaswave_plugin.rehearsed import REHEARSAL, rehearsed_settings
from elaswave_plugin.toml_file import toml_section
from elaswave_plugin.tracking.events import EVENTS_FILE, LEDGER_FILE, STEPS_FILE
from elaswave_plugin.words import (
    FLAG,
    check_options,
    check_variables,
    check_words,
    given_as,
    option_of,
    setting_names,
    variable,
)

# As many as the smallest file takes on a disk.
_TRIAL_BYTES = 4096
ANSWER_S = 2.0
MOST_AT_ONCE = 64


OWN_DESCRIPTORS = 256
"""The most that a worker has open beside one connection with each of the others."""


class SecondJobError(ConfigurationError):
    """Another job uses the run directory."""


def check_run_dir(folder: Path | None) -> None:
    """Raise ConfigurationError where no run directory can be made there; None is none."""
    if folder is None:
        return
    found = next(str(path) for path in (folder, *folder.parents) if os.path.exists(path))
    # A folder in which nobody may search looks like an empty one.
    if not os.path.isdir(found) or not os.access(found, os.W_OK | os.X_OK):
        what = "cannot be written" if os.path.isdir(found) else "is a file"
        raise ConfigurationError(
            f"the run directory is {str(folder)!r}, and {found!r} {what}; name a folder of yours"
            " (--elaswave-dir)"
        )


def open_run_dir(folder: Path | None) -> None:
    """Make a run directory and try all that a job does there; raises ConfigurationError.

    A new one is its user's alone; one that is there keeps the mode that it was given.
    """
    if folder is None:
        return
    trial = folder / f"trial-{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (EVENTS_FILE, STEPS_FILE, LEDGER_FILE):
            with contextlib.suppress(FileNotFoundError):
                os.close(os.open(folder / name, os.O_WRONLY | os.O_APPEND))
        read_addresses(folder)
        try:
            trial.write_bytes(bytes(_TRIAL_BYTES))
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the run directory is {str(folder)!r}, and {str(error.filename or folder)!r} cannot be"
            f" written ({error.strerror}); name a folder of yours (--elaswave-dir)"
        ) from None


def refuse_second_job(folder: Path | None) -> None:
    """Raise ConfigurationError where an agent of another job answers; None is none.

    For the first node of a job, before the others can have written their addresses.
    """
    known = [] if folder is None else read_addresses(folder)
    with ThreadPoolExecutor(max(1, min(MOST_AT_ONCE, len(known)))) as pool:
        ask = partial(_answers, secrets=named_secrets(os.environ, folder))
        for one, answers in zip(known, pool.map(ask, known), strict=True):
            if answers:
                raise SecondJobError(
                    f"a job is running in {str(folder)!r}: its agent of node {one.node} (pid"
                    f" {one.pid}) answers at {one}; give each job a run directory of its own"
                    " (--elaswave-dir)"
                )


def _answers(one: Address, *, secrets: list[Secret]) -> bool:
    try:
        secret = secret_at(one.address, secrets, ANSWER_S)
        answer = request(one.address, {"t": "status"}, ANSWER_S, secret)
    except OSError:
        return False
    # The port may belong to somebody else by now.
    return answer.get("pid") == one.pid


def allow_descriptors(workers: int) -> None:
    """Raise the limit of this process and its children by what a job of this many workers needs.

    Raises ConfigurationError where the hard limit is too low for it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = workers + OWN_DESCRIPTORS
    most = soft + needed if hard == resource.RLIM_INFINITY else hard
    if most < needed:
        raise ConfigurationError(
            f"the limit of open files is {most} (`ulimit -Hn`), wanted at least {needed}: each of "
            f"{workers} workers has a connection with each other one; raise it on every node"
        )
    # Not to the hard limit, which may be a billion: some programs go through all numbers below it.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, soft + needed), hard))


# Fixed at the launch of a job.
_OF_THE_JOB = (
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "standalone",
    "reserve",
    "quiesce_timeout_s",
    "join_timeout_s",
    "quorum_wait_s",
    "heartbeat_timeout_s",
    "finish_grace_s",
    "notice_timeout_s",
)


START, HEARTBEAT = "start_timeout_s", "heartbeat_timeout_s"
START_S = 600.0
_MEANING = (
    (QUIESCE, "a worker that does not answer a view change in this time is killed"),
    (START, "all nodes have to be there by then"),
    ("join_timeout_s", "every worker has to have joined by then"),
    ("quorum_wait_s", "a minority of the nodes stops after this"),
    (HEARTBEAT, "an agent this silent is lost, and its node"),
    ("finish_grace_s", "a worker that has finished and has not exited by then is killed"),
    (
        "notice_timeout_s",
        "workers that were told to go end by force after this; a last checkpoint has to be written"
        " by then",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimeouts:
    """The timeouts of a job's agents; ``start_s``: for how long they look for one another.

    Each is an option and a variable of the environment, for launches whose command line has no room
    for it: --notice-timeout-s is ELASWAVE_NOTICE_TIMEOUT_S.
    """

    start_s: float
    agreement: Timeouts
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One node's part of a job. `master_port` 0 picks a free port (one node only).

    `join`: any agent of a running job, in which these workers take empty slots.
    `standby`: the number of idle places that wait until a slot is lost. `reserve`: the number of
    workers that may join the job beyond those of its launch. `notice_file`: tells the workers to
    leave, once it is there. `shared`: the job of this name, which this line starts or joins.
    Raises ConfigurationError where the values cannot make a job.
    """

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    run_dir: Path | None = None
    zygote: Path | None = None
    preload: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    join: str | None = None
    standby: int = 0
    reserve: int = 0
    shared: SharedJob | None = None
    notice_file: Path | None = None
    start_timeout_s: float = START_S
    timeouts: Timeouts = field(default_factory=Timeouts)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    require_secret: bool = False

    def __post_init__(self) -> None:
        refused = (
            (self.nproc_per_node < 1, f"--nproc-per-node is {self.nproc_per_node}, wanted >= 1"),
            (self.standby < 0, f"--standby is {self.standby}, wanted >= 0"),
            (self.reserve < 0, f"--reserve is {self.reserve}, wanted >= 0"),
            (
                self.join and self.standby,
                "--join takes part at once and --standby waits: give one of them",
            ),
            (self.nnodes < 1, f"--nnodes is {self.nnodes}, wanted >= 1"),
            (
                not 0 <= self.node_rank < self.nnodes,
                f"--node-rank is {self.node_rank}, wanted 0..{self.nnodes - 1} for {self.nnodes}"
                " nodes",
            ),
            (
                not 0 <= self.master_port <= 65535,
                f"--master-port is {self.master_port}, wanted 0..65535",
            ),
            (
                self.nnodes > 1 and self.master_port < 1 and self.shared is None,
                f"--master-port is not set, wanted the same free port on all {self.nnodes} nodes",
            ),
            (
                not self.module and not Path(self.script).is_file(),
                f"script {self.script!r} is no file; give the path of a script, or -m and a module",
            ),
        )
        for is_refused, sentence in refused:
            if is_refused:
                raise ConfigurationError(sentence)
        if self.notice_file is not None:
            check_notice_file(self.notice_file)
        check_run_dir(self.run_dir)


class LaunchParser(argparse.ArgumentParser):
    """The parser of a launcher, whose options stand before the script's."""

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Read a command line; raises ConfigurationError, for an unknown option the nearest."""
        options, unknown = self.parse_known_args(words)
        if not unknown:
            return options
        keys, behind = setting_names(), "the script's, and goes behind it"
        elsewhere = {f"--{key.replace('_', '-')}": given_as(key) for key in keys}
        elsewhere |= dict.fromkeys((FLAG, *map(option_of, keys)), behind)
        parts = (word.partition("=") for word in unknown)
        given = {name: value if equals else None for name, equals, value in parts}
        known = [one for one in self._option_string_actions if "_" not in one]
        check_words(given, known, "unknown option before the script:", elsewhere=elsewhere)
        return options

    def error(self, message: str) -> NoReturn:
        """Raise ConfigurationError."""
        raise ConfigurationError(f"{message}; see `{self.prog} --help`")


def parse_run_args(argv: Sequence[str]) -> LaunchSpec:
    """The job that a command line asks for. Raises ConfigurationError."""
    parser = _parser()
    check_environment(os.environ)
    options = parser.read(argv)
    args = tuple(options.args)
    check_options(args)
    if options.join is not None:
        _check_join(options, parser)
    shared = script_settings(args, os.environ)
    timeouts = read_timeouts(options, os.environ, quiesce_timeout_s=shared.quiesce_timeout_s)
    least, most = node_range(options.nnodes)
    if options.zygote and options.preload:
        raise ConfigurationError(
            f"--preload is {options.preload!r} and --zygote {str(options.zygote)!r}, which has"
            " imported its own modules; leave one of them out"
        )
    notice_file = options.notice_file or os.environ.get(NOTICE_FILE)
    if options.standalone and most != 1:
        raise ConfigurationError(
            f"--standalone means one node, and --nnodes is {options.nnodes}: leave one of them out"
        )
    return LaunchSpec(
        script=options.script,
        args=args,
        module=options.module,
        nproc_per_node=options.nproc_per_node,
        nnodes=most,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
        run_dir=_run_dir(options.dir, shared.run_dir),
        zygote=options.zygote,
        preload=tuple(filter(None, options.preload.split(","))),
        join=options.join,
        standby=options.standby,
        reserve=_reserve(options),
        shared=shared_job(options, parser, least, most),
        notice_file=Path(notice_file).absolute() if notice_file else None,
        start_timeout_s=timeouts.start_s,
        timeouts=timeouts.agreement,
        heartbeat=timeouts.heartbeat,
        require_secret=shared.require_secret,
    )


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a variable that is nearly one that is read."""
    read = (SECRET_FILE, NOTICE_FILE, RESERVE, *map(variable, ("dir", "zygote", "control_port")))
    own = (AGENT, HOST, SLOT, INCARNATION, JOB_SECRET_FD, SNAPSHOT_FDS, PROGRESS_FD, REHEARSAL)
    check_variables(environ, (*read, *(variable(name) for name, _ in _MEANING)), own)


def _run_dir(option: str | None, shared: Path | None) -> Path | None:
    """The launcher's own option wins, except in a rehearsal."""
    if option is None or rehearsed_settings(os.environ):
        return shared
    return Path(option).absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSettings:
    """The settings among the script's own options that concern its agents too."""

    run_dir: Path | None
    quiesce_timeout_s: float | None
    require_secret: bool


def script_settings(args: Sequence[str], env: Mapping[str, str]) -> ScriptSettings:
    """Read a script's --elaswave-dir and --elaswave-quiesce-timeout-s, as the script will.

    An option wins over the file of --elaswave-config or the section of --deepspeed_config, and
    that over ELASWAVE_DIR. Raises ConfigurationError.
    """
    config = peek(args, "--elaswave-config")
    origin = config or 'section "elaswave" of --deepspeed_config'
    section = deepspeed_section(args) if config is None else toml_section(config)
    rehearsed = rehearsed_settings(env).get("dir")
    given = peek(args, "--elaswave-dir") or section.get("dir") or env.get("ELASWAVE_DIR")
    run_dir = rehearsed or given
    if not isinstance(run_dir, str | None):
        raise ConfigurationError(f"{origin}: key 'dir' is {run_dir!r}, wanted a path as a string")
    option = "--elaswave-quiesce-timeout-s"
    value = peek(args, option)
    source = option
    if value is None and "quiesce_timeout_s" in section:
        value, source = str(section["quiesce_timeout_s"]), f"{origin}: key 'quiesce_timeout_s'"
    try:
        quiesce_s = None if value is None else seconds(value)
    except argparse.ArgumentTypeError as error:
        raise ConfigurationError(f"{source}: {error}") from error
    return ScriptSettings(
        run_dir=Path(run_dir).absolute() if run_dir else None,
        quiesce_timeout_s=quiesce_s,
        require_secret=_requires_secret(args, section, origin),
    )


def _requires_secret(args: Sequence[str], section: Mapping[str, Any], origin: str) -> bool:
    value = section.get("require_secret", False)
    if not isinstance(value, bool):
        raise ConfigurationError(f"{origin}: key 'require_secret' is {value!r}, wanted a boolean")
    given = [word.partition("=")[0].replace("_", "-") for word in args]
    if REQUIRE not in given:
        return value
    return str(peek(args, REQUIRE)).lower() not in ("off", "false", "0", "no")


def deepspeed_section(args: Sequence[str]) -> dict[str, Any]:
    """The section of a DeepSpeed configuration; DeepSpeed says what is wrong with that file."""
    section = deepspeed_config(args).get("elaswave")
    return section if isinstance(section, dict) else {}


def deepspeed_config(args: Sequence[str]) -> dict[str, Any]:
    """A script's DeepSpeed configuration; nothing where it has none that can be read."""
    path = peek(args, "--deepspeed-config")
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _parser() -> LaunchParser:
    parser = LaunchParser(
        prog="elaswave run",
        description="Run a training script on N workers; the job goes on when workers are lost.",
        allow_abbrev=False,
    )

    def add(name: str, text: str, **more: object) -> None:
        names = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        parser.add_argument(*names, help=text, **more)  # type: ignore[arg-type]

    add("nproc-per-node", "workers on this node", type=int, default=1)
    add("nnodes", "nodes in the job; MIN:MAX with --rdzv-id", metavar="N or MIN:MAX", default="1")
    add("node-rank", "number of this node, from 0", type=int, default=0)
    add("master-addr", "address of node 0", default="127.0.0.1")
    add("master-port", "a free port of node 0; 0 picks one (one node)", type=int, default=0)
    add("standalone", "one node (accepted for torchrun's sake)", action="store_true")
    add_shared_options(add)
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="join a running job: take its lost slots, then those of its --reserve; HOST:PORT is "
        "any agent of it (`elaswave status DIR --json` lists them); script and arguments as at "
        "its launch",
    )
    text = "extra workers that may --join later, with DeepSpeed's pipelines a multiple of stages"
    default = f"the same on every node (default 0, or {RESERVE})"
    add("reserve", f"{text}; {default}", type=int)
    text = "idle spare workers on this node, which take lost slots by themselves; each needs"
    add("standby", f"{text} its own device: LOCAL_RANK follows the workers'", type=int, default=0)
    text = (
        "as soon as this file exists, the workers of this node leave, as by SIGTERM; its first line"
    )
    add("notice-file", f"{text} is the reason (default: {NOTICE_FILE} in the environment)")
    parser.add_argument("-m", "--module", action="store_true", help="run SCRIPT as python -m does")
    parser.add_argument(
        "--dir", "--elaswave-dir", "--elaswave_dir", help="run directory for events (default: none)"
    )
    parser.add_argument("--zygote", type=Path, help="socket of a running zygote that forks workers")
    parser.add_argument(
        "--preload", default="", help="modules that a zygote of this run imports, as torch,numpy"
    )
    add_timeouts(parser)
    parser.add_argument("script", help="script, or module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def _reserve(options: argparse.Namespace) -> int:
    """Return the reserve of a launch; 0 for workers that join, which are told the job's."""
    if options.join is not None:
        return 0
    given: int | None = options.reserve
    return read_reserve(os.environ) if given is None else given


def _check_join(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """A newcomer is told by the job what the others were told at its launch."""
    host, colon, port = options.join.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigurationError(
            f"--join is {options.join!r}, wanted HOST:PORT of an agent of the job, as "
            "10.0.0.1:29501; `elaswave status DIR --json` has them"
        )
    for name in _OF_THE_JOB:
        if getattr(options, name) != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{option} is the job's own: leave it out with --join")


def peek(args: Sequence[str], option: str) -> str | None:
    """The last value of one of the script's own options that also concerns the agents."""
    found: str | None = None
    for position, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            found = value if equals else next(iter(args[position + 1 :]), None)
    return found


def add_timeouts(parser: argparse.ArgumentParser) -> None:
    """Add an option for each."""
    defaults = _defaults()
    for name, text in _MEANING:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            *dict.fromkeys((option, f"--{name}")),
            type=seconds,
            metavar="SECONDS",
            help=f"{text} (default {defaults[name]:g}, or {variable(name)})",
        )


def read_timeouts(
    options: argparse.Namespace | None, env: Mapping[str, str], *, quiesce_timeout_s: float | None
) -> LaunchTimeouts:
    """Option over environment over default; raises ConfigurationError.

    ``quiesce_timeout_s``: what the script's own settings say, which comes before the environment.
    """
    found = _defaults()
    for name, _ in _MEANING:
        key, own = variable(name), quiesce_timeout_s if name == QUIESCE else None
        try:
            told = own if own is not None or key not in env else seconds(env[key])
        except argparse.ArgumentTypeError as error:
            raise ConfigurationError(f"{key}: {error}") from error
        given = getattr(options, name, None)
        found[name] = next((one for one in (given, told) if one is not None), found[name])
    start_s, heartbeat_s = found.pop(START), found.pop(HEARTBEAT)
    return LaunchTimeouts(
        start_s=start_s,
        agreement=Timeouts(**found),
        heartbeat=Heartbeat(timeout_s=heartbeat_s),
    )


def _defaults() -> dict[str, float]:
    agreement = Timeouts()
    here = {START: START_S, HEARTBEAT: Heartbeat().timeout_s}
    return {name: here.get(name) or getattr(agreement, name) for name, _ in _MEANING}
