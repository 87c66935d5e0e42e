"""After a loss, weight gradients are computed while a worker would wait: to the last bit alike."""

import re
from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived
from tests.faults.hybrid_matrix import PP2_DP2, PP2_VPP2_DP2, PP4_DP2, TP2_PP2_DP2, resized
from tests.faults.test_fp16 import in_fp16
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

ALWAYS = "--elaswave-split-backward=always"
# Says at the end of a worker how many weight gradients it has put off, and computed later.
COUNTING = """
import atexit, os
from elaswave_plugin.adapters.megatron.step.weight_gradients import WeightGradients
original, late = WeightGradients.compute, []
def compute(self, piece):
    late.append(len(self._put_off[piece]))
    original(self, piece)
WeightGradients.compute = compute
# In one piece: all workers write to the same place.
atexit.register(lambda: os.write(1, b"late %d of %d." % (sum(late), len(late))))
"""
FORGETTING = """
from elaswave_plugin.adapters.megatron.step.weight_gradients import WeightGradients
original = WeightGradients.compute
def compute(self, piece):
    (original if piece[1] else self._put_off.pop)(*((self, piece) if piece[1] else (piece,)))
WeightGradients.compute = compute
"""


def split(spec: JobSpec, *options: str, **changes: object) -> JobSpec:
    return replace(spec, options=(*spec.options, ALWAYS, *options), **changes)  # type: ignore[arg-type]


def check_split(run: Outcome) -> None:
    assert run.events("recovered")
    assert all(event["split_backward"] for event in run.events("recovered"))


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("spec", "kill"),
    sampled(
        [
            (PP2_DP2, "1@3:backward"),
            (TP2_PP2_DP2, "6@3:forward"),
            (PP4_DP2, "5@2:reduce"),
            (PP2_VPP2_DP2, "2@3:backward"),
            (in_fp16(PP2_DP2), "0@4:backward"),
        ]
    ),
)
def test_a_split_backward_changes_no_bit(
    run: Launch, reference: Reference, spec: JobSpec, kill: str
) -> None:
    """Late are the four linear layers of every layer, for each micro-batch."""
    survived = run(split(spec, kills=(kill,), sabotage=COUNTING))
    check_equal(survived, reference(spec))
    check_split(survived)
    late = re.findall(r"late (\d+) of (\d+)\.", survived.output)
    counts = [(int(gradients), int(pieces)) for gradients, pieces in late]
    assert len(counts) == spec.nproc - 1
    assert sum(pieces for _, pieces in counts) > 0
    assert all(gradients % (4 * pieces) == 0 for gradients, pieces in counts if pieces)


@proves(Kind.KILLS, Promise.EQUAL, victim="1 2", moment="1:backward 3:reduce")
@pytest.mark.slow
def test_two_losses_one_after_the_other(run: Launch, reference: Reference) -> None:
    survived = run(split(PP2_DP2, kills=("1@1:backward", "2@3:reduce")))
    check_equal(survived, reference(PP2_DP2))
    check_split(survived)


FROZEN = """
import os
from megatron.core.models.gpt import GPTModel
original = GPTModel.__init__
def initialize(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.pre_process:
        for name, parameter in self.decoder.named_parameters():
            parameter.requires_grad_("linear" not in name or "layer_norm" in name)
GPTModel.__init__ = initialize
"""


@proves(Kind.KILL, Promise.EQUAL, victim="3", moment="3:backward")
@pytest.mark.slow
def test_all_workers_run_whole_backwards_where_one_stage_has_to(
    run: Launch, reference: Reference
) -> None:
    """The linear layers of the first stage are frozen: nothing of it could be put off."""
    survived = run(replace(PP2_DP2, kills=("3@3:backward",), sabotage=FROZEN))
    check_equal(survived, reference(replace(PP2_DP2, sabotage=FROZEN)))
    assert not any(event["split_backward"] for event in survived.events("recovered"))


@proves(Kind.KILL, Promise.CLOSE, victim="1", moment="3:backward")
@pytest.mark.slow
def test_cut_micro_batches_with_split_backwards(run: Launch) -> None:
    """Resize in fast mode: bit for bit what whole backwards give."""
    spec = replace(resized(PP2_DP2), kills=("1@3:backward",))
    apart, whole = run(split(spec)), run(spec)
    for one in (apart, whole):
        check_survived(one)
    check_split(apart)
    assert apart.trace() == whole.trace()


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1", moment="3:backward")
@pytest.mark.slow
def test_forgotten_weight_gradients_are_seen(run: Launch, reference: Reference) -> None:
    """A negative control: those of the first micro-batch are dropped."""
    survived = run(split(PP2_DP2, kills=("1@3:backward",), sabotage=FORGETTING))
    check_survived(survived)
    check_split(survived)
    assert survived.trace() != reference(PP2_DP2).trace()


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "split_backward is always, which is for pipeline and tensor parallel"),
        (
            (*PP2_DP2.options, "--recompute-granularity=full"),
            "split_backward is always, and backwards cannot be split here: with full recomputation",
        ),
    ],
    ids=["data parallel", "recomputation"],
)
def test_where_it_cannot_be_is_one_sentence(
    run: Launch, options: tuple[str, ...], sentence: str
) -> None:
    refused = run(JobSpec(options=(*options, ALWAYS)))
    assert refused.returncode == 2
    assert sentence in refused.output
    assert "Traceback" not in refused.output and not refused.orphans
