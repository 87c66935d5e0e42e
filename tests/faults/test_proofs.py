"""Declarations of the fault tests: every job declares, nothing is lost, CI has each promise."""

import json
from collections import Counter
from collections.abc import Mapping

from tests.proofs import Kind, Promise, Proof
from tests.sample import PARTS
from tests.tidy.collected import ROOT, declared
from tests.tidy.documents import PROOFS, block_of
from tests.tidy.proofs import declared_table

BEFORE = ROOT / "tests" / "proofs_before.json"
# Left to `make matrix`: times of steps, which another load on the machine changes.
OF_TIME = {(Kind.KILL, Promise.SHORTER)}
# One agent a node has taken the place of a supervisor a worker: what was lost with that, is now
# lost with a guardian, which is the loss of its node.
RENAMED = {
    "a supervisor is killed with its worker": str(Kind.NODE),
    "supervisors are killed with all copies of a state": str(Kind.COPIES),
}
GONE = {
    # The control of draws in a running stream lost three workers, and whether the last of them
    # changed anything hung on who was first; one loss shows the same.
    Proof(str(Kind.SABOTAGE), "2 1 3", "3:gather 3:gather 2:gather", str(Promise.SEEN)): 1,
    # Copies at a supervisor of the same node are gone: a node holds its memory once.
    Proof(str(Kind.NODE), "1", "", str(Promise.EQUAL)): 1,
    # Was the death of one of two supervisors of a node; now that of node 1.
    Proof(str(Kind.NODE), "2", "", str(Promise.GOES_ON)): 1,
    Proof(str(Kind.NODE_RETURN), "1 3", "", str(Promise.GOES_ON)): 1,
    # The end of a node's own zygote costs nobody any more (NOBODY_LOST).
    Proof(str(Kind.ZYGOTE), "", "", str(Promise.STOPS)): 1,
    # An idle place has no process of its own that could outlive the launcher.
    Proof(str(Kind.NOTHING), "", "", str(Promise.CLEAN)): 1,
    # Declared without the names of process ids.
    Proof(str(Kind.SUSPEND), "pid", "", str(Promise.EQUAL)): 1,
    Proof(str(Kind.SUSPEND), "supervisor_pid pid", "", str(Promise.EQUAL)): 1,
}


def lost(before: Mapping[Proof, int], now: Mapping[Proof, int]) -> dict[Proof, int]:
    """Count the cases that were there before and are not any more."""
    missing = {proof: count - now.get(proof, 0) for proof, count in before.items()}
    return {proof: count for proof, count in missing.items() if count > 0}


def test_every_test_of_a_job_declares_what_it_proves() -> None:
    jobs = [case for case in declared() if case.has_job]
    assert len(jobs) > 1000
    assert {f"{case.file}::{case.test}" for case in jobs if case.proof is None} == set()


def test_nothing_that_was_proven_is_lost() -> None:
    before = Counter[Proof]()
    for kind, victim, moment, promise, count in json.loads(BEFORE.read_text()):
        before[Proof(RENAMED.get(kind, kind), victim, moment, promise)] += count
    now = Counter(case.proof for case in declared() if case.proof is not None)
    assert sum(before.values()) == 1918
    assert lost(before, now) == GONE
    # The comparison sees a proof that is gone.
    some = next(iter(before))
    assert lost(before, now - Counter({some: now[some]})) == {some: before[some], **GONE}


def test_each_fault_with_each_promise_is_in_every_part() -> None:
    """Of tests that are slow by themselves, none is; `tests/sample.py` deals out the others."""
    found = [(case.proof, case.parts) for case in declared() if case.proof is not None]
    pairs = {(proof.kind, proof.promise) for proof, _ in found}
    assert len(pairs) > 100
    for part in range(PARTS):
        here = {(proof.kind, proof.promise) for proof, parts in found if part in parts}
        assert pairs - here == OF_TIME


def test_the_page_has_the_declarations() -> None:
    assert block_of(PROOFS.read_text("utf-8"), "declared") == declared_table()
