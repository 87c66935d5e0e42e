"""Features around a job (launchers, machines, strangers): a sentence each, and tests that show it.

The table of docs/limits.md has the sentences; what any page says of such a feature may not
contradict them.
"""

import re
from pathlib import Path
from typing import NamedTuple

from tests.tidy.gpu_claims import pages, statements

# Words of a statement that nothing shows what it is about.
_UNSHOWN = r"\b(?:[Uu]ntested|not \**run|not tested|nobody has run)\b"


class Feature(NamedTuple):
    """``words``: a pattern by which pages name it; ``shown``: what was run, or why nothing was.

    ``tests``: names of those that show it, none where it is untested; ``denied``: a pattern of what
    a page that names it would say falsely.
    """

    name: str
    words: str
    shown: str
    tests: tuple[str, ...] = ()
    denied: str = _UNSHOWN


FEATURES = (
    Feature(
        "Slurm",
        r"\bSlurm\b|\bsrun\b",
        "array tasks, an allocation that outlives its nodes, and srun, under a real Slurm of four"
        " nodes on one host",
        (
            "test_slurm_brings_a_lost_node_back_and_it_joins",
            "test_an_allocation_outlives_its_first_node",
            "test_srun_does_not_see_the_loss_of_a_trainer",
        ),
    ),
    Feature(
        "torchrun",
        r"\btorchrun\b",
        "with `-m elaswave_plugin.run` before the script; torchrun ends with a lost node",
        ("test_torchrun_does_not_see_the_loss_of_a_trainer", "test_a_job_of_torchrun_grows"),
    ),
    Feature(
        "DeepSpeed's launcher",
        r"\bDeepSpeed's (?:own )?launcher\b",
        "on one node, with `--module elaswave_plugin.run` before the script",
        ("test_the_deepspeed_launcher_with_our_module_survives_a_kill",),
    ),
    Feature(
        "MPI's launchers",
        r"\bmpirun\b",
        "their variables are read, with a stand-in that sets them",
        ("test_mpiruns_variables_are_read",),
    ),
    Feature(
        "Kubernetes",
        r"\bKubernetes\b",
        "untested: the examples are written from its documentation",
    ),
    Feature(
        "several physical machines",
        r"\bseveral (?:physical )?(?:machines|hosts)\b",
        "untested; several launchers and network namespaces on one machine are tested",
    ),
    Feature(
        "processes that do not belong to the job",
        r"\breach(?:es)? a port\b|\bports? of the job\b",
        "refused at every port; who can change packets of an open connection can change the job"
        " ([Security](security.md))",
        ("test_strangers_change_nothing_and_leave_nothing",),
        r"\bcan end it\b|\bcan read and replace\b|\bcan read or replace its state\b",
    ),
    Feature(
        "Weights & Biases",
        r"\bW&B\b|\bWeights & Biases\b",
        "offline; one run through the loss of the worker that writes it",
        (
            "test_wandb_run_survives_the_kill_of_its_owner_and_nothing_stays_behind",
            "test_the_wandb_run_is_the_same_one",
        ),
        _UNSHOWN + r"|\b(?:is|are) refused\b(?! with a pipeline)",
    ),
)


def features_table() -> str:
    """Return the table of docs/limits.md."""
    rows = [
        f"| {one.name} | {one.shown} | {', '.join(f'`{test}`' for test in one.tests) or '-'} |"
        for one in FEATURES
    ]
    return "\n".join(["| around a job | what was run | shown by |", "|---|---|---|", *rows])


def contradictions(text: str, features: tuple[Feature, ...] = FEATURES) -> list[str]:
    """Return the statements of a page that deny a feature which tests show."""
    return [
        statement
        for statement in statements(text)
        for one in features
        if one.tests and re.search(one.words, statement) and re.search(one.denied, statement)
    ]


def contradicting_pages(root: Path) -> dict[str, list[str]]:
    """Return the contradictions of README, changelog and docs, by page."""
    found = {
        page.relative_to(root).as_posix(): contradictions(page.read_text("utf-8"))
        for page in pages(root)
    }
    return {page: those for page, those in found.items() if those}
