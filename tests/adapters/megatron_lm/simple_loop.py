"""Protects Megatron-LM's `examples/run_simple_mcore_train_loop.py`, a changed line an edit.

The file is read where the checkout lies, and its lines are found by their first words: none of
them is kept here. `python -m tests.adapters.megatron_lm.simple_loop CHECKOUT > SCRIPT` prints it.
"""

import difflib
import sys
from pathlib import Path

SOURCE = Path("examples") / "run_simple_mcore_train_loop.py"
_ATTACH = (
    "job = elaswave.attach(global_batch_size=16, micro_batch_size=8, seed=123,"
    " tensor_model_parallel_size=2)"
)
_OPTIMIZER = "OptimizerConfig(optimizer='adam', lr=1e-3, use_distributed_optimizer=True)"
_PRINTS = "print(f'Iteration {iteration}: loss {report.loss!r}', flush=True)"
# (the first words of a line, what stands there in its place): "<" one level further out, a newline
# one line more.
Edits = tuple[tuple[str, str], ...]
EDITS: Edits = (
    (
        "from torch.optim",
        "from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer",
    ),
    (
        "from functools",
        "from functools import partial\nfrom elaswave_plugin.adapters import megatron as elaswave",
    ),
    ('backend="nccl"', "**job.process_group()"),
    ("train_iterator: Iterator = iter(", "train_iterator = job.batches(train_dataloader)"),
    ("initialize_distributed(tensor", f"{_ATTACH}\n{{line}}"),
    ("use_distributed_optimizer=", "use_distributed_optimizer=True,"),
    ("optim: Adam", f"optim = get_megatron_optimizer({_OPTIMIZER}, [gpt_model])"),
    (
        "forward_backward_func:",
        "job.bind(gpt_model, optim, train_iters=5)\n"
        "forward_backward_func = job.forward_backward(get_forward_backward_func())",
    ),
    ("for iteration in range", "def train_step():"),
    ("optim.step()", "return losses_reduced, optim.step()[1]"),
    ('print(f"Iteration', f"<for iteration, report in job.train(train_step): {_PRINTS}"),
)
# Its loop as it is: the three that give it the distributed optimizer.
OPTIMIZER_EDITS = tuple(
    edit
    for edit in EDITS
    if edit[0] in ("from torch.optim", "use_distributed_optimizer=", "optim: Adam")
)
# On a machine without a GPU, and with the wheel's C++ helpers, which are built.
MACHINE = (
    ("from megatron.core.datasets.utils", "compile_helpers = lambda: None"),
    ("device: torch.device = torch.device(", "device = torch.device('cpu')"),
    ("torch.cuda.set_device(", "pass"),
)


def protected(checkout: Path, edits: Edits = EDITS) -> str:
    """The script with these edits; raises ValueError where a line is not there once."""
    return _edited((checkout / SOURCE).read_text(), edits)


def changed_lines(checkout: Path, edits: Edits = EDITS) -> int:
    """Count the lines that the protected script has and the original has not."""
    before = (checkout / SOURCE).read_text().splitlines()
    after = protected(checkout, edits).splitlines()
    matches = difflib.SequenceMatcher(None, before, after, False)
    spans = [(j - i, n - m) for tag, i, j, m, n in matches.get_opcodes() if tag != "equal"]
    return sum(max(span) for span in spans)


def on_this_machine(text: str) -> str:
    """The script without a GPU."""
    return _edited(text, MACHINE)


def _edited(text: str, edits: Edits) -> str:
    lines = text.splitlines()
    for words, new in edits:
        found = [n for n, line in enumerate(lines) if line.lstrip().startswith(words)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} lines begin with {words!r}, wanted one")
        old = lines[found[0]]
        indent = old[: len(old) - len(old.lstrip()) - 4 * new.startswith("<")]
        lines[found[0]] = "\n".join(
            indent + one.lstrip("<").replace("{line}", old.lstrip()) for one in new.split("\n")
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(protected(Path(sys.argv[1])), end="")
