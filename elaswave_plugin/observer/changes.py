"""The losses, departures and arrivals of a run, by its files: those of a test and others."""

from itertools import pairwise

from elaswave_plugin.core.agreement.view import departed
from elaswave_plugin.observer.run import Record, RunFiles, first_steps

LOST, LEFT, CAME = "lost", "left", "came"


def changes_of(run: RunFiles) -> list[Record]:
    """Return one record a worker that was lost, left as it was told to, or came, in order.

    `step`: the first one of the view, or of the next view that completed one; None where no step
    followed.
    """
    views = {event["epoch"]: event for event in run.of_kind("view_committed")}
    arrivals = {(event["epoch"], event["slot"]) for event in run.of_kind("entered")}
    firsts = first_steps(run)
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
