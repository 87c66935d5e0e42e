"""ElasticConfig: the one schema of the settings, on the command line and in configuration files."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from elaswave_plugin.core.agreement.limits import EVALUATION, SAVE
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.rehearsed import rehearsed_settings
from elaswave_plugin.words import check_words

STEP_PHASES = ("data", "forward", "backward", "reduce", "optimizer", "gather", "snapshot")
RECOVERY_PHASES = ("detect", "agree", "edit", "move", "rebind", "verify", "replay")
# A checkpoint is written, from its first byte on; all of it is written, and not named yet.
SAVE_PHASE, FINALIZE_PHASE = SAVE, "finalize"
OUTSIDE_PHASES = ("startup", "body", EVALUATION, SAVE_PHASE, FINALIZE_PHASE)
KILL_PHASES = STEP_PHASES + RECOVERY_PHASES + OUTSIDE_PHASES

_SPOT = re.compile(r"(\d+)(?:\.(\d+))?@(\d+)(?::([a-z]+))?(?::([a-z]+))?")
_CHANGE = re.compile(r"(\+?)(\d+)@(\d+)")
KILL_WAYS = ("kill", "loop", "gil", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A test fault: the worker in `slot` dies or hangs while it is in `phase` of step `step`.

    `how`: kill; or it hangs: loop, in Python; gil, in C, so that no thread of it runs; stop, by
    SIGSTOP.
    `incarnation` 0 is the process of the launch, 1 the first that replaces it. Until that has
    entered the job, its step is 0.
    """

    slot: int
    step: int
    phase: str = "backward"
    incarnation: int = 0
    how: str = "kill"

    def __str__(self) -> str:
        incarnation = f".{self.incarnation}" if self.incarnation else ""
        how = "" if self.how == "kill" else f":{self.how}"
        return f"{self.slot}{incarnation}@{self.step}:{self.phase}{how}"


