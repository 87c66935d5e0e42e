"""The typer commands of `elaswave`; what a command needs is imported when it runs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

TextPath = Annotated[
    Path | None,
    typer.Option(help="File or folder to train on.", show_default="Python's standard library"),
]
Workers = Annotated[
    int | None, typer.Option(help="Number of workers.", show_default="4, or tp x pp x dp")
]
TpSize = Annotated[
    int | None, typer.Option(help="Workers of a tensor-parallel group.", show_default="1")
]
PpSize = Annotated[int | None, typer.Option(help="Pipeline stages.", show_default="1")]
DpSize = Annotated[
    int | None,
    typer.Option(help="Replicas of each stage.", show_default="2 with --tp or --pp"),
]
DemoSteps = Annotated[
    int | None, typer.Option(help="Number of optimizer steps; default 20, with --respawn 40.")
]
Respawn = Annotated[
    bool, typer.Option("--respawn", help="Start the killed workers again, and wait for them.")
]
Kills = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SLOT@STEP[:PHASE]",
        help="Worker to kill in a step; PHASE is data, forward, backward, reduce, optimizer,"
        " gather or snapshot. May be repeated.",
        show_default="2@10:backward",
    ),
]
FrameworkName = Annotated[str, typer.Option(metavar="megatron|deepspeed", help="Framework.")]
ZeroStage = Annotated[
    int | None, typer.Option(help="DeepSpeed's ZeRO stage, 0 to 3.", show_default="1")
]
Seed = Annotated[int, typer.Option(help="Seed of weights, data order and dropout.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="File for the summary, as JSON.")
]
OutFolder = Annotated[Path, typer.Option(metavar="DIR", help="Folder for everything written.")]
RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Run directory (--elaswave-dir).")]
ReferenceFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Run directory to compare with.")
]
Picture = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Picture.", show_default="DIR/report.png")
]
GlobalBatch = Annotated[
    int | None, typer.Option(help="Samples of a step.", show_default="from the ledger")
]
JobFolder = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="Run directory (--elaswave-dir).")
]
JobAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Any agent of the job, in place of DIR."),
]
SourceTree = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="Folder of an installed megatron-core, or a checkout of Megatron-LM."
    ),
]
AnswerTime = Annotated[float, typer.Option(help="Seconds for each agent to answer.")]


def make_command() -> Any:
    """Build the command line."""
    app = typer.Typer(
        help="Keeps Megatron-Core and DeepSpeed jobs training through the loss of workers.",
        add_completion=False,
        rich_markup_mode=None,
    )
    app.command("run", add_help_option=False)(run)
    app.command("demo")(demo)
    app.command("rehearse", context_settings={"allow_interspersed_args": False})(rehearse)
    app.command("report")(report)
    app.command("status")(status)
    app.command("drain")(drain)
    app.command("migrate")(migrate)
    app.command("plan")(plan)
    app.command("doctor")(doctor)
    app.command("checkpoint")(checkpoint)
    secret = typer.Typer(help="Make the secret by which processes of a job know each other.")
    secret.command("new")(secret_new)
    app.add_typer(secret, name="secret")
    patch = typer.Typer(help="Apply or revert diffs that add hooks to upstream's source.")
    patch.command("list")(patch_list)
    patch.command("check")(patch_check)
    patch.command("apply")(patch_apply)
    patch.command("revert")(patch_revert)
    app.add_typer(patch, name="patch")
    return typer.main.get_command(app)


def run() -> None:
    """Start a job on this node, with torchrun's options."""


def demo(
    text: TextPath = None,
    nproc: Workers = None,
    tp: TpSize = None,
    pp: PpSize = None,
    dp: DpSize = None,
    steps: DemoSteps = None,
    kill: Kills = None,
    seed: Seed = 1234,
    framework: FrameworkName = "megatron",
    zero: ZeroStage = None,
    json_file: JsonFile = None,
    respawn: Respawn = False,
    out: OutFolder = Path("out/demo"),
) -> int:
    """Train a GPT, kill a worker, compare with the undisturbed run."""
    from rich.console import Console

    from elaswave_plugin.demo.demo import run_demo
    from elaswave_plugin.demo.options import check_options

    options = check_options(
        text=text,
        nproc=nproc,
        tp=tp,
        pp=pp,
        dp=dp,
        steps=steps,
        kill=list(kill or ()),
        seed=seed,
        json_file=json_file,
        out=out,
        framework=framework,
        zero=zero,
        respawn=respawn,
    )
    return run_demo(options, text, Console())


