"""A save takes no more memory than one without the plugin: nobody gathers optimizer state."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import NO_EVALUATION, ScriptSpec, needs_repository
from tests.adapters.megatron_lm.test_without_plugin import without_plugin
from tests.faults.harness import Outcome
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.slow, pytest.mark.timeout(400)]

# 25 M parameters, with 12 bytes each of optimizer state: gathered, 300 MB a worker.
LARGE = ("--num-layers", "8", "--hidden-size", "512", "--num-attention-heads", "8")
WATCH = "from tests.adapters.megatron_lm.save_peak import watch\nwatch()\n"
SPEC = ScriptSpec(
    steps=2,
    dump="never",
    options=(*NO_EVALUATION, *LARGE, "--save", "{data}/large", "--save-interval", "1"),
)
SAID = re.compile(r"save: (\d+) KiB, (\d+) before")


def most(lines: list[str] | str) -> tuple[int, int]:
    """Return the largest peak of a save, and the most that one adds; in KiB."""
    text = lines if isinstance(lines, str) else "\n".join(lines)
    found = [(int(peak), int(before)) for peak, before in SAID.findall(text)]
    assert len(found) >= 8
    return max(peak for peak, _ in found), max(peak - before for peak, before in found)


@proves(Kind.NOTHING, Promise.SAME)
def test_a_save_adds_as_little_as_without_the_plugin(
    run: Launch, script: Path, data: Path, tmp_path: Path
) -> None:
    ours: Outcome = run(replace(SPEC, sabotage=WATCH))
    assert ours.returncode == 0, ours.output[-4000:]
    said = without_plugin(SPEC, script=script, data=data, folder=tmp_path / "plain", watches=True)
    (our_peak, our_more), (peak, more) = most(ours.output), most(said)
    print(f"ours {our_peak} +{our_more}, without {peak} +{more} KiB")
    assert our_more <= more + 0.1 * peak
