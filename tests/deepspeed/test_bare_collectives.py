"""A loss in a collective that the script makes by itself: the job ends, and was told before."""

from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.faults.mutant_ends import SAYS_BARE
from tests.proofs import Kind, Promise, proves

SCRIPT = SCRIPTS / "widths.py"
# Slot 2 dies in the mean of step 3, the second call of the script behind the engine: by then all
# have left the engine.
DIES = """
import os, signal
import torch.distributed as dist
from elaswave_plugin.ipc.environment import SLOT
native, means = dist.all_reduce, []
def all_reduce(tensor, op=dist.ReduceOp.SUM, **more):
    means.extend([op] if op == dist.ReduceOp.AVG else [])
    if len(means) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return native(tensor, op, **more)
if os.environ[SLOT] == "2":
    dist.all_reduce = all_reduce
"""
DIED = "worker 2 (node 0) exited: killed by SIGKILL"


@proves(Kind.KILL, Promise.NAMED, victim="2", moment="in a collective of the script")
def test_it_is_named_before_a_loss_meets_it(run: Launch) -> None:
    options = ("--what=lines",)
    spec = EngineSpec(script=str(SCRIPT), nproc=3, global_batch=12, options=options, sabotage=DIES)
    killed = run(spec)
    assert killed.returncode == 1 and not killed.orphans, killed.output[-4000:]
    before, died, after = killed.output.partition(DIED)
    assert died and "during a call that is not made again" in after, killed.output[-4000:]
    lines = SCRIPT.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if "ReduceOp.AVG" in line]
    assert before.count(f"{SCRIPT.name}:{number} (all_reduce) {SAYS_BARE}") == 1, before
