"""The secret of a job that starts: from a file, made here, or asked of node 0."""

import time
from collections.abc import Mapping
from pathlib import Path

from elaswave_plugin.agent.peers.rendezvous import open_to_first
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.secret import (
    SECRET_FILE,
    Dialling,
    Kind,
    Secret,
    named_secret,
    read_secret,
    secret_in,
    secrets_of_user,
    write_secret,
)
from elaswave_plugin.ipc.wire import receive_frame

REQUIRE = "--elaswave-require-secret"
_AGAIN_S = 0.05
_ANSWER_S = 5.0


def first_secret(env: Mapping[str, str], run_dir: Path | None) -> Secret:
    """Return the secret of a job that this node starts: that of ELASWAVE_SECRET_FILE, or a new one.

    It is left in the run directory, for commands that come to the job (`elaswave status`). Raises
    ConfigurationError.
    """
    secret = named_secret(env) or Secret.new()
    if run_dir is not None:
        try:
            write_secret(secret_in(run_dir), secret, replace=True)
        except OSError as error:
            raise ConfigurationError(
                f"the run directory is {str(run_dir)!r}, and the job's secret cannot be written"
                f" there ({error.strerror}); name a folder of yours (--elaswave-dir)"
            ) from error
    return secret


def check_required(env: Mapping[str, str], *, alone: bool, required: bool) -> None:
    """Raise ConfigurationError where the secret would have to be handed out, and must not be."""
    if required and not alone and not env.get(SECRET_FILE):
        raise ConfigurationError(
            f"{REQUIRE} is set, and {SECRET_FILE} is not: make a file with `elaswave secret new"
            " FILE`, have it on every node, and name it there"
        )


def agreed_secret(
    env: Mapping[str, str],
    run_dir: Path | None,
    *,
    node: int,
    host: str,
    ports: tuple[int, ...],
    job: str,
    timeout_s: float,
) -> Secret:
    """Return the secret of a job that node 0, at `host`, starts; it may be this `node`.

    For the others it is that of ELASWAVE_SECRET_FILE; else what node 0 has left in the run
    directory, or to this user on this machine; else what node 0 hands out. Where node 0 does not
    answer in time, it is one that no job has: the meeting says so better. Raises
    ConfigurationError.
    """
    if node == 0:
        return first_secret(env, run_dir)
    secret, deadline_s = named_secret(env), time.monotonic() + timeout_s
    while secret is None:
        for port in ports:
            try:
                return _asked(host, port, job, run_dir)
            except (OSError, ValueError) as error:
                if isinstance(error, ConfigurationError):
                    raise
        if time.monotonic() > deadline_s:
            return Secret.new()
        # Nothing can be waited for: node 0 may start later than this one.
        time.sleep(_AGAIN_S)
    return secret


def _asked(host: str, port: int, job: str, run_dir: Path | None) -> Secret:
    sock, opening = open_to_first(host, port, job)
    with sock:
        left = list(secrets_of_user())
        if run_dir is not None and secret_in(run_dir).exists():
            left.append(read_secret(secret_in(run_dir)))
        for secret in left:
            if secret.fingerprint == opening.get("fingerprint"):
                return secret
        if not opening.get("hands_out"):
            raise ConfigurationError(
                f"node 0 does not hand out the job's secret, {SECRET_FILE} is not set here, and"
                f" the run directory {'has another one' if run_dir else 'is not named'}: set"
                f" {SECRET_FILE} to the same file on every node"
            )
        sock.sendall(Dialling(Secret.new(), Kind.SECRET).opening)
        answer = receive_frame(sock, _ANSWER_S, longest_bytes=1 << 16)
        return Secret(str(answer["secret"]).encode())
