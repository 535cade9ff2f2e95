"""What is meant to be the same text is; lint and format; the README's commands and numbers."""

import ast
import importlib.util
import subprocess
import sys

import pytest
from launch import ALONE, ROOT

SET_UP = "# Demo, set-up: a small language model on real text"
END = 'if __name__ == "__main__":'


def set_up_of(path):
    text = path.read_text()
    assert text.count(SET_UP) == 1, f"{path.name} has no demo set-up"
    return text[text.index(SET_UP) :]


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.name)
def test_the_demos_set_up_is_one_short_text(path):
    assert set_up_of(path) == set_up_of(ROOT / "ddp.py")
    assert len(set_up_of(path).partition(END)[0].rstrip().splitlines()) <= 145


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.name)
def test_a_technique_imports_no_other(path):
    tree, imported = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported[node.module.split(".")[0]] = node
    others = imported.keys() - set(sys.stdlib_module_names) - {"torch", "numpy"}
    assert others <= {"safetensors"}  # optional, and imported where it is used
    assert not any(imported[name] in tree.body for name in others)


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed (requirements.txt has it)")
def test_ruff(arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
