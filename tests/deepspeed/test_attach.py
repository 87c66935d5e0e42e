"""The plugin in a script: its way in, its cost without the section, and its refusals in words."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.test_join import entered
from tests.faults.harness import max_relative_difference
from tests.faults.test_upstream_sources import OTHER, SAID
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

OWN_LOADER = str(SCRIPTS / "own_loader.py")


def section(**keys: object) -> str:
    """Settings whose section has these keys only."""
    return json.dumps({"elaswave": keys})


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_loader_of_the_script_is_refused_in_words_that_name_ours(run: Launch) -> None:
    refused = run(EngineSpec(script=OWN_LOADER))
    assert refused.returncode == 2
    assert "elaswave_plugin.deepspeed.loader(engine, dataset)" in refused.output
    assert "Traceback" not in refused.output and not refused.orphans


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_scheduler_that_the_script_steps_is_refused(run: Launch) -> None:
    """A step that is redone would step it twice."""
    script = str(SCRIPTS / "own_optimizer.py")
    settings = json.dumps({"optimizer": None, "scheduler": None})
    refused = run(EngineSpec(script=script, options=("--steps-scheduler",), settings=settings))
    assert refused.returncode == 2
    assert "give it to deepspeed.initialize as lr_scheduler" in refused.output
    assert "Traceback" not in refused.output and not refused.orphans


@proves(Kind.KILL, Promise.PLANNED, victim="0", moment="2:forward")
def test_our_loader_over_a_torch_loader_survives_a_kill(
    run: Launch, twin: Twin, reference: Launch
) -> None:
    spec = EngineSpec(script=OWN_LOADER, options=("--loader",), stage=2, kills=("0@2:forward",))
    check_recovered(killed := run(spec), twin=twin(killed), reference=reference(spec))


@proves(Kind.RETURN, Promise.PLANNED, victim="2", moment="3:backward")
def test_a_worker_whose_script_meets_the_others_itself_comes_back(
    run: Launch, reference: Launch
) -> None:
    """deepspeed.init_distributed() comes first in most scripts."""
    back = {"respawn": 1, "changes": ("+2@6",), "steps": 9}
    spec = EngineSpec(script=OWN_LOADER, options=("--loader",), kills=("2@3:backward",), **back)
    returned = run(spec)
    assert returned.returncode == 0, returned.output[-4000:]
    assert len(returned.events("view_committed")[-1]["ranks"]) == 4
    assert max_relative_difference(returned, reference(spec)) <= 1e-6


@proves(Kind.KILL, Promise.PLANNED, victim="2", moment="3:backward")
def test_a_model_that_zero_init_has_cut_survives_a_kill(
    run: Launch, twin: Twin, reference: Launch
) -> None:
    """As models are built that no worker can hold whole, before the configuration is known."""
    options = ("--loader", "--init")
    spec = EngineSpec(script=OWN_LOADER, options=options, stage=3, kills=("2@3:backward",))
    check_recovered(killed := run(spec), twin=twin(killed), reference=reference(spec))


@proves(Kind.RETURN, Promise.PLANNED, victim="2", moment="1:backward")
def test_a_lost_worker_cuts_its_model_alone(run: Launch, twin: Twin, reference: Launch) -> None:
    back = {"respawn": 5, "steps": 8, "changes": ("+2@4",)}
    options, kills = ("--loader", "--init"), ("2@1:backward",)
    spec = EngineSpec(script=OWN_LOADER, options=options, stage=3, kills=kills, **back)
    check_recovered(killed := run(spec), twin=twin(killed), reference=reference(spec))
    assert entered(killed) == [(2, 1, 4)]


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (section(kil=["2@3"]), ("unknown key 'kil'", "did you mean 'kill'?")),
        (section(enabled="yes"), ("key 'enabled' is 'yes', wanted true or false",)),
        (section(dataflow="redeal"), ("dataflow is redeal, which is for pipeline",)),
        (section(move_layers="always"), ("move_layers is always, which is for pipeline",)),
        (section(kill=["7@3"]), ("kill 7@3:backward names worker 7, wanted 0 to 3",)),
    ],
)
def test_a_wrong_section_is_one_sentence(
    run: Launch, settings: str, words: tuple[str, ...]
) -> None:
    refused = run(EngineSpec(settings=settings))
    assert refused.returncode == 2
    assert all(part in refused.output for part in words)
    assert refused.output.count("elaswave: ") == 1 and "Traceback" not in refused.output


def printed_losses(output: str) -> dict[int, float]:
    """Read what rank 0 of the example printed: "step N | loss X | ..."."""
    lines = [line.split("|") for line in output.splitlines() if line.startswith("step")]
    return {int(step.split()[1]): float(loss.split()[1]) for step, loss, _ in lines}


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.parametrize(("nproc", "stage"), sampled([(4, 1), (4, 3), (2, 1)]))
def test_a_section_that_is_not_enabled_changes_nothing_and_an_enabled_one_no_loss(
    reference: Launch, tmp_path: Path, nproc: int, stage: int
) -> None:
    """Without the plugin: torchrun, gloo, DeepSpeed's own loader."""
    spec = EngineSpec(nproc=nproc, stage=stage, settings=section(enabled=False))
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(nproc), str(SCRIPTS / "no_compiler.py"), spec.script),
        *spec.arguments(tmp_path, tmp_path),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    plain = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert plain.returncode == 0, plain.stderr[-3000:]
    losses = printed_losses(plain.stdout)
    assert sorted(losses) == list(range(spec.steps))
    elastic = printed_losses(reference(EngineSpec(nproc=nproc, stage=stage)).output)
    assert elastic == pytest.approx(losses, rel=1e-6)


