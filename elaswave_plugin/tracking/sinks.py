"""The destinations of metrics: the Sink protocol, and the sinks that a configuration asks for."""

import json
import netrc
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.words import option_of

# The log format of LevelDB: blocks of 32 KiB, records with checksum, length and kind before them.
_BLOCK, _FILE_HEADER = 32768, 7
_RECORD = struct.Struct("<IHB")
_FULL, _LAST = 1, 4


def last_history_step(directory: Path, run_id: str) -> int:
    """Find the last step in the files of a run, in ``directory``/wandb; -1 where none is."""
    return max((row["_step"] for row in history_rows(directory, run_id)), default=-1)


def history_rows(directory: Path, run_id: str) -> list[dict[str, Any]]:
    """Read the rows that the files of a run have, in ``directory``/wandb, offline and online.

    An owner that was killed may have left half a record, which ends its file.
    Source: wandb/sdk/internal/datastore.py.
    """
    return [
        row
        for folder in folders_of(directory, run_id)
        for message in _messages((folder / f"run-{run_id}.wandb").read_bytes())
        if (row := _row(message)) is not None
    ]


def folders_of(directory: Path, run_id: str) -> list[Path]:
    """Find the folders of a run in ``directory``/wandb, one an owner, from the first on."""
    found = directory.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb")
    return sorted((one.parent for one in found), key=lambda one: one.name.removeprefix("offline-"))


def whereabouts(directory: Path, run_id: str) -> tuple[str, ...]:
    """Name a run, where it is, and how it is uploaded: a sentence, none where it has no folder."""
    folders = [*map(str, folders_of(directory, run_id))]
    if not folders:
        return ()
    if not Path(folders[0]).name.startswith("offline-"):
        return (f"W&B run {run_id}: {' '.join(folders)}",)
    return (f"W&B run {run_id} is offline; upload it with\nwandb sync {' '.join(folders)}",)


def _messages(data: bytes) -> Iterator[bytes]:
    place, whole = _FILE_HEADER, b""
    while place + _RECORD.size <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _RECORD.size:
            place += left
            continue
        _, length, kind = _RECORD.unpack_from(data, place)
        place += _RECORD.size
        if place + length > len(data) or kind == 0:
            return
        whole += data[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield whole
            whole = b""


def _row(message: bytes) -> dict[str, Any] | None:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto import wandb_internal_pb2

    record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
    try:
        record.ParseFromString(message)
    except DecodeError:
        return None
    row = {
        ".".join(item.nested_key) or item.key: json.loads(item.value_json)
        for item in record.history.item
    }
    return row if "_step" in row else None


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


_TENSORBOARD_FLUSH_S = 2


class TensorBoardSink:
    """Scalars in TensorBoard's event files; needs the tensorboard package."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._folder = folder
        self._writer = SummaryWriter(str(folder), flush_secs=_TENSORBOARD_FLUSH_S)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one point a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def last_step(self) -> int | None:
        """Tell the last step of a point in the folder's files; -1 where there is none."""
        return max((step for _, step in points_of(self._folder)), default=-1)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def points_of(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield name and step of each point in the event files of a folder, by any worker."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            yield from ((value.tag, event.step) for value in event.summary.value)


Metrics = Mapping[str, float]


class Sink(Protocol):
    """One destination of metrics; opened, used and closed in the tracker's own thread."""

    name: str

    def log(self, metrics: Metrics, step: int) -> None:
        """Write the metrics of a step; steps rise strictly."""

    def last_step(self) -> int | None:
        """Return the last step that the run has here, logged by any worker.

        -1 where there is none, None where that cannot be known.
        """

    def close(self) -> None:
        """Flush and close."""


OpenSink = Callable[[], Sink]


def check_sinks(config: ElasticConfig) -> None:
    """Refuse, before training, a tracker that cannot work; raises ConfigurationError."""
    wandb = option_of("wandb")
    if config.wandb != "off" and find_spec("wandb") is None:
        raise ConfigurationError(
            f"{wandb} is {config.wandb!r} and wandb is not installed, wanted"
            f" `pip install wandb` or {wandb} off"
        )
    if config.wandb == "online" and not has_key(os.environ):
        raise ConfigurationError(
            f"{wandb} is 'online' and no API key was found, wanted WANDB_API_KEY or {wandb} auto"
        )
    if config.tensorboard is not None and find_spec("tensorboard") is None:
        raise ConfigurationError(
            f"{option_of('tensorboard')} is {str(config.tensorboard)!r} and tensorboard is not"
            f" installed, wanted `pip install tensorboard` or no {option_of('tensorboard')}"
        )


def sinks_of(config: ElasticConfig, run_id: str, directory: Path | None) -> tuple[OpenSink, ...]:
    """Return one opener a configured destination; nothing is imported before it is called."""
    openers: list[OpenSink] = []
    if config.wandb != "off":
        openers.append(
            lambda: WandbSink(
                run_id=run_id,
                project=config.wandb_project,
                mode=config.wandb,
                directory=directory or Path("."),
                settings=config.model_dump(mode="json"),
            )
        )
    folder = config.tensorboard
    if folder is not None:
        openers.append(lambda: TensorBoardSink(folder / run_id))
    return tuple(openers)