def parse_kill(text: str, phases: tuple[str, ...] = KILL_PHASES) -> Kill:
    """Read "SLOT[.INCARNATION]@STEP[:PHASE[:HOW]]" (default: 0, backward, kill).

    Raises ConfigurationError.
    """
    match = _SPOT.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"kill is {text!r}, wanted SLOT@STEP[:PHASE], as in 2@10:backward")
    phase = match[4] or "backward"
    if phase not in phases:
        raise ConfigurationError(
            f"kill {text!r} names the phase {phase!r}, wanted one of {', '.join(phases)}"
        )
    how = match[5] or "kill"
    if how not in KILL_WAYS:
        raise ConfigurationError(
            f"kill {text!r} says {how!r}, wanted one of {', '.join(KILL_WAYS)}"
        )
    slot, incarnation, step = int(match[1]), int(match[2] or 0), int(match[3])
    return Kill(slot=slot, incarnation=incarnation, step=step, phase=phase, how=how)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A planned departure before `step`; `arrives`: the arrival of a later worker."""

    slot: int
    step: int
    arrives: bool = False

    def __str__(self) -> str:
        return f"{'+' if self.arrives else ''}{self.slot}@{self.step}"


def parse_change(text: str) -> Change:
    """Read "SLOT@STEP" or "+SLOT@STEP"; raises ConfigurationError."""
    match = _CHANGE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(
            f"change is {text!r}, wanted SLOT@STEP or +SLOT@STEP, as in 2@10 or +2@20"
        )
    return Change(slot=int(match[2]), step=int(match[3]), arrives=bool(match[1]))


def parse_clocks(text: str, *, name: str = "clock_table") -> tuple[float, ...]:
    """Read clocks as in "0.8 0.9 1 1.1"; raises ConfigurationError, which says ``name``."""
    try:
        clocks = tuple(map(float, text.replace(",", " ").split()))
    except ValueError:
        clocks = ()
    rising = all(low < high for low, high in pairwise(clocks))
    if 1.0 not in clocks or not rising or not 0 < clocks[0] <= clocks[-1] < float("inf"):
        raise ConfigurationError(
            f"{name} is {text!r}, wanted rising numbers above 0 with 1 among them, as in"
            " 0.8 0.9 1 1.1"
        )
    return clocks


def _checked_interval(value: object) -> str:
    if not re.fullmatch(r"auto|[1-9]\d*", text := str(value)):
        raise ValueError(f"snapshot_interval is {text}, wanted auto or a number of steps from 1 on")
    return text


_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_KillText = Annotated[str, AfterValidator(lambda text: str(parse_kill(text)))]
_ClocksText = Annotated[
    str, AfterValidator(lambda text: " ".join(f"{clock:g}" for clock in parse_clocks(text)))
]
_IntervalText = Annotated[str, BeforeValidator(_checked_interval)]
_ChangeText = Annotated[str, AfterValidator(lambda text: str(parse_change(text)))]


_OF_THE_JOB = (
    *(
        "consistency",
        "snapshots",
        "snapshot_copies",
        "input_seal_mib",
        "change",
        "respawn",
        "seed",
        "gpu_engine",
    ),
    *("dataflow", "move_layers", "split_backward", "activation_room", "memory_limit_gib"),
    *("slow_workers", "clocks", "clock_table", "power_cap_w", "stop_after"),
    *("rehearse_first_step", "snapshot_interval", "loss"),
)


# Of a setting: another one and its value with which it would do nothing, and why.
_IDLE = (
    ("power_cap_w", "clocks", "off", "which leaves the clocks alone"),
    ("clock_table", "clocks", "off", "which leaves the clocks alone"),
    ("wandb_project", "wandb", "off", "so that there is no run in it"),
    ("snapshot_copies", "snapshots", False, "so that there is nothing to copy"),
    ("snapshot_interval", "snapshots", False, "so that there is nothing to copy"),
    ("respawn", "snapshots", False, "from which a worker that is started again has its state"),
)


# Settings of which one excludes the other: whether they do, and the sentence.
_CONTRADICTIONS: tuple[tuple[Callable[["ElasticConfig"], bool], str], ...] = (
    # Work that stays with its peers or its round comes to some worker twice at once.
    (
        lambda one: one.activation_room is not None and one.dataflow in ("reroute", "resize"),
        "activation_room is {activation_room:g} and dataflow is {dataflow}, which holds what it"
        " holds; leave one of them out",
    ),
    # Cut micro-batches are added in another order than whole ones.
    (
        lambda one: one.dataflow == "resize" and one.consistency == "exact",
        "dataflow is resize and consistency is exact, which needs whole micro-batches; set"
        " consistency to fast, or dataflow to auto, redeal or reroute",
    ),
    # In fast mode a step that is dealt otherwise has other bits.
    (
        lambda one: (
            one.consistency == "fast"
            and "rehearse_first_step" in one.model_fields_set
            and one.rehearse_first_step != "off"
        ),
        "rehearse_first_step is {rehearse_first_step} and consistency is fast, in which bits follow"
        " from the number of workers; leave rehearse_first_step out",
    ),
)


class ElasticConfig(BaseModel):
    """All settings of the plugin; frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    consistency: Literal["exact", "fast"] = Field(
        "exact",
        description="exact: results are bit-identical to a run without losses, at the cost of "
        "one more gradient bucket of memory, and with NCCL of sums made by copies and "
        "additions; fast: native sums, whose last bits change with the number of workers",
    )
    rehearse_first_step: Literal["stop", "continue", "off"] = Field(
        "stop",
        description="exact mode: the first step is run once more before, each micro-batch by "
        "another replica, and losses and gradients are compared; on GPUs one layer is run twice"
        " alike as well; if bits differ, stop: the job ends and names what differs; continue: "
        "it goes on in fast mode; off: the step is run once",
    )
    snapshots: bool = Field(
        True,
        description="copy the optimizer state into shared memory after each step; without it "
        "nothing is copied and a lost worker ends the job",
    )
    snapshot_copies: int = Field(
        1,
        ge=0,
        le=8,
        description="copies of each snapshot with workers of other nodes; each takes the same "
        "memory again, and k of them survive the loss of k nodes at once",
    )
    loss: Literal["tokens", "samples", "sum"] | None = Field(
        None,
        description="what divides the losses, which weighs parts of a micro-batch after a loss "
        "of workers: labels, samples, nothing; none: found by the values of a model's or a "
        "Trainer's",
    )
    input_seal_mib: int = Field(
        512,
        ge=1,
        le=1024,
        description="MiB that a script's batches in memory may have in one call of a worker; they "
        "are copied to other workers as snapshots are",
    )
    snapshot_interval: _IntervalText = Field(
        "auto",
        description="steps from one copy of the state to the next; a loss takes back as many. "
        "Above 1 only with Megatron-Core, Megatron-LM and DeepSpeed's pipelines; auto: more "
        "than 1 where steps wait for copies for a twentieth of them",
    )
    dir: Path | None = Field(
        None,
        description="run directory for events, steps, ledger and state dumps; none: no files",
    )
    dump_state: Literal["never", "last", "every"] = Field(
        "never",
        description="write parameters and optimizer state to DIR/state for outside comparison, "
        "after the last step or after every step; every is slow and large",
    )
    kill: tuple[_KillText, ...] = Field(
        (),
        description="for tests: a fault SLOT[.INCARNATION]@STEP[:PHASE[:HOW]]; PHASE is backward"
        " by default (in save, the fault waits for the first byte); HOW is kill (SIGKILL, the "
        "default), loop (an endless loop in Python), gil (blocked in C with the interpreter's "
        "lock held) or stop (SIGSTOP)",
    )
    change: tuple[_ChangeText, ...] = Field(
        (),
        description="for tests: SLOT@STEP, the worker leaves before that step as planned; "
        "+SLOT@STEP, a lost worker comes back exactly before that step, and the others wait for"
        " it",
    )
    transfer_timeout_s: _Seconds = Field(
        60.0,
        description="seconds for which the copy of a snapshot, or the fetch of a shard from all "
        "who hold it, may make no progress; after them the worker counts as lost",
    )
    require_secret: bool = Field(
        False,
        description="a job on several nodes starts only where ELASWAVE_SECRET_FILE names the "
        "file with its secret (docs/security.md)",
    )
    quiesce_timeout_s: _Seconds = Field(
        30.0,
        description="seconds that a survivor may take to stop its step after a proposed view; "
        "lower removes stuck workers sooner",
    )
    respawn: int = Field(
        10,
        ge=0,
        le=1000,
        description="times that the lost worker of a slot is started again on its node, and "
        "enters between two steps; 0: never",
    )
    hang_timeout_s: _Seconds = Field(
        2.0,
        description="a worker that makes no progress while others wait for it is killed early "
        "enough that they work again within these seconds, or three times the median of the "
        "phase if that is longer; one that a signal has stopped after 2 s in any phase; lower "
        "finds hangs sooner, higher spares slow workers",
    )
    hang_start_timeout_s: _Seconds = Field(
        60.0,
        description="the same in seconds, if longer, until it is measured: the first three "
        "steps, the first passes of an evaluation, and its work between two passes; while "
        "torch.compile compiles, up to half an hour",
    )
    uninterruptible_timeout_s: _Seconds | None = Field(
        None,
        description="seconds after which a worker is given up that hangs in a call of the "
        "kernel's which no signal ends (state D); none: it is named in the log, and the others "
        "wait",
    )
    data_timeout_s: _Seconds = Field(
        30.0,
        description="the same in seconds, if longer, for reading data: storage may stall "
        "for all workers of a stage at once",
    )
    dataflow: Literal["auto", "redeal", "reroute", "resize"] = Field(
        "auto",
        description="how the micro-batches of a lost pipeline replica are run; redeal: dealt "
        "again over every stage's live replicas; reroute: its peers take them over; resize: "
        "every stage cuts the samples of a round evenly, which needs consistency fast; auto: "
        "the fastest in simulation, resize in fast mode only",
    )
    move_layers: Literal["auto", "always", "never"] = Field(
        "auto",
        description="layers leave a pipeline stage with fewer workers after a loss; auto: only "
        "if respawn is 0, since for a worker that comes back soon they would move twice",
    )
    split_backward: Literal["auto", "always", "never"] = Field(
        "auto",
        description="weight gradients are computed apart after a loss, to fill bubbles; results "
        "stay the same, activations are held longer; auto: if the simulated step gains; never "
        "with more than 2,500 micro-batches x stages in a step",
    )
    activation_room: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = Field(
        None,
        description="activation memory that a worker may use after a loss, in multiples of what "
        "one of the first stage holds at launch; with 1 a plan always exists, with more there "
        "may be a faster one; by default 1 on GPUs, on CPUs one slot more than the narrowest "
        "stage needs",
    )
    memory_limit_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="GiB that a worker may hold by a plan in weights, gradients and optimizer "
        "state, in a pipeline also in activations; a loss after which nothing fits ends the "
        "job; none: in pipelines on GPUs what the device has for the job, else no limit",
    )
    slow_workers: Literal["act", "name"] = Field(
        "act",
        description="reaction to a worker whose layers take 1.3 times as long as on the others "
        "of its stage; act: it gets fewer micro-batches (with DeepSpeed samples), and its stage"
        " fewer layers if these may move, as soon as that pays; name: only events and elaswave "
        "status report it",
    )
    clocks: Literal["off", "nvml", "emulated"] = Field(
        "off",
        description="the clocks of pipeline stages change after a loss: up if other stages wait "
        "for this one, down if it waits; nvml: those of the GPUs, which needs the permission to"
        " lock them; emulated: passes sleep, for tests on CPUs",
    )
    clock_table: _ClocksText = Field(
        "0.8 0.9 1 1.1",
        description="clocks that a stage may be set to, relative to that of a whole layout; the "
        "last one is the device's highest, so that jobs start below it",
    )
    power_cap_w: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="watts that all workers may draw together, each 100 + 800 times the third "
        "power of its clock; none: what launch and reserve draw at clock 1",
    )
    gpu_engine: Literal["auto", "host", "nccl"] = Field(
        "auto",
        description="transport of GPU tensors; nccl: NCCL, which needs one process per GPU; "
        "host: the workers' own links, through host memory; auto: NCCL if that works, else host",
    )
    last_checkpoint_dir: Path | None = Field(
        None,
        description="DeepSpeed: folder for a checkpoint that the engine writes before the job "
        "ends because all workers are asked to leave; none: it writes none",
    )
    stop_after: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="steps after which the job ends as if they were all, for rehearsals; the "
        "script's learning rates stay those of its whole run",
    )
    seed: int | None = Field(
        None,
        ge=0,
        description="seed of the random draws; none: the training script's own seed",
    )
    wandb: Literal["auto", "off", "offline", "online"] = Field(
        "off",
        description="Weights & Biases; auto: online if an API key is found, else offline",
    )
    wandb_project: str = Field(
        "elaswave", min_length=1, description="Weights & Biases project of the run"
    )
    tensorboard: Path | None = Field(
        None, description="folder for TensorBoard files; none: no TensorBoard"
    )
    run_id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="name of the run in every tracker; none: made by the launcher",
    )

    def kills(self) -> tuple[Kill, ...]:
        """The test faults, parsed."""
        return tuple(parse_kill(text) for text in self.kill)

    def changes(self) -> tuple[Change, ...]:
        """The planned departures and arrivals."""
        return tuple(parse_change(text) for text in self.change)

    @property
    def moves_layers(self) -> bool:
        """True if layers are to change stage after a loss."""
        if self.move_layers == "auto":
            return self.respawn == 0
        return self.move_layers == "always"

    @property
    def fixed_interval(self) -> int | None:
        """Steps from one snapshot to the next; None: as they turn out to fit beside the steps."""
        return None if self.snapshot_interval == "auto" else int(self.snapshot_interval)

    def of_the_job(self) -> dict[str, Any]:
        """Return the settings that all workers have to be given alike, for JSON.

        The workers' plans and sums depend on them.
        """
        return self.model_dump(mode="json", include=set(_OF_THE_JOB))

    def check_without_stages(self) -> None:
        """Raise ConfigurationError for settings that do something in other kinds of jobs only."""
        idle = {
            "dataflow": ("auto",),
            "move_layers": ("auto", "never"),
            "split_backward": ("auto", "never"),
            "clocks": ("off",),
            "activation_room": (None,),
        }
        for name, values in idle.items():
            if getattr(self, name) not in values:
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)}, which is for pipeline and tensor parallel"
                    " jobs; without them all workers have the same to do; leave it out"
                )

    def check_last_checkpoint(self, otherwise: str) -> None:
        """Raise ConfigurationError where it would stay unused; ``otherwise``: what to do."""
        if self.last_checkpoint_dir is not None:
            raise ConfigurationError(
                f"last_checkpoint_dir is {str(self.last_checkpoint_dir)!r}, which is for DeepSpeed;"
                f" leave it out, and {otherwise}"
            )

    def without_respawn(self, why: str) -> "ElasticConfig":
        """The settings of a job whose lost workers cannot come back, and so stay away.

        Raises ConfigurationError, with the reason ``why``, where the user asks for more.
        """
        if "respawn" in self.model_fields_set and self.respawn:
            raise ConfigurationError(
                f"respawn is {self.respawn}, and {why}; set it to 0 or leave it out"
            )
        return self.model_copy(update={"respawn": 0})

    @field_validator("*", mode="wrap")
    @classmethod
    def _a_switch_is_no_number(cls, value: object, taken: ValidatorFunctionWrapHandler) -> object:
        """Refuse true and false where a number is wanted, as which Python has them."""
        result = taken(value)
        if isinstance(value, bool) and not isinstance(result, bool):
            raise PydanticCustomError("switch", "a number")
        return result

    @model_validator(mode="after")
    def _they_agree(self) -> "ElasticConfig":
        """Refuse settings that contradict each other, or say more of what is switched off."""
        default = {name: field.default for name, field in type(self).model_fields.items()}
        for contradict, sentence in _CONTRADICTIONS:
            if contradict(self):
                raise ValueError(sentence.format(**dict(self)))
        for name in ("data_timeout_s", "hang_start_timeout_s"):
            value = getattr(self, name)
            if value < self.hang_timeout_s and value != default[name]:
                raise ValueError(
                    f"{name} is {value:g} and hang_timeout_s is {self.hang_timeout_s:g}, below"
                    f" which no phase is judged; raise {name}, or lower hang_timeout_s"
                )
        for name, other, off, why in _IDLE:
            value = getattr(self, name)
            if getattr(self, other) == off and value not in (default[name], 0):
                shown = f"{value:g}" if isinstance(value, float) else repr(value)
                raise ValueError(
                    f"{name} is {shown} and {other} is off, {why}; set {other}, or leave {name} out"
                )
        return self

    def check_slots(self, width: int) -> None:
        """Raise ConfigurationError where a test fault or a change names a worker that is none.

        ``width``: workers of the launch.
        """
        kills = [(f"kill {kill}", kill.slot) for kill in self.kills()]
        changes = [(f"change {change}", change.slot) for change in self.changes()]
        for name, slot in (*kills, *changes):
            if slot >= width:
                raise ConfigurationError(
                    f"{name} names worker {slot}, wanted 0 to {width - 1}: the job has {width} "
                    "workers"
                )


