"""Every command that a sentence of the product prints is run by a test, which is named here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = "elaswave|python|pip|make|wandb"
COMMAND = re.compile(rf"`((?:{PROGRAMS}) [^`]+)`")
PRINTED = "tests/launch/test_printed_commands.py::"
JOINED = f"{PRINTED}test_the_line_of_a_job_shows_it_and_lets_a_node_join"
SHOWN = "tests/agent/test_status.py::test_the_command_draws_once_or_prints_json"
REHEARSED = "tests/rehearsal/test_megatron.py::test_the_example_is_equal_and_every_kill_fires"
# A command with its values left out, and the test that runs it.
RUN_BY = {
    "elaswave status --connect {}": JOINED,
    "elaswave run --join {} SCRIPT ARGS": JOINED,
    "python -m elaswave_plugin.trainer.zygote --socket PATH --preload torch": (
        f"{PRINTED}test_the_zygote_that_a_refusal_names_is_one"
    ),
    "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {}"
    " --output_folder {}_universal": (
        "tests/deepspeed/test_save.py::test_a_checkpoint_of_another_number_of_workers_is_refused"
    ),
    "elaswave status DIR --json": SHOWN,
    "elaswave report {}": "tests/observer/test_report.py::test_report_says_how_a_job_ended",
    "elaswave secret new FILE": "tests/ipc/test_secret.py::test_the_command_makes_a_file_once",
    "elaswave rehearse COMMAND": REHEARSED,
    "elaswave rehearse elaswave run --nproc-per-node 4 train.py --elaswave": REHEARSED,
    "elaswave run --dir DIR": SHOWN,
    "elaswave drain --node 0 DIR": "tests/faults/test_told.py::test_told_to_end",
    # An installer's.
    **dict.fromkeys(("pip install wandb", "pip install tensorboard"), None),
    "pip install tree-sitter tree-sitter-bash": None,
    **dict.fromkeys(("pip install -e .", "pip install -e .{}"), None),
}


def printed() -> Iterator[tuple[str, str]]:
    """Yield the place and the words of each command in a string that is no docstring."""
    for path in sorted((ROOT / "elaswave_plugin").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {id(n) for node in ast.walk(tree) for n in _inner(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in parts:
                for found in COMMAND.finditer(_text(node)):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", found.group(1)


def _inner(node: ast.AST) -> list[ast.expr]:
    """List what belongs to a string with values, and docstrings."""
    if isinstance(node, ast.JoinedStr):
        return node.values
    return [node.value] if isinstance(node, ast.Expr) else []


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    values = (one.value if isinstance(one, ast.Constant) else "{}" for one in node.values)
    return "".join(map(str, values))


def test_every_printed_command_is_run_by_a_test() -> None:
    found = {what: where for where, what in printed() if what != "elaswave run"}
    unknown = {where: what for what, where in found.items() if what not in RUN_BY}
    assert not unknown, f"no test is named that runs these: {unknown}"
    assert not RUN_BY.keys() - found.keys(), "these are printed nowhere any more"


@pytest.mark.parametrize("test", sorted({one for one in RUN_BY.values() if one is not None}))
def test_the_named_test_exists(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
