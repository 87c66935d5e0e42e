"""Entry of a supervisor process: reads what it is told, ties itself to its parent, runs."""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from elaswave_plugin.core.patience import Patience
from elaswave_plugin.runtime.coordinator import Heartbeat
from elaswave_plugin.runtime.lifeline import die_with_parent
from elaswave_plugin.runtime.newcomer import serve as serve_newcomer
from elaswave_plugin.runtime.rendezvous import Place
from elaswave_plugin.runtime.supervisor import Supervisor, SupervisorSpec
from elaswave_plugin.runtime.trainer_process import Program

EXIT_CRASHED = 70
BOOT = (
    "import sys; sys.path[0] = {root!r}; "
    "from elaswave_plugin.runtime.{module} import main; sys.exit(main(sys.argv[1:]))"
)


def spec_to_json(spec: SupervisorSpec) -> str:
    """The spec without its environment, which the process itself carries."""
    record = asdict(spec)
    del record["env"]
    return json.dumps(record)


def spec_from_json(text: str, env: Mapping[str, str]) -> SupervisorSpec:
    """The spec that `spec_to_json` described, for a trainer with this environment."""
    record: dict[str, Any] = json.loads(text)
    program = record["program"]
    return SupervisorSpec(
        place=Place(**record["place"]),
        host=record["host"],
        program=Program(
            script=program["script"],
            module=program["module"],
            args=tuple(program["args"]),
            options=tuple(program["options"]),
        ),
        env=env,
        run_dir=record["run_dir"],
        patience=Patience(**record["patience"]),
        heartbeat=Heartbeat(**record["heartbeat"]),
        joins=tuple(record["joins"]),
    )


def main(argv: Sequence[str]) -> int:
    """Arguments: parent pid, three descriptors (or -1), spec.

    The descriptors: the meeting's listener, the zygote, a pipe to which our address is written.
    """
    parent_pid, listener_fd, zygote_fd, address_fd = map(int, argv[:4])
    die_with_parent(parent_pid)
    spec, zygote = spec_from_json(argv[4], dict(os.environ)), _inherited(zygote_fd)
    if address_fd >= 0:
        os.set_inheritable(address_fd, False)

    def tell(address: str) -> None:
        if address_fd >= 0:
            os.write(address_fd, f"{address}\n".encode())
            os.close(address_fd)

    try:
        if spec.joins:
            return serve_newcomer(spec, zygote)
        supervisor = Supervisor(spec, listener=_inherited(listener_fd), zygote=zygote)
        return supervisor.run(on_met=tell)
    except Exception:
        traceback.print_exc()
        return EXIT_CRASHED


def _inherited(fd: int) -> socket.socket | None:
    """A socket handed down to us, which the trainer shall not inherit in turn."""
    if fd < 0:
        return None
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
