"""A test fault of a save waits for the first byte, wherever in the folder it is."""

import threading
from pathlib import Path

from elaswave_plugin.recovery.phases import bytes_in, once_written

LIMIT_S = 20.0


def test_it_fires_once_at_the_first_byte(tmp_path: Path) -> None:
    fired: list[int] = []
    has_fired = threading.Event()

    def fire() -> None:
        fired.append(bytes_in(tmp_path))
        has_fired.set()

    with once_written(tmp_path, fire):
        (tmp_path / "empty").touch()
        (tmp_path / "folder").mkdir()
        assert not fired
        (tmp_path / "folder" / "data").write_bytes(bytes(7))
        assert has_fired.wait(LIMIT_S)
    assert fired == [7]


def test_it_does_not_fire_without_a_byte_nor_after_the_block(tmp_path: Path) -> None:
    fired: list[int] = []
    with once_written(tmp_path, lambda: fired.append(1)):
        (tmp_path / "empty").touch()
    (tmp_path / "data").write_bytes(bytes(7))
    assert not fired
    assert bytes_in(tmp_path) == 7 and bytes_in(tmp_path / "missing") == 0
