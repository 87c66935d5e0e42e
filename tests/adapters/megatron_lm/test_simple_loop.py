"""Megatron-LM's smallest example, protected by a dozen lines, loses a worker and is equal."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm import simple_loop
from tests.adapters.megatron_lm.harness import REPOSITORY, needs_repository
from tests.faults.harness import JobSpec, Outcome, Zygote, check_equal, launch
from tests.proofs import Kind, Promise, proves

pytestmark = needs_repository
CHANGED_LINES, OWN_CHANGED_LINES = 12, 3
PAGE = Path(__file__).parents[3] / "docs" / "megatron_core.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleSpec(JobSpec):
    """The example: TP2, two replicas, five steps of two micro-batches of eight samples."""

    steps: int = 5
    global_batch: int = 16

    def arguments(self, data: Path, directory: Path) -> list[str]:
        """It has no arguments of its own."""
        words = super(SimpleSpec, self).arguments(data, directory)
        return [word for word in words if word.startswith("--elaswave")]


def test_so_many_lines_change() -> None:
    assert simple_loop.changed_lines(Path(REPOSITORY)) == CHANGED_LINES
    own = simple_loop.changed_lines(Path(REPOSITORY), simple_loop.OPTIMIZER_EDITS)
    assert own == OWN_CHANGED_LINES
    said = f"{OWN_CHANGED_LINES} changed lines, or with {CHANGED_LINES} for the verbs"
    assert said in PAGE.read_text()


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("kill", ["1@3:backward", "2@1:forward", "0@4:optimizer"])
def test_it_loses_a_worker_and_is_equal(
    zygote: Zygote, tmp_path: Path, simple_reference: Outcome, kill: str
) -> None:
    killed = launched(SimpleSpec(kills=(kill,)), zygote, tmp_path)
    check_equal(killed, simple_reference)
    assert killed.output.count("Successfully loaded the model") == 3
    assert printed(killed) == printed(simple_reference)


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:backward")
def test_its_own_loop_loses_a_worker_and_is_equal(zygote: Zygote, tmp_path: Path) -> None:
    """With the distributed optimizer, and no other line."""
    runs = []
    for kills in ((), ("1@3:backward",)):
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        spec = SimpleSpec(kills=kills)
        runs.append(launched(spec, zygote, folder, edits=simple_loop.OPTIMIZER_EDITS))
    undisturbed, killed = runs
    check_equal(killed, undisturbed)
    assert killed.output.count("Successfully loaded the model") == 3


def printed(run: Outcome) -> set[str]:
    """The losses, as all workers print them; two may print before either ends its line."""
    found = set(re.findall(r"Iteration \d+: loss \d+\.\d+", run.output))
    assert len(found) == run.spec.steps, run.output[-3000:]
    return found


def launched(
    spec: SimpleSpec,
    zygote: Zygote,
    folder: Path,
    edits: simple_loop.Edits = simple_loop.EDITS,
) -> Outcome:
    script = folder / "simple.py"
    text = simple_loop.protected(Path(REPOSITORY), edits)
    script.write_text(simple_loop.on_this_machine(text))
    directory = folder / "run"
    return launch(
        replace(spec, script=str(script)), zygote=zygote, data=folder, directory=directory
    )


@pytest.fixture(scope="module")
def simple_reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The protected script, undisturbed."""
    run = launched(SimpleSpec(), zygote, tmp_path_factory.mktemp("simple"))
    assert run.returncode == 0, run.output[-4000:]
    return run
