"""The order for one run of a rehearsal, handed to its launcher and its trainers in a file."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """One run: its settings, and where its trainers write.

    ``folder``: of the whole rehearsal; ``name`` of the run, which has a folder of that name in it.
    """

    folder: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    rotates: bool = False
    overwrites: bool = False

    @property
    def run_dir(self) -> Path:
        """The run directory of the job."""
        return self.folder / self.name / "run"

    @property
    def records(self) -> Path:
        """The folder of what its trainers record."""
        return self.folder / self.name / "records"

    @property
    def saves(self) -> Path:
        """The folder below which lies what the script saves."""
        return self.folder / self.name / "saves"

    @property
    def made(self) -> Path:
        """The list of files that the present run has made."""
        return self.folder / "made"

    @property
    def refused(self) -> Path:
        """The file in which a trainer says which file it has refused to open."""
        return self.folder / "refused"

    def write(self) -> Path:
        """Make the folders and write the file; returns its path."""
        for folder in (self.run_dir, self.records, self.saves):
            folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / self.name / "order.json"
        said = {**asdict(self), "folder": str(self.folder)}
        said["settings"] = {**self.settings, "dir": str(self.run_dir)}
        path.write_text(json.dumps(said, indent=1))
        return path

    @classmethod
    def read(cls, path: Path) -> "RunOrder":
        """Read what ``write`` wrote."""
        said = json.loads(path.read_text("utf-8"))
        return cls(**{**said, "folder": Path(said["folder"])})
