"""A checkpoint takes its place, and is the latest, only once every worker has written its part.

DeepSpeed writes straight into the folder of the tag, and rank 0 names it in `latest` while others
may still write. A loss meanwhile would leave a torn checkpoint there, and the files of the former
number of workers beside those of the new one, which no reader of DeepSpeed's can tell apart.
"""

import contextlib
import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from elaswave_plugin.checkpoints.deepspeed_tag import flaw_of, shards_of
from elaswave_plugin.checkpoints.directory import (
    DEEPSPEED_TRACKER,
    check_everywhere,
    check_loadable,
)
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.recovery.drafts import Drafts


def save_whole(
    drafts: Drafts,
    native: Callable[..., Any],
    engine: Any,
    save_dir: str,
    tag: object = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """``engine.save_checkpoint``; may be called again after an interruption anywhere in it.

    Raises OSError. Source: deepspeed/runtime/engine.py, ``save_checkpoint``.
    """
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)

    def write(draft: Path) -> None:
        native(
            save_dir,
            tag=draft.name,
            client_state=client_state or {},
            save_latest=False,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )

    pointer = Path(save_dir, DEEPSPEED_TRACKER) if save_latest else None
    drafts.write(Path(save_dir, name), write, flaw_of, pointer=pointer)
    if pointer is not None and dist.get_rank() == 0:
        with drafts.pointing_to(pointer) as latest:
            latest.write(name)
    return True


def load_checked(
    native: Callable[..., Any],
    engine: Any,
    load_dir: str,
    tag: object = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``engine.load_checkpoint``, once what it is to load was found whole.

    A universal checkpoint has another form, which DeepSpeed's converter has made as a whole.
    Raises CheckpointUnreadableError, and ConfigurationError for a checkpoint of another number of
    workers, on all alike.
    """
    if not engine.load_universal_checkpoint():
        check_everywhere(partial(check_loadable, load_dir, tag=None if tag is None else str(tag)))
        if kwargs.get("load_optimizer_states", True) and not kwargs.get("load_module_only", False):
            _check_width(Path(load_dir), tag, int(engine.dp_world_size))
    return native(load_dir, tag, *args, **kwargs)


def weights_in(engine: Any, folder: Path) -> Mapping[str, torch.Tensor]:
    """Return weights and buffers of a checkpoint by any number of workers, on the host, by name.

    Raises CheckpointUnreadableError on all alike. Source: deepspeed/runtime/engine.py,
    ``_get_ckpt_name``; deepspeed/utils/zero_to_fp32.py.
    """
    check_everywhere(partial(check_loadable, folder))
    if engine.zero_optimization_stage() == 3:
        # It prints what it does, on every worker.
        with contextlib.redirect_stdout(io.StringIO()):
            masters: Mapping[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(
                str(folder), exclude_frozen_parameters=True
            )
        return masters
    name = engine._get_ckpt_name(str(folder), (folder / DEEPSPEED_TRACKER).read_text().strip())
    return engine.checkpoint_engine.load(name, map_location="cpu")["module"]


def _check_width(load_dir: Path, tag: object, width: int) -> None:
    tracker = load_dir / DEEPSPEED_TRACKER
    if tag is None and not tracker.is_file():
        return
    folder = load_dir / (tracker.read_text().strip() if tag is None else str(tag))
    written = shards_of(folder)
    if written is not None and written != width:
        raise ConfigurationError(
            f"{folder} was written by {written} workers, and this job has {width}: start as many, "
            "or convert it by `python -m deepspeed.checkpoint.ds_to_universal"
            f" --inject_missing_state --input_folder {folder} --output_folder {folder}_universal`"
            ' and start again with "checkpoint": {"load_universal": true} in the configuration'
        )
