"""Every command of the README runs; run_all.sh does what it says."""

import importlib.util
import json
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

import claims
import pool
import pytest
import torch
from launch import ROOT, fork, launch

import bench
import ddp

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
PATH = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"
}  # torchrun and python of this environment

C10D = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
EXPERIMENT = [command for command in COMMANDS if "my-gpt2" in command]
HOW = {  # each is run: here as it stands, or by what is named
    "./run_all.sh": ".ci/run",
    "./run_all.sh tests": ".ci/run",
    "./run_all.sh tests --ddp torch.nn.parallel:DistributedDataParallel": "test_oracle",
    "./run_all.sh ddp": "test_run_all_by_name",
    "torchrun --nproc-per-node 2 ddp.py": "run_all.sh",
    "torchrun --nproc-per-node 2 ddp.py --device cuda": "here",
    f"torchrun --nnodes 2 --nproc-per-node 1 {C10D} ddp.py": "test_parallel_3d, with another file",
    f"torchrun --nnodes 2 --nproc-per-node 2 {C10D} parallel_3d.py --tp 2 --pp 2": "test_parallel_3d",
    "python ddp.py": "test_standalone",
    "python ddp.py --data README.md --steps 3": "here",
    "python bench.py ddp": "nobody: a benchmark prints a ratio, and never runs in the suite",
    **dict.fromkeys(EXPERIMENT, "test_the_experiment"),
}


def test_every_command_is_run_somewhere():
    assert set(COMMANDS) == HOW.keys()
    assert "ddp" in bench.ROWS
    assert (ROOT / ".ci" / "run").read_text().split("\n")[-3:-1] == [
        c for c, how in HOW.items() if how == ".ci/run"
    ]


@pytest.mark.parametrize("command", [command for command, how in HOW.items() if how == "here"])
def test_command(command):
    if "cuda" in command and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    file, *arguments = command[command.index("ddp.py") :].split()
    done = fork(file, *arguments, ranks=2 if "torchrun" in command else 1)
    assert done.returncode == 0, done.stderr
    assert "vs 1 device" in done.stdout


