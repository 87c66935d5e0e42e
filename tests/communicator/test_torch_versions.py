"""The versions of torch whose tables of c10d are known, and one that is not."""

import re
from typing import Any

import pytest

from elaswave_plugin.communicator.groups import c10d_tables
from elaswave_plugin.errors import ConfigurationError


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0+cpu", "2.14.2", "2.15.0"])
def test_a_known_torch_is_accepted(version: str) -> None:
    c10d_tables.check_torch(version)


@pytest.mark.parametrize(("place", "wanted"), c10d_tables._KNOWN)
def test_a_torch_whose_tables_are_other_ones_is_refused_in_one_sentence(
    place: str, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = c10d_tables._found
    monkeypatch.setattr(c10d_tables, "_found", lambda one: 7 if one == place else found(one))
    with pytest.raises(ConfigurationError, match=f"{re.escape(place)} of torch .* is 7, wanted"):
        c10d_tables.check_torch("2.13.0")


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0", "unknown"])
def test_an_unknown_torch_is_refused_in_one_sentence(version: str) -> None:
    with pytest.raises(ConfigurationError, match=version):
        c10d_tables.check_torch(version)


def test_no_flight_recorder_is_attached_to_our_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.15 attaches one to each group of a backend that this set does not name."""
    named = {"gloo"}
    monkeypatch.setattr(c10d_tables.c10d, "_FR_SELF_RECORDING_BACKENDS", named, raising=False)
    c10d_tables.register_backend(lambda options, backend_options: None)
    assert named == {"gloo", c10d_tables.BACKEND}
    c10d_tables.unregister_backend()
    assert named == {"gloo"}
