"""The files of a job's secret: those that are taken, and those that are refused with what to do."""

import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elaswave_plugin.cli.main import run_command
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc import secret as secrets
from elaswave_plugin.ipc.secret import (
    SECRET_FILE,
    Secret,
    left_to_user,
    named_secrets,
    read_secret,
    secret_in,
    secrets_of_user,
    write_secret,
)
from elaswave_plugin.launch.job_secret import check_required, first_secret


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "of-user"
    monkeypatch.setattr(secrets, "user_folder", lambda: folder)
    return folder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_written_secret_is_read_again_by_its_owner_alone(tmp_path: Path) -> None:
    secret = Secret.new()
    write_secret(tmp_path / "s", secret)
    assert read_secret(tmp_path / "s") == secret and mode_of(tmp_path / "s") == 0o600
    assert os.listdir(tmp_path) == ["s"]
    assert "value" not in repr(secret) and secret.value.decode() not in str(secret)
    with pytest.raises(FileExistsError):
        write_secret(tmp_path / "s", Secret.new())
    write_secret(tmp_path / "s", Secret.new(), replace=True)
    assert read_secret(tmp_path / "s") != secret


@pytest.mark.parametrize(
    ("content", "mode", "complaint"),
    [
        (None, 0o600, r"cannot be read \(No such file or directory\); make one with `elaswave sec"),
        ("", 0o600, "has 0 characters, wanted 32 to 4096"),
        ("short", 0o600, "has 5 characters, wanted 32 to 4096"),
        ("x" * 5000, 0o600, "has 4097 characters"),
        ("x" * 64, 0o644, "has mode 0644, wanted at most 0640, .* chmod 600 "),
        ("x" * 64, 0o660, "has mode 0660, wanted at most 0640"),
    ],
)
def test_what_is_no_secret_is_refused(
    tmp_path: Path, content: str | None, mode: int, complaint: str
) -> None:
    path = tmp_path / "s"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigurationError, match=complaint) as error:
        read_secret(path)
    assert "\n" not in str(error.value) and "x" * 64 not in str(error.value)


def test_a_group_may_read_it_and_a_folder_is_none(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("x" * 64 + "\n")
    path.chmod(0o440)
    assert read_secret(path) == Secret(b"x" * 64)
    with pytest.raises(ConfigurationError, match="is no regular file"):
        read_secret(tmp_path)


def test_a_named_file_wins_over_the_run_directory_and_that_over_other_jobs(
    tmp_path: Path, user: Path
) -> None:
    named, left, of_user = Secret.new(), Secret.new(), Secret.new()
    write_secret(tmp_path / "named", named)
    write_secret(secret_in(tmp_path), left)
    with left_to_user(of_user):
        assert mode_of(user) == 0o700
        assert named_secrets({SECRET_FILE: str(tmp_path / "named")}, tmp_path) == [named]
        assert named_secrets({}, tmp_path) == [left]
        assert named_secrets({}, None) == [of_user]
    assert not user.exists()
    (unknown,) = named_secrets({}, None)
    assert unknown not in (named, left, of_user)


def test_a_folder_that_others_can_enter_is_not_used(user: Path) -> None:
    user.mkdir(mode=0o755)
    with left_to_user(Secret.new()):
        assert os.listdir(user) == []


def test_what_a_killed_launcher_has_left_is_removed(user: Path) -> None:
    user.mkdir(mode=0o700)
    write_secret(user / f"{2**22 + 1}-0123", Secret.new())  # no process has that number
    with left_to_user(Secret.new()):
        assert [name.partition("-")[0] for name in os.listdir(user)] == [str(os.getpid())]


def test_what_a_living_launcher_has_left_stays_whatever_its_process_id(user: Path) -> None:
    user.mkdir(mode=0o700)
    other = user / f"{2**22 + 1}-0123"  # of a container with process ids of its own
    with other.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with left_to_user(Secret.new()):
            assert other.exists()


def test_launchers_that_start_and_end_at_once_remove_nothing_of_each_other(user: Path) -> None:
    """Nor the folder, which whoever is the last to end removes."""

    def leave(_: int) -> bool:
        secret = Secret.new()
        with left_to_user(secret):
            return secret in secrets_of_user()

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(leave, range(1000)))
    assert not user.exists()


def test_what_was_made_anew_in_a_place_is_not_removed_for_the_old(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the opening and the lock of a file that nobody holds, it goes and comes again."""
    user.mkdir(mode=0o700)
    left = user / "1-of-a-killed-launcher"
    left.write_text("old")
    flock = fcntl.flock

    def replaced(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        left.unlink()
        left.write_text("new")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", replaced)
    with left_to_user(Secret.new()):
        assert left.read_text() == "new"


def test_each_job_has_another_and_leaves_it_in_its_run_directory(tmp_path: Path) -> None:
    one = first_secret({}, tmp_path)
    assert read_secret(secret_in(tmp_path)) == one and mode_of(secret_in(tmp_path)) == 0o600
    assert first_secret({}, tmp_path) != one


def test_a_required_secret_is_that_of_a_file_where_there_are_several_nodes() -> None:
    check_required({}, alone=True, required=True)
    check_required({}, alone=False, required=False)
    check_required({SECRET_FILE: "f"}, alone=False, required=True)
    with pytest.raises(ConfigurationError, match="--elaswave-require-secret is set, and ELASWAVE_"):
        check_required({}, alone=False, required=True)


def test_the_command_makes_a_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.secret"
    assert run_command(["secret", "new", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"set {SECRET_FILE} to it on every node" in said
    assert read_secret(path).value.decode() not in said
    assert run_command(["secret", "new", str(path)]) == 2
    assert "exists; name a new file" in capsys.readouterr().err
