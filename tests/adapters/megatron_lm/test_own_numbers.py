"""Calls by which a loss function asks the others: refused, or told after a loss."""

from pathlib import Path

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import ScriptSpec, needs_repository
from tests.faults.harness import check_survived
from tests.proofs import Kind, Promise, proves

pytestmark = needs_repository
IMPORTS = "import torch\n"
CLONE = "report = {'lm loss': torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}"
# As earlier releases of pretrain_gpt.py have it.
REDUCES = (
    "reporting = loss.clone().detach() / num_tokens\n"
    "    torch.distributed.all_reduce(reporting, group=parallel_state.get_data_parallel_group())\n"
    "    report = {'lm loss': reporting.view(1)}"
)
DIVIDES = "report = {'lm loss': loss.detach().view(1) / torch.distributed.get_world_size()}"


def written(script: Path, name: str, report: str) -> str:
    """The script with another report."""
    text = script.read_text()
    assert text.count(CLONE) == 1
    more = f"{IMPORTS}from megatron.core import parallel_state\n"
    text = text.replace(CLONE, report).replace(IMPORTS, more, 1)
    script.with_name(name).write_text(text)
    return name


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_sum_over_replicas_is_refused_in_the_first_step(run: Launch, script: Path) -> None:
    spec = ScriptSpec(script=written(script, "pretrain_reduces.py", REDUCES))
    refused = run(spec)
    assert refused.returncode == 2
    assert "all_reduce is called in loss_func (pretrain_reduces.py:" in refused.output
    assert not refused.files.steps


@proves(Kind.KILL, Promise.NAMED, victim="1", moment="1:backward")
def test_a_width_is_told_once(run: Launch, reference: Launch, script: Path) -> None:
    name = written(script, "pretrain_divides.py", DIVIDES)
    spec = ScriptSpec(script=name, kills=("1@1:backward",))
    survived = run(spec)
    check_survived(survived)
    (sentence,) = [line for line in survived.output.splitlines() if "may show" in line]
    assert f"{name}:" in sentence and "(get_world_size) may show the loss" in sentence
    assert "may show" not in reference(spec).output