def rehearse(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND...", help="Command that starts the job, unchanged."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 6,
    json_file: JsonFile = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Let the script write to files that are there.")
    ] = False,
    run: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Make only this disturbed run. May be repeated."),
    ] = None,
) -> int:
    """Run a job with and without faults, and compare.

    Exit code 0: all runs are equal; 1: one differs; 2: the rehearsal is refused.
    """
    from rich.console import Console

    from elaswave_plugin.rehearsal.rehearsal import check_options, rehearse

    options = check_options(
        command=list(command or ()),
        steps=steps,
        json_file=json_file,
        overwrites=overwrite,
        only=list(run or ()),
    )
    return rehearse(options, Console())


def report(
    directory: RunFolder,
    reference: ReferenceFolder = None,
    out: Picture = None,
    global_batch: GlobalBatch = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Judge a run by its files: draw report.png, print a summary."""
    from rich.console import Console

    from elaswave_plugin.errors import ConfigurationError
    from elaswave_plugin.observer.observer import summarize
    from elaswave_plugin.observer.output_file import check_picture
    from elaswave_plugin.observer.report import draw_report
    from elaswave_plugin.observer.report_screen import draw_summary
    from elaswave_plugin.observer.run import check_one_job, read_run

    if global_batch is not None and global_batch < 1:
        raise ConfigurationError(f"--global-batch is {global_batch}, wanted 1 or more")
    run_files = read_run(directory)
    other = None if reference is None else read_run(reference)
    for files in (run_files, other):
        if files is not None:
            check_one_job(files)
    if not run_files.steps:
        raise ConfigurationError(
            f"{str(directory)!r} is of a run that completed no step; name another run's"
        )
    out = out or directory / "report.png"
    check_picture("--out", out)
    summary = summarize(
        run_files,
        other,
        steps=1 + max(record["step"] for record in run_files.steps),
        global_batch=global_batch,
    )
    picture = draw_report(run_files, other, out)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        Console().print(draw_summary(summary))
    typer.echo(f"picture: {picture}", err=True)
    return 0


def status(
    directory: JobFolder = None,
    connect: JobAddress = None,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw until the job is over.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    timeout_s: AnswerTime = 5.0,
) -> int:
    """Show a running job: its view, its layout and each worker."""
    from rich.console import Console

    from elaswave_plugin.cli.status import ask_job, find_job
    from elaswave_plugin.cli.status_screen import draw_status
    from elaswave_plugin.cli.status_screen import watch as watch_job
    from elaswave_plugin.errors import ConfigurationError

    if watch and as_json:
        raise ConfigurationError("--watch draws and --json prints once: give one of them")
    known = find_job(directory, connect)
    if watch:
        watch_job(known, timeout_s, Console())
        return 0
    found = ask_job(known, timeout_s)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(draw_status(found))
    return 0


def secret_new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file, with mode 0600.")],
) -> int:
    """Write a new secret; every node of the job names its copy as ELASWAVE_SECRET_FILE."""
    from elaswave_plugin.errors import ConfigurationError
    from elaswave_plugin.ipc.secret import SECRET_FILE, Secret, write_secret

    try:
        write_secret(file, Secret.new())
    except FileExistsError:
        raise ConfigurationError(f"{str(file)!r} exists; name a new file") from None
    except OSError as error:
        raise ConfigurationError(f"{str(file)!r} cannot be written: {error.strerror}") from None
    typer.echo(f"{file}: set {SECRET_FILE} to it on every node")
    return 0


def drain(
    who_and_where: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SLOT] [DIR]", help="Worker to leave; run directory (--elaswave-dir)."
        ),
    ] = None,
    node: Annotated[
        int | None, typer.Option(metavar="N", help="Node whose workers leave, in place of SLOT.")
    ] = None,
    connect: JobAddress = None,
    reason: Annotated[str, typer.Option(help="For the record.")] = "drained by the user",
    timeout_s: AnswerTime = 5.0,
) -> int:
    """Have workers of a running job leave between two steps: nothing is lost or done twice."""
    from elaswave_plugin.cli.status import drain_node, drain_worker, find_job, slot_and_folder

    slot, directory = slot_and_folder(who_and_where or (), node=node)
    known = find_job(directory, connect)
    if node is None:
        typer.echo(drain_worker(known, slot=slot, reason=reason, timeout_s=timeout_s))
    else:
        typer.echo(drain_node(known, node=node, reason=reason, timeout_s=timeout_s))
    return 0


def migrate(
    layers: Annotated[str, typer.Option(metavar="FIRST-LAST", help="Layers to move.")],
    to: Annotated[int, typer.Option(metavar="STAGE", help="The stage that gets them.")],
    directory: JobFolder = None,
    connect: JobAddress = None,
    reason: Annotated[str, typer.Option(help="For the record.")] = "asked for by the user",
    timeout_s: AnswerTime = 5.0,
) -> int:
    """Move layers of a running job to a neighbouring stage, between two steps."""
    from elaswave_plugin.cli.status import find_job, migrate_layers

    known = find_job(directory, connect)
    typer.echo(migrate_layers(known, layers=layers, stage=to, reason=reason, timeout_s=timeout_s))
    return 0


def plan(
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    tp: Annotated[int, typer.Option(help="Workers of a tensor-parallel group.")] = 1,
    dp: Annotated[int | None, typer.Option(help="Replicas of each stage.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="All workers, in place of --dp: tp x pp x dp.")
    ] = None,
    vpp: Annotated[int, typer.Option(help="Model chunks of each stage (interleaved).")] = 1,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 24,
    dead: Annotated[
        list[str] | None,
        typer.Option(metavar="SLOT[-SLOT]", help="Lost workers. May be repeated."),
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a replica.")] = 16,
    microbatch_size: Annotated[int, typer.Option(help="Samples of a micro-batch.")] = 1,
    consistency: Annotated[str, typer.Option(help="exact or fast, as in the job.")] = "exact",
    respawn: Annotated[
        int, typer.Option(help="As in the job; 0: lost workers do not come back, so layers move.")
    ] = 10,
    dataflow: Annotated[
        str, typer.Option(help="auto, or one of redeal, reroute, resize, as in the job.")
    ] = "auto",
    move_layers: Annotated[
        str, typer.Option(help="auto, always or never, as in the job; workers move with them.")
    ] = "auto",
    split_backward: Annotated[
        str, typer.Option(help="auto or never, as in the job: weight gradients in bubbles.")
    ] = "auto",
    forward_ms: Annotated[float, typer.Option(help="Forward of a layer, one sample.")] = 10.0,
    backward_ms: Annotated[float, typer.Option(help="Backward of a layer, one sample.")] = 20.0,
    latency_ms: Annotated[float, typer.Option(help="Latency between stages.")] = 0.5,
    sample_ms: Annotated[float, typer.Option(help="Sending a sample between stages.")] = 1.0,
    weights_mib: Annotated[float, typer.Option(help="16-bit weights of a layer.")] = 400.0,
    activation_mib: Annotated[float, typer.Option(help="Activations of a layer, a sample.")] = 10.0,
    memory_gib: Annotated[
        float | None, typer.Option(help="Memory of a worker.", show_default="no limit")
    ] = None,
    link_gbytes: Annotated[float, typer.Option(help="GB/s into a worker.")] = 25.0,
    horizon_s: Annotated[float, typer.Option(help="Seconds that the plan lasts.")] = 600.0,
    clocks: Annotated[
        str | None,
        typer.Option(help="Clocks to choose from, as a clock_table.", show_default="unchanged"),
    ] = None,
    power_cap_w: Annotated[
        float | None, typer.Option(help="Watts of all workers.", show_default="no limit")
    ] = None,
    json_file: JsonFile = None,
) -> int:
    """Simulate what a job does about lost workers, from given costs."""
    given = {**locals(), "dead": tuple(dead or ())}
    del given["json_file"]

    from rich.console import Console

    from elaswave_plugin.cli.plan import PlanOptions, run_plan

    return run_plan(PlanOptions(**given), json_file, Console())


def doctor(
    launch: Annotated[
        Path | None,
        typer.Argument(
            metavar="LAUNCH",
            help="Launch script of bash, YAML recipe, or configuration of DeepSpeed or Accelerate.",
        ),
    ] = None,
    megatron_lm: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Checkout of Megatron-LM.", show_default="$MEGATRON_LM_PATH"
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Workers of all nodes, for the memory that LAUNCH takes.",
            show_default="as LAUNCH has it",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Say what a job answers to each setting of a launch, or check every patch record.

    With LAUNCH nothing is run: exit code 0 where it attaches, 1 with less, 2 where it is refused.
    Without it every patch record is checked against what is installed; nothing is applied.
    """
    from rich.console import Console

    from elaswave_plugin.cli import doctor as examination
    from elaswave_plugin.errors import PatchMismatchError

    options = {"--megatron-lm": megatron_lm, "--workers": workers, "--json": as_json}
    examination.check_options({"LAUNCH": launch, **options})
    if launch is not None:
        return _examine_launch(launch, workers, as_json)

    findings = examination.examine(examination.find_checkout(megatron_lm))
    if as_json:
        typer.echo(json.dumps(examination.as_json(findings), indent=2))
    else:
        examination.show(findings, Console())
    problem = examination.verdict(findings)
    if problem is not None:
        raise PatchMismatchError(problem)
    return 0


def _examine_launch(launch: Path, workers: int | None, as_json: bool) -> int:
    from rich.console import Console

    from elaswave_plugin.cli import launch_doctor
    from elaswave_plugin.cli.launch_files import read_launch

    read = read_launch(launch)
    if workers is not None:
        read = replace(read, workers=workers)
    if not as_json:
        return launch_doctor.show(read, Console())
    typer.echo(json.dumps(launch_doctor.as_json(read), indent=2))
    return launch_doctor.exit_code_of(launch_doctor.answer_of(read))


def checkpoint(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that a job saves to (--save).")
    ],
) -> int:
    """List the checkpoints of a folder, and which can be read.

    Indices and sizes are checked; no data is read.
    """
    from elaswave_plugin.checkpoints.directory import list_checkpoints

    for line in list_checkpoints(directory):
        typer.echo(line)
    return 0


