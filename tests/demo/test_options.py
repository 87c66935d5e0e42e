"""Bad input costs one sentence and exit code 2, before anything is started or written."""

import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_plugin.cli.main import run_command
from elaswave_plugin.demo import demo
from elaswave_plugin.demo.jobs import job_command
from elaswave_plugin.demo.options import MARKER, check_options, check_sizes, sole_use
from elaswave_plugin.demo.text import find_text

LONG = "a line of text that is long enough for one step\n" * 40


def write(tmp_path: Path, text: str = LONG) -> str:
    (tmp_path / "text.txt").write_text(text)
    return str(tmp_path / "text.txt")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc", "1"], "nproc is 1, wanted at least 2"),
        (["--nproc", "9"], "nproc is 9, wanted at most 8"),
        (["--nproc", "3"], "nproc is 3, wanted a divisor of 8"),
        (["--nproc", "four"], "Invalid value for '--nproc'"),
        (["--steps", "2"], "steps is 2, wanted at least 3"),
        (["--seed", "-1"], "seed is -1, wanted 0 or more"),
        (["--kill", "4@10"], "worker 4, wanted 0 to 3 (nproc is 4)"),
        (["--kill", "2@20"], "step 20, wanted 0 to 19 (steps is 20)"),
        (["--kill", "2@10:lunch"], "phase 'lunch', wanted one of data, forward"),
        (["--kill", "2@10:move"], "phase 'move', wanted one of data, forward"),
        (["--kill", "2.1@10"], "kill 2.1@10:backward names a worker that is started again"),
        (["--kill", "two"], "kill is 'two', wanted SLOT@STEP[:PHASE]"),
        (["--kill", "2@3", "--kill", "2@4"], "name a worker twice"),
        (["--nproc", "2", "--kill", "0@3", "--kill", "1@4"], "leave none of 2 workers"),
        (["--respawn", "--steps", "30"], "wanted at least 35"),
        (["--respawn", "--framework", "deepspeed"], "respawn is on with framework 'deepspeed'"),
        (["--json", "/nonexistent/summary.json"], "whose folder does not exist"),
        (["--frobnicate"], "No such option: --frobnicate"),
    ],
)
def test_demo_bad_option_costs_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ["demo", "--text", write(tmp_path), "--out", str(out), *arguments]
    assert run_command(argv) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and error.startswith("elaswave: ")
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "0"], "tp is 0, wanted 1 or more"),
        (["--tp", "3", "--pp", "2"], "tp is 3, wanted a divisor of the 4 attention heads"),
        (["--pp", "9"], "pp is 9, wanted at most 8: the demo's model has at most 8 layers"),
        (["--nproc", "6", "--tp", "2", "--pp", "2"], "6 workers do not factor into tp 2 x pp 2"),
        (["--nproc", "4", "--tp", "2", "--dp", "4"], "wanted 8, which is tp 2 x pp 1 x dp 4"),
        (["--nproc", "4", "--tp", "2", "--pp", "2"], "dp is 1, wanted at least 2"),
        (["--pp", "2", "--dp", "3"], "dp is 3, wanted a divisor of 8"),
        (["--pp", "2", "--dp", "16"], "dp is 16, wanted at most 8: a step has 8 micro-batches"),
        (["--tp", "2", "--kill", "4@3"], "worker 4, wanted 0 to 3 (nproc is 4)"),
        (
            ["--pp", "2", "--kill", "0@3", "--kill", "1@4"],
            "leave stage 0 with no worker, wanted one in each of 2 stages",
        ),
        (
            ["--tp", "2", *(f"--kill={slot}@3" for slot in range(3))],
            "with no whole TP group of 2",
        ),
        (["--tp", "2", "--framework", "deepspeed"], "tp is 2 with framework 'deepspeed'"),
        (["--dp", "4", "--framework", "deepspeed"], "dp is 4 with framework 'deepspeed'"),
    ],
)
def test_demo_impossible_layout_costs_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test_demo_bad_option_costs_one_sentence(arguments, words, tmp_path, capsys)


@pytest.mark.parametrize(
    ("sizes", "title"),
    [
        ({}, "TP1 x PP1 x DP4, 4 layers"),
        ({"dp": 2}, "TP1 x PP1 x DP2, 4 layers"),
        ({"tp": 2, "pp": 2, "dp": 2}, "TP2 x PP2 x DP2, 4 layers"),
        ({"tp": 2, "pp": 2, "dp": 2, "nproc": 8}, "TP2 x PP2 x DP2, 4 layers"),
        ({"nproc": 8, "tp": 4}, "TP4 x PP1 x DP2, 4 layers"),
        ({"pp": 3}, "TP1 x PP3 x DP2, 6 layers"),
        ({"pp": 5, "dp": 4}, "TP1 x PP5 x DP4, 5 layers"),
    ],
)
def test_demo_layout_and_a_model_whose_layers_divide(sizes: dict[str, int], title: str) -> None:
    wanted = {"nproc": None, "tp": None, "pp": None, "dp": None, **sizes}
    assert str(check_sizes(**wanted)).splitlines()[0] == title


