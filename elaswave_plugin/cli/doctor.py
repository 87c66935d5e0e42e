"""`elaswave doctor`: does each record of each adapter fit what is installed? Nothing is applied."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from elaswave_plugin.adapters.patching import PatchRecord
from elaswave_plugin.errors import ConfigurationError, PatchMismatchError

CHECKOUT = "MEGATRON_LM_PATH"
# What becomes of a record: replaced at run time, a hook that the source has, or not at all.
FITS, HOOK, GONE, ABSENT, NO_CHECKOUT, MISMATCH = (
    "fits",
    "hook",
    "not needed",
    "not installed",
    "no checkout",
    "mismatch",
)

# Without a launch, and with one.
_OBEYED = (("--megatron-lm", "--json"), ("LAUNCH", "--workers", "--json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A record, what is installed and whether they fit; ``problem`` says why not."""

    target: str
    distribution: str
    installed: str | None
    valid: str
    applied: str
    reason: str
    hook: str | None
    state: str
    problem: str | None = None


def check_options(given: Mapping[str, object]) -> None:
    """Raise ConfigurationError for an option that has no effect beside the others."""
    names = [name for name, value in given.items() if value]
    is_launch = "LAUNCH" in names
    for name in names:
        if name not in _OBEYED[is_launch]:
            beside = "with" if is_launch else "without"
            raise ConfigurationError(
                f"{name} is given {beside} LAUNCH, and has no effect; leave it out"
            )


def find_checkout(path: Path | None) -> Path | None:
    """The checkout of Megatron-LM that is named, else that of MEGATRON_LM_PATH; None without one.

    Raises ConfigurationError for a folder that is none.
    """
    named = path or (Path(os.environ[CHECKOUT]) if os.environ.get(CHECKOUT) else None)
    if named is not None and not (named / "megatron" / "training").is_dir():
        raise ConfigurationError(
            f"{named} has no folder megatron/training, wanted a checkout of Megatron-LM; "
            f"correct --megatron-lm or {CHECKOUT}"
        )
    return named


def examine(checkout: Path | None) -> tuple[Finding, ...]:
    """Check every record as attaching does; a checkout goes first on the path of this process.

    Raises ConfigurationError where a framework, or what the checkout brings of one, cannot be
    imported.
    """
    from elaswave_plugin.adapters.patching import installed_version

    def state_of(entry: Entry, installed: str | None) -> tuple[str, str | None]:
        record = entry.record
        if installed is None:
            return ABSENT, None
        if entry.needs_checkout and checkout is None:
            return NO_CHECKOUT, None
        if record.is_gone(installed):
            return GONE, None
        try:
            record.check(installed)
        except PatchMismatchError as error:
            return MISMATCH, str(error)
        return (HOOK if record.point is record.hook else FITS), None

    if checkout is not None:
        sys.path.insert(0, str(checkout.resolve()))
        from elaswave_plugin.adapters.megatron_lm.triton_stub import without_triton

        without_triton()
    # DeepSpeed writes to stdout when it is imported, and Megatron-Core warns of what extensions()
    # says in a line.
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = []
        try:
            ledger = read_ledger()
        except ImportError as error:
            where = "" if checkout is None else f" with {checkout} first"
            raise ConfigurationError(
                f"the frameworks{where} cannot be imported: {error}; install what is missing, or "
                f"name another checkout of Megatron-LM with --megatron-lm or {CHECKOUT}"
            ) from error
        distributions = {entry.record.distribution for entry in ledger}
        versions = {name: installed_version(name) for name in distributions}
        for entry in ledger:
            installed = versions[entry.record.distribution]
            state, problem = state_of(entry, installed)
            found.append(
                Finding(
                    target=entry.record.target,
                    distribution=entry.record.distribution,
                    installed=installed,
                    valid=entry.record.valid,
                    applied=entry.applied,
                    reason=entry.record.reason,
                    hook=None if entry.record.hook is None else entry.record.hook.place,
                    state=state,
                    problem=problem,
                )
            )
    return tuple(found)


def extensions() -> dict[str, str | None]:
    """List what Megatron-Core uses when it finds it.

    Each has its version, or what is missing of it; None: not found.
    """
    return {
        "transformer-engine": _version_of("transformer-engine", "transformer_engine"),
        # Its kernels are a module of their own, which Megatron-Core asks for.
        "apex": _version_of("apex", "apex", kernels="amp_C"),
    }


def _version_of(distribution: str, module: str, kernels: str | None = None) -> str | None:
    if find_spec(module) is None:
        return None
    try:
        found = version(distribution)
    except PackageNotFoundError:
        found = "of unknown version"
    return found if kernels is None or find_spec(kernels) else f"{found}, without {kernels}"


