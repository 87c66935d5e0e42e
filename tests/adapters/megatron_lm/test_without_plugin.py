"""With dropout off, the losses are those of the script without the plugin.

Without a fault, and where a run without the plugin goes on from a checkpoint after a fault.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    NO_EVALUATION,
    TP2_PP2,
    ScriptSpec,
    needs_repository,
    printed,
    printed_in,
)
from tests.faults.harness import ROOT
from tests.proofs import Kind, Promise, proves

# A launch by torchrun imports Megatron-LM in each process.
pytestmark = [needs_repository, pytest.mark.slow, pytest.mark.timeout(400)]

WITHOUT_PLUGIN = Path(__file__).with_name("without_plugin.py")
WITHOUT_TRITON = """
from elaswave_plugin.adapters.megatron_lm.triton_stub import without_triton
without_triton()
"""
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
SPEC = ScriptSpec(options=(*NO_EVALUATION, *NO_DROPOUT))
NUMBER = re.compile(r"((?:lm|sop) loss(?: value| PPL)?|grad norm): ([-+.\dEe]+)")


def without_plugin(
    spec: ScriptSpec, *, script: Path, data: Path, folder: Path, watches: bool = False
) -> list[str]:
    """Return what the script prints in a run without the plugin.

    ``watches``: all that it prints, what its saves take of memory among it.
    """
    done = run_without_plugin(spec, script=script, data=data, folder=folder, watches=watches)
    assert done.returncode == 0, _first_error(done.stderr)
    return [done.stdout] if watches else printed_in(done.stdout + done.stderr)


def run_without_plugin(
    spec: ScriptSpec, *, script: Path, data: Path, folder: Path, watches: bool = False
) -> "subprocess.CompletedProcess[str]":
    """Run the script by torchrun, without the plugin."""
    folder.mkdir()
    # For every interpreter, those that a checkpoint's writers start included.
    (folder / "sitecustomize.py").write_text(WITHOUT_TRITON)
    paths = [str(folder), str(ROOT), str(script.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={spec.nproc}", str(WITHOUT_PLUGIN), str(script)),
            *replace(spec, elastic=False).arguments(data, folder),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **({"WATCH_SAVES": "1"} if watches else {}),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
    )


def _first_error(said: str) -> str:
    """Return where the first worker failed; torchrun's own report comes last."""
    return said[max(said.find("Traceback"), 0) :][:9000]


@pytest.fixture(scope="module")
def plain(script: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of the undisturbed run without the plugin."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return without_plugin(SPEC, script=script, data=data, folder=folder)


def check_close(ours: list[str], theirs: list[str], *, within: float = 1e-6) -> None:
    """Losses to 1e-6 relative, norms but for the last digit printed, all else to the letter.

    ``within``: of losses, where 16-bit weights round what sums in another order differ in.
    """
    assert len(ours) == len(theirs) > 0
    for our, their in zip(ours, theirs, strict=True):
        assert re.sub(NUMBER, r"\1", our) == re.sub(NUMBER, r"\1", their)
        pairs = zip(re.findall(NUMBER, our), re.findall(NUMBER, their), strict=True)
        for (name, one), (_, other) in pairs:
            bound = within * float(other) if "loss" in name else 1e3 * within
            bound *= 10 if name.endswith("PPL") else 1  # a power of the loss
            assert abs(float(one) - float(other)) <= bound


@proves(Kind.NOTHING, Promise.SAME)
def test_without_a_fault_the_losses_are_those_without_the_plugin(
    reference: Launch, plain: list[str]
) -> None:
    check_close(printed_in(reference(SPEC).output), plain)


def losses(lines: list[str]) -> list[float]:
    """Return the loss of each iteration."""
    return [
        float(found[1]) for line in lines if (found := re.search(r"lm loss: ([-+.\dEe]+)", line))
    ]


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.parametrize("more", [(), TP2_PP2], ids=["dp", "tp_pp"])
def test_the_losses_of_twenty_steps_are_those_without_the_plugin(
    reference: Launch, script: Path, data: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    options = (*SPEC.options, *more)
    spec = replace(SPEC, options=options, steps=20, nproc=8 if more else 4)
    plain = without_plugin(spec, script=script, data=data, folder=tmp_path / "plain")
    check_close(printed(reference(spec)), plain)
    assert len(losses(plain)) == 20


@proves(Kind.NOTHING, Promise.SAME)
def test_in_bf16_the_losses_lie_within_the_spread_of_two_orders_of_sums(
    reference: Launch,
    script: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each order of sums is another run in bf16, and none of them is the right one."""
    spec = replace(SPEC, options=(*SPEC.options, "--bf16"), steps=20)
    ours = losses(printed(reference(spec)))
    orders = []
    for seed in (1, 2):
        monkeypatch.setenv("SUM_ORDER", str(seed))
        lines = without_plugin(spec, script=script, data=data, folder=tmp_path / str(seed))
        orders.append(losses(lines))
    pairs = list(zip(*orders, strict=True))
    spread = max(abs(one - other) for one, other in pairs)
    off = max(min(abs(our - one) for one in pair) for our, pair in zip(ours, pairs, strict=True))
    print(f"bf16, 20 steps: spread of two orders {spread:.3g}, off by {off:.3g}")
    assert len(ours) == 20
    assert off <= spread
    assert spread > 0


@proves(Kind.KILL, Promise.WHOLE, victim="1", moment="2:backward")
def test_a_run_without_the_plugin_goes_on_from_a_checkpoint_after_a_loss(
    run: Launch, script: Path, data: Path, tmp_path: Path
) -> None:
    saving = (*SPEC.options, "--save", "{data}/lost", "--save-interval", "4")
    killed = run(replace(SPEC, options=saving, kills=("1@2:backward",)))
    assert killed.returncode == 0, killed.output[-4000:]
    assert len(killed.events("fault_fired")) == 1
    shutil.copytree(data / "lost", data / "lost-four")
    (data / "lost-four" / "latest_checkpointed_iteration.txt").write_text("4")
    loading = replace(SPEC, options=(*SPEC.options, "--load", "{data}/lost-four"))
    with_plugin = run(loading)
    went_on = without_plugin(loading, script=script, data=data, folder=tmp_path / "run")
    # Megatron-LM's line of iteration 6 is the mean of 5 and 6 after a load.
    check_close(printed(with_plugin), went_on)
    assert with_plugin.trace() == {step: killed.trace()[step] for step in (4, 5)}
