"""Launches of DeepSpeed scripts under `elaswave run`, and what a recovery of them promises."""

import json
import uuid
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from elaswave_plugin.config import parse_kill
from tests.convoys import recoveries
from tests.faults.harness import (
    FIRST_PROFILED,
    ROOT,
    JobSpec,
    Outcome,
    check_survived,
    max_relative_difference,
)


def _is_there(module: str) -> bool:
    return find_spec(module.partition(".")[0]) is not None


EXAMPLE = ROOT / "examples" / "train_deepspeed.py"
SCRIPTS = ROOT / "tests" / "deepspeed" / "scripts"
PRELOAD = (
    "torch",
    "numpy",
    "pydantic",
    "deepspeed",
    # What deepspeed.initialize imports, which takes two seconds in each process.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.comm.mori",
    "deepspeed.utils.pin_memory",
    "torch._dynamo",
    *FIRST_PROFILED,
    "elaswave_plugin.adapters.deepspeed.attach",
    "elaswave_plugin.adapters.deepspeed.accelerate.accelerate",
    "accelerate",
    "transformers.models.llama.modeling_llama",
    *(
        name
        for name in ("peft", "datasets", "trl.trainer.sft_trainer", "trl.trainer.grpo_trainer")
        if _is_there(name)
    ),
)
# Largest relative difference of a loss after a loss of workers: sums in another order.
FP32_BOUND, BITS_16_BOUND = 1e-6, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec(JobSpec):
    """One launch: a tiny GPT in fp32 or bf16 under a ZeRO stage, two micro-batches a step."""

    stage: int = 1
    bf16: bool = False
    consistency: str = "fast"
    accumulation: int = 2
    # Pipeline stages.
    stages: int = 1
    # Steps from one seal to the next.
    interval: int | None = None
    settings: str = ""
    script: str = str(EXAMPLE)

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that its zygote has imported."""
        return PRELOAD

    def undisturbed(self) -> Self:
        """The same job without faults and departures, which cannot grow."""
        return replace(self, kills=(), changes=(), joiners=0, launcher=())

    @property
    def has_16_bits(self) -> bool:
        """True if the weights are in bf16 or fp16."""
        return self.bf16 or '"fp16"' in self.settings

    def config(self, directory: Path) -> dict[str, Any]:
        """The DeepSpeed configuration; ``settings`` is JSON on top of it, null takes a key out."""
        width = self.nproc // self.stages
        micro_batch_size = self.global_batch // (self.accumulation * width)
        config = {
            "train_batch_size": self.global_batch,
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 1.0,
            "steps_per_print": 1_000_000,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {
                    "warmup_min_lr": 0.0,
                    "warmup_max_lr": 1e-3,
                    "warmup_num_steps": 5,
                    "warmup_type": "linear",
                },
            },
            "bf16": {"enabled": self.bf16},
            # A pipeline's stages tell each other the shape of a batch once.
            "dataloader_drop_last": self.stages > 1,
            "zero_optimization": {
                "stage": self.stage,
                # Small enough that most parameters of the tiny model are really cut.
                "stage3_param_persistence_threshold": 100,
            },
            "elaswave": {
                "enabled": True,
                "consistency": self.consistency,
                "dir": str(directory),
                "dump_state": self.dump,
                "kill": list(self.kills),
                "change": list(self.changes),
                "respawn": self.respawn,
                "slow_workers": self.slow_workers,
                # As soon as in the other phases: no storage stalls here.
                "data_timeout_s": 2.0,
            },
            **json.loads(self.settings or "{}"),
        }
        if self.interval is not None:
            config["elaswave"]["snapshot_interval"] = self.interval
        return {key: value for key, value in config.items() if value is not None}

    def arguments(self, data: Path, directory: Path) -> list[str]:
        """The script's arguments; the configuration is written beside the run's files."""
        path = directory / "deepspeed.json"
        # Each node's launcher writes it, and a worker of another one may read it at this moment.
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
        draft.write_text(json.dumps(self.config(directory)))
        draft.rename(path)
        return [
            f"--deepspeed_config={path}",
            f"--steps={self.steps}",
            "--num-layers=2",
            "--hidden-size=64",
            "--seq-length=32",
            *self.options,
        ]


def as_it_counted(run: Outcome) -> EngineSpec:
    """The specification with every loss before the step to which the run rolled back.

    That is one step earlier where somebody had not sealed the last one yet when the fault fired.
    """
    assert isinstance(run.spec, EngineSpec)
    found = recoveries(run)
    told = [
        f"{parse_kill(kill).slot}@{found[kill][0]['restored_step']}"
        for kill in run.spec.kills
        if not parse_kill(kill).incarnation
    ]
    return replace(run.spec, kills=tuple(told))


def check_recovered(run: Outcome, *, twin: Outcome, reference: Outcome) -> None:
    """Everything that a recovery promises in a loop that the script owns."""
    assert isinstance(run.spec, EngineSpec)
    check_survived(run)
    check_survived(twin)
    assert run.trace() == twin.trace()
    bound = BITS_16_BOUND if run.spec.has_16_bits else FP32_BOUND
    assert max_relative_difference(run, reference) <= bound
    assert rates(run) == rates(reference)


def rates(run: Outcome) -> dict[int, float]:
    """The learning rate of each step."""
    return {record["step"]: record["lr"] for record in run.files.steps}
