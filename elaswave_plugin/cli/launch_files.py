"""Reads what somebody launches: a bash script, a YAML recipe, or a configuration of DeepSpeed."""

import json
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from elaswave_plugin.adapters.deepspeed_section import read_section
from elaswave_plugin.adapters.megatron_lm_settings import settings
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.words import check_keys, check_options

if TYPE_CHECKING:
    from tree_sitter import Node

# Stands for what only a run would tell: an argument of the script, the output of a command.
UNKNOWN = "\N{WHITE QUESTION MARK ORNAMENT}"
# In a text: between two words, and where something quoted begins, which is a word even if empty.
_CUT, _QUOTE = "\0", "\1"
# Of arithmetic and of tests: its sign and its number of operands, what they are, what it does.
_OPERATORS: tuple[tuple[str, int, type, Callable[..., Any]], ...] = (
    ("=", 2, str, operator.eq),
    ("==", 2, str, operator.eq),
    ("!=", 2, str, operator.ne),
    ("-z", 1, str, operator.not_),
    ("-n", 1, str, operator.truth),
    ("-eq", 2, int, operator.eq),
    ("-ne", 2, int, operator.ne),
    ("-gt", 2, int, operator.gt),
    ("-ge", 2, int, operator.ge),
    ("-lt", 2, int, operator.lt),
    ("-le", 2, int, operator.le),
    ("+", 2, int, operator.add),
    ("-", 2, int, operator.sub),
    ("-", 1, int, operator.neg),
    ("*", 2, int, operator.mul),
    ("/", 2, int, operator.floordiv),
    ("%", 2, int, operator.mod),
)
# What tree-sitter-bash 0.25 does not read as bash does -> what it does; <...> is to be filled in.
_PLAINER = (
    (r"\r\n", "\n"),
    (r"\\\n", " "),
    (r"(?<!\\)\$([A-Za-z_]\w*|\d)", r"${\1}"),
    (r"`#[^`\n]*`", ""),
    (r"`[^`\n]*`", "$(:)"),
    (r"(?m)^(\s*\w+=)<.*", r"\1"),
)
_FURTHER = ("elif_clause", "else_clause")
# Commands that are no part of the story: they make a word of another one.
_RUN_ELSEWHERE = ("command_substitution", "process_substitution")


def training_command(text: str) -> tuple[list[str], list[str]]:
    """Return the words of the command that trains: before the script's name, and from it on.

    It is the command of a Python script with the most options; both are empty without one. Raises
    ConfigurationError where the parser is not installed.
    """
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError as error:
        raise ConfigurationError(
            f"a launch script of bash is read with {error.name}, which is not installed, wanted"
            " `pip install tree-sitter tree-sitter-bash`"
        ) from None
    for pattern, plain in _PLAINER:
        text = re.sub(pattern, plain, text)
    shell = _Shell()
    shell.run(Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node)
    found = [_at_script(words) for words in reversed(shell.commands)]
    return max(found, key=lambda one: (bool(one[1]), _num_options(one[1])), default=([], []))


