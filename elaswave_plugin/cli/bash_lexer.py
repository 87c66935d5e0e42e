"""Cuts a bash script into commands of words, whose variables are not expanded yet."""

import re
from collections.abc import Iterator
from typing import NamedTuple

# What ends a command. Parentheses of arrays are read with the word before them.
_OPERATORS = re.compile(r"&&|\|\||;;&?|[;|&\n()]")
_REDIRECTION = re.compile(r"(\d*|&)(<<<|<<-?|>>|>&|<&|>\||>|<)")

_BEFORE = (
    "then",
    "do",
    "else",
    "{",
    "!",
    "time",
    "export",
    "local",
    "declare",
    "readonly",
    "typeset",
)


class Part(NamedTuple):
    """A piece of a word: its text, whether that is an expression to expand, and in quotes."""

    text: str
    expands: bool
    quoted: bool


Word = tuple[Part, ...]


class Assigned(NamedTuple):
    """NAME=value, NAME+=value, or either with an array."""

    name: str
    adds: bool
    values: tuple[Word, ...]
    is_array: bool


class Command(NamedTuple):
    """The assignments before a command, and its words."""

    assigned: tuple[Assigned, ...]
    words: tuple[Word, ...]


def commands_of(text: str) -> Iterator[Command]:
    """Yield the commands of a script in the order of its lines."""
    yield from _Lexer(text.replace("\r\n", "\n").replace("\\\n", " ")).commands()


class _Lexer:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._here: list[str] = []

    def commands(self) -> Iterator[Command]:
        assigned: list[Assigned] = []
        words: list[Word] = []
        while self._skip_blanks():
            if operator := _OPERATORS.match(self._text, self._at):
                self._at = operator.end()
                yield Command(tuple(assigned), tuple(words))
                assigned, words = [], []
                if operator[0] == "\n":
                    self._skip_here_documents()
            elif redirection := _REDIRECTION.match(self._text, self._at):
                self._redirect(redirection)
            elif all(map(_comes_before, words)) and (one := self._assignment()):
                assigned.append(one)
            else:
                words.append(self._word())
        yield Command(tuple(assigned), tuple(words))

    def _skip_blanks(self) -> bool:
        """Skip blanks and comments; false at the end."""
        while self._at < len(self._text):
            if self._text[self._at] in " \t":
                self._at += 1
            elif self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                return True
        return False

    def _redirect(self, found: re.Match[str]) -> None:
        self._at = found.end()
        self._skip_blanks()
        word = self._word()
        if found[2].startswith("<<") and found[2] != "<<<":
            self._here.append("".join(part.text for part in word))

    def _skip_here_documents(self) -> None:
        for end in self._here:
            found = re.compile(rf"^\t*{re.escape(end)}$\n?", re.M).search(self._text, self._at)
            self._at = len(self._text) if found is None else found.end()
        self._here.clear()

    def _assignment(self) -> Assigned | None:
        found = re.compile(r"([A-Za-z_]\w*)(\+?)=").match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        is_array = self._text[self._at : self._at + 1] == "("
        values = self._array() if is_array else (self._word(),)
        return Assigned(found[1], bool(found[2]), values, is_array)

    def _array(self) -> tuple[Word, ...]:
        self._at += 1
        values: list[Word] = []
        while self._skip_blanks() and self._text[self._at] != ")":
            if self._text[self._at] == "\n":
                self._at += 1
            else:
                before = self._at
                values.append(self._word())
                self._at += self._at == before  # an operator, which has no place here
        self._at += 1
        return tuple(values)

    def _word(self) -> Word:
        parts: list[Part] = []
        plain = ""

        def flush() -> None:
            nonlocal plain
            if plain:
                parts.append(Part(plain, expands=False, quoted=False))
            plain = ""

        while self._at < len(self._text):
            char = self._text[self._at]
            if char in " \t" or _OPERATORS.match(self._text, self._at) or char in "<>":
                break
            if char == "\\":
                plain += self._text[self._at + 1 : self._at + 2]
                self._at += 2
            elif char == "'":
                flush()
                end = self._text.find("'", self._at + 1)
                end = len(self._text) if end < 0 else end
                parts.append(Part(self._text[self._at + 1 : end], expands=False, quoted=True))
                self._at = end + 1
            elif char == '"':
                flush()
                self._at += 1
                parts += self._double_quoted()
            elif char in "$`":
                flush()
                parts.append(self._expression(quoted=False))
            else:
                plain += char
                self._at += 1
        flush()
        return tuple(parts)

    def _double_quoted(self) -> list[Part]:
        parts, plain = [Part("", expands=False, quoted=True)], ""
        while self._at < len(self._text) and self._text[self._at] != '"':
            char = self._text[self._at]
            if char == "\\":
                plain += self._text[self._at + 1 : self._at + 2]
                self._at += 2
            elif char in "$`":
                parts.append(Part(plain, expands=False, quoted=True))
                parts.append(self._expression(quoted=True))
                plain = ""
            else:
                plain += char
                self._at += 1
        self._at += 1
        return [*parts, Part(plain, expands=False, quoted=True)]

    def _expression(self, *, quoted: bool) -> Part:
        """Of $NAME, ${...}, $(...), $((...)) or `...`, without the dollar."""
        begin = self._at
        if self._text[begin] == "`":
            end = self._text.find("`", begin + 1)
            self._at = len(self._text) if end < 0 else end + 1
            return Part("(", expands=True, quoted=quoted)
        follows = self._text[begin + 1 : begin + 2]
        if follows in ("{", "("):
            closing, depth = {"{": "}", "(": ")"}[follows], 0
            for at in range(begin + 1, len(self._text)):
                depth += (self._text[at] == follows) - (self._text[at] == closing)
                if depth == 0:
                    self._at = at + 1
                    return Part(self._text[begin + 1 : at + 1], expands=True, quoted=quoted)
            self._at = len(self._text)
            return Part("(", expands=True, quoted=quoted)
        found = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!-]").match(self._text, begin + 1)
        if found is None:
            self._at += 1
            return Part("$", expands=False, quoted=quoted)
        self._at = found.end()
        return Part(found[0], expands=True, quoted=quoted)


def _comes_before(word: Word) -> bool:
    """Return whether a command, or an assignment, may still begin behind this word."""
    return "".join(part.text for part in word) in _BEFORE
