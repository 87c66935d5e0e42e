"""A node that another leader tells to stop says so; only its own leader's word counts."""

from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.messages import Note, Over, Stop
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.errors import EXIT_FAILED, EXIT_LEFT_OUT

NODES = (0, 1, 1, 2, 2)


def told(node: int, sender: int, message: Stop, *, lost: tuple[int, ...] = ()) -> Agreement:
    agreement = Agreement(node=node, nodes=NODES, timeouts=Timeouts())
    for gone in lost:
        agreement.lost(gone, "its connection broke")
    agreement.receive(sender, message, 0.0)
    return agreement


def stop(*, exit_code: int = EXIT_FAILED, part: bool = False) -> Stop:
    return Stop(reason="as it is", exit_code=exit_code, part=part)


def ending(agreement: Agreement) -> tuple[int, list[tuple[object, object]]]:
    """With which exit code it ends, and of whom it says why."""
    effects = agreement.settle(0.0)
    codes = [effect.exit_code for effect in effects if isinstance(effect, Over)]
    notes = [effect.fields for effect in effects if isinstance(effect, Note)]
    assert len(codes) == 1
    return codes[0], [(note["by"], note["reason"]) for note in notes if "by" in note]


def test_each_node_says_that_the_job_was_stopped_elsewhere() -> None:
    says = (EXIT_FAILED, [(0, "as it is")])
    assert [ending(told(node, 0, stop())) for node in (1, 2)] == [says, says]


def test_the_leader_and_who_is_told_that_all_is_well_say_nothing_more() -> None:
    assert ending(told(0, 2, stop())) == (EXIT_FAILED, [])
    assert ending(told(2, 0, stop(exit_code=0))) == (0, [])


def test_who_is_stopped_by_a_leader_without_majority_says_so() -> None:
    says = (EXIT_LEFT_OUT, [(1, "as it is")])
    assert ending(told(2, 1, stop(part=True), lost=(0,))) == says


def test_a_leader_without_majority_stops_nobody_who_hears_another_one() -> None:
    """Of two that lead, the one that waits for its end may still reach those of the other."""
    assert not told(2, 1, stop(part=True)).over
    assert told(2, 1, stop()).over  # whatever ends the whole job may be found by anyone
