"""A server of sealed snapshots for a test."""

import pytest

from tests.agent.serving import SlotStore, serve


@pytest.fixture
def served() -> tuple[SlotStore, str]:
    store = SlotStore(3)
    return store, serve(store)
