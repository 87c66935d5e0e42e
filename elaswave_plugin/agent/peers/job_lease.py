"""The lease of a job: the leader's agent renews it, and the job trains by it.

Where it cannot be renewed, the trainers wait; where another life of the job has begun meanwhile,
this one is over. A thread of its own, as the file system may stand still.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

from elaswave_plugin.agent.peers.job_place import Lease
from elaswave_plugin.core.agreement.founding import LEASE_S
from elaswave_plugin.core.agreement.lease import DRIFT
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.progress_page import lease_clock_s
from elaswave_plugin.ipc.reactor import Reactor

_EVERY_S = 2.0
_END_WITHIN_S = 10.0
_AGAIN_S = 0.2


class JobLease:
    """One agent's part; `life`: of the job; `on_over(why)`: another life of it has begun.

    `leads`: whether this agent is to renew it from the start.
    """

    def __init__(
        self,
        lease: Lease,
        life: int,
        reactor: Reactor,
        *,
        leads: bool,
        on_over: Callable[[str], None],
    ) -> None:
        self._lease = lease
        self._life = life
        self._reactor = reactor
        self._leads = leads
        self._contacts: tuple[str, ...] = ()
        self._on_over = on_over
        self._told = False
        self._stopped = False
        self._exit_code: int | None = None
        self._then: Callable[[], None] = lambda: None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job-lease", daemon=True)
        # By the clock of leases.
        self.until_s = 0.0

    def start(self) -> None:
        """Begin to renew it."""
        self._thread.start()

    def tell(self, *, leads: bool, contacts: tuple[str, ...]) -> None:
        """Have it renewed from here or not; `contacts`: where agents of the job answer."""
        begins = leads and not (self._leads and self._contacts)
        self._leads, self._contacts = leads, contacts
        if begins:
            self._wake.set()

    def finish(self, exit_code: int | None, then: Callable[[], None]) -> None:
        """Renew it no more; with an exit code, end the job's life in the record; ``then()``.

        A file system that stands still is not waited for: then the lease runs out.
        """
        self._exit_code, self._then = exit_code, then
        self._stopped = True
        self._wake.set()
        self._reactor.after(_END_WITHIN_S if self._thread.is_alive() else 0.0, then)

    def _run(self) -> None:
        while not self._stopped:
            if self._leads:
                self._renew()
            self._wake.wait(_EVERY_S)
            self._wake.clear()
        if self._exit_code is not None:
            self._end(self._exit_code)
        self._reactor.post(self._then)

    def _end(self, exit_code: int) -> None:
        deadline_s = time.monotonic() + _END_WITHIN_S
        while True:
            try:
                self._lease.end(self._life, exit_code)
                return
            except OSError as error:
                if time.monotonic() > deadline_s:
                    say(f"the end of the job is not written {self._lease.where} ({error})")
                    return
                time.sleep(_AGAIN_S)  # others may hold the record for a moment

    def _renew(self) -> None:
        began_s = lease_clock_s()
        try:
            lives = self._lease.renew(self._life, self._contacts)
        except OSError as error:
            if not self._told:
                self._told = True
                say(
                    f"the job's lease {self._lease.where} cannot be renewed ({error}): without it"
                    f" the workers wait after {LEASE_S:g} s, so that no second job trains"
                )
            return
        if not lives:
            why = f"the job has ended, or another life of it begun, {self._lease.where}"
            self._reactor.post(partial(self._on_over, why))
            self._stopped = True
            return
        if self._told:
            self._told = False
            say("the job's lease is renewed again")
        self.until_s = began_s + LEASE_S * (1 - DRIFT)
