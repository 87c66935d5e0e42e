"""Builds the kit's bundle: wheels and the checkout in a folder that installs without a network.

python -m benchmarks.gpu.bundle [--out FOLDER] [--python 3.12]

The target has torch, with CUDA, already; everything else that the package and its tests ask for is
in the bundle, for x86-64 Linux.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.command import run, tell
from benchmarks.gpu.runner import ROOT
from elaswave_plugin.errors import ConfigurationError

MAX_MIB = 55.0
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# None of them asks for torch, which would bring gigabytes; torch asks for setuptools before 82.
FREE_OF_TORCH = (
    *("numpy", "matplotlib", "packaging", "psutil", "pydantic>=2", "rich", "typer", "xxhash"),
    "pyyaml",
    *("einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "tqdm"),
    *("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6", "setuptools>=68,<82", "wheel"),
)
# These do; so their requirements are above. Wheels of Megatron-Core have its C++ built.
MEGATRON, DEEPSPEED = "megatron-core==0.16.1", "deepspeed==0.19.8"
ACCEPTED = ("megatron-core>=0.16.1,<0.20", "deepspeed>=0.19.8,<0.20")
INSTALL = """#!/bin/sh
# Installs the kit beside the torch of this machine, without a network: sh install.sh [PYTHON]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${1:-python3}
"$python" -c 'import torch' || {
    echo "this Python has no torch; name one that has: sh install.sh PYTHON" >&2; exit 2; }
tar -xzf "$here/checkout.tar.gz" -C "$here"
"$python" -m venv --system-site-packages "$here/venv"
# Where the torch of a virtual environment is, since that shows its own packages to no other one.
packages=$("$here/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \\
    >"$packages/torch_there.pth"
# Without what torch asks for itself: it is there, by whatever way.
install() {
    "$here/venv/bin/python" -m pip install --quiet --no-deps --no-index \\
        --find-links "$here/wheels" "$@"
}
install --requirement "$here/requirements.txt"
install --no-build-isolation --editable "$here/checkout"
"$here/venv/bin/python" -c 'import elaswave_plugin.run, torch'
echo "installed; now: sh $here/gpu.sh"
"""
KIT = """#!/bin/sh
# Runs the kit; its page and its JSON are in the folder result beside this file.
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/checkout" && exec "$here/venv/bin/python" -m benchmarks.gpu --out "$here/result" "$@"
"""


def main(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New or empty folder.")] = Path(
        "out/gpu-bundle"
    ),
    python: Annotated[str, typer.Option(metavar="X.Y", help="Python of the target.")] = "3.12",
) -> int:
    """Fetch the wheels, export the commit, write install.sh and gpu.sh; 1 if it is too large."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"--out is {str(out)!r}, which is not empty; name a new folder")
    wheels = out / "wheels"
    wheels.mkdir(parents=True)
    target = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    target += [word for name in PLATFORMS for word in ("--platform", name)]
    _pip("download", "--dest", str(wheels), *target, *FREE_OF_TORCH)
    _pip("download", "--dest", str(wheels), "--no-deps", *target, MEGATRON)
    _pip("wheel", "--wheel-dir", str(wheels), "--no-deps", DEEPSPEED)
    (out / "requirements.txt").write_text("".join(f"{one}\n" for one in _requirements(wheels)))
    _export(out.resolve() / "checkout.tar.gz")
    (out / "install.sh").write_text(INSTALL)
    (out / "gpu.sh").write_text(KIT)
    mib = sum(one.stat().st_size for one in out.rglob("*") if one.is_file()) / 2**20
    tell(f"{out}: {mib:.1f} MiB, for Python {python}; there: sh install.sh, then sh gpu.sh")
    if mib > MAX_MIB:
        tell(f"that is more than {MAX_MIB:g} MiB")
        return 1
    return 0


def _pip(*words: str) -> None:
    """Raises ConfigurationError with pip's last line."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigurationError(f"pip {words[0]} failed: {last}")


def _requirements(wheels: Path) -> list[str]:
    """All wheels by name, those with a range by that: what a machine has in it is kept."""
    ranges = [Requirement(one) for one in (*FREE_OF_TORCH, *ACCEPTED)]
    named = {canonicalize_name(one.name) for one in ranges}
    others = {canonicalize_name(one.name.partition("-")[0]) for one in wheels.glob("*.whl")}
    return [str(one) for one in ranges] + sorted(others - named)


def _export(archive: Path) -> None:
    """Write the files of the commit; raises ConfigurationError where there is none."""
    words = ["git", "archive", "--format=tar.gz", "--prefix=checkout/", "-o", str(archive), "HEAD"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ConfigurationError(f"{ROOT} is no checkout of git: {done.stderr.strip()}")


if __name__ == "__main__":
    raise SystemExit(run(main, "gpu.bundle", sys.argv[1:]))
