"""The rooms of the package: which room may import which, and how that is checked."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

from tests.tidy.rules import PACKAGE, imported_modules

MAX_FILES = 25
# Files at the root are rooms of their own: the doors of the package, and the ground.
_TABLE = """
errors:
around:
accelerate_state:
autoload:
core:
rehearsed:
toml_file: errors
words: errors
megatron_lm:
deepspeed:
version:
values: errors version
kept: errors values
loss_terms: core/step errors
core/step: errors
checkpoints: errors values
core/layout: errors
config: core/agreement errors rehearsed words
command_line: config errors toml_file words
core/agreement: core core/layout errors
core/planner: core/layout core/step errors
testing: core core/agreement core/layout
ipc: core core/agreement core/layout errors
tracking: config errors ipc words
core/recovery_plan: core/layout core/planner core/step errors
observer: config core/agreement core/layout core/planner core/step errors tracking
trainer: core core/agreement core/layout errors ipc rehearsed words
agent/peers: core core/agreement core/layout core/step errors ipc tracking version
communicator/links: core/agreement errors ipc
framework: core/recovery_plan
snapshot: core/layout core/recovery_plan errors ipc values
agent: core core/agreement core/layout errors ipc agent/peers tracking
communicator/groups: communicator/links errors
launch: core/agreement errors ipc rehearsed agent agent/peers toml_file tracking words
communicator/device: communicator/groups communicator/links core/layout errors ipc
run: launch
communicator: communicator/device communicator/groups communicator/links core/layout
    errors
recovery: checkpoints communicator communicator/links config core/agreement core/layout core/planner
    core/recovery_plan core/step errors framework ipc rehearsed snapshot tracking trainer values
    version
adapters: config errors framework ipc recovery tracking trainer words
step_state: errors kept recovery values
adapters/megatron/compat: adapters around checkpoints core/step errors recovery values
adapters/deepspeed/compat: adapters errors
loops: config errors framework ipc recovery step_state trainer values
adapters/megatron/state: adapters around adapters/megatron/compat core/layout errors step_state
    values
adapters/deepspeed/zero: adapters/deepspeed/compat core/layout errors ipc snapshot tracking values
demo: config core/layout errors ipc observer recovery tracking
adapters/megatron/sums: around adapters/megatron/state communicator/groups core/layout
    core/planner core/step errors recovery values
adapters/megatron/step: adapters around adapters/megatron/compat adapters/megatron/state
    adapters/megatron/sums communicator/groups communicator/links core/planner
    core/recovery_plan core/step errors recovery rehearsed step_state trainer values
adapters/deepspeed/engine: adapters adapters/deepspeed/compat adapters/deepspeed/zero checkpoints
    communicator/groups config core/layout core/recovery_plan core/step errors framework ipc loops
    loss_terms recovery step_state tracking trainer values
adapters/megatron: adapters around adapters/megatron/compat adapters/megatron/state
    adapters/megatron/step adapters/megatron/sums communicator config core/layout core/planner
    core/recovery_plan core/step errors framework ipc loops recovery step_state tracking trainer
    values words command_line
adapters/deepspeed/pipeline: adapters adapters/deepspeed/compat adapters/deepspeed/engine
    core/recovery_plan core/step errors framework loops recovery step_state tracking values
adapters/deepspeed/accelerate: adapters/deepspeed/compat adapters/deepspeed/engine errors ipc
    loops trainer values
adapters/deepspeed/hf_trainer: adapters adapters/deepspeed/accelerate adapters/deepspeed/compat
    adapters/deepspeed/engine core/step errors framework ipc kept loops loss_terms step_state
    tracking trainer values
adapters/megatron_lm: adapters around adapters/megatron adapters/megatron/compat
    adapters/megatron/state command_line
    adapters/megatron/step checkpoints config core/layout core/step errors framework ipc loops
    recovery rehearsed step_state tracking trainer values
rehearsal: adapters adapters/deepspeed/engine adapters/megatron adapters/megatron/state config
    core/recovery_plan core/step demo errors framework kept observer recovery rehearsed step_state
    tracking trainer values words
adapters/deepspeed: adapters adapters/deepspeed/compat adapters/deepspeed/engine
    adapters/deepspeed/pipeline adapters/deepspeed/zero communicator/groups config errors ipc loops
    recovery tracking trainer command_line words
cli: adapters adapters/deepspeed/compat adapters/megatron/compat adapters/megatron/step
    adapters/megatron_lm checkpoints config core core/agreement core/layout core/planner core/step
    demo errors ipc launch observer rehearsal agent words
"""
ROOMS = {
    room: tuple(others.split())
    for room, others in re.findall(r"^(\S+):((?:.|\n )*)$", _TABLE, re.MULTILINE)
}
# They run where no framework may be loaded: agents, launchers, and trainers before a script.
STANDARD_LIBRARY_ONLY = ("ipc", "agent", "agent/peers", "launch", "trainer")


def room_of(module: str) -> str:
    """The room of a module of the package, by the table: "core/layout", or "errors" at the root."""
    parts = module.split(".")[1:]
    while parts and "/".join(parts) not in ROOMS:
        parts.pop()
    return "/".join(parts)


def cycle() -> list[str]:
    """A cycle between rooms by the table; empty if there is none."""
    try:
        tuple(TopologicalSorter(ROOMS).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def room_findings(source: str, module: str, is_package: bool = False) -> list[str]:
    """Find imports of a room that the table does not give to the module's own room."""
    tree, here = ast.parse(source), room_of(module)
    found = set()
    for name in imported_modules(tree, module, is_package):
        if name.split(".")[0] == PACKAGE:
            there = room_of(name)
            if here and there not in ("", here, *ROOMS[here]):
                found.add(f"{here} imports {name} of {there}")
        elif here in STANDARD_LIBRARY_ONLY and name.split(".")[0] not in sys.stdlib_module_names:
            found.add(f"{here} is of the standard library only and imports {name}")
    return sorted(found)


def typing_findings(source: str, module: str, is_package: bool = False) -> list[str]:
    """Find imports of another room that only a type checker makes: an arrow that hides."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for name in _of_the_package(imported_modules(node, module, is_package)):
                if room_of(module) and room_of(name) not in ("", room_of(module)):
                    found.append(f"imports {name} under TYPE_CHECKING")
    return sorted(set(found))


def unused(arrows: Iterable[tuple[str, str]]) -> list[str]:
    """Arrows of the table that no import needs."""
    made = set(arrows)
    return [
        f"{room} -> {other}"
        for room, others in ROOMS.items()
        for other in others
        if (room, other) not in made
    ]


def arrows_of(source: str, module: str, is_package: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the rooms of a module and of each module of the package that it imports."""
    for name in _of_the_package(imported_modules(ast.parse(source), module, is_package)):
        yield room_of(module), room_of(name)


def _of_the_package(names: Iterable[str]) -> Iterator[str]:
    yield from (name for name in names if name.split(".")[0] == PACKAGE)
