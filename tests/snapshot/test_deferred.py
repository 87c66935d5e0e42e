"""The optimizer state behind the compute, where it is given up and still being read."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave_plugin.errors import LinkError
from elaswave_plugin.snapshot import restore
from elaswave_plugin.snapshot.restore import Access, DeferredMoments
from tests.job_secret import SECRET


def test_a_read_that_does_not_heed_that_it_is_dropped_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, reads = threading.Event(), threading.Event()

    def read_stuck(*_: object, **__: object) -> None:
        reads.set()
        assert goes_on.wait(10)

    monkeypatch.setattr(restore, "read_parts", read_stuck)
    plan: Any = SimpleNamespace(epoch=3)
    pool: Any = None
    moments = DeferredMoments(
        plan,
        Access(slot=0, pool=pool, secret=SECRET, timeout_s=0.1),
        write=lambda moments: None,
    )
    try:
        assert reads.wait(10)
        with pytest.raises(LinkError, match=r"still being read 0\.1 s after it was given up"):
            moments.drop()
    finally:
        goes_on.set()
    # What ends in time is dropped without a word.
    monkeypatch.setattr(moments, "_timeout_s", 10.0)
    moments.drop()
    assert not moments.is_on_its_way
