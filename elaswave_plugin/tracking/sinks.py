"""The destinations of metrics: the Sink protocol, and the sinks that a configuration asks for."""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.words import option_of

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
    if config.wandb == "online":
        from elaswave_plugin.tracking.wandb_sink import has_key

        if not has_key(os.environ):
            raise ConfigurationError(
                f"{wandb} is 'online' and no API key was found, wanted WANDB_API_KEY or"
                f" {wandb} auto"
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
        openers.append(lambda: _open_wandb(config, run_id, directory))
    folder = config.tensorboard
    if folder is not None:
        openers.append(lambda: _open_tensorboard(folder / run_id))
    return tuple(openers)


def _open_wandb(config: ElasticConfig, run_id: str, directory: Path | None) -> Sink:
    from elaswave_plugin.tracking.wandb_sink import WandbSink

    return WandbSink(
        run_id=run_id,
        project=config.wandb_project,
        mode=config.wandb,
        directory=directory or Path("."),
        settings=config.model_dump(mode="json"),
    )


def _open_tensorboard(folder: Path) -> Sink:
    from elaswave_plugin.tracking.tensorboard_sink import TensorBoardSink

    return TensorBoardSink(folder)
