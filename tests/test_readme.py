"""Every command of the README and of the pages in docs/ runs; run_all.sh does what it says."""

import importlib.util
import json
import os
import re
import shutil
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import claims
import environment
import pool
import pytest
import torch
from launch import ROOT, fork, launch

import bench
import checkpoint
import ddp
import expert_parallel
import fsdp
import zero

README = (ROOT / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
BLOCKS = re.findall(r"```bash\n(.*?)```", README + "".join(PAGES.values()), re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
# torchrun and python of this environment
PATH = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

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
    "torchrun --nproc-per-node 2 ddp.py --idea": "test_standalone, fewer steps",
    "torchrun --nproc-per-node 2 ddp.py --dtype bfloat16 --steps 5": "here",
    "python ddp.py --data README.md --steps 3": "here",
    "./run_all.sh tests --device cuda": "nowhere without a GPU",
    "python bench.py ddp --device cuda": "nowhere: a benchmark never runs in the suite",
    "python bench.py ddp": "nowhere: a benchmark never runs in the suite",
    "torchrun --nproc-per-node 2 docs/architectures.py": "test_hugging_face, some architectures",
    **dict.fromkeys(EXPERIMENT, "test_the_experiment"),
}


@pytest.mark.cpu
def test_every_command_is_run_somewhere():
    assert set(COMMANDS) == HOW.keys()
    assert "ddp" in bench.ROWS
    in_ci = [command for command, how in HOW.items() if how == ".ci/run"]
    assert (ROOT / ".ci" / "run").read_text().split("\n")[-3:-1] == in_ci


@pytest.mark.parametrize("command", [command for command, how in HOW.items() if how == "here"])
def test_command(command):
    if "cuda" in command and environment.DEVICE_TYPE == "cpu":
        pytest.skip("needs --device cuda")
    file, *arguments = command[command.index("ddp.py") :].split()

    done = fork(file, *arguments, ranks=2 if "torchrun" in command else 1)

    assert done.returncode == 0, done.stderr
    assert "vs 1 device loss, gradients and parameters bitwise equal" in done.stdout


@pytest.mark.cpu
def test_the_experiment(tmp_path):
    """The five commands, one after the other, with the smallest GPT-2 and on one machine."""
    texts = [(ROOT / name).read_text() for name in ("ddp.py", "README.md")]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "oscar.jsonl").write_text("".join(lines))
    tokenise, *trainings = EXPERIMENT

    done = fork(ROOT / "data.py", *tokenise.split()[2:], cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    for command, ranks in zip(trainings, (2, 2, 1, 4), strict=True):
        _, flags = command.replace("gpt2-345m", "gpt2-tiny").split("parallel_3d.py ")
        done = fork(ROOT / "parallel_3d.py", *flags.split(), ranks=ranks, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^vs 1 device .* equal within 1e-09", done.stdout, re.MULTILINE)
        assert ("loaded      checkpoints after step 2" in done.stdout) == ("--load" in flags)


# ---- the snippets

(DIFF,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
SNIPPETS = [block.splitlines() for block in DIFF.split("\n\n")]
(USUAL,) = re.findall(r"```python\n(optimizer.*?)```", README, re.DOTALL)
NEW_OPTIMIZER, USUAL_LOOP = USUAL.split("\n", 1)
HAS_CPU_STREAMS = hasattr(torch.cpu.Stream, "record_event")  # from torch 2.7 on
# The snippets with these words are not data-parallel.
ON_THE_SAME_DATA = (
    "DataParallel(model, devices)",
    "tensor.parallel",
    "pipelin",
    "split_sequence",
    "inject_lora",
)


def program(lines, signs):
    """Return the lines that begin with one of the signs, and the usual loop unless there is one."""
    text = "\n".join(line[2:] for line in lines if line[:1] in signs)
    if "for inputs" in text:
        return text
    return f"{text}\n{USUAL_LOOP}" if "optimizer" in text else f"{text}\n{USUAL}"


def make_mixture_of_experts():
    return torch.nn.Sequential(
        torch.nn.Embedding(256, 32), expert_parallel.MoE(32, 48, 4), torch.nn.Linear(32, 256)
    )


def with_attention_of(names):
    """In this context, ddp.py's model calls names["attention"]."""

    def attention(q, k, v, is_causal):
        return names["attention"](q, k, v)

    functional = vars(torch.nn.functional) | {"scaled_dot_product_attention": attention}
    return mock.patch.object(ddp, "F", SimpleNamespace(**functional))


def body_snippet(lines, signs):
    """Return the losses after the snippet, or the sums of a stage's weights."""
    text = program(lines, signs)
    whole = "\n".join(lines)
    has_same_data = any(words in whole for words in ON_THE_SAME_DATA)
    torch.manual_seed(0)
    model = ddp.language_model(C=32, heads=2, layers=3)
    if "expert_parallel" in whole:
        model = make_mixture_of_experts()
    torch.manual_seed(0 if has_same_data else pool.rank())
    batches = [(part[:, :-1], part[:, 1:]) for part in torch.randint(256, (3, 4, 17))]
    names = {"torch": torch, "model": model, "batches": batches, "rank": pool.rank()}
    names |= {"devices": ["cpu", "cpu"], "loss_fn": ddp.language_loss}
    if "peft" in text:
        names["peft"] = importlib.import_module("peft")
    has_attention = "def attention" in whole
    with claims.default_group(pool.group()):
        with with_attention_of(names) if has_attention else nullcontext():
            exec(text, names)
        if "stage" in names:
            return [parameter.detach().sum().item() for parameter in names["stage"].parameters()]
        with torch.no_grad():
            losses = [ddp.language_loss(names["model"](x), y) for x, y in batches]
            return [loss.item() for loss in losses]


@pytest.mark.cpu
@pytest.mark.parametrize("lines", SNIPPETS, ids=lambda lines: lines[0][2:])
def test_a_snippet_trains_after_the_import_as_before(lines):
    if "Muon" in lines[0] and not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    needs_streams = any(words in lines[0] for words in ("fully_shard", "pipelining"))
    if needs_streams and not HAS_CPU_STREAMS:
        pytest.skip(f"PyTorch's own does not run on a CPU in torch {torch.__version__}")
    is_peft = "peft" in "\n".join(lines)
    if is_peft and importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")

    theirs = pool.run(2, body_snippet, lines, " -")
    ours = pool.run(2, body_snippet, lines, " +")

    for before, after in zip(theirs, ours, strict=True):  # of each rank
        assert before == pytest.approx(after, abs=0.05 if is_peft else 1e-4)  # peft draws another A


@pytest.mark.cpu
def test_adding_a_technique(tmp_path):
    """As docs/adding_a_technique.md says it, literally, in an empty directory."""
    (main,) = re.findall(r"```python\n(   def main.*?)```", PAGES["adding_a_technique"], re.DOTALL)
    text = (ROOT / "ddp.py").read_text()
    imports = text[text.index("import argparse") : text.index("# ----")]
    set_up = text[text.index("# Demo, set-up") :]
    (tmp_path / "mine.py").write_text(
        f'"""Mine."""\n{imports}\n\n{textwrap.dedent(main)}\n\n{set_up}'
    )

    done = fork("mine.py", "--steps", 2, ranks=2, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "bitwise equal over 2 steps" in done.stdout


@pytest.mark.cpu
@pytest.mark.parametrize("page", ["README", *PAGES])
def test_what_a_page_links_to_is_there(page):
    folder = ROOT if page == "README" else ROOT / "docs"
    text = README if page == "README" else PAGES[page]
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (folder / link).exists(), link


DEPTHS = (
    r"Read section 1 for the idea \((\d+) minutes\), to section \d+ for the technique \((\d+)\), "
    r"and the rest to use it as a library \((\d+)\)"
)
READING = r"^\| \[(\w+)\]\(\w+\.py\) \| (\d+) \| (\d+) \| (\d+) \|$"


@pytest.mark.cpu
def test_docstrings_and_the_reading_list_agree():
    for name, *minutes in re.findall(READING, README, re.MULTILINE):
        docstring = (ROOT / f"{name}.py").read_text().split('"""')[1]
        assert re.search(DEPTHS, " ".join(docstring.split())).groups() == tuple(minutes), name


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
    assert re.search(
        r"^  mean_gradient +holds +float64 +A step of SGD moves", done.stdout, re.MULTILINE
    )
    assert re.search(r"^  overlap +no +Communication begins", done.stdout, re.MULTILINE)
    assert "1 of 2 claims hold.\nlacks: overlap\n" in done.stdout


# ---- run_all.sh

GOOD = """
import os

if os.environ["RANK"] == "0":
    print("good · 2 ranks · cpu/gloo · 1.0M parameters · 1 steps")
    print("vs 1 device loss, gradients and parameters equal within 1e-09: 3e-11 over 1 steps")
    held = "params 1.0 MB   grads 2.0 MB   optimizer 3.0 MB"
    print(f"held/rank   {held}      (1 device: 1.0 / 2.0 / 3.0)")
    print("sent/rank   4.0 MB per step      formula Ψ = 4.0 MB")
    print("time        5 ms per step      (1 device: 6)")
"""


def make_project(folder, **files):
    """Return run_all.sh in a new directory, with these files NAME.py."""
    folder.mkdir()
    shutil.copy(ROOT / "run_all.sh", folder)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder / "run_all.sh"


def run_script(script, *arguments, cwd="/"):
    in_this_environment = {**PATH, "VIRTUAL_ENV": str(Path(sys.executable).parent.parent)}
    return launch([script, *arguments], cwd, env=in_this_environment)


@pytest.mark.cpu
def test_run_all_by_name_goes_on_after_a_failure_and_counts(tmp_path):
    script = make_project(tmp_path / "a project", good=GOOD, bad="raise SystemExit(3)", other="")

    done = run_script(script, "bad", "-n", "1", "good.py")

    assert done.returncode == 1
    assert "--nproc-per-node 1 good.py" in done.stdout
    *_, table, last = done.stdout.split("\n\n")
    assert [re.sub(r"  +", " | ", line) for line in table.splitlines()] == [
        "file | run | ranks | equal to one device | held/rank MB | sent/rank MB | "
        "time ms (1 device) | verdict",
        "bad.py | - | - | - | - | - | - | FAILED (1)",
        "good.py | good | 2 | within 1e-09 | 1.0 / 2.0 / 3.0 | 4.0 | 5 (6) | ok",
    ]
    assert last.startswith("Next: ")
    assert not (script.parent / ".venv").exists()  # the active environment has all that it needs


WRONG = {
    "nothing": "there is no nothing.py",
    "-n two good": "-n two: give a number of ranks",
    "good -n": "-n without a number",
    "good -m": "there is no option -m",
}


@pytest.mark.cpu
@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_argument_of_run_all_is_one_line(arguments, tmp_path):
    script = make_project(tmp_path / "project", good=GOOD)
    done = run_script(script, *arguments.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(f"error: {WRONG[arguments]}.*\n", done.stderr)


@pytest.mark.cpu
def test_run_all_explains_itself():
    done = run_script(ROOT / "run_all.sh", "--help")
    assert done.stdout.startswith("./run_all.sh [-n RANKS] [NAME ...]")


RECIPES = r"```python\n((?:from checkpoint|step = load).*?)```"
SAVE, LOAD = re.findall(RECIPES, PAGES["training_loops"], re.DOTALL)


def make_names(kind, group):
    """Return what the recipe calls by name."""
    model = ddp.language_model(C=20, heads=2, layers=2).double()
    if kind == "fsdp":
        for layer in (*model, model):
            fsdp.fully_shard(layer, process_group=group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = getattr(zero, kind)(model, torch.optim.AdamW, group, lr=1e-2)
    return {"model": model, "optimizer": optimizer, "fsdp": fsdp}


def train(names, batches):
    """Step along the mean gradient of the batches."""
    for batch in batches:
        loss = ddp.language_loss(names["model"](batch[:, :-1]), batch[:, 1:])
        (loss / len(batches)).backward()
    names["optimizer"].step()
    names["optimizer"].zero_grad()


def recipe(text, kind, folder, names):
    text = text.replace('"checkpoints"', repr(str(folder)))
    if kind == "fsdp":
        text = re.sub("shards = .*\n    # with fsdp: ", "", text)
        text = text.replace("optimizer.sync_parameters()", "")
    exec(text, names)


@pytest.mark.parametrize("kind", ["Zero1", "Zero3", "fsdp"])
@pool.on(2)
def test_a_run_of_two_ranks_is_saved_and_goes_on_bitwise_on_one(kind, tmp_path):
    rank = pool.rank()
    alone = [torch.distributed.new_group([r]) for r in range(2)][rank]
    batches = torch.randint(256, (4, 2, 3, 9))  # the same on both ranks
    with claims.default_group(pool.group()):
        names = make_names(kind, pool.group())
        for step, batch in enumerate(batches, start=1):
            train(names, [batch[rank]])
            recipe(SAVE, kind, tmp_path / f"step {step}", names | {"step": step})
    with claims.default_group(alone):
        names = make_names(kind, alone)
        train(names, [batches[3, 0]])  # creates the optimizer's state
        recipe(SAVE.partition("save(")[0], kind, "", names)
        recipe(LOAD, kind, tmp_path / "step 2", names)
        for batch in batches[2:]:
            train(names, list(batch))
        recipe(SAVE, kind, tmp_path / f"alone {rank}", names | {"step": 4})
    assert names["step"] == 2
    found = checkpoint.load_whole(tmp_path / f"alone {rank}")
    expected = checkpoint.load_whole(tmp_path / "step 4")
    assert found.keys() == expected.keys()
    assert len(found) == 4 * len(list(names["model"].parameters()))
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
