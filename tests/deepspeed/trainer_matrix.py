"""The Trainer's fault matrix: moment x ZeRO stage x {full, LoRA} x {in place, offloaded optimizer}.

Moments are the phases of a step, an evaluation, a save, a resumed run, a return and two losses.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from safetensors.torch import load_file

from elaswave_plugin.config import STEP_PHASES, parse_change
from elaswave_plugin.tracking.state_dump import hash_state
from tests.deepspeed.harness import PRELOAD, EngineSpec, as_it_counted, check_recovered
from tests.deepspeed.hf_runs import AUTO, SAVING, TRAINER, check_newcomer, check_tapes, checkpoints
from tests.deepspeed.test_adams import PLAYED
from tests.deepspeed.test_offload import check_offloaded
from tests.fault_matrix import FaultMatrix, Runs
from tests.faults.harness import Outcome
from tests.proofs import Promise

OUTSIDE = ("evaluation", "save")
RESUME, RETURN, TWO = "resume", "return", "two losses"
MOMENTS = (*STEP_PHASES, *OUTSIDE, RESUME, RETURN, TWO)
STAGES = range(4)
WORKERS = 4
# A lost worker comes back before this step.
BACK = 4
# Steps from one checkpoint and evaluation to the next.
EVERY = 2
# A job is resumed behind this step, and the last checkpoint is that of its last one.
RESUMED, LAST = 4, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec(EngineSpec):
    """One launch of the stock script, which evaluates and saves every two of its six steps."""

    # Its name: two jobs that differ in it alone are the same.
    moment: str = field(default="", compare=False)
    lora: bool = False
    offload: bool = False
    # Steps of the checkpoint from which it is resumed.
    made: int = 0

    @property
    def batches(self) -> Sequence[int]:
        """Samples of each step."""
        return (self.steps - self.made) * [self.global_batch]

    def step_with(self, phase: str, first: int) -> int:
        """The first step from ``first`` on in which a worker is in this phase."""
        return first + first % EVERY if phase in OUTSIDE else first


def case(moment: str, stage: int, lora: bool, offload: bool) -> TrainerSpec:
    """The launch that loses a worker at a moment; these and its kind of job decide which one."""
    slot = (stage + 2 * lora + offload + MOMENTS.index(moment) // 2) % WORKERS
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    place: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 100, **place}
    more = {"optimizer": {"type": "AdamW", "params": auto}} if offload else {}
    kills = {
        RESUME: (f"{slot}@1:backward",),
        RETURN: (f"{slot}@1:backward",),
        TWO: (f"{slot}@1:backward", f"{(slot + 1) % WORKERS}@3:forward"),
    }
    usual = (f"{slot}@{4 if moment in OUTSIDE else 3}:{moment}",)
    return TrainerSpec(
        moment=moment,
        made=RESUMED if moment == RESUME else 0,
        stage=stage,
        lora=lora,
        offload=offload,
        script=TRAINER,
        options=(*SAVING, *(("--lora",) if lora else ())),
        settings=json.dumps({**AUTO, **more, "zero_optimization": zero}),
        # What DeepSpeedCPUAdam compiles is played by torch.
        sabotage=PLAYED if offload else "",
        kills=kills.get(moment, usual),
        respawn=5 if moment == RETURN else 0,
        changes=(f"+{slot}@{BACK}",) if moment == RETURN else (),
    )


def cases() -> tuple[TrainerSpec, ...]:
    """Every case of the matrix, in order; ZeRO 0 offloads nothing."""
    return tuple(
        case(moment, stage, lora, offload)
        for stage, lora, offload, moment in itertools.product(
            STAGES, (False, True), (False, True), MOMENTS
        )
        if stage or not offload
    )


def cover() -> list[TrainerSpec]:
    """Every pair of moment, stage, kind of weights and place, in as few cases as two axes have."""
    return [
        case(moment, stage, bool((index + stage) % 2), bool(stage and (index + stage // 2) % 2))
        for stage, (index, moment) in itertools.product(STAGES, enumerate(MOMENTS))
    ]


def launch(spec: TrainerSpec, runs: Runs) -> Outcome:
    """Run a case; one that is resumed, from a checkpoint of the run that nothing disturbs."""
    if spec.made:
        folder = runs.reference(replace(spec, made=0)).directory / "trainer"
        options = (*spec.options, f"--resume={folder / f'checkpoint-{spec.made}'}")
        spec = replace(spec, options=options)
    return runs.run(spec)


def check(run: Outcome, runs: Runs) -> None:
    """Bit-equal to the planned departure; callbacks and logs as those of the undisturbed run."""
    spec = run.spec
    assert isinstance(spec, TrainerSpec)
    assert run.returncode == 0, run.output[-4000:]
    planned = runs.twin(as_it_counted(run))
    undisturbed = runs.reference(replace(spec, respawn=0))
    check_recovered(run, twin=planned, reference=undisturbed)
    check_tapes(run, undisturbed, survivors=WORKERS - len(spec.kills))
    for back in map(parse_change, spec.changes):
        check_newcomer(run, undisturbed, first=back.step)
    if spec.offload:
        check_offloaded(run, fewest=1 if spec.made or spec.changes else None)
    if spec.lora:
        assert all(".lora_" in name for name, _ in hash_state(run.directory).by_name)
    check_checkpoints(run, planned, undisturbed)


def check_checkpoints(run: Outcome, planned: Outcome, undisturbed: Outcome) -> None:
    """They have the steps and as much of the log as without the loss, and the twin's weights."""
    ours, wanted = checkpoints(run), checkpoints(undisturbed)
    assert list(ours) == list(wanted)
    for name, state in ours.items():
        assert state["global_step"] == wanted[name]["global_step"]
        assert len(state["log_history"]) == len(wanted[name]["log_history"])
    written = weights(run)
    assert written.keys() == weights(planned).keys()
    for place, tensors in weights(planned).items():
        assert tensors.keys() == written[place].keys()
        assert all(tensors[name].equal(written[place][name]) for name in tensors), place


def weights(run: Outcome) -> dict[str, Any]:
    """Return what the last checkpoint has in files that Transformers reads, by file."""
    folder = run.directory / "trainer" / f"checkpoint-{LAST}"
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


MATRIX = FaultMatrix(
    framework="trainer",
    cases=cases(),
    fields=("moment", "stage", "lora", "offload", "kills"),
    preload=PRELOAD,
    promise=lambda spec: Promise.PLANNED,
    run=launch,
    check=check,
)
