"""The house is in order: style, sizes, import directions, types; each check can fail."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tidy import pickles, rooms, rules

ROOT = Path(__file__).resolve().parents[2]
OURS = ("elaswave_plugin", "tests", "examples", "benchmarks")
LONG_FUNCTION = "def long() -> None:\n" + "    pass\n" * 70


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "__pycache__" not in path.parts]


def texts() -> list[Path]:
    others = {".venv", ".venv312", "out"}
    pages = [path for path in ROOT.rglob("*.md") if others.isdisjoint(path.parts)]
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


def test_core_is_pure_and_frameworks_have_their_homes() -> None:
    found = []
    for path in sources("elaswave_plugin"):
        module, is_package = module_of(path)
        found.append((path, rules.import_findings(path.read_text(), module, is_package)))
    assert not report(found), "\n" + report(found)


def modules() -> list[tuple[str, str, bool]]:
    """Source, module and whether it is a package's, of all files of the package."""
    return [(path.read_text("utf-8"), *module_of(path)) for path in sources("elaswave_plugin")]


def test_rooms_import_only_what_the_table_gives_them() -> None:
    found = [one for file in modules() for one in rooms.room_findings(*file)]
    found += [one for file in modules() for one in rooms.typing_findings(*file)]
    assert not found, "\n" + "\n".join(found)


def test_rooms_have_no_cycle_and_the_table_no_arrow_too_many() -> None:
    assert rooms.cycle() == []
    assert rooms.unused(arrow for file in modules() for arrow in rooms.arrows_of(*file)) == []


def test_rooms_hold_a_number_of_files_that_can_be_read() -> None:
    folders = Counter(path.parent for path in sources("elaswave_plugin"))
    assert {path: n for path, n in folders.items() if n > rooms.MAX_FILES + 1} == {}


PLAN, LINKS = "elaswave_plugin.core.recovery_plan.plan", "elaswave_plugin.communicator.links.frames"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (PLAN, "import torch"),
        (PLAN, "def f():\n    from time import time"),
        (PLAN, "import os.path"),
        (LINKS, "import megatron.core"),
        ("elaswave_plugin.adapters.deepspeed.x", "from megatron.core import parallel_state"),
        ("elaswave_plugin.demo.demo", "import deepspeed"),
    ],
)
def test_imports_control_finds(module: str, source: str) -> None:
    assert rules.import_findings(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (PLAN, "from elaswave_plugin.communicator import links"),
        (PLAN, "from ...tracking import events"),
        (PLAN, "from elaswave_plugin.core.agreement.view import MembershipView"),
        (LINKS, "from elaswave_plugin.adapters import base"),
        (LINKS, "from elaswave_plugin import adapters"),
        (LINKS, "from elaswave_plugin.snapshot.fetch import Fetcher"),
        ("elaswave_plugin.tracking.events", "from elaswave_plugin.core import codec"),
        ("elaswave_plugin.agent.slot", "import torch"),
        ("elaswave_plugin.agent.slot", "from elaswave_plugin.trainer.member import Member"),
        ("elaswave_plugin.errors", "from elaswave_plugin.config import ElasticConfig"),
    ],
)
def test_rooms_control_finds(module: str, source: str) -> None:
    assert rooms.room_findings(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (PLAN, "import math\nfrom elaswave_plugin.core.layout import shards"),
        (PLAN, "from elaswave_plugin.errors import SnapshotGapError"),
        (LINKS, "import torch, socket\nfrom elaswave_plugin.core.agreement import view"),
        ("elaswave_plugin.adapters.megatron.x", "from megatron.core import parallel_state"),
        ("elaswave_plugin.demo.text", "from megatron.core.datasets import indexed_dataset"),
    ],
)
def test_imports_control_passes(module: str, source: str) -> None:
    assert rules.import_findings(source, module) == []
    assert rooms.room_findings(source, module) == []


def test_hidden_arrows_control() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from elaswave_plugin"
    assert rooms.typing_findings(f"{source}.recovery.worker import Worker", LINKS)
    assert rooms.typing_findings(f"{source}.communicator.links.frames import x", LINKS) == []


def test_functions_and_files_are_short() -> None:
    check([*sources(*OURS), ROOT / "setup.py"], rules.size_findings)


def test_every_file_says_its_one_job_in_its_first_line() -> None:
    check([*sources(*OURS), ROOT / "setup.py"], rules.docstring_findings)


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    check(sources(*OURS), rules.first_word_findings)


def test_messages_comments_and_pages_are_in_plain_words() -> None:
    said = sources("elaswave_plugin", "benchmarks", "examples")
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name != "proofs.md"]
    pages += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"]
    others = [path for path in said if path.parent.name != "megatron_lm"]
    check([*others, *pages], rules.word_findings)


def test_names_use_no_forbidden_word() -> None:
    found = [
        (path, rules.name_findings(path.read_text(), str(path.relative_to(ROOT))))
        for path in [*sources(*OURS), ROOT / "setup.py"]
    ]
    assert not report(found), "\n" + report(found)


def test_modules_hold_no_state_and_do_no_work_at_import() -> None:
    check(sources("elaswave_plugin"), rules.state_findings)


def test_nothing_is_unpickled_that_another_process_wrote() -> None:
    found = pickles.findings()
    assert sorted(found) == sorted(pickles.KNOWN), found


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as plain",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "dist.all_gather_object(all, one)",
        "torch.distributed.broadcast_object_list(one, src=0)",
        "dist.scatter_object_list(out, one)",
        "send_object_list([one], 1)",
    ],
)
def test_pickles_control_finds(bad: str) -> None:
    assert pickles.pickle_findings(bad)


@pytest.mark.parametrize("good", ["torch.load(f, weights_only=True)", "np.load(f)", "json.load(f)"])
def test_pickles_control_passes(good: str) -> None:
    assert pickles.pickle_findings(good) == []


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
        (rules.first_word_findings, '"""What a file holds."""\n'),
        (rules.first_word_findings, 'class A:\n    """Who is lost."""\n'),
        (rules.first_word_findings, 'async def f():\n    """Whether it ends."""\n'),
        (rules.first_word_findings, 'class A:\n    def f(self):\n        """By whom."""\n'),
        (rules.word_findings, "A plan\nfor whoever is left."),
        (rules.word_findings, 'raise ValueError(f"the worker {name} for whom all wait")'),
        (rules.word_findings, "x = 1  # dealt anew"),
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
        (rules.first_word_findings, '"""Whence."""\ndef f():\n    """Return what is."""\n'),
        (rules.word_findings, 'x = f"{count} workers renewed"  # for the reader\n'),
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
