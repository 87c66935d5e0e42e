"""Refuses a zygote whose libraries were loaded under other settings than the job's.

Some variables are read when a library is loaded, which a zygote has done: a worker that it forks
would compute with its threads, and not have the bits of one that was started by exec (standard
library only).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from elaswave_plugin.errors import ConfigurationError

_READ_AT_LOAD = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_")
_READ_AT_START = ("PYTHONHASHSEED",)
_CREDENTIALS = struct.Struct("3i")


def check_zygote(sock: socket.socket, path: str, env: Mapping[str, str]) -> None:
    """Raise ConfigurationError for settings that the zygote at ``path`` has loaded otherwise.

    ``sock``: a connection to it; ``env``: what a worker is to have. One of another user, whose
    environment may not be read, is taken as it is.
    """
    size = _CREDENTIALS.size
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, _, _ = _CREDENTIALS.unpack(data)
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return
    pairs = (line.decode(errors="replace").partition("=") for line in lines if line)
    theirs = {name: value for name, _, value in pairs}
    for name in sorted({*theirs, *env}):
        is_read = name.startswith(_READ_AT_LOAD) or name in _READ_AT_START
        if is_read and theirs.get(name) != env.get(name):
            raise ConfigurationError(
                f"--zygote is {path}, which was started with {_said(name, theirs)}, and workers are"
                f" to have {_said(name, env)}, which it has read already: start it with the same"
            )


def _said(name: str, values: Mapping[str, str]) -> str:
    return f"{name}={values[name]}" if name in values else f"no {name}"
