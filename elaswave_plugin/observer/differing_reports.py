"""Names what the workers of one view report differently, although they carry out one plan."""

from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]
# What follows from the plan alone. The layout before is not among it: a worker that comes back has
# none, and one whose recovery was interrupted by the next one tells of that before both.
_OF_THE_PLAN = (
    *("layout_after", "dataflow", "pieces", "windows", "clocks", "slow", "greedy_order"),
    *("split_backward", "layer_times_s", "bytes_moved", "restored_step"),
)


def differing_reports(recovered: Iterable[Record]) -> list[str]:
    """Return one sentence for each field of a plan that two workers of a view report differently.

    ``recovered``: the events of this kind. What is judged by such a field goes by the first report.
    """
    firsts: dict[int, Record] = {}
    found: dict[tuple[int, str], str] = {}
    for event in recovered:
        first = firsts.setdefault(event["epoch"], event)
        for field in _OF_THE_PLAN:
            if event.get(field) != first.get(field):
                slots = f"workers {first['slot']} and {event['slot']}"
                sentence = f"{slots} report different {field} of view {event['epoch']}"
                found.setdefault((event["epoch"], field), sentence)
    return list(found.values())
