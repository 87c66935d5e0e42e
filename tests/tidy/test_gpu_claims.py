"""Every claim about a GPU says "not run" until a result file of `make gpu` shows it."""

import json
from pathlib import Path

import pytest

from tests.tidy.gpu_claims import RESULTS, is_result, pages, unshown_claims

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = (
    "A kill of one of 8 workers on H100 costs 90 ms.",
    "| H200 | median 90 ms |",
    "This ran on a GPU.",
    "Recoveries were run over NCCL; all were bit-equal.",
    "- `pytest -m gpu` passed on two GPUs",
    "Seals were measured on a GPU: 12 GB/s.",
    "On GPUs the step takes 1.03x the time.",
    "Nothing else is needed. An abort\nover NCCL took 40 ms. It says so.",
)


def test_no_page_claims_what_no_result_file_shows() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): claims
        for path in pages(ROOT)
        if (claims := unshown_claims(path.read_text("utf-8"), ROOT))
    }
    assert not found, f'say "not run", or name a file of {RESULTS} that shows it: {found}'


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_is_seen(claim: str, tmp_path: Path) -> None:
    assert len(unshown_claims(f"A page.\n\n{claim}\n\nThe end.\n", tmp_path)) == 1


@pytest.mark.parametrize(
    "plain",
    [
        "On a GPU: not run.",
        "Aborts over NCCL are **not run**, whatever 40 ms are.",
        "Measured on 2 CPU cores, no GPU: 90 ms.",
        "`gpu_engine`: NCCL needs one process per GPU.",
        "```\nThis ran on a GPU.\n```",
    ],
)
def test_what_claims_nothing_is_left_alone(plain: str, tmp_path: Path) -> None:
    assert unshown_claims(plain, tmp_path) == []


@pytest.mark.parametrize(
    ("device", "status", "shown"),
    [
        ("cuda", "passed", True),
        ("stand-in", "passed", False),
        ("cuda", "failed", False),
        ("", "not run", False),
    ],
)
def test_a_result_of_a_gpu_shows_a_claim(
    device: str, status: str, shown: bool, tmp_path: Path
) -> None:
    place = tmp_path / RESULTS / "h100.json"
    claim = f"On H100 a loss adds 90 ms ({RESULTS}/h100.json)."
    assert unshown_claims(claim, tmp_path) == [claim]
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps({"items": [{"device": device, "status": status}]}))
    assert unshown_claims(claim, tmp_path) == ([] if shown else [claim])


def test_committed_results_are_of_gpus_and_without_one_the_pages_say_so() -> None:
    results = sorted((ROOT / RESULTS).glob("*.json"))
    assert all(is_result(path) for path in results)
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    assert all(f"{RESULTS}/{path.name}" in page for path in results)
    if not results:
        assert "every statement about GPUs on these pages is **not run**" in " ".join(page.split())
        assert (
            "On GPUs and on several physical machines: not run" in (ROOT / "README.md").read_text()
        )
