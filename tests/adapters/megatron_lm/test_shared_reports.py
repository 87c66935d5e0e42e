"""A loss function of a script of one's own that reports the loss itself, which is divided."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    EVALUATION,
    TP2_PP2,
    ScriptSpec,
    needs_repository,
    printed,
)
from tests.faults.harness import check_equal
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

pytestmark = needs_repository
CLONE = "torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])"
RETURN = "return loss, num_tokens, report"
SPECS = {
    "dp4": ScriptSpec(options=EVALUATION, kills=("1@1:backward",)),
    "tp2 pp2 dp2": ScriptSpec(nproc=8, options=(*EVALUATION, *TP2_PP2), kills=("6@1:backward",)),
}
FORMS = {
    "of two": ("loss.detach()", "return loss, report"),
    "of three": ("loss.detach()", RETURN),
}


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("layout", sampled(SPECS))
@pytest.mark.parametrize("form", FORMS)
def test_a_report_keeps_its_value(
    run: Launch, reference: Launch, script: Path, form: str, layout: str
) -> None:
    """In training and in evaluations, as printed."""
    report, returns = FORMS[form]
    text = script.read_text()
    assert text.count(CLONE) == text.count(RETURN) == 1
    name = f"pretrain_{form.replace(' ', '_')}.py"
    script.with_name(name).write_text(text.replace(CLONE, report).replace(RETURN, returns))
    spec = replace(SPECS[layout], script=name)
    survived, undisturbed = run(spec), reference(spec)
    check_equal(survived, undisturbed)
    assert printed(survived) == printed(undisturbed)
