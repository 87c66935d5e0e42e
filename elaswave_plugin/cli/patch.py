"""The diffs of patches/: which of them fit a source tree, applied and taken back as one."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from elaswave_plugin.errors import ConfigurationError

APPLIED, FITS = "applied", "not applied, fits"
_GIT = ("git", "apply", "--unidiff-zero", "--whitespace=nowarn", "-p1")
_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Diff:
    """A diff: its name in the series, such as "megatron-core/0.16.1/new_group.diff", and text."""

    name: str
    text: str

    @property
    def family(self) -> str:
        """The folder that it is in, which says what it is for."""
        return self.name.rpartition("/")[0]

    @property
    def summary(self) -> str:
        """The first line of its header."""
        return self.text.partition("\n")[0]

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it changes, from the root of the tree."""
        return tuple(re.findall(r"^\+\+\+ b/(.*)$", self.text, re.MULTILINE))

    def field(self, name: str) -> str:
        """A field of its header: Reason, Valid, Hook or Upstream."""
        header = self.text.partition("\n--- ")[0]
        found = re.search(rf"^{name}: (.*?)(?=^\w+: |\Z)", header, re.MULTILINE | re.DOTALL)
        return " ".join(found[1].split()) if found else ""


@dataclass(frozen=True, slots=True)
class Tree:
    """A source tree: the folder that holds ``megatron/``, and the families of diffs for it."""

    root: Path
    families: tuple[str, ...]


def find_folder() -> Path:
    """Return the folder of the diffs: in the installed package, or beside it in our repository.

    Raises ConfigurationError where there is none.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "patches", package.parent / "patches"):
        if (folder / "series").is_file():
            return folder
    raise ConfigurationError(
        f"there is no folder patches with a file series in {package} or beside it; reinstall "
        "elaswave_plugin"
    )


def read_series() -> tuple[Diff, ...]:
    """All diffs, in the order of the series."""
    folder = find_folder()
    lines = (folder / "series").read_text("utf-8").splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    return tuple(Diff(name, (folder / name).read_text("utf-8")) for name in names)


def find_tree(path: Path) -> Tree:
    """The tree that PATH is in: site-packages, megatron/core in it, or a checkout.

    Raises ConfigurationError where there is no Megatron-Core.
    """
    here = path.resolve()
    for root in (here, here.parent, here.parent.parent):
        info = root / "megatron" / "core" / "package_info.py"
        if info.is_file():
            parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", info.read_text("utf-8"), re.M))
            version = ".".join(parts.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))
            scripts = (root / "megatron" / "training").is_dir()
            tag = (f"megatron-lm/core_v{version}",) if scripts else ()
            return Tree(root, (f"megatron-core/{version}", *tag))
    raise ConfigurationError(
        f"{path} has no megatron/core/package_info.py, wanted the folder of an installed "
        "megatron-core (.../site-packages/megatron/core) or a checkout of Megatron-LM"
    )


def diffs_for(tree: Tree) -> tuple[Diff, ...]:
    """The diffs of a tree's version; raises ConfigurationError where there are none."""
    series = read_series()
    found = tuple(one for one in series if one.family in tree.families)
    if not found:
        known = ", ".join(sorted({one.family for one in series}))
        raise ConfigurationError(
            f"{tree.root} is {tree.families[0]}, and there are diffs for {known} only; "
            "install one of these, or leave the patches to run time"
        )
    return found


def state_of(tree: Tree, diff: Diff) -> str:
    """APPLIED or FITS; raises ConfigurationError where the source is neither."""
    # First, since the lines that a diff takes out may be among those that it puts in.
    if _git(tree.root, [diff], "--check", "--reverse") is None:
        return APPLIED
    problem = _git(tree.root, [diff], "--check")
    if problem is None:
        return FITS
    raise ConfigurationError(
        f"{diff.name} does not fit {tree.root}: {problem}; it was written for "
        f"{diff.field('Valid')}; nothing was changed"
    )


def apply(tree: Tree) -> tuple[Diff, ...]:
    """Apply all that are not applied yet, or none; returns those."""
    return _change(tree, FITS)


def revert(tree: Tree) -> tuple[Diff, ...]:
    """Take back all that are applied, or none; returns those."""
    return _change(tree, APPLIED, "--reverse")


def _change(tree: Tree, state: str, *options: str) -> tuple[Diff, ...]:
    chosen = tuple(one for one in diffs_for(tree) if state_of(tree, one) == state)
    if not chosen:
        return ()
    names = sorted({name for diff in chosen for name in diff.files})
    with TemporaryDirectory(prefix="elaswave-") as copy:
        for name in names:
            target = Path(copy, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree.root / name, target)
        problem = _git(Path(copy), chosen, *options)
        if problem is not None:
            raise ConfigurationError(
                f"{tree.root} cannot be changed: {problem}; nothing was changed"
            )
        _put({tree.root / name: Path(copy, name) for name in names})
    return chosen


def _put(files: Mapping[Path, Path]) -> None:
    """Put every file in its place once all of them are written beside it."""
    written: list[tuple[Path, Path]] = []
    try:
        for place, changed in files.items():
            beside = place.with_name(f"{place.name}.elaswave-new")
            written.append((beside, place))
            shutil.copy(changed, beside)
    except OSError as error:
        for beside, _ in written:
            beside.unlink(missing_ok=True)
        raise ConfigurationError(
            f"{error.filename} cannot be written ({error.strerror}); nothing was changed"
        ) from error
    for beside, place in written:
        beside.replace(place)


def _git(root: Path, diffs: Sequence[Diff], *options: str) -> str | None:
    """Run git apply in a folder; returns why not, in a few words."""
    if shutil.which("git") is None:
        raise ConfigurationError("git is not found, which applies the diffs; install it")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    # Neither a repository around the tree nor the user's settings have a say.
    environ |= {
        "GIT_CEILING_DIRECTORIES": str(root.parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "LC_ALL": "C",
    }
    done = subprocess.run(
        [*_GIT, *options, "-"],
        input="".join(one.text for one in diffs),
        cwd=root,
        env=environ,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode == 0:
        return None
    place = re.search(r"patch failed: (.*):(\d+)", done.stderr)
    if place:
        return f"{place[1]} has other text at line {place[2]}"
    return done.stderr.strip().removeprefix("error: ").replace("\n", ", ")
