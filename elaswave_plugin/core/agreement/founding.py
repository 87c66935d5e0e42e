"""The start of a job by nodes that are started with one line each: found, join, end (pure).

They share a record, of which each looks at the newest state about once a second, alone for that
moment, and leaves it changed. A job of one name has one life at a time: nodes meet, the founder
chooses those that the job begins on, their agents start it, and from then on its leader renews the
record. A life whose record stands still for longer than a lease is over, and the nodes that wait
found the next one. The job trains only while its own lease lasts, which is shorter and counted from
before the record was renewed: so no two lives ever train at the same time.

Nobody compares clocks: each one measures for how long it has seen something stand still.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

from elaswave_plugin.errors import EXIT_REQUEUE, EXIT_TOLD

MEETS, STARTS, RUNS, ENDED = "meets", "starts", "runs", "ended"
LEASE_S = 10.0
"""A job trains for less than this after its record was renewed for the last time."""
OVER_S = 1.1 * LEASE_S
"""Who has seen it stand still for so long knows that the lease has run out, whatever its clock."""
GONE_S = 5.0
"""A waiting node that has looked no more for so long is not waited with."""
AGAIN = (EXIT_REQUEUE, EXIT_TOLD)
"""After these exit codes the same line begins a new life of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A node that waits: how often it has looked."""

    looks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The state of a job, for the nodes that are started with its name.

    `life`: the number of its present life; `program`: what its founder runs; `founder`: the node
    that chooses; `waiting`: in the order in which they came; `chosen`: the nodes of the launch by
    rank, which meet at `address`, and whose scripts are given `scripts_port`; `renewals`: changed
    by the agent that leads, once there is one; `contacts`: agents of the job; `exit_code`: once it
    has ended.
    """

    life: int = 0
    state: str = ENDED
    program: Mapping[str, object] = field(default_factory=dict)
    founder: str = ""
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    address: str = ""
    scripts_port: int = 0
    renewals: int = 0
    contacts: tuple[str, ...] = ()
    exit_code: int = EXIT_REQUEUE


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again soon; `why`: for people."""

    why: str


@dataclass(frozen=True, slots=True)
class Start:
    """Begin the job's life on `nodes` nodes, as the one of this rank; they meet at `address`."""

    life: int
    rank: int
    nodes: int
    address: str
    scripts_port: int


