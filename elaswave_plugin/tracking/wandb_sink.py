"""Weights & Biases as a sink: one run id for the whole job, offline when there is no API key."""

import netrc
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from elaswave_plugin.tracking.wandb_files import last_history_step

Mode = Literal["auto", "off", "offline", "online"]

# A killed owner loses the rows of the last interval, so it is short; W&B's own default is 15 s.
FLUSH_INTERVAL_S = 0.2
OPEN_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0
POLL_S = 0.05


class WandbSink:
    """A W&B run; the next owner opens the same id again and W&B appends to it.

    Offline, each owner leaves its own folder with the same run id; `wandb sync` of all of them,
    in one call, joins them. W&B's service process watches the process id of its owner and ends
    with it.
    """

    name = "W&B"

    def __init__(
        self,
        *,
        run_id: str,
        project: str,
        mode: Mode,
        directory: Path,
        settings: Mapping[str, Any],
    ) -> None:
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._run_id, self._logged = directory, run_id, -1
        self.mode = chosen_mode(mode, os.environ)
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            project=project,
            mode=self.mode,
            dir=str(directory),
            config=dict(settings),
            settings=_quiet(wandb.Settings),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one row; commit at once, because W&B holds back the row of the newest step."""
        self._logged = step
        self._run.log(dict(metrics), step=step, commit=True)

    def last_step(self) -> int | None:
        """Tell the last step in the run's files or, online, what the server had at the start."""
        if self.mode == "offline":
            return last_history_step(self._directory, self._run_id)
        return None if self._logged >= 0 else int(self._run.starting_step) - 1

    def close(self) -> None:
        """Finish the run; offline, its last rows come to the file a moment later."""
        self._run.finish()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while self.mode == "offline" and time.monotonic() < deadline_s:
            if last_history_step(self._directory, self._run_id) >= self._logged:
                return
            time.sleep(POLL_S)  # W&B's own process writes it, and tells nobody when


def chosen_mode(mode: Mode, environment: Mapping[str, str]) -> Literal["offline", "online"]:
    """Resolve auto: online with an API key in the environment or in netrc, else offline."""
    if mode in ("offline", "online"):
        return "online" if mode == "online" else "offline"
    if environment.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return "offline"
    return "online" if has_key(environment) else "offline"


def has_key(environment: Mapping[str, str]) -> bool:
    """Tell whether an API key is in the environment or in netrc; the key itself stays there."""
    if environment.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    place = environment.get("NETRC") or str(Path(environment.get("HOME", "~"), ".netrc"))
    try:
        return netrc.netrc(place).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def flush_early() -> None:
    """Have runs that others open in this process lose little when it is killed."""
    import wandb

    if "x_transaction_log_flush_interval" in wandb.Settings.model_fields:
        wandb.setup(wandb.Settings(x_transaction_log_flush_interval=FLUSH_INTERVAL_S))


def _quiet(settings: Any) -> Any:
    """W&B settings that keep out of training's way, as far as the installed version knows them."""
    wanted = {
        "console": "off",
        "silent": True,
        "disable_git": True,
        "save_code": False,
        "init_timeout": OPEN_TIMEOUT_S,
        "finish_timeout": CLOSE_TIMEOUT_S,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_save_requirements": False,
        "x_transaction_log_flush_interval": FLUSH_INTERVAL_S,
    }
    known = set(settings.model_fields)
    return settings(**{key: value for key, value in wanted.items() if key in known})
