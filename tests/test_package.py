"""The wheel: one package, whose command trains and checks a class of the user's anywhere."""

import ast
import json
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest
import torch
from launch import ROOT, launch

MINE = """
import torch
import torch.distributed as dist


class MyDDP(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, op=OPERATION)
            parameter.grad /= DIVISOR
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="hatchling is not installed (requirements.txt has it)")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    """The command, in an environment of its own that finds torch where this one does."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [folder / "bin" / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True)
    return folder / "bin" / "onefile-parallel"


@pytest.mark.cpu
def test_the_wheel_has_one_package_with_all_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"onefile_parallel"}
    for path in ROOT.glob("*.py"):
        assert f"onefile_parallel/{path.name}" in names


@pytest.fixture(scope="module")
def wrong_ones(command, tmp_path_factory):
    """What `check` prints and writes about two kinds: one does not divide, one crashes."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "sums.py").write_text(
        MINE.replace("OPERATION", "dist.ReduceOp.SUM").replace("DIVISOR", "1")
    )
    (folder / "crashes.py").write_text("def crashes(tensor):\n    raise KeyError('a key')\n")
    kinds = ["--ddp", "sums.py:MyDDP", "--all-reduce", "crashes.py:crashes"]
    check = [command, "check", "-k", "mean_gradient or overlap or strided"]
    return launch([*check, *kinds, "--json", "verdicts.json"], folder), folder


@pytest.mark.cpu
def test_a_class_of_the_users_is_checked_from_an_empty_directory(command, wrong_ones, tmp_path):
    right = MINE.replace("OPERATION", "dist.ReduceOp.SUM").replace(
        "DIVISOR", "dist.get_world_size()"
    )
    (tmp_path / "mine.py").write_text(right)

    holds = launch([command, "check", "-k", "mean_gradient", "--ddp", "mine.py:MyDDP"], tmp_path)
    fails, folder = wrong_ones

    assert (holds.returncode, fails.returncode) == (0, 1), holds.stdout + holds.stderr
    assert "1 of 1 claims hold." in holds.stdout
    assert "wrong: mean_gradient" in fails.stdout
    left = {path.name for path in (*tmp_path.iterdir(), *folder.iterdir())}
    assert left <= {"mine.py", "sums.py", "crashes.py", "verdicts.json", "__pycache__"}


@pytest.mark.cpu
def test_the_command_trains_and_passes_the_exit_status_on(command, tmp_path):
    trains = launch([command, "run", "ddp", "--steps", 1], tmp_path)
    assert trains.returncode == 0, trains.stderr
    assert "bitwise equal over 1 step\n" in trains.stdout
    assert launch([command, "run", "estimate", "-n", 1, "--no-such-flag"], tmp_path).returncode != 0
    unknown = launch([command, "run", "nothing"], tmp_path)
    assert unknown.returncode == 2
    assert "there is no technique nothing" in unknown.stdout


@pytest.mark.cpu
def test_the_files_are_modules_of_the_package(command, tmp_path):
    python = command.parent / "python"
    code = "from onefile_parallel.fsdp import fully_shard; print(fully_shard.__module__)"
    done = launch([python, "-c", code], tmp_path, env={"PYTHONPATH": ""})
    assert done.stdout == "onefile_parallel.fsdp\n", done.stderr


def inline_metadata(text):
    """Return the lines of the block of PEP 723."""
    (block,) = re.findall(r"^# /// script\n((?:# .*\n)+?)# ///$", text, re.MULTILINE)
    return block


@pytest.mark.cpu
@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.name)
def test_a_file_says_what_uv_run_must_install(path):
    text = path.read_text()
    block = inline_metadata(text)
    assert '# requires-python = ">=3.10"\n' in block
    assert ("torch>=2.6" in block) == bool(re.search(r"^import torch$", text, re.MULTILINE))
    assert ("numpy" in block) >= bool(re.search(r"^import numpy", text, re.MULTILINE))


@pytest.mark.cpu
def test_all_files_are_in_the_grammar_of_python_3_10():
    for path in ROOT.glob("**/*.py"):
        if ".venv" not in path.parts:
            ast.parse(path.read_text(), path.name, feature_version=(3, 10))


@pytest.mark.cpu
def test_verdicts_are_written_for_machines(wrong_ones):
    _, folder = wrong_ones

    page = json.loads((folder / "verdicts.json").read_text())

    assert page["torch"] == torch.__version__
    by_name = {answer["claim"]: answer for answer in page["claims"]}
    assert by_name.keys() == {"mean_gradient", "overlap", "strided"}
    wrong = by_name["mean_gradient"]
    assert (wrong["verdict"], wrong["kind"]) == ("wrong", "ddp")
    assert wrong["implementation"] == "sums.py:MyDDP"
    assert "/crashes.py:2 in crashes" in by_name["strided"]["finding"]


OF_A_USER = """
import onefile_parallel
import torch.distributed as dist


def my_all_reduce(tensor, process_group=None):
    dist.all_reduce(tensor, group=process_group)


test_mine = onefile_parallel.claims("all-reduce", my_all_reduce)
"""


@pytest.mark.cpu
def test_claims_are_cases_of_a_users_own_test(command, tmp_path):
    """PyTorch's all-reduce changes only a part of a strided slice over gloo."""
    (tmp_path / "test_mine.py").write_text(OF_A_USER)
    python = command.parent / "python"
    done = launch([python, "-m", "pytest", "-q", "test_mine.py"], tmp_path)
    assert "FAILED test_mine.py::test_mine[strided] - AssertionError" in done.stdout
    assert re.search(r"^1 failed, \d+ passed", done.stdout, re.MULTILINE), done.stdout
