"""The import hook: who looks a watched module up is answered, and who imports it attaches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.harness import ROOT

# Packages of these names, of which ours replaces a function; each execution makes a new one.
PACKAGES = {
    "deepspeed/__init__.py": (
        "from deepspeed import comm\nfrom deepspeed.comm import init_distributed\n"
        "def initialize(): pass\n"
    ),
    "deepspeed/comm.py": "def init_distributed(): pass\n",
    "megatron/__init__.py": "",
    "megatron/training/__init__.py": "from .training import pretrain\ndef pretrain(): pass\n",
    "megatron/training/training.py": "def pretrain(): pass\n",
}
FUNCTIONS = (("deepspeed", "initialize"), ("megatron.training", "pretrain"))
# A finder that asks all others, as other hooks do, and one that finds the package by itself.
ASKING = """
class Finder:
    asking = False
    def find_spec(self, name, path=None, target=None):
        if name == NAME and not self.asking:
            self.asking = True
            try:
                return find_spec(name)
            finally:
                self.asking = False
"""
OWN = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path, target) if name == NAME else None
"""
# What happens between the hook's start and the import of NAME.
LOOKS = {
    "nothing": "",
    "a look-up": "assert find_spec(NAME) and find_spec(NAME)",
    "metadata": "import importlib.metadata as m; m.packages_distributions(); m.version('torch')",
    "a loader that is read": (
        "spec = find_spec(NAME); assert spec.loader.get_code(NAME) and spec.origin;"
        "assert spec.loader.is_package(NAME) and spec.loader.get_source(NAME)"
    ),
    "a module made by hand": (
        "spec = find_spec(NAME); sys.modules[NAME] = module = module_from_spec(spec);"
        "spec.loader.exec_module(module)"
    ),
    "a finder that asks, before ours": f"{ASKING}\nsys.meta_path.insert(0, Finder())",
    "a finder that asks, after ours": f"{ASKING}\nsys.meta_path.insert(1, Finder())",
    "a finder that asks, asked": f"{ASKING}\nsys.meta_path.insert(1, Finder()); find_spec(NAME)",
    "a finder of its own, before ours": f"{OWN}\nsys.meta_path.insert(0, Finder())",
    "a finder of its own, after ours": f"{OWN}\nsys.meta_path.insert(1, Finder())",
    "an import that fails": """
file, text = open(find_spec(NAME).origin), None
text = file.read()
open(file.name, "w").write("raise ImportError('not yet')")
try:
    import_module(NAME)
except ImportError:
    open(file.name, "w").write(text)
""",
    "a reload": "first = import_module(NAME); reload(first)",
    "an import anew": "import_module(NAME); del sys.modules[NAME]",
}
SCRIPT = """
import sys
sys.dont_write_bytecode = True
from importlib import import_module, reload
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec
from elaswave_plugin import autoload
NAME = {name!r}
autoload.watch()
{look}
function = getattr(import_module(NAME), {function!r})
assert hasattr(function, "__wrapped__"), "it is the framework's own"
assert not hasattr(function.__wrapped__, "__wrapped__"), "it is ours twice"
module = sys.modules[NAME]
assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with the packages."""
    for name, text in PACKAGES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_a_script_gets_our_function_whoever_has_looked(
    packages: Path, name: str, function: str, look: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(name=name, function=function, look=look)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(packages), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
