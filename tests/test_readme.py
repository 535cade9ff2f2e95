"""Every command of the README and of the pages in docs/ runs; run_all.sh does what it says."""

import importlib.util
import json
import math
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import claims
import environment
import pool
import pytest
import torch
import torch.nn.functional as F
from launch import ROOT, fork, launch

import checkpoint
import ddp
import expert_parallel

README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
BLOCKS = re.findall(r"```bash\n(.*?)```", "".join(PAGES.values()), re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]

C10D = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
EXPERIMENT = [command for command in COMMANDS if "my-gpt2" in command]
HOW = {  # where each is run
    "./run_all.sh": ".ci/run",
    "./run_all.sh tests": ".ci/run",
    "./run_all.sh tests --ddp torch.nn.parallel:DistributedDataParallel": "test_oracle",
    "./run_all.sh tests --peers": "test_peers, without the libraries",
    "./run_all.sh ddp": "test_run_all_by_name_goes_on_after_a_failure_and_counts",
    "torchrun --nproc-per-node 2 ddp.py": "run_all.sh",
    "torchrun --nproc-per-node 2 ddp.py --device cuda": "here",
    f"torchrun --nnodes 2 --nproc-per-node 1 {C10D} ddp.py": "test_parallel_3d, with another file",
    f"torchrun --nnodes 2 --nproc-per-node 2 {C10D} parallel_3d.py --tp 2 --pp 2": (
        "test_parallel_3d"
    ),
    "torchrun --nproc-per-node 2 ddp.py --idea": "test_standalone, on three ranks",
    "torchrun --nproc-per-node 2 ddp.py --dtype bfloat16 --steps 5": "here",
    "python ddp.py --data README.md --steps 3": "here",
    "./run_all.sh tests --device cuda": "nowhere without a GPU",
    "python bench.py ddp --device cuda": "nowhere: a benchmark never runs in the suite",
    "python bench.py ddp": "nowhere: a benchmark never runs in the suite",
    "torchrun --nproc-per-node 2 tests/architectures.py": "test_hugging_face, some architectures",
    **dict.fromkeys(EXPERIMENT, "test_the_experiment"),
}


@pytest.mark.cpu
def test_every_command_is_run_somewhere():
    assert set(COMMANDS) == HOW.keys()
    in_ci = [command for command, how in HOW.items() if how == ".ci/run"]
    assert (ROOT / ".ci" / "run").read_text().split("\n")[-3:-1] == in_ci


def run(command, folder):
    """Without torchrun, on one machine, with the smallest GPT-2. Return what it prints."""
    numbers = re.findall(r"--n\S+ (\d)", command)  # of machines, and of ranks on each
    ranks = math.prod(map(int, numbers))
    small = command.replace("345m", "tiny")
    file, flags = re.search(r"(\w+\.py) (.*)", small).groups()
    done = fork(ROOT / file, *flags.split(), ranks=ranks, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", [command for command, how in HOW.items() if how == "here"])
def test_command(command):
    if "cuda" in command and environment.DEVICE_TYPE == "cpu":
        pytest.skip("needs --device cuda")
    equal = "vs 1 device loss, gradients and parameters bitwise equal"
    assert equal in run(command, folder=ROOT)


@pytest.mark.cpu
def test_the_experiment(tmp_path):
    """The five commands, one after the other."""
    lines = [json.dumps({"text": text}) + "\n" for text in PAGES.values()]
    (tmp_path / "oscar.jsonl").write_text("".join(lines))
    for command in EXPERIMENT:
        output = run(command, folder=tmp_path)
        is_equal = re.search(r"\nvs 1 device .* equal within 1e-09", output)
        assert is_equal or "data.py" in command
        assert ("loaded      checkpoints after step 2" in output) == ("--load" in command)


# ---- the snippets

PAGE = PAGES[ROOT / "docs/use_it.md"]
SNIPPETS = [block.splitlines() for block in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)]
(USUAL,) = re.findall(r"```python\n(optimizer.*?)```", PAGE, re.DOTALL)
NEW_OPTIMIZER, USUAL_LOOP = USUAL.split("\n", 1)
HAS_CPU_STREAMS = hasattr(torch.cpu.Stream, "record_event")  # from torch 2.7 on
IS_THERE = {  # a word of a snippet's first line: whether what it needs is installed
    "Muon": hasattr(torch.optim, "Muon"),  # from torch 2.9 on
    "fully_shard": HAS_CPU_STREAMS,
    "pipelining": HAS_CPU_STREAMS,
    "peft": importlib.util.find_spec("peft"),
}
# The snippets with these words are not data-parallel.
ON_THE_SAME_DATA = (
    "DataParallel(model, devices)",
    "tensor.parallel",
    "pipelin",
    "split_sequence",
    "inject_lora",
)


