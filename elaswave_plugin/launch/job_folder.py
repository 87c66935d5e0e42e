"""A node's view of a job by the folder that all its nodes see: `elaswave run --rdzv-dir`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elaswave_plugin.agent.peers.job_file import held
from elaswave_plugin.core.agreement.founding import Decision, End, Founder, Join, LastCall, Wait
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.secret import SECRET_FILE, Secret, secret_in, write_secret
from elaswave_plugin.launch.job_program import check_alike

_OPEN_WITHIN_S = 60.0


class JobFolder:
    """Looks at the job's record; `who`: this node, in this life of its process.

    The job's secret lies in the folder. Raises ConfigurationError where that cannot be written.
    """

    host: str | None = None

    def __init__(
        self, folder: Path, who: str, program: Mapping[str, Any], last_call: LastCall
    ) -> None:
        self._folder = folder
        self._program = program
        self._founder = Founder(who, program=program, last_call=last_call)
        _open_folder(folder)
        os.environ.setdefault(SECRET_FILE, str(secret_in(folder)))

    def look(self, address: str, scripts_port: int) -> Decision:
        """Look at the record; a node that runs something else leaves no trace in it.

        Raises ConfigurationError for that one.
        """
        try:
            with held(self._folder) as record:
                new, decision = self._founder.look(
                    record.record, time.monotonic(), address=address, scripts_port=scripts_port
                )
                if not isinstance(decision, End):
                    joins = isinstance(decision, Join)
                    check_alike(self._program, new.program, joins=joins)
                record.write(new)
                self._founder.decided(decision)
        except OSError as error:
            return Wait(f"the record in {str(self._folder)!r} ({error})")
        return decision

    def takes_part(self, life: int) -> None:
        """Leave it to the record, which is written."""

    def waits(self, life: int) -> None:
        """Have the nodes meet again where the life that this one has founded never ran."""
        with contextlib.suppress(OSError), held(self._folder) as record:
            record.write(self._founder.start_failed(record.record, life))

    def close(self) -> None:
        """Leave it to the record, in which the job's agents have written its end."""


def _open_folder(folder: Path) -> None:
    """Make the job's folder and its secret, or take what another node has made."""
    deadline_s = time.monotonic() + _OPEN_WITHIN_S
    while True:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with held(folder):
                _make_secret(secret_in(folder))
            return
        except OSError as error:
            # Others come at the same moment; what is not writable stays so.
            if isinstance(error, TimeoutError) and time.monotonic() < deadline_s:
                continue
            raise ConfigurationError(
                f"--rdzv-dir is {str(folder.parent)!r}, where the job's folder cannot be"
                f" written or locked ({error.strerror or error}); name one that all nodes see"
            ) from error


def _make_secret(path: Path) -> None:
    """Leave a secret there, under the lock; what a killed launcher left half made is replaced."""
    if not path.exists():
        for draft in path.parent.glob(f".{path.name}.*"):
            draft.unlink()
        write_secret(path, Secret.new())
