"""The calls of a script that have a place in one verb of the job only."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from elaswave_plugin.adapters.megatron.arguments import Sizes
from elaswave_plugin.adapters.megatron.plain import PlainJob
from elaswave_plugin.adapters.megatron.turns import EVALUATE, RUN, Turns
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.errors import ConfigurationError


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_newest_checkpoint_is_named_in_a_save_only() -> None:
    turns = Turns()
    with turns.of(RUN):
        turns.check_saves()
    with pytest.raises(ConfigurationError, match=r"outside of job\.run.* call it in `save`"):
        turns.check_saves()
    with turns.of(EVALUATE), pytest.raises(ConfigurationError, match=r"outside of job\.run"):
        turns.check_saves()


def test_without_the_plugin_the_newest_checkpoint_is_named_by_a_rename(
    world_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    tracker = tmp_path / "latest"
    tracker.write_text("2")
    inode = tracker.stat().st_ino
    sizes = Sizes(global_batch_size=1, micro_batch_size=1, model_parallel=(1, 1), seed=1)
    job = PlainJob(sizes, patches=PatchSet([]))
    with job._turns.of(RUN):
        job.name_newest(str(tracker), 4)
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert tracker.read_text() == "4" and tracker.stat().st_ino != inode
