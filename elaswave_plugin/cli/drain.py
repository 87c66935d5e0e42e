"""Has one worker of a running job leave it between two steps, by asking its supervisor."""

from collections.abc import Sequence

from elaswave_plugin.cli.status import ask_job, ask_worker
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.address_file import Address


def drain_worker(known: Sequence[Address], *, slot: int, reason: str, timeout_s: float) -> str:
    """Give the worker of `slot` notice; returns what will happen, in a sentence.

    `known`: some supervisors of the job. It does not wait for the worker to have left.
    Raises ConfigurationError where there is no such worker, or its supervisor refuses or is silent.
    """
    status = ask_job(known, timeout_s)
    live = status["view"]["ranks"]
    if slot not in live:
        raise ConfigurationError(
            f"worker {slot} is not in the job, wanted one of {' '.join(map(str, sorted(live)))}"
        )
    answer = ask_worker(status, slot, {"t": "drain", "reason": reason}, timeout_s)
    if answer["refused"] is not None:
        raise ConfigurationError(f"worker {slot} stays: {answer['refused']}")
    return f"worker {slot} leaves between two steps; `elaswave status` shows when it has"
