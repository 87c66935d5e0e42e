"""A module as its user sees it, except for some of its functions."""

from collections.abc import Callable, Mapping
from typing import Any


class Answering:
    """Stands for ``module``; the functions named in ``answers`` are those given there."""

    def __init__(self, module: Any, answers: Mapping[str, Callable[..., Any]]) -> None:
        self._module, self._answers = module, answers

    def __getattr__(self, name: str) -> Any:
        return self._answers.get(name) or getattr(self._module, name)
