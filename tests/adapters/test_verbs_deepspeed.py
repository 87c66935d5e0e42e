"""Every verb of a DeepSpeed engine, at every width and ZeRO kind, for every loss of up to two."""

from collections.abc import Iterator

import pytest

from tests.adapters import sabotaged_verbs as sabotaged
from tests.adapters import tiny_deepspeed as tiny
from tests.adapters.one_process import OneProcess

WIDEST = 4


@pytest.fixture(scope="module")
def one() -> Iterator[OneProcess]:
    with pytest.MonkeyPatch.context() as patch:
        yield from tiny.in_one_process(patch)


@pytest.mark.parametrize("width", range(2, WIDEST + 1))
@pytest.mark.parametrize("kind", tiny.KINDS, ids=str)
def test_state_survives_every_loss_and_every_return(
    one: OneProcess, kind: tiny.Kind, width: int
) -> None:
    tiny.start(one, width, kind).through_every_loss()


@pytest.mark.parametrize(
    ("kind", "sabotage"),
    [
        *((tiny.Kind(0, bf16=True), sabotage) for sabotage in sabotaged.WRITES),
        *((tiny.Kind(2, groups=2), sabotage) for sabotage in sabotaged.ALL),
        *((tiny.Kind(3, bf16=True), sabotage) for sabotage in sabotaged.ALL),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_a_verb_that_is_wrong_is_seen(
    one: OneProcess, kind: tiny.Kind, sabotage: sabotaged.Sabotage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same change as passes above."""
    change = tiny.start(one, 3, kind)
    seen = sabotage(monkeypatch, one)
    with pytest.raises(sabotaged.RAISED, match=seen):
        change.through((0, 2), (0, 1, 2))
