"""The items of the kit, the most telling first; their budgets are 25 minutes together."""

from typing import Any

from benchmarks.gpu.gpu_tests import SCRIPTS
from benchmarks.gpu.item import Item

MEGATRON = ("megatron", (None,))
DEEPSPEED = ("deepspeed", (1, 2, 3))
MARKED = "gpu_tests:run_marked"
LOSSES, ABORTS = "losses:survive", "communicators:abort_and_make"
SHARED = ", four workers on one GPU: kill, hang, return"
APART = " over NCCL, a worker a GPU: kill, hang, return"


def items() -> list[Item]:
    """Return all items in their order."""
    return [
        _item("machine", "The machine", 30, 0, "machine:describe"),
        _item("kernels", "Kernels repeat their bits", 60, 1, "kernels:repeat"),
        _item("tests", "pytest -m gpu", 120, 1, MARKED),
        _item("scripts", "pretrain_gpt.py, compiled and slow passes", 210, 1, MARKED, SCRIPTS),
        _item("sums", "Sums in rank order: one kernel, and a loop", 30, 1, "row_sums:compare"),
        _item("megatron", f"Megatron-Core{SHARED}", 120, 1, LOSSES, "host", *MEGATRON),
        _item("deepspeed", f"ZeRO 1 to 3{SHARED}", 210, 1, LOSSES, "host", *DEEPSPEED),
        _item("nccl", "NCCL: aborts, new communicators, ids behind an abort", 90, 2, ABORTS),
        _item("megatron-nccl", f"Megatron-Core{APART}", 120, 2, LOSSES, "nccl", *MEGATRON),
        _item("deepspeed-nccl", f"ZeRO 1 to 3{APART}", 180, 2, LOSSES, "nccl", *DEEPSPEED),
        _item("phases", "A recovery by its phases", 90, 1, "phases:measure"),
        _item("seals", "Seals of 1, 4 and 16 GB: share of a step", 90, 1, "seals:measure"),
        _item("exact", "Exact over fast, healthy and after a loss", 120, 1, "consistency:measure"),
        _item("layers", "Transformer Engine and Apex", 30, 1, "vendor_layers:run_layers"),
    ]


def _item(name: str, title: str, budget_s: float, gpus: int, place: str, *arguments: Any) -> Item:
    return Item(
        name=name,
        title=title,
        budget_s=budget_s,
        gpus=gpus,
        place=f"benchmarks.gpu.{place}",
        arguments=arguments,
    )