@dataclass(frozen=True, slots=True)
class Join:
    """The job runs: take slots that are free, by way of any of its agents."""

    life: int
    contacts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The job has ended with this exit code."""

    exit_code: int


Decision = Wait | Start | Join | End


class Founder:
    """One node's part: `look` at the record again and again, until there is something to do.

    `name`: of this node, which no other has; `last_call`: on how many nodes the job begins.
    """

    def __init__(self, name: str, *, program: Mapping[str, object], last_call: "LastCall") -> None:
        self._name = name
        self._program = program
        self._last_call = last_call
        self._seen = Seen()
        self._looks = 0
        self._tried_life = 0

    def look(
        self, record: JobRecord, now_s: float, *, address: str, scripts_port: int
    ) -> tuple[JobRecord, Decision]:
        """Return what the record becomes, and what to do.

        `address`: where the others reach this node, if it founds; `scripts_port`: another port.
        """
        self._looks += 1
        if record.state == ENDED and record.exit_code not in AGAIN:
            return record, End(record.exit_code)
        if self._is_over(record, now_s):
            record = self._new_life(record)
        if record.state == MEETS:
            record = self._meet(record, now_s)
            there, founds = len(record.waiting), record.founder == self._name
            count = self._last_call.enough(there, record.life, now_s) if founds else 0
            if not count:
                return record, self._last_call.wait(there)
            record = self._choose(record, count, address, scripts_port)
        if record.state == ENDED:
            return record, Wait("the lease of the job's last life to run out")
        rank = record.chosen.index(self._name) if self._name in record.chosen else None
        if record.state == STARTS and rank is not None and self._tried_life < record.life:
            nodes = len(record.chosen)
            return record, Start(record.life, rank, nodes, record.address, record.scripts_port)
        if record.state == RUNS:
            return record, Join(record.life, record.contacts)
        return record, Wait("the nodes that were chosen to start the job")

    def decided(self, decision: Decision) -> None:
        """Note what was decided, once the record is written."""
        if isinstance(decision, Start):
            self._tried_life = decision.life

    def start_failed(self, record: JobRecord, life: int) -> JobRecord:
        """Meet again where the life that this node has founded never ran: its agent met nobody."""
        if record.life != life or record.state != STARTS or record.founder != self._name:
            return record
        return self._new_life(record)

    # ---- inside -------------------------------------------------------------------------------

    def _is_over(self, record: JobRecord, now_s: float) -> bool:
        """Return whether nobody is left of those that this state waits for."""
        if record.state == MEETS:  # nothing is started yet
            return record.founder not in record.waiting
        if not record.life:
            return True
        # Agents of an end that asks for another life may not all be gone either.
        which = "renewals", record.life, record.state
        return self._seen.still_s(which, record.renewals, now_s) > OVER_S

    def _new_life(self, record: JobRecord) -> JobRecord:
        """Found the next one; who waits already waits for it."""
        waiting = record.waiting if record.state == MEETS else {}
        return JobRecord(
            life=record.life + 1,
            state=MEETS,
            program=self._program,
            founder=self._name,
            waiting={**waiting, self._name: Waiting(looks=self._looks)},
        )

    def _meet(self, record: JobRecord, now_s: float) -> JobRecord:
        """Wait with the others, and without those that are gone: any may have to found."""
        everybody = {**record.waiting, self._name: Waiting(looks=self._looks)}
        there = {
            name: one
            for name, one in everybody.items()
            if self._seen.still_s(("node", name), one.looks, now_s) <= GONE_S
        }
        return replace(record, waiting=there)

    def _choose(self, record: JobRecord, count: int, address: str, scripts_port: int) -> JobRecord:
        """Begin on this number of nodes, the founder first: the others meet at its address."""
        others = [name for name in record.waiting if name != self._name]
        return replace(
            record,
            state=STARTS,
            chosen=(self._name, *others)[:count],
            address=address,
            scripts_port=scripts_port,
            waiting={},
        )


class LastCall:
    """Tells on how many of the nodes that are there a job begins, once it is time.

    That is once `most` are there, or `last_call_s` after `least` of them, which `fits` allows.
    """

    def __init__(
        self, least: int, most: int, *, last_call_s: float, fits: Callable[[int], bool]
    ) -> None:
        self._least = least
        self._most = most
        self._last_call_s = last_call_s
        self._fits = fits
        self._seen = Seen()

    def enough(self, there: int, life: int, now_s: float) -> int:
        """Return the number of nodes to begin a life on now; 0: more are waited for."""
        count = min(there, self._most)
        while count >= self._least and not self._fits(count):
            count -= 1
        is_enough = count >= self._least
        since_s = self._seen.still_s(("enough", life), is_enough, now_s)
        called = there >= self._most or since_s >= self._last_call_s
        return count if is_enough and called else 0

    def wait(self, there: int) -> Wait:
        """Say what is waited for."""
        return Wait(f"{self._least} nodes to come, and {there} are there")


class Seen:
    """Measures for how long values have stood still before one process, by its own clock."""

    def __init__(self) -> None:
        self._since: dict[Hashable, tuple[Hashable, float]] = {}

    def still_s(self, name: Hashable, value: Hashable, now_s: float) -> float:
        """Return for how long this has had this value."""
        if self._since.get(name, (object(), 0.0))[0] != value:
            self._since[name] = value, now_s
        return now_s - self._since[name][1]


def renewed(record: JobRecord, life: int, contacts: tuple[str, ...]) -> JobRecord | None:
    """Renew the record of a life; None where another life has begun, or this one has ended.

    `contacts`: the addresses of its agents, none before they have met.
    """
    if record.life != life or record.state not in (STARTS, RUNS):
        return None
    state = RUNS if contacts else record.state
    return replace(record, state=state, renewals=record.renewals + 1, contacts=contacts)


def ended(record: JobRecord, life: int, exit_code: int) -> JobRecord | None:
    """End a life; None where another one has begun, or its end is told."""
    if record.life != life or record.state == ENDED:
        return None
    return replace(record, state=ENDED, exit_code=exit_code, contacts=())
