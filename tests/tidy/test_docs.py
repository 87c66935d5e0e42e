"""The documents say what the code says: tables, names, commands and paths; each check can fail."""

import ast
import json
import re
import subprocess
from collections.abc import Callable, Sequence, Set
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from elaswave_plugin import errors
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.step.step_entries import state_of_a_step
from elaswave_plugin.words import option_of
from tests.config.files import config_of
from tests.tidy import documents, room_pages

ROOT = documents.ROOT
PACKAGE = ROOT / "elaswave_plugin"
DOCS = documents.DOCS
PAGES = (
    *("README.md", "CONTRIBUTING.md", "tests/README.md", "patches/README.md"),
    *(str(path.relative_to(ROOT)) for path in sorted(DOCS.glob("*.md"))),
    *(f"elaswave_plugin/{room}/README.md" for room in room_pages.FOLDERS),
)
# Options of launchers, beside those of the settings.
OTHER_OPTIONS = ("--elaswave", "--elaswave-config", "--elaswave-control-port")
DECISION = ("Chosen:", "Instead of:", "Because:", "Revisit when:")
MAX_README_LINES = 120
# Of a room, beside its list: one line a file.
MAX_ROOM_LINES = 10
MAX_GLOSSARY_WORDS = 12
# A thing is said once; elsewhere there is a link.
MAX_WORDS_OF_DOCS = 40_000


def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def text_of(name: str) -> str:
    return page(name) if (ROOT / name).is_file() else ""


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


