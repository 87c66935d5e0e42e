"""Every worker is told to leave: the engine saves once more, into the folder of the settings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import FP32_BOUND, EngineSpec
from tests.deepspeed.test_save import SAVING, state_of, writers
from tests.faults.harness import Zygote, max_relative_difference
from tests.faults.test_last_checkpoint import SAVE_S, completed_once, told_to_end
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", sampled([1, 3]))
def test_the_engine_saves_where_all_leave(
    run: Launch, zygote: Zygote, tmp_path: Path, stage: int
) -> None:
    folder = tmp_path / "last"
    spec = EngineSpec(
        stage=stage,
        steps=60,
        dump="last",
        launcher=(f"--notice-timeout-s={SAVE_S:g}",),
    )
    settings = {**spec.config(tmp_path / "run")["elaswave"], "last_checkpoint_dir": str(folder)}
    spec = replace(spec, settings=json.dumps({"elaswave": settings}))
    told = told_to_end(spec, zygote=zygote, data=tmp_path, directory=tmp_path / "run")
    done = completed_once(told)
    tag = folder / f"global_step{done}"
    assert (folder / "latest").read_text() == tag.name
    # Nobody left before all of them were told.
    assert writers(tag) == 4
    assert len(state_of(tag, tmp_path)) > 20
    undisturbed = run(EngineSpec(stage=stage, steps=done, dump="last"))
    assert max_relative_difference(told, undisturbed) <= FP32_BOUND
    # Another job goes on from it.
    loading = EngineSpec(script=SAVING, stage=stage)
    again = (f"--save={tmp_path / 'again'}", f"--load={folder}")
    loaded = run(replace(loading, options=again))
    assert loaded.returncode == 0, loaded.output[-3000:]
    assert (tmp_path / "again" / "latest").read_text() == f"global_step{done + loading.steps}"


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_on_accelerate_saves_where_all_leave(
    run: Launch, zygote: Zygote, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    from tests.deepspeed.test_hf import spec_of

    folder = tmp_path / "last"
    spec = spec_of(steps=60, launcher=(f"--notice-timeout-s={SAVE_S:g}",))
    section = {**spec.config(tmp_path / "run")["elaswave"], "last_checkpoint_dir": str(folder)}
    settings = json.dumps({**json.loads(spec.settings), "elaswave": section})
    told = told_to_end(
        replace(spec, settings=settings), zygote=zygote, data=tmp_path, directory=tmp_path / "run"
    )
    done = completed_once(told)
    tag = folder / f"global_step{done}"
    assert (folder / "latest").read_text() == tag.name
    assert writers(tag) == 4
