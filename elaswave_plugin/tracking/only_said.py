"""Calls of trackers that are not ours: what they raise is said, and ends nothing."""

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


def only_said(
    call: Callable[..., Any],
    *args: Any,
    what: str,
    otherwise: Callable[[], None] = lambda: None,
    **given: Any,
) -> Any:
    """Call it; where it raises, say so in one sentence about ``what``, and return None."""
    try:
        return call(*args, **given)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        log.warning("tracking: %s (%s); training goes on without it", what, reason)
        otherwise()
        return None