def program(lines, sign):
    """Return the lines before or after the change, and the usual loop unless there is one."""
    text = "\n".join(line[2:] for line in lines if line[:1] in (" ", sign))
    if "for inputs" in text:
        return text
    return f"{text}\n{USUAL_LOOP}" if "optimizer" in text else f"{text}\n{USUAL}"


def causal_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def body_snippet(lines, sign):
    """Return the losses after the snippet, or the sums of a stage's weights."""
    whole = "\n".join(lines)
    torch.manual_seed(0)
    model = ddp.language_model(C=32, heads=2, layers=3)
    model[4] = expert_parallel.MoE(32, 48, 4)
    has_same_data = any(words in whole for words in ON_THE_SAME_DATA)
    torch.manual_seed(0 if has_same_data else pool.rank())
    batches = [(part[:, :-1], part[:, 1:]) for part in torch.randint(256, (3, 4, 17))]
    names = {"torch": torch, "model": model, "batches": batches, "rank": pool.rank()}
    names |= {"devices": ["cpu", "cpu"], "loss_fn": ddp.language_loss}
    names["attention"] = causal_attention  # what the model calls, unless the snippet has its own
    if "peft" in whole:
        names["peft"] = importlib.import_module("peft")
    calls = {"scaled_dot_product_attention": lambda q, k, v, is_causal: names["attention"](q, k, v)}
    functional = SimpleNamespace(**vars(F) | calls)
    with claims.default_group(pool.group()), mock.patch.object(ddp, "F", functional):
        exec(program(lines, sign), names)
        if "stage" in names:
            return [parameter.detach().sum().item() for parameter in names["stage"].parameters()]
        names["attention"] = causal_attention  # on the whole sequence
        with torch.no_grad():
            return [ddp.language_loss(names["model"](x), y).item() for x, y in batches]


