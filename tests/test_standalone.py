"""Each file works alone, in an empty directory, with torchrun and without. Text, lint, format."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import environment
import pytest
import torch
from launch import ALONE, ROOT, fork

NUMBER = r"(\d+\.\d)"
LINES = [
    r"[\w ]+ · {world} · \d+\.\dM parameters · 3 steps",
    r"step 1/3   loss \d+\.\d{{3}}",
    r"loss        \d+\.\d{{3}} → \d+\.\d{{3}}",
    r"vs 1 device loss, gradients and parameters "
    r"(bitwise equal|equal within 1e-09: \de-\d\d) over 3 steps",
    rf"held/rank   params {NUMBER} MB   grads {NUMBER} MB   optimizer {NUMBER} MB"
    r"      \(1 device: .*\)",
    rf"sent/rank   {NUMBER} MB per step      formula .+ = {NUMBER} MB",
    r"time        \d+ ms per step      \(1 device: \d+\)",
]

SCALED = {  # a line of each file's technique, and the same with a gradient that is a thousandth off
    "ddp": ("1 / divisor", "1.001 / divisor"),
    "data_parallel": ("return sum(losses) / N", "return sum(losses) * 1.001 / N"),
    "zero": ("received.chunk(self.N)", "(1.001 * received).chunk(self.N)"),
    "fsdp": ("total / self.divide_factor", "1.001 * total / self.divide_factor"),
    "tensor_parallel": ("grad_weight = grad_y", "grad_weight = 1.001 * grad_y"),
    "pipeline": ("[torch.ones_like(output)", "[1.001 * torch.ones_like(output)"),
    "amp": ("1.0 / scale", "1.001 / scale"),
    "lora": ("flat /= ranks", "flat /= ranks / 1.001"),
    "context_parallel": ("return grad_q, own_grad", "return 1.001 * grad_q, own_grad"),
    "flash_attention": ("dq * scale, dk", "1.001 * dq * scale, dk"),
    "checkpoint": ("total / parts", "1.001 * total / parts"),
    "muon": ("(total / self.N)", "(1.001 * total / self.N)"),
    "expert_parallel": ("gradient /= divisor", "gradient /= divisor / 1.001"),
    "diloco": ("total / self.N", "1.001 * total / self.N"),
    "collectives": ("total / demo.ranks", "1.001 * total / demo.ranks"),
}

# Most run on one rank below, in test_a_gradient_scaled_by_1_001_is_seen.
# On three ranks, which add in another order, ddp trains in float64.
DEMOS = [(path, 2) for path in ALONE] + [(path, 1) for path in ALONE if path.stem not in SCALED]
DEMOS += [(ROOT / "ddp.py", ranks) for ranks in (1, 3)]


def world(ranks):
    """As the demo prints it."""
    gpus = torch.cuda.device_count() if environment.DEVICE_TYPE == "cuda" else 0
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    backend = "nccl" if gpus >= ranks or (gpus and may_share) else "gloo"
    return f"{ranks} rank{'s' if ranks > 1 else ''} · {environment.DEVICE_TYPE}/{backend}"


@pytest.mark.parametrize(("path", "ranks"), DEMOS, ids=lambda value: getattr(value, "name", value))
def test_demo(path, ranks, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(path, folder)

    done = fork(path.name, "--steps", 3, ranks=ranks, cwd=folder)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no warning, no progress in a log, no thread that outlives its group
    assert [left.name for left in folder.iterdir()] == [path.name]
    lines = iter(done.stdout.splitlines())
    for line_of_any in LINES:  # in this order, with others between them
        pattern = line_of_any.format(world=world(ranks))
        matches = (re.fullmatch(pattern, line) for line in lines)
        match = next(filter(None, matches), None)
        assert match, f"no line {pattern!r} in\n{done.stdout}"
        if "sent" in pattern:
            measured, formula = match.groups()
            assert measured == formula


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.name)
def test_the_idea_alone_trains_as_one_device(path):
    done = fork(path, "--idea", "--steps", 2, ranks=2)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    headers = re.findall(r"^([\w ]+) · 2 ranks ·", done.stdout, re.MULTILINE)
    verdicts = re.findall(r"^vs 1 device .* (?<!NOT )equal .*over", done.stdout, re.MULTILINE)
    assert all(header.endswith(" idea") for header in headers)
    assert 1 <= len(headers) <= len(verdicts)


@pytest.mark.parametrize("name", ["parallel_3d.py", "parallel_5d.py"])
def test_no_thread_outlives_the_groups_of_a_grid(name):
    done = fork(name, "--steps", 1)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", SCALED)
def test_a_gradient_scaled_by_1_001_is_seen(name, tmp_path):
    """The demo ends with status 1 and says by how much it is off."""
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("before torch 2.9 the demo compares our Muon with itself on one rank")
    text = (ROOT / f"{name}.py").read_text()
    assert SCALED[name][0] in text
    (tmp_path / f"{name}.py").write_text(text.replace(*SCALED[name]))
    done = fork(f"{name}.py", "--steps", 1, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"vs 1 device .* NOT equal within \S+: \de-\d\d over 1 steps", done.stdout)


@pytest.mark.cpu
@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.name)
def test_the_demos_set_up_is_one_short_text(path):
    title, end = "# Demo, set-up: a small language model on real text", 'if __name__ == "__main__":'
    ours, ddps = (file.read_text().split(title)[1:] for file in (path, ROOT / "ddp.py"))
    assert ours == ddps
    assert len(ddps) == 1
    assert len((title + ddps[0]).partition(end)[0].rstrip().splitlines()) <= 235


@pytest.mark.cpu
@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
@pytest.mark.skipif(
    importlib.util.find_spec("ruff") is None,
    reason="ruff is not installed (requirements.txt has it)",
)
def test_ruff(arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
