"""Calls of trackers that are not ours: what they raise is said, and ends nothing."""

import logging
from collections.abc import Callable
from typing import Any

from elaswave_plugin.errors import ElasWaveError

log = logging.getLogger(__name__)


def only_said(
    call: Callable[..., Any],
    *args: Any,
    what: str,
    otherwise: Callable[[], None] = lambda: None,
    ends: Callable[[Exception], bool] = lambda error: False,
    **given: Any,
) -> Any:
    """Call it; where it raises, say so in one sentence about ``what``, and return None.

    What ends the job is raised on: a process that was stopped learns it in any call. So is an error
    of which ``ends`` says so.
    """
    try:
        return call(*args, **given)
    except ElasWaveError:
        raise
    except Exception as error:
        if ends(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        log.warning("tracking: %s (%s); training goes on without it", what, reason)
        otherwise()
        return None
