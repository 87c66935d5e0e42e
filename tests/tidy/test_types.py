"""Types hold in all of the sources; mypy was started beside the tests before this one."""

import subprocess

import pytest


@pytest.mark.timeout(600)
def test_mypy_result_is_clean(mypy: subprocess.Popen[str]) -> None:
    output, _ = mypy.communicate(timeout=600)
    assert mypy.returncode == 0, output