INERT = """
import sys
import torch
ours = [name for name in sys.modules if name.startswith("elaswave_plugin")]
assert set(ours) <= {"elaswave_plugin", "elaswave_plugin.errors", "elaswave_plugin.autoload"}, ours
import deepspeed
assert deepspeed.initialize.__wrapped__ is not None
try:
    deepspeed.initialize(model=torch.nn.Linear(1, 1), config={"train_batch_size": -1})
except Exception as error:
    print(type(error).__name__)
heavy = [name for name in sys.modules if name.startswith("elaswave_plugin.recovery")]
assert not heavy, heavy
"""


@proves(Kind.NOTHING, Promise.SAME)
def test_without_the_section_nothing_of_ours_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INERT], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr[-3000:]


@proves(Kind.NOTHING, Promise.SAME)
def test_the_function_is_ours_whatever_is_imported_first() -> None:
    check = "assert use.__wrapped__.__module__ == 'deepspeed', use; print(type(use))"
    orders = (
        "import torch, deepspeed; use = deepspeed.initialize",
        "import deepspeed; import torch; use = deepspeed.initialize",
        "from deepspeed import initialize as use",
    )
    # Beside each other: each imports everything anew.
    importing = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", f"{imports}; {check}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for imports in orders
    ]
    said = [process.communicate(timeout=90)[1] for process in importing]
    assert [process.returncode for process in importing] == [0, 0, 0], said


@proves(Kind.NOTHING, Promise.SAME)
def test_installing_by_hand_is_the_same(run: Launch, reference: Launch) -> None:
    code = "import elaswave_plugin.deepspeed as e; e.install(); e.install()"
    spec = EngineSpec(steps=3)
    by_hand = run(replace(spec, sabotage=code))
    assert by_hand.trace() == reference(spec).trace()


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.parametrize(
    ("stage", "table", "name"),
    sampled(
        [
            (1, "ZERO_12", "DeepSpeedZeroOptimizer.__init__"),
            (3, "ZERO_3", "DeepSpeedZeroOptimizer_Stage3.__init__"),
        ]
    ),
)
def test_another_source_of_what_is_re_implemented_is_said_once(
    run: Launch, reference: Launch, stage: int, table: str, name: str
) -> None:
    spec = EngineSpec(stage=stage, steps=3)
    known, other = reference(spec), run(replace(spec, sabotage=OTHER.format(table=table)))
    assert (known.returncode, other.returncode) == (0, 0), other.output[-4000:]
    assert (known.output.count(SAID), other.output.count(SAID)) == (0, 1)
    (line,) = [line for line in other.output.splitlines() if SAID in line]
    assert f"{name} (re-implemented in adapters/deepspeed/zero/" in line
    assert other.trace() == known.trace()
