"""The settings of a rehearsal, which win over what a script's own options say.

Standard library only: agents read them as well.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REHEARSAL = "ELASWAVE_REHEARSAL"
"""The file in which a rehearsal says what its present run is like (`rehearsal/order.py`)."""


def rehearsed_settings(env: Mapping[str, str]) -> dict[str, Any]:
    """The settings that the rehearsal's present run is made with; none in any other job."""
    path = env.get(REHEARSAL)
    if path is None:
        return {}
    settings: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))["settings"]
    return settings
