"""Layers of Transformer Engine's spec: a loss changes nothing.

They need a GPU. On a CPU stand-ins take their place (tests/stand_ins), with the parameters, the
extra state and the ways of theirs to accumulate gradients: into ``main_grad``, where it was in the
forward pass, in place of what is there for a first micro-batch.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from elaswave_plugin.adapters.megatron.state.stage_parts import move_to_tp_position
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal
from tests.faults.hybrid_matrix import PP2_DP2, TP2_PP2_DP2
from tests.faults.test_first_step import ON_GPU, repeated
from tests.faults.test_fused_adam import MOVED, STAND_INS, why_not
from tests.faults.test_outside_a_step import saved_tensors
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled
from tests.session import Run, Zygotes, each_once

# Before the script: weight gradients are fused into the backward.
FUSES = """
from megatron.core.transformer import TransformerConfig
checked = TransformerConfig.__post_init__
def fused(self):
    self.gradient_accumulation_fusion = True
    checked(self)
TransformerConfig.__post_init__ = fused
"""
# And the layers are theirs.
USES = f"""{FUSES}
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.transformer.transformer_layer import TransformerLayer
specs.get_gpt_layer_local_spec = specs.get_gpt_layer_with_transformer_engine_spec
build = TransformerLayer.__init__
def built(self, *args, **kwargs):
    build(self, *args, **kwargs)
    parts = self.self_attention.linear_qkv, self.self_attention.core_attention
    assert all("transformer_engine" in type(one).__mro__[1].__module__ for one in parts)
TransformerLayer.__init__ = built
"""


@pytest.fixture(scope="module")
def with_te(zygotes: Zygotes, run: Run) -> Launch:
    """Launch jobs whose layers are stand-ins."""
    zygote = zygotes(path=(STAND_INS / "with_te", STAND_INS))
    return lambda spec: run(replace(spec, sabotage=spec.sabotage or USES), zygote)


@pytest.fixture(scope="module")
def undisturbed(with_te: Launch) -> Launch:
    """The run of the same layers without a fault, made once."""
    once = each_once(with_te)
    return lambda spec: once(spec.undisturbed())


SPECS = [
    JobSpec(kills=("2@3:backward",)),
    replace(PP2_DP2, kills=("0@2:backward",)),
    MOVED,
    replace(PP2_DP2, lost_trainers=(2, 3)),
    replace(TP2_PP2_DP2, kills=("5@3:backward",)),
    replace(TP2_PP2_DP2, kills=("0@2:forward",)),
]


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("spec", sampled(SPECS))
def test_a_loss_with_stand_ins_for_the_layers_changes_nothing(
    with_te: Launch, undisturbed: Launch, spec: JobSpec
) -> None:
    check_equal(with_te(spec), undisturbed(spec))


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("spec", sampled(SPECS[:3]))
def test_a_loss_with_fused_weight_gradients_changes_nothing(
    with_te: Launch, reference: Reference, spec: JobSpec
) -> None:
    """Megatron-Core's own layers: the sums are those of the unfused gradients."""
    check_equal(with_te(replace(spec, sabotage=FUSES)), reference(spec))


@proves(Kind.NOTHING, Promise.EQUAL)
@pytest.mark.parametrize("layers", [USES, FUSES], ids=["stand-ins", "fused"])
@pytest.mark.parametrize("spec", sampled([JobSpec(), TP2_PP2_DP2]))
def test_a_layer_that_is_run_twice_leaves_no_trace(
    with_te: Launch, spec: JobSpec, layers: str
) -> None:
    """On a GPU: both add to gradient buffers in the backward pass itself."""
    once = with_te(replace(spec, sabotage=layers))
    twice = with_te(replace(spec, sabotage=f"{layers}\n{ON_GPU}"))
    assert (once.returncode, twice.returncode) == (0, 0), twice.output[-4000:]
    assert twice.trace() == once.trace()
    assert (repeated(once), repeated(twice)) == ([], [(0, True)])


@proves(Kind.KILL, Promise.WHOLE, victim="1", moment="2:backward")
@pytest.mark.slow
def test_a_checkpoint_after_a_loss_has_the_extra_state_of_every_layer(
    with_te: Launch, tmp_path: Path
) -> None:
    def saving(name: str, *kills: str) -> JobSpec:
        options = (*PP2_DP2.options, f"--save={tmp_path / name}", "--save-interval=6")
        return replace(PP2_DP2, options=options, kills=kills)

    check_equal(with_te(saving("lost", "1@2:backward")), with_te(saving("whole")))
    lost, whole = (tmp_path / name / "iter_0000006" for name in ("lost", "whole"))
    left, right = saved_tensors(lost), saved_tensors(whole)
    assert len(left) > 20 and left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    names = [
        set(FileSystemReader(one).read_metadata().state_dict_metadata) for one in (lost, whole)
    ]
    assert names[0] == names[1]
    assert sum("linear_qkv._extra_state" in name for name in names[0]) >= 1


def test_layers_that_know_their_tp_position_are_told_the_new_one() -> None:
    """Megatron-Core's layers on top of theirs keep it by value."""
    layer = torch.nn.Linear(1, 1)
    layer.tp_rank, layer._tp_group = 0, SimpleNamespace(rank=lambda: 1)
    move_to_tp_position(torch.nn.Sequential(layer))
    assert layer.tp_rank == 1


@proves(Kind.KILL, Promise.EQUAL, victim="2", moment="3:backward")
@pytest.mark.gpu
def test_a_loss_with_the_real_layers_changes_nothing(run: Launch, reference: Reference) -> None:
    if reason := why_not("te"):
        pytest.skip(reason)
    spec = JobSpec(kills=("2@3:backward",), sabotage=USES)
    check_equal(run(spec), run(replace(spec, kills=())))
