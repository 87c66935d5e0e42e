"""The examples in docstrings print what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import elaswave_plugin

PACKAGE = Path(elaswave_plugin.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text("utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_hold(module: str) -> None:
    ran = doctest.testmod(import_module(module))
    assert ran.attempted and not ran.failed, ran