def test_demo_hybrid_job_is_started_with_its_sizes(tmp_path: Path) -> None:
    def command(**sizes: int) -> str:
        checked = check_options(
            text=Path(write(tmp_path)),
            **sizes,
            steps=6,
            kill=[],
            seed=1,
            json_file=None,
            out=tmp_path / "out",
        )
        words = job_command(checked, socket_path=tmp_path, data=tmp_path, directory=tmp_path)
        return " ".join(words)

    hybrid = command(tp=2, pp=2)
    assert "--nproc-per-node 8 " in hybrid
    assert "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 " in hybrid
    assert "--sequence-parallel " in hybrid
    assert "--num-layers 6 " in command(pp=3) and "--sequence-parallel" not in command(pp=3)
    plain = command(nproc=2)
    assert "--nproc-per-node 2 " in plain and "parallel" not in plain


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "which holds no text"), ("short", "has 6 tokens, wanted at least 1025")],
)
def test_demo_text_too_short_is_refused(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["demo", "--text", write(tmp_path, content)]) == 2
    assert words in capsys.readouterr().err


def test_demo_text_absent_or_empty_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["demo", "--text", str(tmp_path / "absent")]) == 2
    assert "which does not exist" in capsys.readouterr().err
    assert run_command(["demo", "--text", str(tmp_path)]) == 2
    assert "which holds no text" in capsys.readouterr().err


def test_demo_unreadable_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)

    def refuse(self: Path, mode: str) -> None:  # root may read everything, so the refusal is made
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert run_command(["demo", "--text", path]) == 2
    assert "cannot be read: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("framework", ["torch", "megatron"])
def test_demo_without_a_framework_says_what_to_install(
    framework: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == framework else object())
    argv = ["demo", "--text", write(tmp_path), "--out", str(tmp_path / "out")]
    assert run_command(argv) == 2
    error = capsys.readouterr().err
    assert f"trains with {framework}, which is not installed; `pip install -e ." in error


def test_demo_out_of_someone_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("dear")
    text = write(tmp_path)
    assert run_command(["demo", "--text", text, "--out", str(tmp_path)]) == 2
    assert "which holds files that no demo wrote" in capsys.readouterr().err
    assert (tmp_path / "run" / "thesis.tex").exists() and not (tmp_path / MARKER).exists()


def options(tmp_path: Path, nproc: int, steps: int, kill: list[str]) -> list[str]:
    checked = check_options(
        text=Path(write(tmp_path)),
        nproc=nproc,
        steps=steps,
        kill=kill,
        seed=1,
        json_file=None,
        out=tmp_path / "out",
    )
    return [str(kill) for kill in checked.kills]


def test_demo_default_kill_fits_small_demos(tmp_path: Path) -> None:
    assert options(tmp_path, 4, 20, []) == ["2@10:backward"]
    assert options(tmp_path, 2, 6, []) == ["1@3:backward"]
    assert options(tmp_path, 4, 20, ["0@5", "3@5:gather"]) == ["0@5:backward", "3@5:gather"]


def test_find_text_takes_files_in_order_and_no_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", ".hidden", ".git/config", "empty"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty" else name)
    source = find_text(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in source.paths] == ["a/z.txt", "b.txt"]
    assert source.num_bytes == 12 and source.num_tokens == 14


def test_find_text_of_the_standard_library_is_large_and_capped() -> None:
    source = find_text(None)
    assert 2**20 < source.num_bytes <= 8 * 2**20
    assert source == find_text(None)


def test_elaswave_run_imports_nothing_heavy() -> None:
    code = (
        "import sys; from elaswave_plugin.cli import main\n"
        "try: main.run_command(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pydantic', 'typer', 'rich', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"], ["report", "--help"], []])
def test_elaswave_help_is_no_error(argv: list[str]) -> None:
    assert run_command(argv) == 0


def test_the_folder_of_a_running_demo_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    (out / MARKER).touch()
    with sole_use(out):
        assert run_command(["demo", "--text", write(tmp_path), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "in which another demo is running; name another folder" in error
    assert error.count("\n") == 1 and (out / "data").is_dir()
    with sole_use(out):
        pass
