"""The rules of the house as pure functions: a source text in, findings out."""

import ast
import re
import sys
from collections.abc import Iterator

MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 600
PACKAGE = "elaswave_plugin"
FORBIDDEN_WORDS = frozenset(
    f"{word}{end}"
    for word in ("manager", "helper", "util", "handler", "context")
    for end in ("", "s")
)
# Megatron's own name of a kind of parallelism: upstream spelling, nothing of ours.
UPSTREAM_NAMES = ("context_parallel",)
IMPURE = frozenset(
    ("asyncio", "concurrent", "logging", "multiprocessing", "os", "pathlib", "random")
) | frozenset(
    (
        "select",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "time",
    )
)
CORE_MAY_IMPORT = ("numpy", f"{PACKAGE}.core", f"{PACKAGE}.errors")
# Who may import a framework: its adapter, the writer of Megatron's data format, and the benchmark's
# script that puts layers to sleep.
FRAMEWORK_HOMES = (
    (
        "megatron",
        (
            f"{PACKAGE}.adapters.megatron",
            f"{PACKAGE}.adapters.megatron_lm",
            f"{PACKAGE}.demo.text",
            "benchmarks.emulated_compute",
        ),
    ),
    ("deepspeed", (f"{PACKAGE}.adapters.deepspeed",)),
    ("transformer_engine", (f"{PACKAGE}.adapters",)),
    ("apex", (f"{PACKAGE}.adapters",)),
)
IMMUTABLE_CALLS = frozenset(
    (
        "ContextVar",
        "MappingProxyType",
        "NewType",
        "ParamSpec",
        "Path",
        "PurePath",
        "Struct",
        "TypeVar",
        "object",
    )
) | frozenset(
    ("bytes", "calcsize", "compile", "float", "frozenset", "int", "namedtuple", "str", "tuple")
)
LOGGER_CALLS = frozenset(("getLogger",))
CONSTANT_NAME = re.compile(r"_{0,2}[A-Z][A-Z0-9_]*$")
ALIAS_NAME = re.compile(r"_?[A-Z][A-Za-z0-9]*$")
TODO_WITHOUT_ISSUE = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b(?!\(#\d+\))")
# A docstring says what it documents: a verb for a function, a noun for the rest.
QUESTION = re.compile(
    r"(?:Who(?:m|se|ever)?|What(?:ever)?|Whether|How|Where|When|Which"
    r"|(?:At|By|For|From|In|Of|On|To|Until) (?:what|when|which|whom|whose))\b"
)
# Workers, agents and programs have names; "again" and "except" are plainer.
NOT_PLAIN = re.compile(r"\b(?:[Ww]hom|[Ww]hoever|so many|anew|but for)\b")
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:work|root|home|opt|mnt|Users)/\w")


def imported_modules(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[str]:
    """Yield the absolute name of every import in a module, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*kept, base] if base else kept)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def import_findings(source: str, module: str, is_package: bool = False) -> list[str]:
    """Find imports that are not pure in core, and frameworks outside of their homes."""
    found: list[str] = []
    tree = ast.parse(source)
    for name in imported_modules(tree, module, is_package):
        top = name.split(".")[0]
        if _within(module, f"{PACKAGE}.core"):
            outside = top not in sys.stdlib_module_names and name != PACKAGE
            allowed = any(_within(name, base) for base in CORE_MAY_IMPORT)
            if top in IMPURE or (outside and not allowed):
                found.append(f"{module} is pure and imports {name}")
        for framework, homes in FRAMEWORK_HOMES:
            if top == framework and not any(_within(module, home) for home in homes):
                found.append(f"{module} imports {name}, which belongs in {homes[0]}")
    return sorted(set(found))


def size_findings(source: str) -> list[str]:
    """Find functions of more than 70 lines and files of more than 600."""
    found: list[str] = []
    count = len(source.splitlines())
    if count > MAX_FILE_LINES:
        found.append(f"{count} lines, at most {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def docstring_findings(source: str) -> list[str]:
    """Find a file whose first line is not a docstring (a #! line may stand before it)."""
    lines = source.splitlines()
    first = lines[1:2] if lines and lines[0].startswith("#!") else lines[0:1]
    text = ast.get_docstring(ast.parse(source))
    if text and first and first[0].lstrip("r").startswith('"""') and len(first[0]) > 5:
        return []
    return ["the first line is not a docstring that says the file's one job"]


def first_word_findings(source: str) -> list[str]:
    """Find docstrings that begin with a question's word instead of a verb or a noun."""
    found = []
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text and QUESTION.match(text):
            where = getattr(node, "name", "the file")
            found.append(f"the docstring of {where} begins with {text.split()[0]!r}")
    return found


def word_findings(text: str) -> list[str]:
    """Find words of a text that is not plain English: "whoever", "whom", "anew", "so many"."""
    return [
        f"line {number}: says {found[0]!r}"
        for number, line in enumerate(text.splitlines(), start=1)
        for found in NOT_PLAIN.finditer(line)
    ]


def name_findings(source: str, path: str = "") -> list[str]:
    """Find names of ours that use a word of the forbidden list."""
    names = {part.removesuffix(".py") for part in path.split("/")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.alias) and node.asname:
            names.add(node.asname)
    return sorted(f"the name {name!r} uses a forbidden word" for name in names if _forbidden(name))


def state_findings(source: str) -> list[str]:
    """Find module-level mutable state, `global` and work done at import."""
    tree = ast.parse(source)
    found = [
        f"line {node.lineno}: global {', '.join(node.names)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    for statement in tree.body:
        found.extend(f"line {statement.lineno}: {text}" for text in _statement_state(statement))
    return found


def _statement_state(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is None or isinstance(node, ast.AugAssign):
            return [] if node.value is None else ["changes a module-level name"]
        return [text for target in targets for text in _assignment_state(target, node.value)]
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        if "__name__" in test:
            return []
        return [text for child in [*node.body, *node.orelse] for text in _statement_state(child)]
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
        return [f"work at import: {ast.unparse(node)[:60]}"]
    if isinstance(node, ast.For | ast.While | ast.With | ast.Delete):
        return [f"work at import: {ast.unparse(node).splitlines()[0][:60]}"]
    return []


def _assignment_state(target: ast.expr, value: ast.expr) -> list[str]:
    if isinstance(target, ast.Tuple):
        parts = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
        pairs = zip(target.elts, parts, strict=False)
        return [text for one, part in pairs for text in _assignment_state(one, part)]
    name = target.id if isinstance(target, ast.Name) else ast.unparse(target)
    if name in ("__all__", "__version__"):
        return []
    if isinstance(value, ast.Call) and _called(value) in LOGGER_CALLS:
        return []
    if not CONSTANT_NAME.match(name) and not ALIAS_NAME.match(name):
        return [f"{name} is module state; only UPPER_CASE constants are allowed"]
    if isinstance(value, ast.Subscript):
        return []  # a type alias such as Callable[[int], str]
    bad = [node for node in ast.walk(value) if _mutable(node)]
    return [f"{name} holds {ast.unparse(bad[0])[:50]}, which is mutable"] if bad else []


def _mutable(node: ast.AST) -> bool:
    containers = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    if isinstance(node, ast.Call):
        return _called(node) not in IMMUTABLE_CALLS
    return isinstance(node, containers)


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Subscript):
        function = function.value
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def public_name_findings(source: str) -> list[str]:
    """Find a package root whose __all__ is unsorted or not exactly the names that it offers."""
    listed: list[str] = []
    offered: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = list(ast.literal_eval(node.value))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            offered.update(alias.asname or alias.name for alias in node.names)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            offered.add(node.name)
    found = [] if listed == sorted(listed) else ["__all__ is not sorted"]
    found += [f"{name} is offered and not in __all__" for name in sorted(offered - set(listed))]
    return found + [f"{name} is in __all__ and absent" for name in sorted(set(listed) - offered)]


def text_findings(text: str) -> list[str]:
    """Find unfinished marks without an issue number and paths of one machine."""
    found: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if TODO_WITHOUT_ISSUE.search(line):
            found.append(f"line {number}: an unfinished mark without an issue number (#N)")
        if MACHINE_PATH.search(line):
            found.append(f"line {number}: a path of one machine")
    return found


def view_findings(source: str) -> list[str]:
    """Find texts in which a number of a view is called an epoch; only data has epochs there."""
    about_views = r"epoch \{(?!self\._epoch\} of the data|epoch\}, and others have not)"
    return [
        f"line {number}: a view is called an epoch"
        for number, line in enumerate(source.splitlines(), start=1)
        if re.search(about_views, line)
    ]


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _forbidden(name: str) -> bool:
    for upstream in UPSTREAM_NAMES:
        name = name.replace(upstream, "")
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    return any(word in FORBIDDEN_WORDS for word in words)
