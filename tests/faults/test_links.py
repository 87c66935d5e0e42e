"""Links that break between workers that live: the view is renewed, and nothing is lost."""

from dataclasses import replace

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_survived
from tests.proofs import Kind, Promise, proves

# In the backward pass of step 3 the connection of workers 1 and 2 breaks, `times` times, each of
# them once: a socket that its other end has closed too cannot be shut down (ENOTCONN), and the
# sabotage would take its own worker down with it.
SEVER = """
import socket
from elaswave_plugin.recovery import worker
from elaswave_plugin.recovery.phases import Phases
enter, init, made, left = Phases.enter, worker.Worker.__init__, [], [{times}]
def shut(sock):
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
def remember(self, **options):
    init(self, **options)
    made.append(self)
def sever(self, phase):
    if self._slot == 1 and (self.step, phase) == (3, "backward") and left[0]:
        link = made[0].links.connections.links.get(2)
        if link is not None and link.state.value == "open" and shut(link.sock):
            left[0] -= 1
            self._events.emit("severed", slot=1)
    enter(self, phase)
Phases.enter, worker.Worker.__init__ = sever, remember
"""


@proves(Kind.LINK, Promise.EQUAL)
def test_a_severed_link_costs_a_view_change_and_no_worker(
    run: Launch, reference: Reference
) -> None:
    survived = run(JobSpec(sabotage=SEVER.format(times=1)))
    check_survived(survived)
    assert len(survived.events("severed")) == 1
    views = survived.events("view_committed")
    assert [view["ranks"] for view in views] == [[0, 1, 2, 3]] * 2
    assert "the link between workers" in views[1]["reason"]
    assert survived.trace() == reference(JobSpec()).trace()


@proves(Kind.LINK, Promise.GOES_ON)
def test_a_pair_that_stays_apart_loses_one_of_the_two(run: Launch, reference: Reference) -> None:
    spec = JobSpec(sabotage=SEVER.format(times=9))
    survived = run(spec)
    assert survived.returncode == 0, survived.output[-4000:]
    assert len(survived.events("severed")) >= 3
    last = survived.events("view_committed")[-1]
    assert last["ranks"] == [0, 1, 3], last
    assert "3 times in one step" in last["reason"]
    assert survived.trace() == reference(replace(spec, sabotage="")).trace()
    assert not survived.orphans
