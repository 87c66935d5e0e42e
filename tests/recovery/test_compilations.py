"""The compilations of torch.compile on a progress page."""

from collections.abc import Callable
from typing import Any

import torch

from elaswave_plugin.ipc.progress_page import COMPILATION, ProgressPage
from elaswave_plugin.recovery.phases import Compilations


def compiled(seen: list[str | None], page: ProgressPage) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function whose compiler looks at the page."""

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append(page.announced)
        return module.forward

    return torch.compile(lambda x: x * 2 + 1, backend=backend)


def test_a_page_tells_of_a_compilation_and_of_its_end() -> None:
    page, seen = ProgressPage(), list[str | None]()
    compilations = Compilations(page)
    torch._dynamo.reset()
    compilations.watch()
    compilations.watch()
    assert compiled(seen, page)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert (seen, page.announced) == ([COMPILATION], None)
    # Which forgets all callbacks.
    torch._dynamo.reset()
    compilations.watch()
    compiled(seen, page)(torch.ones(3))
    assert (seen, page.announced) == ([COMPILATION] * 2, None)
    torch._dynamo.reset()