def test_the_experiment(tmp_path):
    """Its five commands, one after the other, with the smallest GPT-2 and, for two machines, four ranks on one."""
    texts = [
        json.dumps({"text": (ROOT / name).read_text()}) + "\n" for name in ("ddp.py", "README.md")
    ]
    (tmp_path / "oscar.jsonl").write_text("".join(texts))
    tokenise, *trainings = EXPERIMENT
    assert (
        launch([sys.executable, ROOT / "data.py", *tokenise.split()[2:]], tmp_path).returncode == 0
    )
    for command, ranks in zip(trainings, (2, 2, 1, 4), strict=True):
        _, flags = command.replace("gpt2-345m", "gpt2-tiny").split("parallel_3d.py ")
        done = fork(ROOT / "parallel_3d.py", *flags.split(), ranks=ranks, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^vs 1 device .* equal within 1e-09", done.stdout, re.MULTILINE)
        assert ("loaded      checkpoints after step 2" in done.stdout) == ("--load" in flags)


# ---- the snippets

(DIFF,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
SNIPPETS = [block.splitlines() for block in DIFF.split("\n\n")]
ON_A_CPU = hasattr(torch.cpu.Stream, "record_event")  # from torch 2.7 on
(USUAL,) = re.findall(r"```python\n(optimizer.*?)```", README, re.DOTALL)
ON_THE_SAME_DATA = (
    "DataParallel(model, devices)",
    "parallelize",
    "pipelin",
    "inject_lora",
)  # not data-parallel


def body_snippet(lines, signs):
    """Run what is marked so in a snippet, and the usual loop unless it has one. -> losses after it, or weights"""
    text = "\n".join(line[2:] for line in lines if line[:1] in signs)
    same = any(words in "\n".join(lines) for words in ON_THE_SAME_DATA)
    torch.manual_seed(0)
    model, rank = ddp.language_model(C=32, heads=2, layers=3), pool.rank()
    tokens = torch.randint(
        256, (3, 4, 17), generator=torch.Generator().manual_seed(0 if same else rank)
    )
    batches = [(part[:, :-1], part[:, 1:]) for part in tokens]
    names = {
        "torch": torch,
        "model": model,
        "batches": batches,
        "rank": rank,
        "devices": ["cpu", "cpu"],
    }
    names |= {"loss_fn": ddp.language_loss}
    if "peft" in text:
        names["peft"] = importlib.import_module("peft")
    with claims.default_group(pool.group()):
        usual = USUAL.partition("\n")[2] if "optimizer" in text else USUAL
        exec(text if "for inputs" in text else f"{text}\n{usual}", names)
        if "stage" in names:
            return [p.detach().sum().item() for p in names["stage"].parameters()]
        with torch.no_grad():
            return [
                ddp.language_loss(names["model"](inputs), targets).item()
                for inputs, targets in batches
            ]


@pytest.mark.parametrize("lines", SNIPPETS, ids=lambda lines: lines[0][2:])
def test_a_snippet_trains_after_the_import_as_before(lines):
    if not ON_A_CPU and any(words in lines[0] for words in ("fully_shard", "pipelining")):
        pytest.skip(f"PyTorch's own does not run on a CPU in torch {torch.__version__}")
    peft = "peft" in "\n".join(lines)  # which draws A otherwise
    if peft and importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    results = [pool.run(2, body_snippet, lines, signs) for signs in (" -", " +")]
    for before, after in zip(*results, strict=True):  # of each rank
        assert before == pytest.approx(after, abs=0.05 if peft else 1e-4)


def test_adding_a_technique(tmp_path):
    """As README says it, literally, in an empty directory."""
    (main,) = re.findall(r"```python\n(   def main.*?)```", README, re.DOTALL)
    text = (ROOT / "ddp.py").read_text()
    imports = text[text.index("import argparse") : text.index("# ----")]
    set_up = text[text.index("# Demo, set-up") :]
    (tmp_path / "mine.py").write_text(
        f'"""Mine."""\n{imports}\n\n{textwrap.dedent(main)}\n\n{set_up}'
    )
    done = fork("mine.py", "--steps", 2, ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bitwise equal over 2 steps" in done.stdout


def test_readme_is_short_and_its_pictures_are_there():
    assert len(README.splitlines()) <= 300
    for picture in re.findall(r"!\[[^]]+\]\((\S+)\)", README):
        assert "<svg" in (ROOT / picture).read_text()


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
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
"""


@pytest.mark.cpu
def test_another_class_by_an_option(tmp_path):
    """Its path is relative to where the user stands. To send after backward is not an error."""
    (tmp_path / "mine.py").write_text(MINE)
    arguments = ["tests", "--ddp", "mine.py:MyDDP", "-k", "mean_gradient or overlap"]

    done = run_script(ROOT / "run_all.sh", *arguments, cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^mean_gradient: holds$", done.stdout, re.MULTILINE)  # while it runs
    assert re.search(r"^  mean_gradient +holds +A step of SGD moves", done.stdout, re.MULTILINE)
    assert re.search(r"^  overlap +no +Communication begins", done.stdout, re.MULTILINE)
    assert "Results that do not hold: none." in done.stdout
    assert "Properties that it lacks: overlap." in done.stdout


@pytest.mark.cpu
def test_a_class_that_is_not_there_is_one_error(tmp_path):
    done = run_script(ROOT / "run_all.sh", "tests", "--ddp", "mine.py:MyDDP", cwd=tmp_path)

    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    expected = f"ERROR: --ddp mine.py:MyDDP: there is no file {tmp_path}/mine.py"
    assert (done.stdout, done.stderr.strip()) == ("", expected)


@pytest.mark.cpu
def test_help_says_how_an_implementation_is_called():
    done = run_script(ROOT / "run_all.sh", "tests", "--pipeline-schedule", "--help")

    assert done.returncode == 0, done.stderr
    assert "function that returns lists of actions. It runs nothing." in done.stdout
    assert "Ours is pipeline:build_schedule" in done.stdout


# ---- run_all.sh

GOOD = """
import os

if os.environ["RANK"] == "0":
    print("good · 2 ranks · cpu/gloo · 1.0M parameters · 1 steps")
    print("vs 1 device loss, gradients and parameters equal within 1e-09: 3e-11 over 1 steps")
    print("held/rank   params 1.0 MB   grads 2.0 MB   optimizer 3.0 MB      (1 device: 1.0 / 2.0 / 3.0)")
    print("sent/rank   4.0 MB per step      formula Ψ = 4.0 MB")
    print("time        5 ms per step      (1 device: 6)")
"""


def make_project(folder, **files):
    folder.mkdir()
    shutil.copy(ROOT / "run_all.sh", folder)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder / "run_all.sh"


def run_script(script, *arguments, cwd="/"):
    return launch(
        [script, *arguments],
        cwd,
        env={**PATH, "VIRTUAL_ENV": str(Path(sys.executable).parent.parent)},
    )


def test_run_all_goes_on_after_a_failure_and_counts(tmp_path):
    script = make_project(tmp_path / "a project", good=GOOD, bad="raise SystemExit(3)", bench="")
    done = run_script(script)
    assert done.returncode == 1
    *_, table, last = done.stdout.split("\n\n")
    assert [re.sub(r"  +", " | ", line) for line in table.splitlines()] == [
        "file | run | ranks | equal to one device | held/rank MB | sent/rank MB | time ms (1 device) | verdict",
        "bad.py | - | - | - | - | - | - | FAILED (1)",
        "good.py | good | 2 | within 1e-09 | 1.0 / 2.0 / 3.0 | 4.0 | 5 (6) | ok",
    ]
    assert last.startswith("Next: ")
    assert not (
        tmp_path / "a project" / ".venv"
    ).exists()  # the active environment had all it takes


def test_run_all_by_name(tmp_path):
    script = make_project(tmp_path / "project", good=GOOD, bad="raise SystemExit(3)")
    for arguments in (["-n", "1", "good"], ["good", "-n", "1"]):
        done = run_script(script, *arguments)
        assert done.returncode == 0
        assert "--nproc-per-node 1 good.py" in done.stdout
    for arguments, words in (
        (["nothing"], "error: there is no nothing.py here\n"),
        (["-n", "two", "good"], "error: -n two: give a number of ranks, 1 or more\n"),
        (["good", "-n"], "error: -n without a number: give a number of ranks, 1 or more\n"),
        (["good", "-m"], "error: there is no option -m; see ./run_all.sh --help\n"),
    ):
        wrong = run_script(script, *arguments)
        assert (wrong.returncode, wrong.stdout, wrong.stderr) == (1, "", words)
    assert run_script(script, "--help").stdout.startswith("./run_all.sh [-n RANKS] [NAME ...]")
