"""Contexts that passes enter by hand, and do not leave where they are interrupted."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave_plugin.adapters.megatron.state.open_passes import OpenPasses


class Chunk:
    """As Megatron-Core's DDP: the last micro-batch is one whose gradients are counted."""

    def __init__(self, config: SimpleNamespace) -> None:
        self.config, self.is_last = config, True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.is_last = False
        try:
            yield
        finally:
            self.is_last = True


@pytest.mark.parametrize("one_each", [False, True])
def test_an_interrupted_pass_ends_once(one_each: bool) -> None:
    config = SimpleNamespace(no_sync_func=None)
    chunks: list[Any] = [Chunk(config), Chunk(config)]
    given = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = given if one_each else given[0]
    passes = OpenPasses(chunks)
    enter = config.no_sync_func[0] if one_each else config.no_sync_func
    interrupted = enter()
    interrupted.__enter__()
    passes.end()
    assert chunks[0].is_last
    with chunks[0].no_sync(), chunks[1].no_sync():
        del interrupted
        gc.collect()
        assert not chunks[0].is_last and not chunks[1].is_last
    assert chunks[0].is_last and chunks[1].is_last
    passes.end()


def test_other_functions_stay() -> None:
    config = SimpleNamespace(no_sync_func=None)
    OpenPasses([Chunk(config)])
    assert config.no_sync_func is None
    config.no_sync_func = contextmanager(lambda: iter([None]))
    function = config.no_sync_func
    OpenPasses([Chunk(config)])
    assert config.no_sync_func is function
