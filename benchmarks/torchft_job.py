"""A torchft job of a few replicas, of which one stops or dies in a step; needs torch and torchft.

torchft_job.py FOLDER HOW REPLICAS: every replica writes its steps to FOLDER/replica-N, as JSON
lines [step, seconds, whether it was committed, how many took part], and the victim the moment of
its fault. The job is ended once each survivor has committed steps again. Limits and timeouts are
torchft's own defaults.
"""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft._torchft import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

FAULT_STEP, STEPS_AFTER = 10, 3
DEFAULT = timedelta(seconds=60)
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
# The others wait for the victim in the all-reduce of the backward pass by then.
AHEAD_S = 0.5
LIMIT_S = 200.0
NOT_BACK = 3


def replica(folder: Path, how: str, number: int, replicas: int, lighthouse: str) -> None:
    """Train; the last replica is the victim."""
    torch.set_num_threads(1)
    c10d: Any = dist
    store = c10d.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.Linear(64, 64)
    quorum = Manager(
        pg=ProcessGroupGloo(timeout=DEFAULT),
        min_replica_size=2,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        replica_id=str(number),
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
    )
    wrapped = DistributedDataParallel(quorum, model)
    optimizer = OptimizerWrapper(quorum, torch.optim.SGD(model.parameters(), lr=0.01))
    with (folder / f"replica-{number}").open("w", buffering=1) as out:
        while True:
            step = quorum.current_step()
            optimizer.zero_grad()
            loss = wrapped(torch.randn(8, 64)).sum()
            if number == replicas - 1 and step == FAULT_STEP:
                time.sleep(AHEAD_S)
                out.write(json.dumps([step, time.monotonic(), False, 0]) + "\n")
                os.kill(os.getpid(), SIGNALS[how])
            loss.backward()
            optimizer.step()
            committed = quorum.current_step() > step
            out.write(
                json.dumps([step, time.monotonic(), committed, quorum.num_participants()]) + "\n"
            )


def steps_of(folder: Path, number: int) -> list[Any]:
    """Return what a replica has written so far."""
    path = folder / f"replica-{number}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def is_back(folder: Path, number: int, replicas: int) -> bool:
    """Return whether a survivor has committed steps after the fault."""
    victim = steps_of(folder, replicas - 1)
    if not victim or victim[-1][3]:
        return False
    after = [one for one in steps_of(folder, number) if one[1] > victim[-1][1] and one[2]]
    return len(after) >= STEPS_AFTER


def main(folder: Path, how: str, replicas: int) -> int:
    """Start the lighthouse and the replicas; NOT_BACK where a survivor does not come back."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2)
    command = [sys.executable, __file__, str(folder), how, str(replicas), lighthouse.address()]
    processes = [subprocess.Popen([*command, str(number)]) for number in range(replicas)]
    deadline_s = time.monotonic() + LIMIT_S
    try:
        while not all(is_back(folder, number, replicas) for number in range(replicas - 1)):
            if time.monotonic() > deadline_s:
                return NOT_BACK
            time.sleep(0.1)
        return 0
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    place, way, count, *rest = sys.argv[1:]
    if rest:
        replica(Path(place), way, int(rest[1]), int(count), rest[0])
    raise SystemExit(main(Path(place), way, int(count)))
