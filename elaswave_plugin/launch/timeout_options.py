"""The timeouts of a job's supervisors: options of `elaswave run` and of torchrun's launches.

Each is also a variable of the environment, for launches whose command line has no room for it:
--notice-timeout-s is ELASWAVE_NOTICE_TIMEOUT_S.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from elaswave_plugin.core.agreement.timeouts import Heartbeat, Timeouts
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.environment import QUIESCE, variable

START, HEARTBEAT = "start_timeout_s", "heartbeat_timeout_s"
START_S = 600.0
_MEANING = (
    (QUIESCE, "a worker that does not answer a view change in this time is killed"),
    (START, "the job does not start unless all nodes come within this time"),
    ("join_timeout_s", "a worker that has not joined the job within this time is killed"),
    ("quorum_wait_s", "a minority of the nodes stops after this time"),
    (HEARTBEAT, "a supervisor that is silent for this time counts as lost"),
    ("finish_grace_s", "a finished worker that has not exited within this time is killed"),
    (
        "notice_timeout_s",
        "workers that were asked to leave are killed after this time; a last checkpoint has to be"
        " written by then",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimeouts:
    """``start_s``: for how long the supervisors look for one another."""

    start_s: float
    agreement: Timeouts
    heartbeat: Heartbeat


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


def seconds(text: str) -> float:
    """A positive number; raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return value


def _defaults() -> dict[str, float]:
    agreement = Timeouts()
    here = {START: START_S, HEARTBEAT: Heartbeat().timeout_s}
    return {name: here.get(name) or getattr(agreement, name) for name, _ in _MEANING}
