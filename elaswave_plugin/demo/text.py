"""Turns a file or folder of text into Megatron-Core's indexed dataset, one token a byte.

Run as `python -m elaswave_plugin.demo.text PREFIX [PATH]` it writes PREFIX.bin and PREFIX.idx; in
its own process, because Megatron-Core imports torch.
"""

import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elaswave_plugin.errors import ConfigurationError

END_OF_DOCUMENT = 256  # the token after the 256 byte values
LIBRARY_LIMIT_BYTES = 8 * 2**20
FOLDER_LIMIT_BYTES = 64 * 2**20
SKIPPED_FOLDERS = frozenset(("__pycache__", "dist-packages", "site-packages", "test", "tests"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """Files to read, in order; every file is a document."""

    name: str
    paths: tuple[Path, ...]
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """One token a byte and one at the end of each document."""
        return self.num_bytes + len(self.paths)

    def __str__(self) -> str:
        return f"{self.name}: {len(self.paths)} files, {self.num_bytes / 2**20:.1f} MiB"


def find_text(path: Path | None) -> TextSource:
    """List the text under a file or folder, or of Python's standard library if none is named.

    At most 64 MiB of a folder (8 MiB of the library) are taken, in the order of the names. Raises
    ConfigurationError if the path is absent, unreadable or empty.
    """
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        source = _listed("Python's standard library", _python_files(library), LIBRARY_LIMIT_BYTES)
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
        source = _listed(str(path), files, FOLDER_LIMIT_BYTES)
    elif path.exists():
        source = _listed(str(path), [path], None)
    else:
        raise ConfigurationError(
            f"text is {str(path)!r}, which does not exist; name a file or folder"
        )
    if source.num_bytes == 0:
        raise ConfigurationError(f"text is {source.name!r}, which holds no text; name a fuller one")
    return source


def write_dataset(source: TextSource, prefix: Path) -> int:
    """Write PREFIX.bin and PREFIX.idx with Megatron-Core's builder; returns the tokens written."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    num_tokens = 0
    for path in source.paths:
        tokens = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int32)
        document = torch.from_numpy(np.append(tokens, np.int32(END_OF_DOCUMENT)))
        builder.add_document(document, [document.numel()])
        num_tokens += document.numel()
    builder.finalize(f"{prefix}.idx")
    return num_tokens


def main(argv: list[str]) -> int:
    """Write a dataset from the command line: PREFIX [PATH]."""
    source = find_text(Path(argv[1]) if len(argv) > 1 else None)
    write_dataset(source, Path(argv[0]))
    return 0


def _python_files(library: Path) -> list[Path]:
    return sorted(
        path
        for path in library.rglob("*.py")
        if not SKIPPED_FOLDERS & set(path.relative_to(library).parts)
    )


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _listed(name: str, paths: Iterable[Path], limit_bytes: int | None) -> TextSource:
    taken, total = [], 0
    for path in paths:
        try:
            with path.open("rb"):
                size = path.stat().st_size
        except OSError as error:
            raise ConfigurationError(
                f"text {str(path)!r} cannot be read: {error.strerror}; name one that can"
            ) from None
        if limit_bytes is not None and total + size > limit_bytes:
            break
        if size:
            taken.append(path)
            total += size
    return TextSource(name=name, paths=tuple(taken), num_bytes=total)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
