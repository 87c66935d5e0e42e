"""Pages say the same of launchers, machines and strangers, and tests show what they say."""

import re
from pathlib import Path

import pytest

from tests.tidy.features import FEATURES, contradicting_pages, contradictions

ROOT = Path(__file__).resolve().parents[2]


def test_no_page_denies_what_a_test_shows() -> None:
    assert contradicting_pages(ROOT) == {}


def test_the_tests_that_are_named_exist() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text("utf-8"), re.MULTILINE)
    }
    assert {test for one in FEATURES for test in one.tests} <= defined


@pytest.mark.parametrize(
    "stale",
    [
        "| Slurm, Kubernetes | untested: the examples are written from their documentation |",
        "- The network of the job is trusted: a program that reaches a port of the job can end it.",
        "Jobs under torchrun are not run.",
    ],
)
def test_a_stale_sentence_is_seen(stale: str) -> None:
    assert len(contradictions(f"A page.\n\n{stale}\n\nThe end.\n")) == 1


@pytest.mark.parametrize(
    "right",
    [
        "What follows was run on a real Slurm of four nodes.",
        "On Kubernetes the examples are untested.",
        "A process that reaches a port of the job proves nothing and is closed.",
    ],
)
def test_what_is_right_is_left_alone(right: str) -> None:
    assert contradictions(f"A page.\n\n{right}\n\nThe end.\n") == []
