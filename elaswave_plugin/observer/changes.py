"""The losses, departures and arrivals of a run, by its files: those of a test and others."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from elaswave_plugin.core.agreement.view import departed

Record = dict[str, Any]
LOST, LEFT, CAME = "lost", "left", "came"


def changes_from(
    *, committed: Iterable[Record], entered: Iterable[Record], steps: Sequence[Record]
) -> list[Record]:
    """Return one record a worker that was lost, left as it was told to, or came, in order.

    ``committed`` and ``entered``: the events of these kinds. `step`: the first one of the view, or
    of the next view that completed one; None where no step followed.
    """
    views = {event["epoch"]: event for event in committed}
    arrivals = {(event["epoch"], event["slot"]) for event in entered}
    firsts: dict[int, int] = {}
    for record in steps:
        view, step = record["epoch"], record["step"]
        firsts[view] = min(step, firsts.get(view, step))
    found = []
    for before, after in pairwise(sorted(views)):
        step = next((firsts[view] for view in sorted(firsts) if view >= after), None)
        was, now, reason = views[before]["ranks"], views[after]["ranks"], views[after]["reason"]
        came = {slot for slot in now if slot not in was or (after, slot) in arrivals}
        changes = [
            (LEFT if departed(reason, slot) else LOST, slot)
            for slot in sorted(was)
            if slot not in now or slot in came
        ]
        changes += [(CAME, slot) for slot in sorted(came)]
        for what, slot in changes:
            record = {"view": after, "step": step, "slot": slot, "what": what, "reason": reason}
            found.append({**record, "workers": len(now)})
    return found
