"""The house is in order: style, sizes, import directions, types; each check can fail."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tidy import rules

ROOT = Path(__file__).resolve().parents[2]
OURS = ("elaswave_plugin", "tests", "examples", "benchmarks")
LONG_FUNCTION = "def long() -> None:\n" + "    pass\n" * 70


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "__pycache__" not in path.parts]


def texts() -> list[Path]:
    pages = [path for path in ROOT.rglob("*.md") if not set(path.parts) & {".venv", "out"}]
    return [*sources(*OURS), ROOT / "setup.py", ROOT / "Makefile", ROOT / "pyproject.toml", *pages]


def module_of(path: Path) -> tuple[str, bool]:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def report(findings: list[tuple[Path, list[str]]]) -> str:
    lines = [f"{path.relative_to(ROOT)}: {text}" for path, found in findings for text in found]
    return "\n".join(lines)


def check(paths: list[Path], rule: Callable[[str], list[str]]) -> None:
    assert paths
    problems = report([(path, rule(path.read_text(encoding="utf-8"))) for path in paths])
    assert not problems, "\n" + problems


def tool(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)


def test_imports_run_one_way() -> None:
    found = []
    for path in sources("elaswave_plugin"):
        module, is_package = module_of(path)
        found.append((path, rules.import_findings(path.read_text(), module, is_package)))
    assert not report(found), "\n" + report(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("elaswave_plugin.core.plan", "import torch"),
        ("elaswave_plugin.core.plan", "def f():\n    from time import time"),
        ("elaswave_plugin.core.plan", "import os.path"),
        ("elaswave_plugin.core.plan", "from elaswave_plugin.runtime import links"),
        ("elaswave_plugin.core.plan", "from ..tracking import events"),
        ("elaswave_plugin.runtime.links", "from elaswave_plugin.adapters import base"),
        ("elaswave_plugin.runtime.links", "from elaswave_plugin import adapters"),
        ("elaswave_plugin.runtime.links", "import megatron.core"),
        ("elaswave_plugin.adapters.deepspeed.x", "from megatron.core import parallel_state"),
        ("elaswave_plugin.tracking.events", "from elaswave_plugin.core import membership"),
        ("elaswave_plugin.tracking.events", "from elaswave_plugin.runtime.links import LinkTable"),
        ("elaswave_plugin.demo.demo", "import deepspeed"),
    ],
)
def test_imports_control_finds(module: str, source: str) -> None:
    assert rules.import_findings(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("elaswave_plugin.core.plan", "import math\nfrom elaswave_plugin.core import shards"),
        ("elaswave_plugin.core.plan", "from elaswave_plugin.errors import SnapshotGapError"),
        (
            "elaswave_plugin.runtime.links",
            "import torch, socket\nfrom elaswave_plugin.core import x",
        ),
        ("elaswave_plugin.adapters.megatron.x", "from megatron.core import parallel_state"),
        ("elaswave_plugin.demo.text", "from megatron.core.datasets import indexed_dataset"),
    ],
)
def test_imports_control_passes(module: str, source: str) -> None:
    assert rules.import_findings(source, module) == []


def test_functions_and_files_are_short() -> None:
    check([*sources(*OURS), ROOT / "setup.py"], rules.size_findings)


def test_every_file_says_its_one_job_in_its_first_line() -> None:
    check([*sources(*OURS), ROOT / "setup.py"], rules.docstring_findings)


def test_names_use_no_forbidden_word() -> None:
    found = [
        (path, rules.name_findings(path.read_text(), str(path.relative_to(ROOT))))
        for path in [*sources(*OURS), ROOT / "setup.py"]
    ]
    assert not report(found), "\n" + report(found)


def test_modules_hold_no_state_and_do_no_work_at_import() -> None:
    check(sources("elaswave_plugin"), rules.state_findings)


def test_public_names_are_exact_and_sorted() -> None:
    check([ROOT / "elaswave_plugin" / "__init__.py"], rules.public_name_findings)


def test_texts_name_an_issue_for_what_is_unfinished_and_no_machine() -> None:
    check([path for path in texts() if ROOT / "tests" / "tidy" not in path.parents], text_rule)


def test_texts_call_a_view_no_epoch() -> None:
    check(sources("elaswave_plugin"), rules.view_findings)


def text_rule(text: str) -> list[str]:
    return rules.text_findings(text)


@pytest.mark.parametrize(
    ("rule", "bad"),
    [
        (rules.size_findings, LONG_FUNCTION),
        (rules.size_findings, "x = 1\n" * 601),
        (rules.docstring_findings, "import os\n"),
        (rules.docstring_findings, '# note\n"""Late."""\n'),
        (rules.docstring_findings, '"""\nStarts on the second line.\n"""\n'),
        (rules.name_findings, "class LinkManager: ..."),
        (rules.name_findings, "def f(context): ..."),
        (rules.name_findings, "test_utils = 1"),
        (rules.name_findings, "class A:\n    def f(self):\n        self.my_handler = 1"),
        (rules.name_findings, "import x as helpers"),
        (rules.state_findings, "TABLE = {}"),
        (rules.state_findings, "TABLE: dict[str, int] = {1: 2}"),
        (rules.state_findings, "count = 0"),
        (rules.state_findings, "A, B = 1, []"),
        (rules.state_findings, "A, b = 1, 2"),
        (rules.state_findings, "LOCK = threading.Lock()"),
        (rules.state_findings, "NAMES = ([1], 2)"),
        (rules.state_findings, "if True:\n    LIST = []"),
        (rules.state_findings, "print('at import')"),
        (rules.state_findings, "for i in range(3):\n    pass"),
        (rules.state_findings, "def f():\n    global x\n    x = 1"),
        (rules.public_name_findings, "from elaswave_plugin.a import B\n__all__ = []"),
        (rules.public_name_findings, "__all__ = ['A']"),
        (
            rules.public_name_findings,
            "from elaswave_plugin.a import A, B\n__all__ = ['B', 'A']",
        ),
        (rules.view_findings, 'text = f"epoch {view.epoch} has {count} workers"'),
        (rules.text_findings, "x = 1  # TODO finish"),
        (rules.text_findings, "# FIXME: later"),
        (rules.text_findings, "open('/home/me/file')"),
    ],
)
def test_rule_control_finds(rule: Callable[[str], list[str]], bad: str) -> None:
    assert rule(bad)


@pytest.mark.parametrize(
    ("rule", "good"),
    [
        (rules.size_findings, LONG_FUNCTION.replace("    pass\n", "", 1)),
        (rules.docstring_findings, '#!/usr/bin/env python3\n"""One job."""\n'),
        (rules.name_findings, "from contextlib import contextmanager\ncontext_parallel_size = 1"),
        (rules.state_findings, 'A_S = 1.5\n_B = ("x", "y")\nC = frozenset((1,))\n"""text"""'),
        (rules.state_findings, "log = logging.getLogger(__name__)\nX = re.compile('a')"),
        (rules.state_findings, "if __name__ == '__main__':\n    main()"),
        (rules.state_findings, "A, B = 1, (2, 3)\n_ABSENT = object()"),
        (rules.state_findings, "Fold = Callable[[int], int]\nT = TypeVar('T')"),
        (rules.view_findings, 'text = f"in epoch {self._epoch} of the data"'),
        (rules.text_findings, "x = 1  # TODO(#12) finish\nlocalhost/work/x ../work/y"),
    ],
)
def test_rule_control_passes(rule: Callable[[str], list[str]], good: str) -> None:
    assert rule(good) == []


def test_ruff_check_is_clean() -> None:
    result = tool("ruff", "check", "--no-cache", ".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_format_is_clean() -> None:
    result = tool("ruff", "format", "--no-cache", "--check", ".")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("command", "bad"),
    [
        (("ruff", "check"), '"""Bad."""\n\nimport os\n'),
        (("ruff", "check"), f'"""Bad."""\n\nX = "{"x" * 100}"\n'),
        (("ruff", "format", "--check"), '"""Bad."""\n\nx = { 1:2 }\n'),
        (("mypy",), '"""Bad."""\n\n\ndef untyped(x):\n    return x\n'),
    ],
)
def test_tool_control_finds(command: tuple[str, ...], bad: str, tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text(bad)
    config = ("--config-file" if command[0] == "mypy" else "--config", str(ROOT / "pyproject.toml"))
    cache = ("--cache-dir", str(tmp_path / "cache"))
    result = tool(*command, *config, *cache, str(sample), cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    sample.write_text('"""Good."""\n')
    result = tool(*command, *config, *cache, str(sample), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
