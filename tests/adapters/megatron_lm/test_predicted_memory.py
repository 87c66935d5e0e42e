"""The memory of snapshots that `elaswave doctor` predicts is that which a job says it takes."""

import re
from dataclasses import replace

import pytest

from elaswave_plugin.cli.launch_files import of_words
from elaswave_plugin.cli.launch_memory import Memory, memory_of
from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import TP2_PP2, ScriptSpec, needs_repository
from tests.proofs import Kind, Promise, proves

pytestmark = needs_repository

# As the other tests have them, so that no run is made for this one alone.
STAGES = ScriptSpec(nproc=8, steps=5, options=(*ScriptSpec().options, *TP2_PP2))


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.parametrize("spec", [ScriptSpec(), STAGES], ids=["dp", "tp_pp"])
def test_snapshots_take_what_was_predicted(reference: Launch, spec: ScriptSpec) -> None:
    run = reference(spec)
    told = re.search(r"snapshots use ([\d.]+) MiB", run.output)
    assert told is not None
    words = replace(spec, elastic=False).arguments(run.directory, run.directory)
    memory = memory_of(of_words("pretrain_gpt.py", words).arguments, workers=spec.nproc)
    assert isinstance(memory, Memory)
    # Shards are padded, of models as small as these by a few percent.
    assert memory.snapshots / 2**20 == pytest.approx(float(told[1]), rel=0.05)
