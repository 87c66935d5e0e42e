"""A zygote that has loaded its libraries under other settings is refused, with both."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.launch.own_zygote import check_zygote

LISTEN = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[socket.socket]:
    """To a process with one thread for OpenMP."""
    place = str(tmp_path / "zygote.sock")
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, place],
        env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"listens\n"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(place)
            yield sock
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_the_same_settings_fit(connection: socket.socket) -> None:
    check_zygote(connection, "zygote.sock", {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"OMP_NUM_THREADS": "4"}, "with OMP_NUM_THREADS=1, and .* have OMP_NUM_THREADS=4"),
        ({}, "with OMP_NUM_THREADS=1, and .* have no OMP_NUM_THREADS"),
        (
            {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7"},
            "with no PYTHONHASHSEED, and .* PYTHONHASHSEED=7",
        ),
    ],
)
def test_other_settings_are_refused(
    connection: socket.socket, env: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_zygote(connection, "zygote.sock", env)
