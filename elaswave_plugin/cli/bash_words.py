"""Reads which command a launch script of bash runs, without running anything.

Variables and arrays are expanded in the order of their assignments. Of a condition that cannot be
known here the first branch is taken, and of a loop one round.
"""

import ast
import operator
import re
import shlex
from collections.abc import Mapping, Sequence

from elaswave_plugin.cli.bash_lexer import Assigned, Command, Part, Word, commands_of

# Stands for what only a run would tell: an argument of the script, the output of a command.
UNKNOWN = "\N{WHITE QUESTION MARK ORNAMENT}"
_ARITHMETIC = (
    (ast.Add, operator.add),
    (ast.Sub, operator.sub),
    (ast.Mult, operator.mul),
    (ast.Div, operator.floordiv),
    (ast.FloorDiv, operator.floordiv),
    (ast.Mod, operator.mod),
)
# Of texts, and of whole numbers.
_OF_TEXT = (("=", operator.eq), ("==", operator.eq), ("!=", operator.ne))
_OF_NUMBERS = (
    ("-eq", operator.eq),
    ("-ne", operator.ne),
    ("-gt", operator.gt),
    ("-ge", operator.ge),
    ("-lt", operator.lt),
    ("-le", operator.le),
)


def training_words(text: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the words of the command that trains, from the script's name on; empty without one.

    It is the command of a Python script with the most options.
    """
    return training_command(text, environment)[1]


def training_command(
    text: str, environment: Mapping[str, str] | None = None
) -> tuple[list[str], list[str]]:
    """Return the words of the same command, those before the script's name apart."""
    shell = _Shell(dict(environment or {}))
    launcher: list[str] = []
    found: list[str] = []
    for command in commands_of(text):
        before, words = _at_script(shell.run(command))
        if words and _num_options(words) >= _num_options(found):
            launcher, found = before, words
    return launcher, found


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
    if not flat or flat[0] in ("echo", "printf", "cat", "cp", "sed", "ls", "rm", "export"):
        return [], []
    for at, word in enumerate(flat):
        if word.endswith(".py") and not word.startswith("-"):
            return flat[:at], flat[at:]
    return [], []


class _Shell:
    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = {name: [value] for name, value in variables.items()}
        # Of each open condition: whether its branch is taken now, and whether one was.
        self._branches: list[tuple[bool, bool]] = []
        self._case: list[str] = []

    def run(self, command: Command) -> list[str]:
        """Take in a command; returns its words, none where it is not run."""
        words = list(command.words)
        first = _plain(words[0]) if words else ""
        while first in ("then", "do", "else", "elif", "fi", "{", "}", "done", "esac", "!", "time"):
            self._structure(first)
            words = words[1:]
            if first == "elif":
                return self._condition(words)
            first = _plain(words[0]) if words else ""
        if first == "if":
            self._branches.append((True, False))
            return self._condition(words[1:])
        if not all(taken for taken, _ in self._branches):
            return []
        if first == "for" and len(words) > 3:
            values = self._expand_all(words[3:])
            self._variables[_plain(words[1])] = values[:1]
            return []
        for one in command.assigned:
            self._assign(one)
        return self._expand_all(words)

    def _structure(self, word: str) -> None:
        if word == "else" and self._branches:
            _, had = self._branches[-1]
            self._branches[-1] = (not had, True)
        elif word == "fi" and self._branches:
            self._branches.pop()

    def _condition(self, words: Sequence[Word]) -> list[str]:
        _, had = self._branches[-1] if self._branches else (True, False)
        if not self._branches:
            return []
        takes = not had and self._holds(self._expand_all(words))
        self._branches[-1] = (takes, had or takes)
        return []

    def _holds(self, words: list[str]) -> bool:
        """Return whether a condition holds; what cannot be known does."""
        words = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
        if words[:1] == ["!"]:
            return not self._holds(words[1:])
        if UNKNOWN in "".join(words):
            return True
        try:
            if len(words) == 2 and words[0] in ("-z", "-n"):
                return bool(words[1]) == (words[0] == "-n")
            if len(words) == 1 and words[0] in ("-z", "-n"):
                return words[0] == "-z"
            if len(words) == 3 and (compares := dict(_OF_TEXT).get(words[1])):
                return bool(compares(words[0], words[2]))
            if len(words) == 3 and (orders := dict(_OF_NUMBERS).get(words[1])):
                return bool(orders(int(words[0]), int(words[2])))
        except ValueError:
            return True
        return True

    def _assign(self, one: Assigned) -> None:
        values = self._expand_all(one.values) if one.is_array else [self._joined(one.values[0])]
        before = self._variables.get(one.name, [])
        if one.adds and one.is_array:
            values = [*before, *values]
        elif one.adds:
            values = ["".join(before[:1]) + values[0], *before[1:]]
        self._variables[one.name] = values

    def _joined(self, word: Word) -> str:
        """Return the value of a word without cutting it."""
        return "".join(
            " ".join(self._value(part.text)) if part.expands else part.text for part in word
        )

    def _expand_all(self, words: Sequence[Word]) -> list[str]:
        return [one for word in words for one in self._expand(word)]

    def _expand(self, word: Word) -> list[str]:
        """Expand one word, which unquoted variables may cut into several."""
        done: list[str] = []
        open_word: str | None = None
        for part in word:
            pieces, cuts_before, cuts_after = self._pieces(part)
            for index, piece in enumerate(pieces):
                if open_word is not None and (index > 0 or cuts_before):
                    done.append(open_word)
                    open_word = None
                open_word = piece if open_word is None else open_word + piece
            if cuts_after and open_word is not None:
                done.append(open_word)
                open_word = None
        return done if open_word is None else [*done, open_word]

    def _pieces(self, part: Part) -> tuple[list[str], bool, bool]:
        if not part.expands:
            return [part.text], False, False
        values = self._value(part.text)
        if part.quoted:
            is_list = part.text == "@" or part.text.endswith("[@]}")
            return (values if is_list else [" ".join(values)]), False, False
        text = " ".join(values)
        return text.split(), text[:1].isspace(), text[-1:].isspace()

    def _value(self, expression: str) -> list[str]:
        """Return the value of what stands behind a dollar."""
        if expression.startswith("(("):
            return [self._arithmetic(expression.strip("()"))]
        if expression.startswith("("):
            return [UNKNOWN]
        inner = expression[1:-1] if expression.startswith("{") else expression
        found = re.fullmatch(r"(#?)([A-Za-z_]\w*|[\d@*?$!#-])(\[[^]]*\])?(.*)", inner, re.S)
        if found is None:
            return [UNKNOWN]
        count, name, index, rest = found.groups()
        values = self._variables.get(name)
        if count:
            return [str(len(values or []))]
        if values is not None and index and index[1:-1].isdigit():
            values = values[int(index[1:-1]) :][:1]
        default = re.fullmatch(r"(:?[-=+?])(.*)", rest, re.S)
        if default is not None:
            is_set = values is not None and (":" not in default[1] or any(values))
            if default[1].endswith("+"):
                return [self._text(default[2])] if is_set else []
            if not is_set and not default[1].endswith("?"):
                values = [self._text(default[2])]
        if values is None:
            return [UNKNOWN] if name.isdigit() or name in "@*?$!" else []
        return values if default is not None or not rest else [UNKNOWN]

    def _text(self, text: str) -> str:
        """Expand a default as a word of its own."""
        commands = list(commands_of(f"x {text}"))
        words = commands[0].words[1:] if commands else ()
        return " ".join(self._expand_all(words))

    def _arithmetic(self, text: str) -> str:
        known = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: self._number(m[1]), text)
        try:
            return str(_evaluate(ast.parse(known.strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, KeyError):
            return UNKNOWN

    def _number(self, name: str) -> str:
        return "".join(self._variables.get(name, [UNKNOWN])[:1])


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return int(dict(_ARITHMETIC)[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    raise ValueError("no arithmetic of whole numbers")


def _plain(word: Word) -> str:
    return "".join(part.text for part in word)
