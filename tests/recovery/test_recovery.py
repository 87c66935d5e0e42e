"""A recovery in which replicas do not hold the same weights, and the end of its job."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave_plugin.agent.snapshot_server import SnapshotServer, listen_for_data
from elaswave_plugin.core.agreement.messages import Stop
from elaswave_plugin.errors import WeightsDifferError
from elaswave_plugin.ipc.environment import AGENT, INCARNATION, JOB_SECRET_FD, SLOT
from elaswave_plugin.ipc.frames import SAY
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import Frame
from elaswave_plugin.recovery import recover
from elaswave_plugin.trainer import fatal
from tests.agent.serving import SlotStore
from tests.core.over_the_wire import as_json
from tests.job_secret import SECRET


class _Phases:
    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        yield


def _worker() -> Any:
    return SimpleNamespace(
        slot=0,
        phases=_Phases(),
        config=SimpleNamespace(transfer_timeout_s=1.0),
        member=SimpleNamespace(
            check=None, secret=None, progress_page=SimpleNamespace(waiting=lambda _: None)
        ),
        state=SimpleNamespace(access=None, leave_seal=lambda: None),
    )


def _framework() -> Any:
    nothing = lambda *_: None  # noqa: E731
    return SimpleNamespace(rebind=nothing, write_weights=nothing, write_capsule=nothing)


def _plan(live: dict[int, tuple[int, int]]) -> Any:
    return SimpleNamespace(epoch=3, live=live)


def test_weights_that_differ_are_read_anew_and_then_end_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[int, tuple[int, int]]] = []

    def restore(_: object, *, make_plan: Callable[..., Any], **__: Any) -> Any:
        plan = make_plan()
        asked.append(plan.live)
        return SimpleNamespace(plan=plan, masters=None, capsule=None)

    monkeypatch.setattr(recover, "restore", restore)
    plan_of = partial(_plan, live={0: (4, 2)})
    verdicts = ["shard group 0 has digests {0: 1, 1: 2}", None]
    monkeypatch.setattr(recover, "compare_weights", lambda *_: verdicts.pop(0))
    recover.take_state(_worker(), _framework(), plan_of)
    assert (asked, verdicts) == ([{0: (4, 2)}, {}], [])
    verdict = "shard group 0 has digests {0: 1, 1: 2}"
    monkeypatch.setattr(recover, "compare_weights", lambda *_: verdict)
    with pytest.raises(WeightsDifferError, match=r"view 3, although .* again: shard group 0 has"):
        recover.take_state(_worker(), _framework(), plan_of)


def test_they_stop_the_whole_job_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker meets them alike: none of them is a lost worker."""
    heard = list[Frame]()

    @fatal.ends_in_a_sentence
    def fails() -> None:
        raise WeightsDifferError("replicas hold different weights")

    with agent(heard) as address, memory_of(SECRET) as secret_fd:
        # Beside the control link: whoever joined before has that one.
        for name, value in ((AGENT, address), (JOB_SECRET_FD, secret_fd)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv(INCARNATION, "0")
        monkeypatch.setenv(SLOT, "1")
        with pytest.raises(SystemExit) as end:
            fails()
    told = Stop(reason="replicas hold different weights", exit_code=1)
    assert heard == [{"t": SAY, "slot": 1, "incarnation": 0, "frame": as_json(told)}]
    assert end.value.code == 1


@contextmanager
def agent(heard: list[Frame]) -> Iterator[str]:
    """The address of an agent that takes in what its trainer says beside the link."""

    def hear(said: Frame) -> Frame:
        heard.append(said)
        return {"t": "heard"}

    store = SlotStore(1)
    server = SnapshotServer(store, listen_for_data("127.0.0.1"), {SAY: hear}, secret=SECRET)
    server.start()
    yield server.address
    store.close()


@contextmanager
def memory_of(secret: Secret) -> Iterator[int]:
    """The descriptor by which a trainer inherits the secret."""
    fd = os.memfd_create("secret")
    os.pwrite(fd, secret.value, 0)
    yield fd
    os.close(fd)
