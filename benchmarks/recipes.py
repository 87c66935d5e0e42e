"""Counts the recipes of training packages that attach by the settings that they name.

python -m benchmarks.recipes CHECKOUT [CHECKOUT ...] [--json FILE]

A recipe is a function of Megatron-Bridge's `recipes` that returns a configuration, or a launch
script (`*.sh`) that names a parallel size. Its settings are read, not run: those of the functions
that it calls come before its own, and what it computes is not known. Each is held against the table
of settings that are not carried (`adapters/megatron_settings.py`), so that the count is of those
that nothing *named* refuses.
"""

import argparse
import ast
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances
from elaswave_plugin.adapters.answers import Setting
from elaswave_plugin.adapters.megatron_settings import settings

Values = dict[str, Any]

# What is refused beside the table, by `megatron/unsupported.py`.
_SIZES = ("context_parallel_size", "expert_model_parallel_size")
_OFF = ("use_precision_aware_optimizer", "optimizer_cpu_offload", "optimizer_cuda_graph")
_BESIDE = (
    *(Setting(name=name, carried=(1, None), says="") for name in _SIZES),
    *(Setting(name=name, carried=(False, None), says="") for name in _OFF),
    Setting(name="moe_token_dispatcher_type", carried=("allgather", "alltoall"), says=""),
    Setting(name="optimizer", carried=("adam",), says=""),
)
# As packages name what Megatron-Core names otherwise.
_NAMES = {"fp8_format": "fp8", "fp8_recipe": "", "use_dist_optimizer": "use_distributed_optimizer"}
_DEFAULTS = {"use_distributed_optimizer": True}
# What a package sets where a launch does not name it.
_OF_SWIFT = {"variable_seq_lengths": True}
_UNKNOWN = object()
_OPTION = re.compile(r"--([\w-]+)(?:[ =]+([^\s\\-][^\s\\]*))?")


def refused(values: Mapping[str, Any]) -> list[str]:
    """Return the names of a recipe's settings that are not carried."""
    values = {**_DEFAULTS, **values}
    known = {name: value for name, value in values.items() if value is not _UNKNOWN}
    return sorted(
        {
            one.name
            for one in (*settings(), *_BESIDE)
            if one.name in known and one.reply(known) is not None
        }
    )


def of_functions(folder: Path) -> Iterator[tuple[str, Values]]:
    """Yield the recipes of Megatron-Bridge: functions that return a ConfigContainer."""
    functions: dict[str, ast.FunctionDef] = {}
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        functions |= {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    for name, function in functions.items():
        returns = ast.unparse(function.returns) if function.returns else ""
        if returns == "ConfigContainer" and not name.startswith("_"):
            yield name, _set_in(function, functions, frozenset({name}))


def _set_in(
    function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef], seen: frozenset[str]
) -> Values:
    """Return what a function sets, in its order, and what those set that it calls."""
    found: Values = {}
    for node in _in_order(function.body):
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            if called in functions and called not in seen:
                found |= _set_in(functions[called], functions, seen | {called})
            found |= {one.arg: _value(one.value) for one in node.keywords if one.arg}
        elif isinstance(node, ast.Assign):
            targets = (one for one in node.targets if isinstance(one, ast.Attribute))
            found |= {one.attr: _value(node.value) for one in targets}
    precision = found.get("mixed_precision")
    if isinstance(precision, str) and "fp8" in precision:
        found["fp8"] = precision
    return found


def _in_order(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes behind those that they are made of."""
    for node in nodes:
        yield from _in_order(ast.iter_child_nodes(node))
        yield node


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _UNKNOWN


def of_scripts(folder: Path, defaults: Mapping[str, Any]) -> Iterator[tuple[str, Values]]:
    """Yield the launch scripts of a folder that name a parallel size."""
    for path in sorted(folder.rglob("*.sh")):
        text = re.sub(r"(?m)^\s*#.*$", "", path.read_text("utf-8", "replace"))
        named = {name.replace("-", "_"): value for name, value in _OPTION.findall(text)}
        if any(name.endswith("model_parallel_size") for name in named):
            options = {_NAMES.get(name, name): _plain(value) for name, value in named.items()}
            yield path.relative_to(folder).as_posix(), {**defaults, **options}


def _plain(text: str) -> Any:
    if text.startswith("$"):
        return _UNKNOWN
    plain = {"": True, "true": True, "false": False, "none": None}.get(text.lower(), text)
    return int(text) if text.isdigit() else plain


def counted(checkout: Path) -> dict[str, Any]:
    """Return the counts of a checkout: its commit, its recipes, those that attach, the reasons."""
    bridge = checkout / "src" / "megatron" / "bridge" / "recipes"
    is_swift = (checkout / "swift" / "megatron").is_dir()
    found = of_functions(bridge) if bridge.is_dir() else None
    found = found or of_scripts(checkout, _OF_SWIFT if is_swift else {})
    reasons = {name: refused(values) for name, values in found}
    alone = Counter(one[0] for one in reasons.values() if len(one) == 1)
    each = Counter(name for one in reasons.values() for name in one)
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return {
        "package": checkout.name,
        "commit": commit.stdout.strip() or "unknown",
        "recipes": len(reasons),
        "attach": sum(not one for one in reasons.values()),
        "refused_by": {name: [count, alone[name]] for name, count in each.most_common()},
    }


def main() -> None:
    """Print a table, and write it with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--json", type=Path, help="file for the counts")
    args = parser.parse_args()
    missing = [str(one) for one in args.checkouts if not one.is_dir()]
    if missing:
        parser.error(f"{missing[0]} is no folder: give checkouts of packages")
    rows = [counted(one) for one in args.checkouts]
    print("| package | commit | recipes | attach | refused by (recipes, by that alone) |")
    print("|---|---|---|---|---|")
    for row in rows:
        why = "; ".join(f"{name} {n}, {m}" for name, (n, m) in row["refused_by"].items())
        first = (row["package"], row["commit"][:8], row["recipes"], row["attach"], why)
        print(f"| {' | '.join(map(str, first))} |")
    if args.json:
        text = json.dumps({**circumstances("benchmarks.recipes"), "packages": rows}, indent=1)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
