"""A message that an agent sends after its promise is newer than what it promised with."""

from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.testing import Cluster


def test_who_has_exited_during_the_election_is_not_waited_for() -> None:
    cluster = Cluster((0, 1, 2, 3), Timeouts())
    for command in ("start", "quiesce all", "seal all", "done 1,2,3"):
        cluster.do(command)
    late = (3, 1)
    cluster.held.add(late)  # its promise is on its way for long
    cluster.do("kill 0")
    assert not cluster.alive[1].leads
    cluster.do("done 2 0")
    cluster.held.discard(late)
    cluster.order += [late] * len(cluster.wires[late])
    cluster.run()
    assert cluster.alive[1].leads
    for command in ("quiesce all", "done 1 0", "done 3 0"):
        cluster.do(command)
    assert {slot: end.exit_code for slot, end in cluster.ends.items()} == {1: 0, 2: 0, 3: 0}