@cache  # all pages ask for the same two folders, of which one takes a second
def definitions(folder: str) -> frozenset[str]:
    """Functions as "name" and methods as "Class.name", in all files of a folder."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.ClassDef):
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
                found |= {f"{node.name}.{method.name}" for method in methods}
    return frozenset(found)


def first_screen_findings(text: str) -> list[str]:
    """The first code comes by line 25, after at most 100 words; the page has an end."""
    lines = text.splitlines()
    code = next((number for number, line in enumerate(lines) if line.startswith("```")), 999)
    words = len(" ".join(lines[:code]).split())
    found = [f"first code in line {code + 1}, wanted by 25"] if code >= 25 else []
    found += [f"{words} words before the first code, at most 100"] if words > 100 else []
    if len(lines) > MAX_README_LINES:
        found.append(f"{len(lines)} lines, wanted at most {MAX_README_LINES}")
    return found


def glossary_words() -> list[str]:
    return re.findall(r"^\| ([a-z ]+) \|", page("docs/glossary.md"), re.MULTILINE)[1:]


def undefined_findings(text: str, words: Sequence[str]) -> list[str]:
    """Each word of the glossary is set off by asterisks, and explained, where it comes first."""
    prose = re.sub(r"```.*?```|`[^`]*`|!?\[[^]]*\]\([^)]*\)", "", text, flags=re.DOTALL).lower()
    prose = re.sub(r"\s+", " ", prose)
    found = []
    for word in words:
        first = re.search(rf"(\*?)\b{word}s?\b(\*?)", prose)
        if first is not None and first.groups() != ("*", "*"):
            found.append(f"uses {word!r} before it is defined")
    return found


def named_test_findings(text: str, tests: Set[str]) -> list[str]:
    """Every test that a page names exists."""
    named = set(re.findall(r"\btest_[a-z0-9_]+\b(?!\.py)", text))
    return [f"names the test {name}, which does not exist" for name in sorted(named - tests)]


def placed_test_findings(text: str) -> list[str]:
    """Every test that a page names with its file is in that file."""
    named = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)))
    missing = [(file, test) for file, test in named if f"\ndef {test}(" not in text_of(file)]
    return [f"names {file}::{test}, which does not exist" for file, test in missing]


def function_findings(text: str, known: Set[str]) -> list[str]:
    """Every function that a page names, as `f()` or `Class.f()`, exists."""
    named = set(re.findall(r"`([A-Za-z_][\w.]*)\(\)`", text))
    return [f"names {name}(), which does not exist" for name in sorted(named - known)]


def path_findings(text: str, folder: Path) -> list[str]:
    """Every file and folder that a page names in code or links to is there."""
    names = re.findall(r"`([\w./*-]*(?:\.py|\.md|\.toml|\.sh|\.txt|/))`", text)
    names += re.findall(r"\]\(([\w./-]+)\)", text)
    places = (folder, ROOT, PACKAGE, ROOT / "tests")
    missing = [name for name in names if not any(any(place.glob(name)) for place in places)]
    return [f"names {name}, which is nowhere" for name in missing if "<" not in name]


def room_findings(text: str, room: str) -> list[str]:
    """Find a README of a room with another title, or with more than ten lines beside its list."""
    lines = [one for one in text.splitlines() if one and not re.match(r"- `|```|<!--", one)]
    found = [] if lines[0] == f"# {room}" else [f"{lines[0]!r}, wanted '# {room}'"]
    if len(lines) > MAX_ROOM_LINES:
        found.append(f"{len(lines)} lines beside the list, wanted at most {MAX_ROOM_LINES}")
    return found


def decision_findings(text: str) -> list[str]:
    """Each decision has its date and its four parts."""
    entries = re.split(r"\n\n(?=\*\*)", text.strip())
    found = [] if entries and entries[0] else ["has no decision"]
    for entry in entries:
        parts = [part for part in DECISION if part not in entry]
        if parts or not re.match(r"\*\*\d{4}-\d\d-\d\d\.\*\*", entry):
            found.append(f"{entry[:30]!r} lacks {parts or 'its date'}")
    return found


def marked_lines(script: str) -> list[str]:
    return [line.split("# [elastic]")[0].strip() for line in script.splitlines() if "# [el" in line]


def python_block(text: str) -> list[str]:
    block = text.split("```python\n", 1)[1].split("```", 1)[0]
    return [line.strip() for line in block.splitlines() if line]


def test_readme_shows_code_first_and_is_short() -> None:
    assert first_screen_findings(page("README.md")) == []


def test_glossary_is_short_and_readme_defines_each_word_before_its_use() -> None:
    words = glossary_words()
    assert "worker" in words and len(words) <= MAX_GLOSSARY_WORDS
    assert undefined_findings(page("README.md"), words) == []


def test_the_docs_say_things_once() -> None:
    words = {path.name: len(path.read_text("utf-8").split()) for path in DOCS.glob("*.md")}
    longest = sorted(words, key=lambda name: -words[name])[:5]
    assert sum(words.values()) <= MAX_WORDS_OF_DOCS, f"shorten one of {longest}"


def test_readme_has_the_lines_that_the_example_marks() -> None:
    lines = python_block(page("README.md"))
    assert lines == marked_lines(page("examples/train_gpt.py"))
    assert len(lines) == 10


def test_readme_commands_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", page("Makefile"), re.MULTILINE))
    for name in PAGES:
        wanted = set(re.findall(r"^make ([\w-]+)", page(name), re.MULTILINE))
        wanted |= set(re.findall(r"`make ([\w-]+)`", page(name)))
        assert wanted <= targets, name
    assert {"demo", "test"} <= set(re.findall(r"^make (\w+)", page("README.md"), re.MULTILINE))
    for module in re.findall(r"python -m ([\w.]+)", "".join(map(page, PAGES))):
        assert find_spec(module) is not None, module


def test_readme_options_exist() -> None:
    known = {option_of(key) for key in ElasticConfig.model_fields} | set(OTHER_OPTIONS)
    for name in PAGES:
        assert set(re.findall(r"(?<!\w)--elaswave[\w-]*", page(name))) <= known, name


def test_readme_exit_codes_are_those_of_the_code() -> None:
    rows = re.findall(
        r"^\| (\d+(?:\+n)?) \|", section(page("docs/launching.md"), "Exit codes"), re.M
    )
    named = (errors.EXIT_FAILED, errors.EXIT_CONFIGURATION, errors.EXIT_REQUEUE)
    assert rows == ["0", *map(str, named), "128+n"]


# Wrong lines name what does not exist.
@pytest.mark.parametrize("name", [name for name in PAGES if name != "docs/wrong_lines.md"])
def test_page_names_only_what_exists(name: str) -> None:
    text = page(name)
    tests = {one for one in definitions("tests") if one.startswith("test_")}
    assert named_test_findings(text, tests) == []
    assert placed_test_findings(text) == []
    assert function_findings(text, definitions("elaswave_plugin")) == []
    assert path_findings(text, (ROOT / name).parent) == []


def test_every_room_has_a_short_page_and_all_pages_are_of_rooms() -> None:
    for room in room_pages.FOLDERS:
        assert room_findings(page(f"elaswave_plugin/{room}/README.md"), room) == [], room
    pages = {room_pages.page_of(room) for room in room_pages.FOLDERS}
    assert pages == set(PACKAGE.rglob("README.md"))


def test_map_of_a_room_has_its_arrows_and_all_of_its_files() -> None:
    text = room_pages.map_of("communicator")
    assert "communicator -> communicator/device  communicator/groups  communicator/links" in text
    assert "communicator <- adapters/megatron  recovery" in text
    assert re.findall(r"^- `([\w./]+)`: \S", text, re.MULTILINE) == [
        *("process_group.py", "device/", "groups/", "links/")
    ]


def test_page_of_decisions_has_dated_ones() -> None:
    for part in page("docs/decisions.md").split("\n## ")[1:]:
        assert decision_findings(part.partition("\n")[2]) == []


@pytest.mark.parametrize(
    ("path", "name", "make"),
    documents.parts(),
    ids=[f"{path.parent.name}/{path.name}-{name}" for path, name, _ in documents.parts()],
)
def test_generated_part_is_that_of_its_source(
    path: Path, name: str, make: Callable[[], str]
) -> None:
    assert documents.block_of(path.read_text("utf-8"), name) == make(), f"run `{documents.HOW}`"


def test_toml_file_has_every_key_with_its_default(tmp_path: Path) -> None:
    text = documents.TOML.read_text("utf-8")
    assert text == documents.toml_text(), f"run `{documents.HOW}`"
    assert config_of(documents.TOML) == ElasticConfig()
    keys = re.findall(r"^(?:# )?(\w+) = ", text, re.MULTILINE)
    assert keys == list(ElasticConfig.model_fields)
    # What is commented out is valid as well.
    fields = ElasticConfig.model_fields
    without_default = [key for key in fields if fields[key].default is None]
    every = tmp_path / "every.toml"
    uncommented = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    # A power cap is refused where no clock changes.
    every.write_text(uncommented.replace('clocks = "off"', 'clocks = "emulated"'))
    loaded = config_of(every)
    assert all(getattr(loaded, key) is not None for key in without_default)


def test_ledger_is_that_of_the_patch_records(doctor: subprocess.CompletedProcess[str]) -> None:
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    records = json.loads(doctor.stdout)["records"]
    assert len(records) > 20
    ledger = documents.block_of(page("patches/README.md"), "ledger")
    assert ledger == documents.ledger_table(records), f"run `{documents.HOW}`"


def test_each_part_of_a_steps_state_is_on_the_list() -> None:
    """A part is a class with the four verbs of `Part`; its name is what messages call it."""
    found: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and any(
                isinstance(base, ast.Name) and base.id == "Part" for base in node.bases
            ):
                name = next(one for one in node.body if isinstance(one, ast.Assign))
                assert isinstance(name.value, ast.Constant), node.name
                found.append(str(name.value.value))
    assert len(found) >= 8
    assert set(found) == {one.part for one in state_of_a_step() if one.part}


def test_series_lists_exactly_the_diffs() -> None:
    listed = [line for line in page("patches/series").splitlines() if not line.startswith("#")]
    assert listed
    diffs = [path.relative_to(ROOT / "patches") for path in (ROOT / "patches").rglob("*.diff")]
    assert sorted(listed) == sorted(map(str, diffs))


def test_changelog_has_an_unreleased_part() -> None:
    text = page("CHANGELOG.md")
    assert "keepachangelog.com" in text
    kinds = re.findall(r"^### (\w+)", section(text, "[Unreleased]"), re.MULTILINE)
    assert kinds and set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed"}


@pytest.mark.parametrize(
    "found",
    [
        first_screen_findings("word\n" * 25 + "```\n"),
        first_screen_findings("word " * 101 + "\n```\n"),
        first_screen_findings("```\n" * 121),
        undefined_findings("A view is new. A *view* is a list.", ["view"]),
        named_test_findings("`test_of_nothing`", {"test_of_something"}),
        placed_test_findings("`tests/tidy/test_docs.py::test_of_nothing`"),
        placed_test_findings("`tests/tidy/absent.py::test_of_something`"),
        function_findings("`Worker.fly()`", {"Worker.seal", "fly"}),
        path_findings("`core/absent.py`", ROOT),
        path_findings("[here](ABSENT.md)", ROOT),
        room_findings("# cli: commands\n", "cli"),
        room_findings("# cli\n" + "more\n" * MAX_ROOM_LINES, "cli"),
        decision_findings("\n## Decisions\n"),
        decision_findings("\n## Decisions\n\n**2026-11-21.** Chosen: a. Because: b."),
        decision_findings(f"\n## Decisions\n\n{' x. '.join(DECISION)}"),
    ],
)
def test_document_control_finds(found: list[str]) -> None:
    assert found


def test_generated_block_control_finds_a_change() -> None:
    text = page("docs/settings.md").replace("- `seed` ", "- `sead` ")
    assert documents.block_of(text, "settings") != documents.settings_list()
    again = documents.with_block(text, "settings", documents.settings_list())
    assert again == page("docs/settings.md")
    with pytest.raises(ValueError, match="no block 'absent'"):
        documents.block_of(text, "absent")


def lacking(result: dict[str, object]) -> set[str]:
    """Return what a result file lacks of how it was made, whole or in each of its slices."""
    parts = result.get("slices", [result])
    assert isinstance(parts, list)
    wanted = {"command", "date", "commit", "hardware"}
    return set().union(*(wanted - {key for key, value in part.items() if value} for part in parts))


def test_every_result_file_says_how_it_was_made() -> None:
    assert lacking({"command": "x", "date": "y", "commit": None, "hardware": "z"}) == {"commit"}
    assert lacking({"slices": [{"command": "x"}]}) == {"date", "commit", "hardware"}
    files = sorted((ROOT / "benchmarks").glob("*.json"))
    found = {file.name: lacking(json.loads(file.read_text("utf-8"))) for file in files}
    assert files and not any(found.values()), found
    told = page("docs/measurements.md")
    recorded = {*re.findall(r"`([a-z0-9_]+\.json)`", told)}
    assert recorded <= set(found), recorded - set(found)
