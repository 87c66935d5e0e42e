"""Adapters beside frozen weights: what is trained is sealed, what is frozen stays or is read back.

With ZeRO-3 the frozen weights are cut as well, and the part of a lost worker comes out of the
memory of a node.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from elaswave_plugin.tracking.state_dump import hash_state
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.test_join import entered
from tests.faults.harness import Outcome, check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

LORA = EngineSpec(script=str(SCRIPTS / "lora.py"))
FROZEN = "from elaswave_plugin.adapters.deepspeed.zero import zero3_frozen as frozen"
# As if each worker had a node, or a container, of its own.
APART = f"{FROZEN}; frozen.SharedMemory.find = lambda place: None"


def frozen(run: Outcome) -> list[dict[str, str]]:
    """Return the digests of the frozen weights, as each process had them at the end."""
    return [json.loads(path.read_text()) for path in sorted(run.directory.glob("frozen-*"))]


def check_frozen(run: Outcome, reference: Outcome, *, workers: int) -> None:
    """Every worker has all frozen weights as they were, and nothing of them was sealed."""
    wanted = frozen(reference)[0]
    assert len(wanted) > 20
    assert frozen(run) == [wanted] * workers
    names = {name for name, _ in hash_state(run.directory).by_name}
    assert names and all(".down." in name or ".up." in name for name in names)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "options"),
    sampled(
        [
            (0, "3@2:backward", ()),
            (1, "2@2:forward", ()),
            (2, "1@2:backward", ()),
            (2, "0@3:optimizer", ()),
            (3, "0@2:forward", ()),
            (3, "3@1:gather", ()),
            (3, "2@3:snapshot", ()),
            (3, "1@2:backward", ("--cut",)),
        ]
    ),
)
def test_a_kill_equals_the_planned_departure(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str, options: tuple[str, ...]
) -> None:
    spec = replace(LORA, stage=stage, kills=(kill,), options=options)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_frozen(killed, reference(spec), workers=3)


@proves(Kind.KILLS, Promise.PLANNED)
@pytest.mark.parametrize("bf16", sampled([False, True]))
def test_two_losses_in_one_run(run: Launch, twin: Twin, reference: Launch, bf16: bool) -> None:
    spec = replace(LORA, stage=3, bf16=bf16, kills=("0@1:backward", "3@3:forward"))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_frozen(killed, reference(spec), workers=2)


@proves(Kind.RETURN, Promise.PLANNED, victim="1", moment="1:backward")
@pytest.mark.parametrize("sabotage", sampled(["", APART]), ids=["together", "apart"])
def test_who_comes_back_is_given_what_is_frozen(
    run: Launch, twin: Twin, reference: Launch, sabotage: str
) -> None:
    """From the memory of its node, or from another node's."""
    spec = replace(LORA, stage=3, steps=7, respawn=5, sabotage=sabotage)
    killed = run(replace(spec, kills=("1@1:backward",), changes=("+1@4",)))
    check_survived(killed)
    assert entered(killed) == [(1, 1, 4)]
    assert killed.trace() == twin(killed).trace()
    check_frozen(killed, reference(spec), workers=4)


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1", moment="2:backward")
def test_a_part_that_is_not_read_back_is_seen(run: Launch, twin: Twin, reference: Launch) -> None:
    sabotage = f"{FROZEN}; frozen.FrozenWeights.recut = lambda self: frozen.cut_again(self._params)"
    spec = replace(LORA, stage=3, kills=("1@2:backward",))
    broken = run(replace(spec, sabotage=sabotage))
    check_survived(broken)
    with pytest.raises(AssertionError):
        check_recovered(broken, twin=twin(spec), reference=reference(spec))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "memory": (
        {"sabotage": f"{FROZEN}; frozen.available_bytes = lambda: 10"},
        "ZeRO-3 jobs keep one copy in the memory of each node, and a node has 10 left",
    ),
    "change": (
        {"options": ("--follow",)},
        "the weight 'head.weight' is not trained, and was changed between two steps",
    ),
}


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_be_restored_is_refused(run: Launch, case: str) -> None:
    changes, words = REFUSED[case]
    refused = run(replace(LORA, stage=3, **changes))
    assert refused.returncode == 2, refused.output[-4000:]
    assert sum(words in line for line in refused.output.splitlines()) == 1
    assert "Traceback" not in refused.output and not refused.orphans
