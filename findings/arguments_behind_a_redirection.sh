#!/usr/bin/env bash
# Arguments of a command that stand behind a redirection are names of files to tree-sitter-bash, and arguments to bash.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet tree-sitter==0.26.1 tree-sitter-bash==0.25.1
cat >"$folder/show.py" <<'PY'
import subprocess
from importlib.metadata import version

import tree_sitter_bash
from tree_sitter import Language, Parser

LINE = "printf '%s\\n' train.py > words.txt --lr 1e-4"

parser = Parser(Language(tree_sitter_bash.language()))
root = parser.parse(LINE.encode()).root_node
assert not root.has_error
(statement,) = root.named_children


def texts(node, field):
    return [one.text.decode() for one in node.children_by_field_name(field)]


command = statement.child_by_field_name("body")
(redirect,) = statement.children_by_field_name("redirect")
arguments, files = texts(command, "argument")[1:], texts(redirect, "destination")
subprocess.run(["bash", "-c", LINE], check=True)
given = open("words.txt").read().split()
print("tree-sitter-bash", version("tree-sitter-bash"))
print("line:", LINE)
print("bash gives the command", given)
print("tree-sitter-bash: arguments", arguments, "files", files)
assert given == ["train.py", "--lr", "1e-4"]
assert arguments == ["train.py"] and files == ["words.txt", "--lr", "1e-4"]
PY
cd "$folder"
"$folder/venv/bin/python" "$folder/show.py"
