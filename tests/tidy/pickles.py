"""Finds calls that unpickle: in that way bytes of another process, or of a file, can run code."""

import ast
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.tidy.rules import PACKAGE

MODULES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
COLLECTIVES = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
# File, finding, and the reason why it may stay.
KNOWN: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("adapters/megatron/step/made_again.py", "imports pickle"): "what the same process has"
        " pickled, as a copy of it; the bytes go nowhere",
        ("checkpoints/archives.py", "imports pickle"): "an Unpickler that builds and calls nothing"
        " that a file names (tests/checkpoints/test_whole.py has one that tries)",
        ("checkpoints/torch_dist.py", "imports pickle"): "torch's own .metadata of a checkpoint on"
        " disk, which torch unpickles as well, right behind it",
    }
)


def findings(root: Path = Path(PACKAGE)) -> list[tuple[str, str]]:
    """Find them in all files of the package: file and finding."""
    return [
        (path.relative_to(root).as_posix(), one)
        for path in sorted(root.rglob("*.py"))
        for one in pickle_findings(path.read_text("utf-8"))
    ]


def pickle_findings(source: str) -> list[str]:
    """Find imports of modules that unpickle, collectives of objects, loads that may run code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found += [f"imports {name}" for name in names if name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(f"imports {node.module}")
        elif isinstance(node, ast.Call):
            found += _of_call(node)
    return found


def _of_call(node: ast.Call) -> list[str]:
    name = ast.unparse(node.func)
    given = {one.arg: ast.unparse(one.value) for one in node.keywords}
    if name.rpartition(".")[2] in COLLECTIVES:
        return [f"calls {name}"]
    if name == "torch.load" and given.get("weights_only") != "True":
        return ["calls torch.load without weights_only=True"]
    if given.get("allow_pickle", "False") != "False":
        return [f"calls {name} with allow_pickle"]
    return []
