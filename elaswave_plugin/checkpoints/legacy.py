"""Finds out whether a checkpoint in Megatron-LM's format torch can be read."""

from pathlib import Path

from elaswave_plugin.checkpoints.archives import archive_flaw

RANKS, MODEL = "mp_rank_", "model_optim_rng.pt"


def flaw_of(folder: Path) -> str | None:
    """Say what keeps a checkpoint from being read, naming the file; None where it is whole.

    Each folder of a rank has its file, and each file its end. No data is read.
    """
    ranks = sorted(path for path in folder.glob(f"{RANKS}*") if path.is_dir())
    if not ranks:
        return f"{folder} has no folder {RANKS}*"
    for rank in ranks:
        if not (rank / MODEL).is_file():
            return f"{rank / MODEL} is missing"
        for file in sorted(rank.glob("*.pt")):
            if (flaw := archive_flaw(file)) is not None:
                return flaw
    return None