def from_section(
    section: Mapping[str, Any],
    source: str = "section elaswave",
    *,
    elsewhere: Mapping[str, str] | None = None,
) -> ElasticConfig:
    """Build the configuration from a mapping (a table of a file); raises ConfigurationError.

    ``elsewhere``: words that are no settings, and what they are.
    """
    if not isinstance(section, Mapping):
        raise ConfigurationError(f"{source} is {section!r}, wanted a table of keys and values")
    given = {str(key): value for key, value in section.items()}
    check_words(given, ElasticConfig.model_fields, f"{source}: unknown key", elsewhere=elsewhere)
    try:
        return ElasticConfig.model_validate({**section, **rehearsed_settings(os.environ)})
    except ValidationError as error:
        # `from None`: users get one sentence, not the validator's traceback.
        raise ConfigurationError(_sentence(error, source)) from None


def _sentence(error: ValidationError, source: str) -> str:
    """Put the first mistake into one sentence: key, value seen, value wanted."""
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    message = str(first["msg"]).removeprefix("Value error, ")
    if not key or first["type"] == "value_error":
        return f"{source}: {message}"
    wanted = message.replace("Input should be ", "").replace("valid tuple", "list")
    return f"{source}: key {key!r} is {first['input']!r}, wanted {wanted}"
