"""The demo's options, checked before anything starts, with a layout whose layers divide."""

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elaswave_plugin.config import STEP_PHASES, Kill, parse_kill
from elaswave_plugin.core.layout.layout import ParallelLayout, launch_layout, sizes_of
from elaswave_plugin.demo.text import TextSource, find_text
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.output_file import check_output

GLOBAL_BATCH = 8
MICRO_BATCH = 1
SEQUENCE_LENGTH = 128
ATTENTION_HEADS = 4
LEAST_LAYERS, MOST_LAYERS = 4, 8
DEFAULT_NPROC, DEFAULT_HYBRID_DP = 4, 2


DEFAULT_KILL = "2@10"
STEPS, STEPS_WITH_RESPAWN, STEPS_TO_COME_BACK = 20, 40, 25
SCRIPTS = (("megatron", "train_gpt.py"), ("deepspeed", "train_deepspeed.py"))
MARKER = ".elaswave-demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """A demo that can run: every value is in range."""

    source: TextSource
    layout: ParallelLayout
    steps: int
    kills: tuple[Kill, ...]
    seed: int
    json_file: Path | None
    out: Path
    script: Path
    framework: str = "megatron"
    zero: int = 1
    respawn: bool = False

    @property
    def nproc(self) -> int:
        """Workers at launch."""
        return len(self.layout.workers)

    @property
    def is_hybrid(self) -> bool:
        """True if there is more than data parallelism."""
        return self.nproc > self.layout.dp


def check_options(
    *,
    text: Path | None,
    nproc: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    steps: int | None,
    kill: list[str],
    seed: int,
    json_file: Path | None,
    out: Path,
    framework: str = "megatron",
    zero: int | None = None,
    respawn: bool = False,
) -> DemoOptions:
    """Check every option; raises ConfigurationError with one sentence at the first wrong one."""
    _check_framework(framework, zero, {"tp": tp, "pp": pp, "dp": dp})
    if respawn and framework == "deepspeed":
        raise ConfigurationError(
            "respawn is on with framework 'deepspeed', whose twin the demo cannot make; leave out"
            " --respawn, or add --framework megatron"
        )
    layout = check_sizes(nproc=nproc, tp=tp, pp=pp, dp=dp)
    if steps is None:
        steps = STEPS_WITH_RESPAWN if respawn else STEPS
    if steps < 3:
        raise ConfigurationError(f"steps is {steps}, wanted at least 3")
    if seed < 0:
        raise ConfigurationError(f"seed is {seed}, wanted 0 or more")
    check_output("--json", json_file)
    source = find_text(text)
    needed = GLOBAL_BATCH * SEQUENCE_LENGTH + 1
    if source.num_tokens < needed:
        raise ConfigurationError(
            f"text {source.name!r} has {source.num_tokens} tokens, wanted at least {needed}: one"
            f" step takes {GLOBAL_BATCH} samples of {SEQUENCE_LENGTH}"
        )
    kills = _checked_kills(kill, layout, steps)
    last = max(one.step for one in kills)
    if respawn and steps < last + STEPS_TO_COME_BACK:
        raise ConfigurationError(
            f"steps is {steps} with a kill in step {last} and --respawn, wanted at least"
            f" {last + STEPS_TO_COME_BACK}: a worker that is started again needs seconds"
        )
    script = _training_script(dict(SCRIPTS)[framework])
    _check_out(out)  # last, since it makes the folder
    return DemoOptions(
        source=source,
        layout=layout,
        steps=steps,
        kills=kills,
        seed=seed,
        json_file=json_file,
        out=out,
        script=script,
        framework=framework,
        zero=1 if zero is None else zero,
        respawn=respawn,
    )


def _check_framework(framework: str, zero: int | None, sizes: Mapping[str, int | None]) -> None:
    if framework not in dict(SCRIPTS):
        raise ConfigurationError(
            f"framework is {framework!r}, wanted one of {', '.join(dict(SCRIPTS))}"
        )
    if framework != "deepspeed":
        if zero is not None:
            raise ConfigurationError(
                f"zero is {zero} with framework {framework!r}; add --framework deepspeed"
            )
        return
    if zero is not None and zero not in range(4):
        raise ConfigurationError(f"zero is {zero}, wanted a ZeRO stage: 0, 1, 2 or 3")
    for name, size in sizes.items():
        if size is not None:
            raise ConfigurationError(
                f"{name} is {size} with framework 'deepspeed', which the demo runs data-parallel;"
                " leave it out and give --nproc, or add --framework megatron"
            )


def _checked_kills(texts: list[str], layout: ParallelLayout, steps: int) -> tuple[Kill, ...]:
    nproc = len(layout.workers)
    if not texts:
        usual = parse_kill(DEFAULT_KILL)
        return (Kill(slot=min(usual.slot, nproc - 1), step=min(usual.step, steps // 2)),)
    kills = tuple(parse_kill(text, STEP_PHASES) for text in texts)
    for kill in kills:
        if kill.slot >= nproc:
            raise ConfigurationError(
                f"kill {kill} names worker {kill.slot}, wanted 0 to {nproc - 1} (nproc is {nproc})"
            )
        if kill.incarnation:
            raise ConfigurationError(
                f"kill {kill} names a worker that is started again, wanted SLOT@STEP[:PHASE]"
            )
        if kill.step >= steps:
            raise ConfigurationError(
                f"kill {kill} is in step {kill.step}, wanted 0 to {steps - 1} (steps is {steps})"
            )
    slots = [kill.slot for kill in kills]
    if len(set(slots)) < len(slots):
        raise ConfigurationError(f"kills name a worker twice: {', '.join(map(str, kills))}")
    if len(slots) >= nproc:
        raise ConfigurationError(f"{len(slots)} kills leave none of {nproc} workers; kill fewer")
    check_kills_leave_whole_groups(kills, layout)
    return kills


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"out is {str(out)!r}, which is a file, wanted a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).exists():
        raise ConfigurationError(
            f"out is {str(out)!r}, which holds files that no demo wrote; name a new folder"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / MARKER).touch()
    except OSError as error:
        raise ConfigurationError(
            f"out is {str(out)!r}, which cannot be written: {error.strerror}; name another folder"
        ) from None


@contextmanager
def sole_use(out: Path) -> Iterator[None]:
    """Keeps other demos out of the folder, whose files each of them replaces.

    Raises ConfigurationError where one is running there.
    """
    with (out / MARKER).open("w") as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"out is {str(out)!r}, in which another demo is running; name another folder"
            ) from None
        yield


def _training_script(name: str) -> Path:
    script = Path(__file__).resolve().parents[2] / "examples" / name
    if not script.is_file():
        raise ConfigurationError(
            f"the demo's examples/{name} is not beside the package; run it from a clone"
            " installed with `pip install -e .`"
        )
    return script


def check_sizes(
    *, nproc: int | None, tp: int | None, pp: int | None, dp: int | None
) -> ParallelLayout:
    """The layout at launch; None is a size that the user left open.

    Raises ConfigurationError with one sentence at the first size that does not fit.
    """
    for name, size in (("tp", tp), ("pp", pp), ("dp", dp)):
        if size is not None and size < 1:
            raise ConfigurationError(f"{name} is {size}, wanted 1 or more")
    tp, pp = tp or 1, pp or 1
    if ATTENTION_HEADS % tp:
        raise ConfigurationError(
            f"tp is {tp}, wanted a divisor of the {ATTENTION_HEADS} attention heads of the demo's"
            " model: 1, 2 or 4"
        )
    if pp > MOST_LAYERS:
        raise ConfigurationError(
            f"pp is {pp}, wanted at most {MOST_LAYERS}: the demo's model has at most"
            f" {MOST_LAYERS} layers, and every stage needs one"
        )
    width_name = "nproc" if dp is None and tp * pp == 1 else "dp"
    width = _width(nproc, tp=tp, pp=pp, dp=dp)
    _check_width(width_name, width)
    # The smallest model that is not smaller than the usual one.
    num_layers = pp * -(-LEAST_LAYERS // pp)
    return launch_layout(tp=tp, pp=pp, dp=width, num_layers=num_layers)


def check_kills_leave_whole_groups(kills: Sequence[Kill], layout: ParallelLayout) -> None:
    """Raise ConfigurationError if a stage would be left without a whole TP group."""
    left = layout.without([kill.slot for kill in kills]).reformed_in_place()
    for stage, width in enumerate(left.widths):
        if not width:
            raise ConfigurationError(
                f"kills {', '.join(map(str, kills))} leave stage {stage} with"
                f" {layout.groups_text(0)}, wanted one in each of {len(layout.stages)} stages; kill"
                " fewer"
            )


def _width(nproc: int | None, *, tp: int, pp: int, dp: int | None) -> int:
    """The replicas of each stage, from whichever of ``nproc`` and ``dp`` is given."""
    if dp is not None:
        wanted = tp * pp * dp
        if nproc is not None and nproc != wanted:
            raise ConfigurationError(
                f"nproc is {nproc}, wanted {wanted}, which is tp {tp} x pp {pp} x dp {dp}; leave"
                " one of them out"
            )
        return dp
    if tp * pp == 1:
        return DEFAULT_NPROC if nproc is None else nproc
    return DEFAULT_HYBRID_DP if nproc is None else sizes_of(nproc, tp=tp, pp=pp)


def _check_width(name: str, width: int) -> None:
    micro_batches = GLOBAL_BATCH // MICRO_BATCH
    if width < 2:
        raise ConfigurationError(
            f"{name} is {width}, wanted at least 2: one is killed, one goes on"
        )
    if width > micro_batches:
        raise ConfigurationError(
            f"{name} is {width}, wanted at most {micro_batches}: a step has {micro_batches}"
            " micro-batches and every worker needs one"
        )
    if micro_batches % width:
        raise ConfigurationError(
            f"{name} is {width}, wanted a divisor of {micro_batches}: the micro-batches of a step"
            " are dealt out evenly at launch"
        )
