"""The claims of README, changelog and docs about GPUs, and the result files that show them.

A statement is a sentence, an item of a list or a row of a table. It is a claim where it names a
model of GPU, or says of GPUs, CUDA or NCCL that something ran, passed or was measured, or gives a
time, a rate or a share. It says "not run", or something as plain, or names a result file of
`make gpu` below benchmarks/gpu/results in which an item has passed on a GPU.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

RESULTS = "benchmarks/gpu/results"

_MODEL = re.compile(
    r"\b(?:[AHLV][1248]0{1,2}S?|[BH]200|GB?H?200|RTX ?\d+|T4|MI\d{3}X?|Tesla|Hopper|Blackwell)\b"
)
_DEVICE = re.compile(r"\b(?:GPUs?|CUDA|NCCL)\b")
_DONE = re.compile(
    r"\b(?:ran|has run|have run|(?:was|were) (?:run|shown|proved)|passed|pass|tested"
    r"|measured (?:on|with|over)|verified|survived|proven|took)\b"
    r"|\d ?(?:ms|s|us|GB/s|GiB/s|%|x)(?![\w/])|\b(?:steps|tokens|bytes|seconds) a second\b"
)
_PLAIN = re.compile(
    r"\bnot \**run\b|\bnever run\b|\bhas never\b|\bno GPU\b|\bnot on GPUs\b|\b(?:un|not )tested\b"
    r"|\b[Uu]n(?:tested|proven)\b|\bwithout (?:a GPU|one)\b|\bstand(?:s|ed)?[ -]ins?\b"
    r"|\bwhen: this has run\b|\bstood in\b"
)
_FILE = re.compile(re.escape(RESULTS) + r"/[\w.-]+\.json")


def pages(root: Path) -> list[Path]:
    """List the files whose claims count."""
    return [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").glob("*.md"))]


def unshown_claims(text: str, root: Path) -> list[str]:
    """Return the claims of a page that no result file shows and that do not say "not run"."""
    return [
        one
        for one in statements(text)
        if (_MODEL.search(one) or (_DEVICE.search(one) and _DONE.search(one)))
        and not _PLAIN.search(one)
        and not any(is_result(root / name) for name in _FILE.findall(one))
    ]


def is_result(path: Path) -> bool:
    """Return whether a file is a result of `make gpu` with an item that has passed on a GPU."""
    try:
        items = json.loads(path.read_text("utf-8"))["items"]
        return any((one["device"], one["status"]) == ("cuda", "passed") for one in items)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def statements(text: str) -> Iterator[str]:
    """Yield the sentences, items and rows of a page, without its code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |\||#))", text):
        if block.lstrip().startswith("|"):
            yield block.strip()
        else:
            yield from re.split(r"(?<=[.:])\s+(?=[A-Z*`\[])", " ".join(block.split()))
