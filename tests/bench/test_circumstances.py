"""A result file names the commit that was measured."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import circumstances

SOURCE = "measured.py"
ROOT = Path(__file__).parents[2]
WHO = ("-c", "user.name=a", "-c", "user.email=a@b")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of its own, with the file under test, a source and a result file."""
    shutil.copy(circumstances.__file__, tmp_path)
    (tmp_path / "benchmarks").mkdir()
    for path in (tmp_path / SOURCE, tmp_path / "benchmarks" / "old.json"):
        path.write_text("{}\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, *WHO, "commit", "--quiet", "--message=all")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)
    return done.stdout.decode().strip()


def told(folder: Path) -> str:
    code = "import circumstances; print(circumstances.described_commit())"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=folder, check=True, capture_output=True, timeout=60
    )
    return done.stdout.decode().strip()


def test_result_files_that_were_written_before_do_not_make_a_commit_dirty(checkout: Path) -> None:
    commit = told(checkout)
    assert commit and git(checkout, "rev-parse", "HEAD").startswith(commit)
    (checkout / "benchmarks" / "old.json").write_text("[]\n")
    (checkout / "benchmarks" / "new.json").write_text("[]\n")
    assert told(checkout) == commit
    (checkout / SOURCE).write_text("[]\n")
    assert told(checkout) == f"{commit}-dirty"


def test_what_is_no_checkout_has_no_commit(tmp_path: Path) -> None:
    shutil.copy(circumstances.__file__, tmp_path)
    assert told(tmp_path) == "None"


def test_an_archive_knows_the_commit_that_it_was_made_of(checkout: Path, tmp_path: Path) -> None:
    assert circumstances.EXPORTED.is_file()
    shutil.copy(circumstances.EXPORTED, checkout)
    shutil.copy(ROOT / ".gitattributes", checkout)
    attributes = checkout / ".gitattributes"
    attributes.write_text(attributes.read_text().replace("benchmarks/exported", "exported"))
    git(checkout, "add", "--all")
    git(checkout, *WHO, "commit", "--quiet", "--message=more")
    exported = checkout / "exported"
    git(checkout, "archive", "--format=zip", f"--output={exported}.zip", "HEAD")
    shutil.unpack_archive(f"{exported}.zip", exported)
    commit = told(checkout)
    shutil.rmtree(checkout / ".git")
    assert told(exported) == commit
