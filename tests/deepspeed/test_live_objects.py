"""After a loss the live DeepSpeed objects equal those of a job that never had the lost worker."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import EngineSpec
from tests.deepspeed.test_pipeline import PP2_DP2
from tests.faults.harness import ROOT, Outcome, check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# What differs for a known reason, each with that reason.
KNOWN = {
    r"engine/(_config|config)/train_micro_batch_size_per_gpu": "shares grow, the launch stays",
    r"engine/config/elaswave/(dir|respawn|(kill|change)/.*)": "two runs",
    r"engine/local_rank": "the device and the place on the node are those of the launch",
    r".*/post_backward_callback_graph_task_id": "the live ones have made one pass more",
    # Read where `_hp_mapping` is set, and both are set together.
    r".*/_index_in_param_group": "the constructor leaves it where a parameter is another's now",
}
# The same of a worker that came later.
KNOWN_LATER = {
    r"engine/tput_timer/.*": "it times the steps that it has seen itself",
    # Read by the constructor only (stage3.py), which ran before the schedule was there.
    r"optimizer/trainable_param_groups/\d+/lr": "the rate at which it was built",
}
# The same of a pipeline, whose micro-batches become more, and not larger.
KNOWN_PIPELINE = {
    r"(engine/(_)?config|optimizer(/.*)?)/gradient_accumulation_steps": "the launch stays",
    r"module/micro_offset": "it counts the micro-batches of a pipeline of the launch",
    r"module/local_rank": "the device and the place on the node are those of the launch",
    r"optimizer/.*/backward_active_depth": "it grows with every pass since the constructor ran",
}
SPEC = EngineSpec(global_batch=12, accumulation=1)
STALE = """
from elaswave_plugin.adapters.deepspeed.engine.framework import DeepSpeedFramework
rebind = DeepSpeedFramework.rebind
def forgetful(self, plan):
    before = self._engine.seq_dp_world_size
    rebind(self, plan)
    self._engine.seq_dp_world_size = before
DeepSpeedFramework.rebind = forgetful
"""


def walked(
    run: Launch,
    folder: Path,
    *,
    spec: EngineSpec = SPEC,
    sabotage: str = "",
    **more: Any,
) -> Outcome:
    folder.mkdir()
    watch = f"from tests.deepspeed.walk_live_objects import watch; watch({str(folder)!r})"
    sabotage = f"import sys; sys.path.append({str(ROOT)!r}); {watch}\n{sabotage}"
    return run(replace(spec, steps=4, sabotage=sabotage, dump="never", **more))


def differences(
    live: dict[str, Any], fresh: dict[str, Any], known: Iterable[str] = KNOWN
) -> list[str]:
    return [
        f"{path}: live {live.get(path, 'absent')!r}, fresh {fresh.get(path, 'absent')!r}"
        for path in sorted(live.keys() | fresh.keys())
        if live.get(path, "absent") != fresh.get(path, "absent")
        and not any(re.fullmatch(pattern, path) for pattern in known)
    ]


def pictures(folder: Path, width: int = 3) -> list[dict[str, Any]]:
    return [json.loads((folder / f"walk-{rank}.json").read_text()) for rank in range(width)]


@proves(Kind.KILL, Promise.FRESH, victim="1", moment="2:backward")
@pytest.mark.parametrize("stage", sampled([0, 1, 2, 3]))
def test_live_objects_after_a_loss_equal_fresh_ones(
    run: Launch, tmp_path: Path, stage: int
) -> None:
    check_survived(walked(run, tmp_path / "live", stage=stage, kills=("1@2:backward",)))
    check_survived(walked(run, tmp_path / "fresh", stage=stage, nproc=3))
    both = zip(pictures(tmp_path / "live"), pictures(tmp_path / "fresh"), strict=True)
    for live, fresh in both:
        assert len(live) > 1000
        assert not differences(live, fresh)
        groups = [
            value for value in live.values() if isinstance(value, list) and value[:1] == ["group"]
        ]
        assert groups and all(len(members) == 3 for _, members, _ in groups)


@proves(Kind.RETURN, Promise.FRESH)
@pytest.mark.parametrize(("stage", "slot"), sampled([(0, 2), (1, 0), (2, 3), (3, 1)]))
def test_live_objects_after_a_return_equal_fresh_ones(
    run: Launch, tmp_path: Path, stage: int, slot: int
) -> None:
    """On those who stayed, and on the one that came back."""
    back = {"kills": (f"{slot}@1:backward",), "changes": (f"+{slot}@2",), "respawn": 5}
    again = walked(run, tmp_path / "again", stage=stage, **back)
    check_survived(again)
    assert len(again.events("entered")) == 1
    check_survived(walked(run, tmp_path / "fresh", stage=stage))
    both = zip(pictures(tmp_path / "again", 4), pictures(tmp_path / "fresh", 4), strict=True)
    for place, (live, fresh) in enumerate(both):
        assert len(live) > 1000
        known = [*KNOWN, *KNOWN_LATER] if place == slot else KNOWN
        assert not differences(live, fresh, known)


@proves(Kind.JOIN, Promise.FRESH)
@pytest.mark.parametrize("stage", sampled([0, 1, 2, 3]))
def test_live_objects_of_a_grown_engine_equal_fresh_ones(
    run: Launch, tmp_path: Path, stage: int
) -> None:
    """Four workers, joined by a fifth one, are a job of five, on all of them."""
    spec = replace(SPEC, stage=stage, global_batch=20, options=("--limit=80",))
    grows = {"launcher": ("--reserve=1",), "joiners": 1, "changes": ("+4@2",)}
    grown = walked(run, tmp_path / "grown", spec=spec, **grows)
    check_survived(grown)
    assert len(grown.events("entered")) == 1
    check_survived(walked(run, tmp_path / "fresh", spec=spec, nproc=5))
    both = zip(pictures(tmp_path / "grown", 5), pictures(tmp_path / "fresh", 5), strict=True)
    for place, (live, fresh) in enumerate(both):
        assert len(live) > 1000
        assert not differences(live, fresh, [*KNOWN, *KNOWN_LATER] if place == 4 else KNOWN)


@proves(Kind.KILLS, Promise.FRESH, victim="1 3", moment="1:backward 2:data")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_live_objects_of_a_pipeline_equal_fresh_ones(
    run: Launch, tmp_path: Path, stage: int
) -> None:
    """Both workers of a pipeline are lost, so that the others have the ranks of a fresh job."""
    lost = {"kills": ("1@1:backward", "3@2:data"), "accumulation": 2}
    check_survived(walked(run, tmp_path / "live", spec=PP2_DP2, stage=stage, **lost))
    fresh = {"nproc": 2, "accumulation": 4}
    check_survived(walked(run, tmp_path / "fresh", spec=PP2_DP2, stage=stage, **fresh))
    both = zip(pictures(tmp_path / "live", 2), pictures(tmp_path / "fresh", 2), strict=True)
    for live, fresh in both:
        assert len(live) > 1000
        assert not differences(live, fresh, [*KNOWN, *KNOWN_PIPELINE])


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1", moment="2:backward")
def test_a_stale_size_is_found(run: Launch, tmp_path: Path) -> None:
    """Negative control: one cached size that nobody sets."""
    live = walked(run, tmp_path / "live", kills=("1@2:backward",), sabotage=STALE)
    check_survived(live)
    check_survived(walked(run, tmp_path / "fresh", nproc=3))
    both = zip(pictures(tmp_path / "live"), pictures(tmp_path / "fresh"), strict=True)
    for stale, fresh in both:
        assert differences(stale, fresh) == ["engine/seq_dp_world_size: live 4, fresh 3"]
