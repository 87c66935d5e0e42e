"""Tells a save that the storage failed from one that a mistake in the program ended."""

from pathlib import Path

# torch's writer of archives is C++, and its errors have no number of the system.
_TORCH_WRITER = (
    *("PytorchStreamWriter", "inline_container", "iostream error"),
    *("cannot be opened", "Parent directory"),
)
_PROBE_BYTES = 1 << 20


def storage_failure(error: BaseException, folder: Path | None = None) -> str | None:
    """Say in the system's words how the storage failed; None for any other error.

    torch's CheckpointException is raised on every rank, and only the coordinator's says why: the
    others get an empty text. Where torch's writer hides what the system said, it is asked again by
    a small file in ``folder``.
    """
    is_storage = isinstance(error, OSError) or type(error).__name__ == "SafetensorError"
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):
        if not failures:
            return ""
        first = next(iter(failures.values()))
        error, is_storage = first[0] if isinstance(first, tuple) else first, True
    if any(word in str(error) for word in _TORCH_WRITER):
        return (folder and _asked(folder)) or _words(error)
    return _words(error) if is_storage else None


def _asked(folder: Path) -> str | None:
    """Return what the system says to a file of a mebibyte in the nearest folder that is there."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    probe = folder / ".elaswave-probe"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    except OSError as error:
        return _words(error)
    finally:
        probe.unlink(missing_ok=True)
    return None


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
