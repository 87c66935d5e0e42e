"""The example of a Trainer: LoRA under ZeRO-3, by the launch command of the documentation."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EngineSpec, check_recovered
from tests.deepspeed.hf_runs import AUTO
from tests.faults.harness import ROOT
from tests.proofs import Kind, Promise, proves


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSpec(EngineSpec):
    """One launch of the example, whose arguments are the Trainer's."""

    script: str = str(ROOT / "examples" / "train_hf.py")

    def arguments(self, data: Path, directory: Path) -> list[str]:
        """The script's arguments; the configuration is written beside the run's files."""
        path = directory / "deepspeed.json"
        path.write_text(json.dumps(self.config(directory)))
        return [
            *(f"--deepspeed={path}", f"--output_dir={directory / 'model'}"),
            *(f"--max_steps={self.steps}", "--per_device_train_batch_size=1"),
            f"--gradient_accumulation_steps={self.accumulation}",
            *("--learning_rate=0.001", "--logging_steps=1", "--report_to=none"),
            *("--num_layers=2", "--hidden_size=64", "--seq_length=32", "--save_strategy=no"),
        ]


@proves(Kind.KILL, Promise.PLANNED, victim="2", moment="2:backward")
def test_a_kill_equals_the_planned_departure(run: Launch, twin: Twin, reference: Launch) -> None:
    spec = ExampleSpec(stage=3, settings=json.dumps(AUTO), kills=("2@2:backward",))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert (killed.directory / "model" / "adapter_model.safetensors").is_file()


def test_the_configuration_of_the_documentation_is_the_one_beside_it() -> None:
    config = json.loads((ROOT / "configs" / "deepspeed_hf.json").read_text())
    page = (ROOT / "docs" / "huggingface.md").read_text()
    shown = page.partition("```json\n")[2].partition("```")[0]
    assert json.loads(shown) == config