@pytest.mark.cpu
def test_the_readmes_example_is_one_of_the_snippets():
    (example,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    assert example.splitlines() in SNIPPETS


@pytest.mark.cpu
@pytest.mark.parametrize("lines", SNIPPETS, ids=lambda lines: lines[0][2:])
def test_a_snippet_trains_after_the_import_as_before(lines):
    for word, is_there in IS_THERE.items():
        if word in lines[0] and not is_there:
            pytest.skip(f"{word} is not installed, or not for CPUs (torch {torch.__version__})")

    theirs = pool.run(2, body_snippet, lines, "-")
    ours = pool.run(2, body_snippet, lines, "+")

    tolerance = 0.05 if "peft" in lines[0] else 1e-4  # peft draws another A
    for before, after in zip(theirs, ours, strict=True):  # of each rank
        assert before == pytest.approx(after, abs=tolerance)


@pytest.mark.cpu
def test_adding_a_technique(tmp_path):
    """As docs/adding_a_technique.md says it, literally, in an empty directory."""
    page = PAGES[ROOT / "docs/adding_a_technique.md"]
    (main,) = re.findall(r"```python\n(   def main.*?)```", page, re.DOTALL)
    ddps = (ROOT / "ddp.py").read_text()
    technique = ddps[ddps.index("# ----") : ddps.index("# Demo, set-up")]
    main = textwrap.dedent(main)
    (tmp_path / "mine.py").write_text(ddps.replace(technique, main))

    done = fork("mine.py", "--steps", 2, ranks=2, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "bitwise equal over 2 steps" in done.stdout


@pytest.mark.cpu
def test_what_the_pages_link_to_is_there():
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert link.startswith("http") or (page.parent / link).exists(), link


DEPTHS = (
    r"Read section 1 for the idea \((\d+) minutes\), to section (\d+) for the technique \((\d+)\), "
    r"and the rest to use it as a library \((\d+)\)"
)
SECTION = r"^# -{98}\n# (?:(\d+)\.|Demo)"


def row_of(name):
    """Return the file's row of the reading list: lines counted, minutes as in the docstring."""
    text = (ROOT / f"{name}.py").read_text()
    docstring = " ".join(text.split('"""')[1].split())
    idea, last, technique, file = re.search(DEPTHS, docstring).groups()
    starts = {}  # {number of the section: its first line}; the demo has the number 99
    for match in re.finditer(SECTION, text, re.MULTILINE):
        starts.setdefault(int(match[1] or 99), text.count("\n", 0, match.start()))
    idea_lines = starts[2] - starts[1]
    end = min(line for number, line in starts.items() if number > int(last))
    cells = f"{idea_lines} lines, {idea} min | {end - starts[1]}, {technique}"
    return f"| [{name}]({name}.py) | {cells} | {len(text.splitlines())}, {file} |"


@pytest.mark.cpu
def test_the_reading_list_has_the_lines_and_the_minutes_of_the_files():
    for name in re.findall(r"^\| \[(\w+)\]\(\w+\.py\) \| \d+ lines", README, re.MULTILINE):
        assert row_of(name) in README


@pytest.mark.cpu
def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200


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
    lines = re.sub("  +", " | ", done.stdout).splitlines()
    assert "mean_gradient: holds" in lines  # while it runs
    assert any(line.startswith(" | mean_gradient | holds | float64 | A step") for line in lines)
    assert any(line.startswith(" | overlap | no | Communication begins") for line in lines)
    assert lines[-3:-1] == ["1 of 2 claims hold.", "lacks: overlap"]


# ---- run_all.sh

GOOD = """
import os

if os.environ["RANK"] == "0":
    print("good · 2 ranks · cpu/gloo · 1.0M parameters in float32 · 1 step")
    print("vs 1 device loss, gradients and parameters equal within 1e-09: 3e-11 over 1 step")
    held = "params 1.0 MB   grads 2.0 MB   optimizer 3.0 MB"
    print(f"held/rank   {held}      (1 device: 1.0 / 2.0 / 3.0)")
    print("sent/rank   4.0 MB per step      formula Ψ = 4.0 MB")
    print("time        5 ms per step      (1 device: 6)")
"""


def run_script(script, *arguments, cwd="/"):
    """With torchrun and python of this environment."""
    here = Path(sys.executable).parent
    path = f"{here}:{os.environ['PATH']}"
    return launch([script, *arguments], cwd, env={"PATH": path, "VIRTUAL_ENV": str(here.parent)})


@pytest.mark.cpu
def test_run_all_goes_in_the_order_of_reading_and_with_the_ranks_of_the_file(tmp_path):
    shutil.copy(ROOT / "run_all.sh", tmp_path)
    for name in ("bench", "data_parallel", "amp", "new"):
        (tmp_path / f"{name}.py").write_text("RANKS = 3  # of a grid\n" * (name == "new"))

    done = run_script(tmp_path / "run_all.sh")

    assert re.findall(r"--nproc-per-node (\d+) (\w+)", done.stdout) == [
        ("2", "data_parallel"),
        ("2", "amp"),
        ("3", "new"),
    ]


@pytest.mark.cpu
def test_run_all_by_name_goes_on_after_a_failure_and_counts(tmp_path):
    folder = tmp_path / "a project"
    folder.mkdir()
    shutil.copy(ROOT / "run_all.sh", folder)
    (folder / "good.py").write_text(GOOD)
    (folder / "bad.py").write_text("raise SystemExit(3)")
    (folder / "other.py").write_text("")

    done = run_script(folder / "run_all.sh", "bad", "-n", "1", "good.py")

    assert done.returncode == 1
    assert done.stdout.startswith("Running 2 files, in about 1 min on two idle cores: bad good\n")
    assert "--nproc-per-node 1 good.py" in done.stdout
    *_, table, last = done.stdout.split("\n\n")
    assert [re.sub(r"  +", " | ", line) for line in table.splitlines()] == [
        "file | run | ranks | equal to one device | held/rank MB | sent/rank MB | "
        "time ms (1 device) | verdict",
        "bad.py | - | - | - | - | - | - | FAILED (1)",
        "good.py | good | 2 | within 1e-09 | 1.0 / 2.0 / 3.0 | 4.0 | 5 (6) | ok",
    ]
    assert last.startswith("Next: ")
    assert not (folder / ".venv").exists()  # the active environment has all that it needs


@pytest.mark.cpu
@pytest.mark.skipif(not shutil.which("taskset"), reason="taskset is not installed")
@pytest.mark.skipif(not importlib.util.find_spec("xdist"), reason="pytest-xdist is not installed")
@pytest.mark.parametrize(
    ("arguments", "cores", "expected"),
    [([], "0,1", True), ([], "0", False), (["-q"], "0,1", False)],
)
def test_the_whole_suite_runs_in_two_processes_on_two_cores(arguments, cores, expected, tmp_path):
    shutil.copy(ROOT / "run_all.sh", tmp_path)
    (tmp_path / "conftest.py").write_text("import sys\nprint('arguments:', sys.argv[1:])\n")

    done = run_script("taskset", "-c", cores, tmp_path / "run_all.sh", "tests", *arguments)

    assert ("'-n', '2'" in done.stdout + done.stderr) == expected


# ---- the script of docs/training_loops.md

(TRAIN,) = re.findall(
    r"```python\n(\"\"\"`torchrun.*?)```",
    PAGES[ROOT / "docs/training_loops.md"],
    re.DOTALL,
)


def script(kind, folder):
    text = TRAIN.replace("Zero2", "Zero2" if kind == "fsdp" else kind)
    if kind == "fsdp":  # a line becomes the one in the comment below it
        text = re.sub(r"\n.*\n( *)# (?=fsdp|optimizer|shards|pass)", r"\n\1", text)
    text = text.replace('"checkpoints"', repr(str(folder)))
    return re.sub(r"dist\.(init|destroy)_process_group\(.*\)", "", text)


def train(kind, folder, group, steps):
    """Run the script on the ranks of `group`. Return what it saves, from all ranks."""
    if torch.distributed.get_rank(group) >= 0:
        with claims.default_group(group), mock.patch("sys.argv", ["train.py", f"{steps}"]):
            exec(script(kind, folder), {})
    torch.distributed.barrier(pool.group())
    return checkpoint.load_whole(folder)


@pytest.mark.parametrize("kind", ["Zero1", "Zero2", "Zero3", "fsdp"])
@pool.on(3)
def test_a_run_of_two_ranks_is_saved_and_goes_on_on_others(kind, tmp_path):
    groups = [torch.distributed.new_group(range(ranks)) for ranks in (1, 2, 3)]
    expected = train(kind, tmp_path / "whole", groups[1], 8)
    assert len(expected) == 4 * 4  # weight, exp_avg, exp_avg_sq and step of four parameters
    for number, group in enumerate(groups):
        folder = tmp_path / f"{number}"
        train(kind, folder, groups[1], 4)
        found = train(kind, folder, group, 8)
        bound = 0.0 if number == 1 else 1e-12
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
