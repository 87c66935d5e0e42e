"""Launch scripts of bash are read as bash would run them: bash itself is the judge."""

import subprocess
from pathlib import Path

import pytest

from elaswave_plugin.cli.launch_files import UNKNOWN, training_command

VARIABLES = """
GPUS=8
NODES=${NODES:-2}
WORLD=$((GPUS * $NODES))
MODEL="--num-layers 12 \\
    --hidden-size 64"
MODEL+=" --seq-length 32"
"""
ARRAYS = """
ARGS=(
    --lr 1e-4  # the rate
    --save "a folder/with blanks"
)
ARGS+=(--bf16 --global-batch-size ${WORLD})
"""
BRANCHES = """
PRECISION=bf16
if [ "$PRECISION" = fp8 ]; then
    MORE="--fp8-format hybrid"
elif [[ $PRECISION == bf16 ]]; then
    MORE="--bf16"
else
    MORE="--fp16"
fi
if [ -z "$UNSET" ]; then MORE="$MORE --log-interval 1"; fi
if [ $GPUS -gt 8 ]; then MORE="$MORE --wrong"; else MORE="$MORE --sft"; fi
"""
CALLS = {
    "plain": "python pretrain_gpt.py $MODEL --x",
    "quoted": 'torchrun --nproc_per_node $GPUS pretrain_gpt.py "${ARGS[@]}" ${MODEL}',
    "branches": "torchrun pretrain_gpt.py $MORE ${MODEL} ${ARGS[@]} --end",
    "lines": "python -u pretrain_gpt.py \\\n  $MODEL \\\n  ${ARGS[*]} > log 2>&1",
    "single": "python pretrain_gpt.py --data '$MODEL' --b=\"$GPUS $NODES\"",
    "eval": 'CALL="python pretrain_gpt.py $MODEL --eval"; eval $CALL',
    "piped": "python pretrain_gpt.py --a $WORLD 2>&1 | tee log",
    "placed": "SEED=3; python pretrain_gpt.py --save $PRECISION/$SEED.out '$A' ${X-a  b}$NODES",
    "chosen": 'python pretrain_gpt.py ${NODES:+--x "$NODES" "" } ${NONE:+--y} --z=${#ARGS[@]}',
    "redirected": "python pretrain_gpt.py --a > log --b 2>&1",
    "in a loop": 'for one in $GPUS; do python pretrain_gpt.py --n "${ARGS[1]}" --n$one; done',
    "patterns": 'if [[ "$NODES" == *"8"* || ! -n "$GPUS" ]]; then MODEL=; fi\n'
    "python pretrain_gpt.py $MODEL",
    "heredoc": "cat <<END\npython pretrain_gpt.py --a --b\nEND\npython pretrain_gpt.py --a `# b`",
    "glued": 'python pretrain_gpt.py --save=dir/"$PRECISION"-${GPUS}x/$NODES $EMPTY --x',
}
# Prints the words behind the script's name, in place of running it.
STAND_INS = """
python() { while [ "$1" != pretrain_gpt.py ]; do shift; done; printf '%s\\n' "$@" > "$OUT"; }
torchrun() { python "$@"; }
"""


@pytest.mark.parametrize("call", CALLS)
def test_words_are_those_that_bash_gives_to_the_script(call: str, tmp_path: Path) -> None:
    script = VARIABLES + ARRAYS + BRANCHES + CALLS[call] + "\n"
    out = tmp_path / "words"
    subprocess.run(
        ["bash", "-c", STAND_INS + script],
        env={"OUT": str(out), "PATH": "/usr/bin:/bin"},
        check=True,
        timeout=30,
        cwd=tmp_path,
    )
    by_bash = out.read_text().splitlines()
    assert by_bash[0] == "pretrain_gpt.py"
    assert training_command(script)[1] == by_bash


def test_what_only_a_run_tells_is_marked() -> None:
    text = "SAVE=$1/run\nNOW=$(date)\npython pretrain_gpt.py --save $SAVE --name x-$NOW --lr 1\n"
    _, words = training_command(text)
    assert words[:3] == ["pretrain_gpt.py", "--save", f"{UNKNOWN}/run"]
    assert UNKNOWN in words[4] and words[5:] == ["--lr", "1"]


def test_the_command_with_the_most_options_is_the_one_that_trains() -> None:
    text = "python tools/check.py --a\npython pretrain_gpt.py --a --b\npython done.py\n"
    assert training_command(text)[1][0] == "pretrain_gpt.py"
    assert training_command("echo python pretrain_gpt.py --a\n") == ([], [])