def _num_options(words: Sequence[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _at_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    flat: list[str] = []
    for word in words:
        if re.search(r"\.py\b.*\s|\s.*\.py\b", word):  # of bash -c "..."
            try:
                flat += shlex.split(word)
            except ValueError:
                flat += word.split()
        else:
            flat.append(word)
    if not flat or flat[0] in ("echo", "printf", "cat", "cp", "sed", "ls", "rm"):
        return [], []
    for at, word in enumerate(flat):
        if word.endswith(".py") and not word.startswith("-"):
            return flat[:at], flat[at:]
    return [], []


class _Shell:
    """The commands of a bash script, without running anything.

    Variables and arrays are expanded in the order of their assignments. Of a condition that cannot
    be known here the first branch is taken, and of a loop one round.
    """

    def __init__(self) -> None:
        self._variables: dict[str, list[str]] = {}
        self.commands: list[list[str]] = []

    def run(self, node: "Node") -> None:
        """Take in a part of a script, with the commands in it."""
        inside = node.named_children
        if node.type == "variable_assignment":
            self._assign(node)
            return
        if node.type == "command":
            parts = [*node.children_by_field_name("name"), *node.children_by_field_name("argument")]
            self.commands.append(self._words(parts))
            inside = [one for one in inside if one not in parts]
        elif node.type == "file_redirect" and self.commands:
            # Its name comes first; what follows is of the command again.
            self.commands[-1] += self._words(node.children_by_field_name("destination")[1:])
        elif node.type == "if_statement":
            inside = self._branch(node)
        elif node.type == "for_statement":
            values = self._words(node.children_by_field_name("value"))
            self._variables[_source(inside[0])] = values[:1]
        for one in inside:
            if one.type not in _RUN_ELSEWHERE:
                self.run(one)

    def _branch(self, node: "Node") -> "list[Node]":
        """Return what a condition and its further ones have run."""
        others = [one for one in node.named_children if one.type in _FURTHER]
        if node.type == "else_clause" or self._holds(node.named_children[0]):
            return [one for one in node.named_children if one not in others]
        return next(filter(None, map(self._branch, others)), [])

    def _holds(self, node: "Node") -> bool:
        """Return whether a condition holds; what cannot be known does."""
        if node.type == "test_command" and node.named_children:
            return self._holds(node.named_children[0])
        signs = [one.type for one in node.children if not one.is_named]
        if node.type == "negated_command" or (node.type, signs) == ("unary_expression", ["!"]):
            return not self._holds(node.named_children[-1])
        if signs in (["&&"], ["||"]):
            return (all if signs == ["&&"] else any)(map(self._holds, node.named_children))
        try:
            return bool(self._evaluated(node))
        except (LookupError, ArithmeticError, ValueError):
            return True

    def _evaluated(self, node: "Node") -> Any:
        """Return the value of a test or of arithmetic; raises where only a run tells it."""
        if node.type == "binary_expression":
            left, sign, *right = node.children  # a pattern is of several parts
            other = "".join(str(self._evaluated(one)) for one in right)
            return _operated(sign, self._evaluated(left), other)
        if node.type == "unary_expression":
            sign, operand = node.children
            return _operated(sign, self._evaluated(operand))
        if node.type == "parenthesized_expression":
            return self._evaluated(node.named_children[0])
        if node.type == "variable_name":
            return "".join(self._variables[_source(node)][:1])
        (text,) = self._words([node])
        if UNKNOWN in text:
            raise ValueError(text)
        return text

    def _assign(self, node: "Node") -> None:
        name, sign = (_source(one) for one in node.children[:2])
        value = node.child_by_field_name("value")
        before = self._variables.get(name, []) if sign == "+=" else []
        if value is not None and value.type == "array":
            values = [*before, *self._words(value.named_children)]
        else:
            added = "" if value is None else self._joined(value)
            values = ["".join(before[:1]) + added, *before[1:]]
        self._variables[name] = values

    def _words(self, nodes: "Iterable[Node]") -> list[str]:
        """Expand words, which unquoted variables may cut into several."""
        text = _CUT.join(self._text(one) for one in nodes if one.type != "comment")
        return [word.replace(_QUOTE, "") for word in text.split(_CUT) if word]

    def _joined(self, node: "Node") -> str:
        """Return the value of a word without cutting it."""
        return self._text(node, quoted=True).replace(_CUT, " ").replace(_QUOTE, "")

    def _text(self, node: "Node", *, quoted: bool = False) -> str:
        source = _source(node)
        if node.type.endswith(("expansion", "substitution")):
            # The parser counts blanks before it as its own.
            blanks = source[: len(source) - len(source.lstrip())]
            return blanks + self._expanded(node, quoted=quoted)
        if node.type == "string":
            return _QUOTE + self._texts(node.children, quoted=True)
        if node.type == "raw_string":
            return _QUOTE + re.sub(r"\$\{(\w+)\}", r"$\1", source[1:-1])
        if not node.children:
            return re.sub(r'"$|\\(.)', r"\1", source, flags=re.S)
        return self._texts(node.children, quoted=quoted)

    def _texts(self, nodes: "list[Node]", *, quoted: bool) -> str:
        """Return the texts of parts that follow each other, with the blanks between them."""
        return "".join(
            " " * (one.start_byte - before.end_byte) + self._text(one, quoted=quoted)
            for before, one in pairwise([*nodes[:1], *nodes])
        )

    def _expanded(self, node: "Node", *, quoted: bool) -> str:
        """Return the value of an expression behind a dollar."""
        if node.type == "arithmetic_expansion":
            try:
                return str(int(self._evaluated(node.named_children[0])))
            except (LookupError, ArithmeticError, ValueError):
                return UNKNOWN
        if node.type.endswith("substitution") or not node.named_children:
            return UNKNOWN
        name, _, index = _source(node.named_children[0]).removesuffix("]").partition("[")
        sign = node.child_by_field_name("operator")
        operation = "" if sign is None else _source(sign)
        values = self._variables.get(name)
        if values is not None and index.isdigit():
            values = values[int(index) :][:1]
        if sign is not None and operation == "#" == node.children[1].type:
            return str(len(values or []))
        is_set = values is not None and (":" not in operation or any(values))
        kind = operation.removeprefix(":")
        if sign is not None and kind in (("+",) if is_set else ("-", "=")):
            rest = node.children[node.children.index(sign) + 1 : -1]
            text = self._texts(rest, quoted=quoted)
        elif kind not in ("", "-", "=", "?"):
            text = "" if kind == "+" else UNKNOWN
        elif values is None:
            is_special = node.named_children[0].type == "special_variable_name"
            text = UNKNOWN if is_special or name.isdigit() else ""
        else:
            text = (_CUT if quoted and "@" in (name, index) else " ").join(values)
        return text if quoted else re.sub(r"\s+", _CUT, text)


def _operated(sign: "Node", *operands: Any) -> Any:
    signs = {(text, count): (kind, work) for text, count, kind, work in _OPERATORS}
    kind, work = signs[_source(sign), len(operands)]
    return work(*map(kind, operands))


def _source(node: "Node") -> str:
    return (node.text or b"").decode()


# Keys by which a mapping is known to be for DeepSpeed.
_OF_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
_OF_ACCELERATE = ("distributed_type", "deepspeed_config", "mixed_precision", "fsdp_config")
# What Accelerate's section says, and the key of DeepSpeed's configuration that it becomes.
_ZERO_KEYS = (
    ("offload_optimizer_device", "offload_optimizer"),
    ("offload_param_device", "offload_param"),
)
_CONSTANTS = (("true", True), ("false", False), ("none", None), ("null", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The settings of a launch."""

    script: str = ""
    """The Python script; empty where a recipe names none."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of Megatron-LM, by their names."""
    deepspeed: Mapping[str, Any] | None = None
    """The configuration of DeepSpeed; None for a launch of Megatron-LM."""
    unknown: tuple[str, ...] = ()
    """Options whose value only a run tells."""
    workers: int = 0
    """Workers of all nodes, by the options of torchrun; 0 where these do not tell."""
    nodes: int = 1


def read_launch(path: Path) -> Launch:
    """Read a file by what is in it.

    Raises ConfigurationError where it is no launch, and for words that are nearly ours.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    if path.suffix == ".py":
        raise ConfigurationError(
            f"{path} is a Python script, wanted what launches it: a launch script of bash, a YAML"
            " recipe, or a configuration of DeepSpeed or Accelerate"
        )
    if path.suffix in (".json", ".yaml", ".yml"):
        return _of_mapping(_parsed(text, path), path)
    launcher, words = training_command(text)
    if not words:
        raise ConfigurationError(
            f"{path} has no command that runs a Python script; give a launch script of bash, a YAML"
            " recipe, or a configuration of DeepSpeed or Accelerate"
        )
    nodes, width = (_option(launcher, name) for name in ("nnodes", "nproc-per-node"))
    check_options(words[1:])
    launch = of_words(words[0], words[1:])
    return replace(launch, workers=(nodes or 1) * width, nodes=nodes or 1)


def _option(words: Sequence[str], name: str) -> int:
    """Return a number among the words of a launcher; 0 where there is none."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        option, _, value = word.replace("_", "-").partition("=")
        if option == f"--{name}":
            number = value or after
            return int(number) if number.isdecimal() else 0
    return 0


def of_words(script: str, words: Sequence[str]) -> Launch:
    """A launch of a script with the words behind it."""
    flags: dict[str, Any] = {}
    option = ""
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            flags[option] = value if equals else True
        elif option:
            before = flags[option]
            flags[option] = word if before is True else f"{before} {word}"
    unknown = tuple(name for name, value in flags.items() if UNKNOWN in str(value))
    # Where only a run tells a value, its setting is not judged, and still counts as given.
    known = {n: v for n, v in flags.items() if n not in unknown or n not in _by_option()}
    return Launch(script=Path(script).name, arguments=arguments_of(known), unknown=unknown)


def arguments_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that options of the command line make, by their names."""
    found, by_option = {}, _by_option()
    for option, value in flags.items():
        plain = "--" + option.removeprefix("--").replace("_", "-")
        name = by_option.get(plain, plain.removeprefix("--").replace("-", "_"))
        found[name] = _value(value)
    return found


def _by_option() -> dict[str, str]:
    """The name of each setting of the table, by its option."""
    return {setting.option: setting.name for setting in settings()}


def _value(value: Any) -> Any:
    if isinstance(value, str):
        constants = dict(_CONSTANTS)
        if value.lower() in constants:
            return constants[value.lower()]
        return int(value) if re.fullmatch(r"-?\d+", value) else value
    return value


def _parsed(text: str, path: Path) -> Any:
    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        line = str(error).splitlines()[0]
        raise ConfigurationError(f"{path} is no {path.suffix[1:].upper()} file: {line}") from error


def _of_mapping(content: Any, path: Path) -> Launch:
    if not isinstance(content, Mapping):
        raise ConfigurationError(f"{path} holds {type(content).__name__}, wanted keys with values")
    if any(key in content for key in _OF_DEEPSPEED):
        check_keys(content)
        read_section(content)
        return Launch(deepspeed=content)
    if any(key in content for key in _OF_ACCELERATE):
        return _of_accelerate(content, path)
    return Launch(arguments=arguments_of(dict(_leaves(content))))


def _of_accelerate(content: Mapping[str, Any], path: Path) -> Launch:
    kind = str(content.get("distributed_type", "NO"))
    if kind.upper() != "DEEPSPEED":
        raise ConfigurationError(
            f"{path} has distributed_type {kind}, and elaswave_plugin carries DEEPSPEED: run "
            "`accelerate config` and choose DeepSpeed, ZeRO 1 to 3"
        )
    section = content.get("deepspeed_config") or {}
    if isinstance(section, Mapping) and (file := section.get("deepspeed_config_file")):
        return read_launch(path.parent / str(file))
    zero: dict[str, Any] = {"stage": section.get("zero_stage", 0)}
    for key, becomes in _ZERO_KEYS:
        zero[becomes] = {"device": section.get(key, "none")}
    return Launch(deepspeed={"zero_optimization": zero})


def _leaves(content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every key that has no further keys; a recipe groups them as it likes."""
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        found += _leaves(value) if isinstance(value, Mapping) else [(str(key), value)]
    return found
