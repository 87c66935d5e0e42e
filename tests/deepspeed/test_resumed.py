"""The place at which a loop that the script owns begins in the data, in a job that is resumed."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader, GlobalOrder
from elaswave_plugin.adapters.deepspeed.engine.resumed import Resumed
from elaswave_plugin.errors import ConfigurationError
from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.faults.harness import Outcome
from tests.proofs import Kind, Promise, proves

# Six iterations of a pass, of three samples each; the checkpoint is in the second pass.
PASS, EACH, TRAINED = 18, 3, 30


class Script:
    """The first step of a script, and what it has in the ledger."""

    def __init__(self, *, reshuffles: bool = False, per_step: int = 1) -> None:
        sizes: dict[str, Any] = {"num_replicas": EACH, "micro_batch_size": 1, "drop_last": False}
        order = GlobalOrder(PASS, shuffle=True, seed=1, reshuffles=reshuffles, **sizes)
        self.loader = ElasticLoader(None, [*range(PASS)], order, collate=list)  # type: ignore[arg-type]
        self.resumed = Resumed(TRAINED, batch=EACH, per_step=per_step, speaks=True)
        self.ledger: list[tuple[list[int], int]] = []

    def consume(self, *, samples: list[int], trained: int) -> None:
        self.ledger.append((samples, trained))

    def read(self, count: int = 1, *, begins: bool = True) -> None:
        for _ in range(count):
            self.resumed.passes_over(self.loader)
            items = self.loader.items()
            share, _ = self.loader.read(items, (0, len(items)))
            self.resumed.serve(self.loader, items, share.ids, self.consume, begins=begins)

    def use(self) -> list[int]:
        self.resumed.use()
        samples, trained = self.ledger[-1]
        assert trained == TRAINED
        return samples


def test_one_that_passes_over_what_was_trained_on_goes_on_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = Script()
    iter(script.loader)
    script.read(TRAINED % PASS // EACH + 1)
    assert not script.ledger
    assert script.use() == [30, 31, 32]
    script.read(begins=False)
    assert script.use() == [33, 34, 35]
    said = capfd.readouterr()
    assert not said.out + said.err
    with pytest.raises(ConfigurationError, match="passed over 4 batches"):
        script.resumed.check_redo(0)
    script.resumed.check_redo(1)


def test_one_that_skips_them_reads_none_of_them_and_may_begin_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In the pass that the checkpoint was in, and in a redo; the next pass is a whole one."""
    script = Script()
    script.loader.prepare_epoch(0, number=0, skipped=TRAINED % PASS // EACH)
    sealed = script.loader.position
    iter(script.loader)
    wanted = script.loader.items_at(1, TRAINED % PASS // EACH)
    for _ in range(2):
        script.loader.position = sealed
        assert script.loader.items() == wanted
        script.read()
        assert script.use() == [30, 31, 32]
        script.resumed.check_redo(0)
    script.read()
    with pytest.raises(StopIteration):
        script.loader.items()
    iter(script.loader)
    assert script.loader.items() == script.loader.items_at(1, 0)
    said = capfd.readouterr()
    assert not said.out + said.err


@pytest.mark.parametrize(("reshuffles", "passed"), [(False, 0), (True, 4)])
def test_one_that_begins_elsewhere_is_told_and_its_samples_are_repeated(
    capfd: pytest.CaptureFixture[str], reshuffles: bool, passed: int
) -> None:
    script = Script(reshuffles=reshuffles)
    iter(script.loader)
    script.read(passed + 1)
    first = passed * EACH
    assert script.use() == [first, first + 1, first + 2]
    said = capfd.readouterr()
    text = f"begins at batch {passed} of pass 0 of the training data"
    assert (said.out + said.err).count(text) == 1
    assert "wanted batch 4 of pass 1" in said.out + said.err


@pytest.mark.parametrize(("passed", "follows"), [(10, True), (9, False)])
def test_a_pass_that_ends_with_a_shorter_step_has_as_many_steps(
    capfd: pytest.CaptureFixture[str], passed: int, follows: bool
) -> None:
    """Six batches of a pass are steps of four and of two: the third step ends at batch four."""
    script = Script(per_step=4)
    script.resumed = Resumed(3 * 4 * EACH, batch=EACH, per_step=4, speaks=True)
    iter(script.loader)
    for _ in range(passed + 1):
        if script.loader.at_end:
            iter(script.loader)
        script.read()
    script.resumed.use()
    said = capfd.readouterr()
    assert ("wanted batch 4 of pass 1" in said.out + said.err) is not follows


# ---- whole jobs ---------------------------------------------------------------------------------

DONE, STEPS = 4, 8


def saving(folder: Path, *options: str, steps: int = STEPS - DONE, **more: Any) -> EngineSpec:
    script = str(SCRIPTS / "saving.py")
    given = (f"--save={folder}", f"--every={DONE}", *options)
    return EngineSpec(script=script, stage=2, steps=steps, options=given, **more)


@pytest.fixture(scope="module")
def whole(run: Launch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """A run, and the folder of the checkpoint that it wrote in its middle."""
    folder = tmp_path_factory.mktemp("saved")
    done = run(saving(folder, steps=STEPS))
    assert done.returncode == 0, done.output[-4000:]
    (folder / "latest").write_text(f"global_step{DONE}")
    return done, folder


@proves(Kind.RESUME, Promise.SAME)
@pytest.mark.parametrize("passes_over", [True, False])
def test_a_loop_goes_on_behind_its_checkpoint_or_its_samples_are_repeated(
    run: Launch, whole: tuple[Outcome, Path], tmp_path: Path, passes_over: bool
) -> None:
    done, folder = whole
    options = (f"--load={folder}", *(("--passes-over",) if passes_over else ()))
    resumed = run(saving(tmp_path, *options))
    assert resumed.returncode == 0, resumed.output[-4000:]
    bits, later = resumed.trace(), done.trace()
    follows = [bits[step] for step in sorted(bits)] == [later[n] for n in range(DONE, STEPS)]
    assert follows is passes_over
    assert ("samples are trained on again" in resumed.output) is not passes_over
    repeated = 0 if passes_over else DONE * resumed.spec.global_batch
    assert f"samples: 0 lost, {repeated} repeated" in resumed.output


@proves(Kind.KILL, Promise.REFUSED, victim="1", moment="0:backward")
def test_a_loss_in_the_first_step_behind_passed_batches_ends_the_job_in_a_sentence(
    run: Launch, whole: tuple[Outcome, Path], tmp_path: Path
) -> None:
    options = (f"--load={whole[1]}", "--passes-over")
    killed = run(saving(tmp_path, *options, kills=("1@0:backward",)))
    assert killed.events("fault_fired") and killed.returncode != 0 and not killed.orphans
    assert "start the job again from the checkpoint" in killed.output
    assert "Traceback" not in killed.output, killed.output[-4000:]