def verdict(findings: Sequence[Finding]) -> str | None:
    """The first record that does not fit, how many more, and the jobs of these; None: all fit."""
    problems = [one.problem for one in findings if one.problem is not None]
    if not problems:
        return None
    others = f" (and {len(problems) - 1} more records do not fit)" if len(problems) > 1 else ""
    jobs = "; ".join(sorted({one.applied for one in findings if one.problem is not None}))
    return f"{problems[0]}{others}; refused are jobs that apply them: {jobs}"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return everything that is known, for programs."""
    return {
        "holds": verdict(findings) is None,
        "extensions": extensions(),
        "records": [asdict(one) for one in findings],
    }


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print a row for each package, a line for each extension, and one line of verdict.

    Every record and its reason is in ``--json`` and in docs/patches.md.
    """
    packages: dict[tuple[str, str, str], Counter[str]] = {}
    for one in findings:
        package = one.distribution, one.installed or "not installed", one.valid
        packages.setdefault(package, Counter())[one.state] += 1
    table = Table("package", "installed", "wanted", "records", box=SIMPLE_HEAD, show_edge=False)
    for package, states in packages.items():
        style = "red" if states[MISMATCH] else None
        table.add_row(*package, _counted(states), style=style)
    console.print(table)
    for name, found in extensions().items():
        console.print(f"{name}: {'not found' if found is None else f'found ({found})'}")
    states = Counter(one.state for one in findings)
    if states[NO_CHECKOUT]:
        console.print(f"no checkout: give --megatron-lm PATH or {CHECKOUT} to check these too")
    fits = "records do not fit" if states[MISMATCH] else "every record that is checked fits"
    console.print(f"verdict: {fits} what is installed ({_counted(states)})", highlight=False)


def _counted(states: Mapping[str, int]) -> str:
    """Say how many records are in each state, the worst first."""
    order = (MISMATCH, FITS, HOOK, GONE, NO_CHECKOUT, ABSENT)
    return ", ".join(f"{states[name]} {name}" for name in order if states.get(name))


class Entry(NamedTuple):
    """A record and the jobs that apply it."""

    record: PatchRecord
    applied: str

    @property
    def needs_checkout(self) -> bool:
        """True if the target is in Megatron-LM's repository only, not in megatron-core."""
        return self.record.target.startswith(("megatron.training.", "megatron.legacy."))


def read_ledger() -> tuple[Entry, ...]:
    """All entries; Megatron's where it can be imported, the others whether or not they are there.

    Imports torch and Megatron-Core.
    """
    return (*(_of_megatron() if find_spec("megatron") else ()), *_of_deepspeed(), *_of_scripts())


def _of_megatron() -> Iterable[Entry]:
    from elaswave_plugin.adapters.megatron.compat.cpu_patches import cpu_patches
    from elaswave_plugin.adapters.megatron.compat.patches import elastic_patches
    from elaswave_plugin.adapters.megatron.step.weight_gradients import WeightGradients

    yield from (Entry(record, "no GPU") for record in cpu_patches().records)
    always = {record.target for record in elastic_patches(exact=False).records}
    for record in elastic_patches(exact=True).records:
        yield Entry(record, "elastic" if record.target in always else "elastic, exact")
    yield from (
        Entry(record, "elastic, while backwards are split")
        for record in WeightGradients().patches.records
    )


def _of_deepspeed() -> Iterable[Entry]:
    from elaswave_plugin.adapters.deepspeed.compat import patches as of_deepspeed
    from elaswave_plugin.adapters.deepspeed.compat.exact_norms import exact_patches

    for patches, applied in (
        (of_deepspeed.launch_patches(), "elastic"),
        (of_deepspeed.deepspeed_patches(), "elastic"),
        (exact_patches(), "elastic, exact mode"),
        (of_deepspeed.destruction_patches(None), "elastic"),
        (of_deepspeed.newcomer_patches(), "elastic, started again"),
        (of_deepspeed.detached_patches(), "elastic, started again, ZeRO-3"),
        (of_deepspeed.stage_patches(None), "elastic, beyond the launch"),
        (of_deepspeed.accelerate_patches(None), "elastic, Accelerate"),
        (of_deepspeed.processor_patches(None), "no GPU, Accelerate"),
        (of_deepspeed.width_patches("deepspeed", None), "elastic"),
        (of_deepspeed.width_patches("accelerate", None), "elastic, Accelerate"),
        (of_deepspeed.asking_patches(), "elastic, a Trainer, after a loss"),
        (of_deepspeed.trainer_patches(None), "elastic, transformers.Trainer"),
        (of_deepspeed.resume_patches(), "elastic, transformers.Trainer, started again"),
        *(
            (of_deepspeed.generation_patches(None, f"trl.trainer.{name}_trainer"), "elastic, TRL")
            for name in ("grpo", "rloo")
        ),
    ):
        yield from (Entry(record, applied) for record in patches.records)


def _of_scripts() -> Iterable[Entry]:
    if not find_spec("megatron"):
        return
    from elaswave_plugin.adapters.megatron.compat.cpu_patches import cpu_patches
    from elaswave_plugin.adapters.megatron_lm.hooks import Hooks
    from elaswave_plugin.adapters.megatron_lm.patches import lm_patches

    known = {record.target for record in cpu_patches().records}
    for record in cpu_patches(scripts=True).records:
        if record.target not in known:
            yield Entry(record, "no GPU, Megatron-LM")
    for record in lm_patches(Hooks(lambda config: None)).records:
        yield Entry(record, "elastic, Megatron-LM")