def patch_list() -> int:
    """List the diffs, with the reason and the upstream state of each."""
    from elaswave_plugin.cli.patch import read_series

    for diff in read_series():
        typer.echo(f"{diff.name}: {diff.summary}")
        for name in ("Reason", "Valid", "Upstream"):
            typer.echo(f"    {name}: {diff.field(name)}")
    return 0


def patch_check(path: SourceTree) -> int:
    """Say which diffs are applied to PATH and whether the others fit."""
    from elaswave_plugin.cli.patch import diffs_for, find_tree, state_of

    tree = find_tree(path)
    for diff in diffs_for(tree):
        typer.echo(f"{diff.name}: {state_of(tree, diff)}")
    return 0


def patch_apply(path: SourceTree) -> int:
    """Apply all diffs to PATH, or none."""
    from elaswave_plugin.cli.patch import apply, find_tree

    return _changed("applied", apply(find_tree(path)))


def patch_revert(path: SourceTree) -> int:
    """Remove all applied diffs from PATH, or none."""
    from elaswave_plugin.cli.patch import find_tree, revert

    return _changed("reverted", revert(find_tree(path)))


def _changed(verb: str, diffs: Sequence[Any]) -> int:
    for diff in diffs:
        typer.echo(f"{verb} {diff.name}")
    if not diffs:
        typer.echo(f"nothing to do: all are {verb} already")
    return 0
