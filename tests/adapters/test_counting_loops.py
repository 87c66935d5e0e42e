"""The line by which a script's loop ends at a count of its batches, and loops that do not."""

import contextlib
import itertools
import linecache
import textwrap
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from elaswave_plugin.adapters.counting_loops import counting_line

# What ends in "# here" is named.
COUNTING = (
    """
    for step in range(9):  # here
        next(batches)
    """,
    """
    for step, batch in enumerate(loader):
        if step == 9:
            break  # here
    """,
    """
    for epoch in range(3):
        for step, batch in enumerate(progress(loader)):
            log(batch)
            if debug and (step + 1) // 2 >= limit:
                return  # here
    """,
    """
    for step, batch in zip(range(9), loader):  # here
        engine(batch)
    """,
    """
    for batch in itertools.islice(loader, 9):  # here
        engine(batch)
    """,
    """
    count = 0
    while count < 9:  # here
        engine(next(batches))
        count += 1
    """,
    """
    done = 0
    while True:
        for batch in loader:
            if engine.is_gradient_accumulation_boundary():
                done = done + 1
            is_over = done >= limit
            if is_over:
                break  # here
    """,
    """
    done = 0
    while done < limit:  # here
        for batch in loader:
            done += 1
    """,
    """
    state.step = 0
    while True:
        with timer:
            try:
                batch = next(batches)
            except StopIteration:
                break
            state.step += 1
            if state.step > 9:
                break  # here
    """,
    """
    for step in range(9):
        for part in range(2):  # here
            engine(next(batches))
    """,
    """
    for step in range(9):  # here
        engine(fetch(batches))
    """,
    """
    for step in range(9):  # here
        next(cycle(loader))
    """,
    """
    def some(loader):
        for number, batch in enumerate(loader):
            if number == 9:
                return  # here
            yield batch
    for batch in some(loader):
        engine(batch)
    """,
)
OTHERS = (
    """
    for epoch in range(3):
        for step, batch in enumerate(loader):
            engine(batch)
            if step % 10 == 0:
                log(step)
    """,
    """
    while engine.global_steps < 9:
        for batch in loader:
            engine(batch)
            if engine.global_steps == 9:
                break
    """,
    """
    while engine.global_steps < 9:
        for part in range(2):
            engine(next(batches))
    """,
    """
    for step in range(1000):
        engine(next(batches))
        if engine.global_steps == 9:
            break
    """,
    """
    updates = 0
    for epoch in range(3):
        for step, batch in enumerate(loader):
            with accelerator.accumulate(model):
                engine(batch)
            if accelerator.sync_gradients:
                updates += 1
            if updates >= limit:
                break
    """,
    """
    for epoch in range(3):
        for batch in loader:
            made = engine.global_steps
            engine(batch)
            is_made = engine.global_steps > made
            if is_made:
                updates += 1
            if updates == limit:
                return
    """,
    """
    epoch = 0
    while epoch < 3:
        for batch in loader:
            engine(batch)
        epoch += 1
    """,
    """
    for epoch in range(3):
        train_epoch(loader)
    """,
    """
    for batch in loader:
        engine(batch)
        if time() > limit:
            break
    """,
    """
    for batch in (moved(batch) for batch in loader):
        engine(batch)
    """,
    """
    batches = iter(loader)
    next(batches)
    """,
)
COMMON = """
def fetch(batches):
    return next(batches)

def cycle(loader):
    while True:
        for batch in loader:
            yield batch

def progress(loader):
    done = 0
    for batch in loader:
        yield batch
        done += 1
        if done > 100:
            log(done)

def train_epoch(loader):
    for batch in loader:
        engine(batch)

def main():
    batches = iter(loader)
"""


class Asked(Exception):
    """A loader was asked for its first batch."""


class Loader:
    """Looks for the loop that asks it."""

    line: str | None = None

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> NoReturn:
        # In a frame of ours, as in a job.
        ours: dict[str, Any] = {"__name__": "elaswave_plugin.loader", "look": counting_line}
        self.line = eval("(lambda: look())()", ours)
        raise Asked


def line_of(body: str) -> tuple[str | None, str | None]:
    """Return the line that is found in a script's loop, and the one that is marked there."""
    text = f"{COMMON}{textwrap.indent(textwrap.dedent(body), '    ')}\nmain()\n"
    linecache.cache["/a/train.py"] = (len(text), None, text.splitlines(keepends=True), "train.py")
    loader = Loader()
    names: dict[str, Any] = {
        "__name__": "__main__",
        "loader": loader,
        "engine": SimpleNamespace(global_steps=0),
        "state": SimpleNamespace(),
        "timer": contextlib.nullcontext(),
        "itertools": itertools,
        "limit": 9,
    }
    with pytest.raises(Asked):
        exec(compile(text, "/a/train.py", "exec"), names)
    marked = [n for n, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]
    return loader.line, f"train.py:{marked[0]}" if marked else None


@pytest.mark.parametrize("body", [*COUNTING, *OTHERS])
def test_a_loop_that_ends_by_a_count_is_found(body: str) -> None:
    found, wanted = line_of(body)
    assert (wanted is not None) is (body in COUNTING)
    assert found == wanted


def test_a_script_without_its_text_is_left_alone() -> None:
    names = {"__name__": "__main__", "loader": (loader := Loader())}
    with pytest.raises(Asked):
        exec("for _ in range(9): next(loader)", names)
    assert loader.line is None
