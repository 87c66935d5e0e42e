"""`elaswave doctor LAUNCH`: what a job would say to each setting of a launch.

Nothing is run or imported of a framework. The tables are those that a job obeys.
"""

from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from elaswave_plugin.adapters import deepspeed_settings
from elaswave_plugin.adapters.answers import Answer, replies, worst
from elaswave_plugin.adapters.megatron_lm_settings import settings, why_not
from elaswave_plugin.cli.launch_files import Launch
from elaswave_plugin.cli.launch_memory import Memory, memory_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The answer to one setting of a launch."""

    setting: str
    answer: Answer
    sentence: str


def answers_of(launch: Launch) -> tuple[Said, ...]:
    """Return the answers to whatever of a launch is not simply carried."""
    if launch.deepspeed is not None:
        return tuple(
            Said(setting=sentence.split(" is ")[0], answer=Answer.REFUSED, sentence=sentence)
            for sentence in deepspeed_settings.problems(launch.deepspeed)
        )
    said = [
        Said(setting=reply.setting.option, answer=reply.answer, sentence=reply.sentence)
        for reply in replies(settings(), launch.arguments)
    ]
    reason = why_not(launch.script, launch.arguments)
    if reason is not None:
        said.append(Said(setting=launch.script, answer=Answer.REFUSED, sentence=reason))
    return tuple(said)


def exit_code_of(answer: Answer) -> int:
    """Return the exit code of the command."""
    return {Answer.LESS: 1, Answer.REFUSED: 2}.get(answer, 0)


def show(launch: Launch, console: Console) -> int:
    """Print each answer, the worst one last; returns the exit code of the command."""
    said = answers_of(launch)
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for title in ("setting", "answer", "what is done, or to do"):
        table.add_column(title, overflow="fold")
    order = list(Answer)
    for one in sorted(said, key=lambda one: order.index(one.answer), reverse=True):
        style = {Answer.REFUSED: "red", Answer.LESS: "yellow"}.get(one.answer)
        table.add_row(one.setting, str(one.answer), one.sentence, style=style)
    if said:
        console.print(table)
    if launch.unknown:
        console.print(f"not known without a run: {', '.join(launch.unknown)}")
    if launch.deepspeed is None:
        memory = _memory(launch)
        lines = memory.lines() if isinstance(memory, Memory) else (memory,)
        console.print("\n".join(lines), highlight=False)
    answer = worst(one.answer for one in said)
    number = sum(one.answer is answer for one in said)
    verdict = {
        Answer.CARRIED: "attaches as it is",
        Answer.ADJUSTED: "attaches; what is adjusted is said in one line at the start",
        Answer.LESS: f"attaches with less: {number} of its settings",
        Answer.REFUSED: f"is refused for {number} of its settings",
    }
    console.print(f"{launch.script or 'this launch'} {verdict[answer]}", highlight=False)
    return exit_code_of(answer)


def _memory(launch: Launch) -> Memory | str:
    return memory_of(launch.arguments, workers=launch.workers, nodes=launch.nodes)


def answer_of(launch: Launch) -> Answer:
    """Return the answer to the whole launch."""
    return worst(one.answer for one in answers_of(launch))


def as_json(launch: Launch) -> dict[str, Any]:
    """Return the answers, for programs."""
    said, memory = answers_of(launch), _memory(launch)
    return {
        "script": launch.script,
        "answer": str(worst(one.answer for one in said)),
        "memory_bytes": asdict(memory) if isinstance(memory, Memory) else None,
        "unknown": list(launch.unknown),
        "settings": [
            {"setting": one.setting, "answer": str(one.answer), "sentence": one.sentence}
            for one in said
        ],
    }
