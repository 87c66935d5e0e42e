"""Numbers that a script makes of what its workers run: told with their lines after a loss."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

RETURN = "        return losses, grad_norm\n"
EVALUATE = "            loss = job.evaluate(evaluate)  # [elastic] 9\n"


def in_step(line: str) -> own_scripts.Change:
    """A line of ``train_step``, behind the update."""
    return RETURN, f"        {line}\n{RETURN}"


# What the script does by itself, where, and the name by which it is told.
LINES = {
    "reads the losses": (in_step("sum(total / tokens for total, tokens in losses)"), "losses"),
    "counts them": (in_step("[0.0] * len(losses) if losses else []"), "losses"),
    "makes a tensor of them": (in_step("torch.tensor(losses).sum(0)"), "losses"),
    "prints them": (in_step("print(losses)"), "losses"),
    "reads them to evaluate": (
        (EVALUATE, EVALUATE.replace("(evaluate)", "(lambda: [one[:] for one in evaluate()])")),
        "losses",
    ),
    "sums over the workers": (
        in_step("torch.distributed.all_reduce(torch.ones(()))"),
        "all_reduce",
    ),
    "asks for the replicas": (
        in_step("parallel_state.get_data_parallel_world_size()"),
        "get_data_parallel_world_size",
    ),
    "asks for the ranks": (
        in_step("torch.distributed.get_process_group_ranks(torch.distributed.group.WORLD)"),
        "get_process_group_ranks",
    ),
    "asks between two steps": (
        own_scripts.in_body("        torch.distributed.get_world_size()\n"),
        "get_world_size",
    ),
}
# Of work that starts again as a whole, and of the launch.
NOT_TOLD = (
    own_scripts.in_body('        job.run(torch.distributed.get_world_size, phase="count")\n'),
    own_scripts.before_model("WIDTH = []\n\n\n"),
    (
        "    train, valid = build_datasets(args)\n",
        "    train, valid = build_datasets(args)\n"
        "    WIDTH.append(torch.distributed.get_world_size())\n",
    ),
)
LOSES = JobSpec(steps=5, kills=("1@1:backward",), options=("--eval-interval=2", "--eval-iters=1"))


def told(output: str) -> list[str]:
    """The sentences about such lines."""
    return [line for line in output.splitlines() if "may show the loss" in line]


@proves(Kind.KILL, Promise.NAMED, victim="1", moment="1:backward")
@pytest.mark.parametrize("name", sampled(LINES))
def test_a_line_whose_number_shows_the_loss_is_named(
    run: Launch, reference: Reference, tmp_path: Path, name: str
) -> None:
    change, call = LINES[name]
    spec = replace(LOSES, script=own_scripts.write(tmp_path, change))
    survived, undisturbed = run(spec), reference(spec)
    check_equal(survived, undisturbed)
    assert told(undisturbed.output) == []
    (sentence,) = told(survived.output)
    new = {*Path(spec.script).read_text().splitlines()} - {*own_scripts.script().splitlines()}
    lines = Path(spec.script).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if line in new]
    assert f"train_gpt.py:{number} ({call}) may show the loss" in sentence
    assert "run 2 or 3 micro-batches of a batch now (2 each at the launch)" in sentence


@proves(Kind.KILL, Promise.NAMED, victim="1", moment="1:backward")
def test_other_lines_are_not_named(run: Launch, reference: Reference, tmp_path: Path) -> None:
    spec = replace(LOSES, script=own_scripts.write(tmp_path, *NOT_TOLD))
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert told(survived.output) == []
