"""DeepSpeed's own Adams, which it takes unless told otherwise: their state survives as torch's.

The optimizers are DeepSpeed's; what they compile at their first use is played by torch in the fast
cases, and is compiled in the slow ones, for some minutes.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# Counts how often the update was asked for, which shows that it was this one.
PLAYED = """
import atexit
import os
import torch
from deepspeed.ops.adam import cpu_adam, fused_adam
calls = [0]
# In one piece: all workers write to the same place.
atexit.register(lambda: os.write(1, b"updates %d." % calls[0]))
def update(g, p, m, v, lr, beta1, beta2, eps, step, decoupled, correct, decay):
    calls[0] += 1
    g = g if decoupled else g + decay * p
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    first, second = (1 - beta1**step, 1 - beta2**step) if correct else (1.0, 1.0)
    if decoupled:
        p.mul_(1 - lr * decay)
    p.sub_(lr * (m / first) / ((v / second).sqrt() + eps))
class Fused:
    def load(self):
        return self
    def multi_tensor_adam(self, chunk, flag, lists, *scalars):
        for one in zip(*lists):
            update(*one, *scalars)
class Cpu:
    def load(self):
        return self
    def create_adam(self, number, lr, beta1, beta2, eps, decay, decoupled, log):
        self.decoupled = decoupled
    def adam_update(self, number, step, lr, beta1, beta2, eps, decay, correct, p, g, m, v):
        update(g, p, m, v, lr, beta1, beta2, eps, step, self.decoupled, correct, decay)
    def destroy_adam(self, number):
        pass
fused_adam.FusedAdamBuilder, cpu_adam.CPUAdamBuilder = Fused, Cpu
"""
COMPILING = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
for kind in (DeepSpeedCPUAdam, FusedAdam):
    kind([torch.nn.Parameter(torch.zeros(1))])
"""
# A script that makes its own AdamW makes DeepSpeed's.
OWN = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
torch.optim.AdamW = DeepSpeedCPUAdam
"""
# What a configuration says that does not ask for torch's.
FUSED = EngineSpec(
    settings='{"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}}'
)
CPU = EngineSpec(
    settings='{"optimizer": null, "scheduler": null}',
    script=str(SCRIPTS / "own_optimizer.py"),
)


def environment(folder: Path) -> dict[str, str]:
    """Return variables for torch's compiled files, and for ninja, which is in this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"TORCH_EXTENSIONS_DIR": str(folder), "PATH": path}


@pytest.fixture(scope="module")
def compiled_adams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both optimizers' libraries, compiled unless TORCH_EXTENSIONS_DIR has them."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = Path(given) if given else tmp_path_factory.mktemp("extensions")
    env = {**os.environ, **environment(folder)}
    subprocess.run([sys.executable, "-c", COMPILING], env=env, check=True, timeout=3000)
    return folder


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("spec", "own", "stage"),
    sampled(
        [
            (FUSED, "", 1),
            (CPU, OWN, 2),
            (FUSED, "", 3),
            (FUSED, "", 0),
            (CPU, OWN, 3),
        ]
    ),
)
def test_its_state_survives(
    run: Launch, twin: Twin, reference: Launch, spec: EngineSpec, own: str, stage: int
) -> None:
    spec = replace(spec, stage=stage, kills=("2@3:optimizer",), sabotage=PLAYED + own)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    counts = [int(count) for count in re.findall(r"updates (\d+)\.", killed.output)]
    assert len(counts) == spec.nproc - 1 and min(counts) >= spec.steps


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("spec", "own"), [(FUSED, ""), (CPU, OWN)], ids=["fused", "cpu"])
def test_what_is_compiled(
    run: Launch,
    twin: Twin,
    reference: Launch,
    compiled_adams: Path,
    spec: EngineSpec,
    own: str,
) -> None:
    own += f"import os; os.environ.update({environment(compiled_adams)!r})"
    spec = replace(spec, stage=2, kills=("1@3:backward",), sabotage=own)
    check_recovered(killed := run(spec), twin=twin(killed), reference=reference(spec))
