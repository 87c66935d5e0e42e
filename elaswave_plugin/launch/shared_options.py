"""The options of a job that the same line on every node starts or joins, with torchrun's names."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elaswave_plugin.agent.peers.job_place import JobPlace
from elaswave_plugin.errors import ConfigurationError


def seconds(text: str) -> float:
    """A positive number; raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return value


# As torchrun's.
LAST_CALL_S = 30.0
_PORT = 29400


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJob:
    """A job that the same line on every node starts or joins, by its `name`, known at `place`.

    It begins on `least` to `most` nodes, `last_call_s` after the least are there; this one is
    reached at `local_addr`, or by the way out of this machine. `life`: of the job, once one of its
    lives begins here; `scripts_port`: MASTER_PORT in it.
    """

    name: str
    place: JobPlace
    least: int
    most: int
    last_call_s: float
    local_addr: str | None = None
    life: int = 0
    scripts_port: int = 0


def add_shared_options(add: Callable[..., None]) -> None:
    """Add them: `add(name, help, **more)` adds one."""
    add("rdzv-id", "name of the job, for the same line on every node")
    text = "folder that all nodes see: the line starts the job of this name there, or joins it"
    add("rdzv-dir", text, type=Path)
    text = f"or HOST[:PORT] of one node, which must live; or of all MAX nodes (port {_PORT})"
    add("rdzv-endpoint", text, metavar="HOST[:PORT][,...]")
    text = f"once MIN nodes are there, wait so long for more (default {LAST_CALL_S:g})"
    add("rdzv-last-call", text, type=seconds, metavar="SECONDS", default=LAST_CALL_S)
    add("local-addr", "address of this node for the others, with --rdzv-id")


def node_range(text: str) -> tuple[int, int]:
    """Read N or MIN:MAX, as torchrun has it; raises ConfigurationError."""
    least, colon, most = text.partition(":")
    if not (least.isdecimal() and (most.isdecimal() if colon else True)):
        raise ConfigurationError(f"--nnodes is {text!r}, wanted a number, or two as in 2:4")
    low, high = int(least), int(most or least)
    if low < 1:
        raise ConfigurationError(f"--nnodes is {text!r}, wanted at least one node")
    if low > high:
        raise ConfigurationError(f"--nnodes is {text!r}: MIN is above MAX")
    return low, high


def shared_job(
    options: argparse.Namespace, parser: argparse.ArgumentParser, least: int, most: int
) -> SharedJob | None:
    """Return the job that the options name, if they do; raises ConfigurationError."""
    if options.rdzv_dir is None and options.rdzv_endpoint is None:
        for name in ("rdzv_id", "local_addr", "rdzv_last_call"):
            if getattr(options, name) != parser.get_default(name):
                option = f"--{name.replace('_', '-')}"
                raise ConfigurationError(f"{option} is set, and --rdzv-dir or --rdzv-endpoint not")
        if least != most:
            raise ConfigurationError(
                f"--nnodes is {options.nnodes!r}: MIN:MAX needs --rdzv-dir or --rdzv-endpoint"
            )
        return None
    given = "--rdzv-endpoint" if options.rdzv_dir is None else "--rdzv-dir"
    for name in ("join", "node_rank", "master_addr", "master_port"):
        if getattr(options, name) != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{option} and {given} say the same twice: leave one out")
    name = options.rdzv_id or ""
    if not name or "/" in name or name.startswith("."):
        raise ConfigurationError(f"--rdzv-id is {name!r}, wanted the job's name, as run-17")
    return SharedJob(
        name=name,
        place=_place(options, name, least, most),
        least=least,
        most=most,
        last_call_s=options.rdzv_last_call,
        local_addr=options.local_addr,
    )


def _place(options: argparse.Namespace, name: str, least: int, most: int) -> JobPlace:
    text: str | None = options.rdzv_endpoint
    if text is None:
        return JobPlace(folder=str(options.rdzv_dir.absolute() / name))
    if options.rdzv_dir is not None:
        raise ConfigurationError("--rdzv-dir and --rdzv-endpoint are set: leave one out")
    names = tuple(map(_with_port, text.split(",")))
    if len(names) == 1:
        return JobPlace(names=names, wanted=1)
    _check_names(text, names, least, most)
    return JobPlace(names=names, wanted=least)


def _check_names(text: str, names: Sequence[str], least: int, most: int) -> None:
    """Raise ConfigurationError where two halves of these names could each start a job."""
    if len({*names}) < len(names):
        raise ConfigurationError(f"--rdzv-endpoint is {text!r}, which has a name twice")
    if len(names) != most:
        raise ConfigurationError(
            f"--rdzv-endpoint has {len(names)} names and --nnodes at most {most} nodes: name each"
            " node, or only one of them, or give a --rdzv-dir"
        )
    if 2 * least <= most:
        raise ConfigurationError(
            f"--nnodes is {least}:{most}, wanted at least {most // 2 + 1}:{most} with these names,"
            " as two halves could each start a job; or give a --rdzv-dir"
        )


def _with_port(name: str) -> str:
    """Return HOST:PORT; raises ConfigurationError."""
    host, colon, port = name.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = name, str(_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"--rdzv-endpoint has {name!r}, wanted HOST or HOST:PORT, as node1:{_PORT}"
        )
    return f"{host}:{port}"
