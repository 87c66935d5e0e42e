"""The result file of a matrix: rows of one commit only, and no case twice."""

from typing import Any

import pytest

from tests import fault_matrix
from tests.fault_matrix import joined, result_of
from tests.matrix import MATRICES

MATRIX = MATRICES[0]


def row(number: int, **changes: Any) -> dict[str, Any]:
    times = {"mttr_s": [0.3], "median_step_after_s": 0.1}
    return {**MATRIX.identity(MATRIX.cases[number]), "passed": True, **times, **changes}


def test_the_lists_have_no_case_twice() -> None:
    for matrix in MATRICES:
        assert len({str(matrix.identity(spec)) for spec in matrix.cases}) == len(matrix.cases)


def test_rows_of_the_same_commit_stay_and_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_matrix, "described_commit", lambda: "same")
    before = {"commit": "same", "rows": [row(2, seconds=1), row(0)]}
    rows = joined(MATRIX, before, [row(1), row(2, seconds=2)])
    assert rows == [row(0), row(1), row(2, seconds=2)]
    assert joined(MATRIX, {**before, "commit": "other"}, [row(1)]) == [row(1)]
    assert joined(MATRIX, None, [row(1)]) == [row(1)]


def test_a_failed_case_is_counted_and_a_step_is_taken_off_the_last_recovery() -> None:
    failed = row(1, passed=False, mttr_s=[], median_step_after_s=None)
    result = result_of(MATRIX, [row(0), failed, row(2, mttr_s=[0.1, 0.5])])
    assert (result["cases"], result["passed"]) == (3, 2)
    assert result["mttr_s"] == {"median": 0.3, "max": 0.5}
    assert result["mttr_less_a_step_s"] == {"median": 0.3, "max": 0.4}
