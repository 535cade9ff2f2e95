"""A fault ends the run soon, with one clear message and a non-zero status. No process stays."""

import os
import re
import signal
import subprocess

import pytest
from launch import ROOT, TORCHRUN, fork

pytestmark = pytest.mark.cpu

SCRIPT = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist, torch.nn as nn
sys.path.insert(0, {root!r})
from ddp import DDP

dist.init_process_group("gloo", timeout=timedelta(seconds=2))
rank = dist.get_rank()
torch.manual_seed(0)

class Fault(torch.autograd.Function):
    armed = False
    forward = staticmethod(lambda ctx, x: x.clone())
    @staticmethod
    def backward(ctx, gradient):
        if Fault.armed and rank == 1:
            {fault}
        return gradient

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.second(Fault.apply(self.first(x)))

model = DDP(Model(), bucket_cap_mb=1e-6)
for step in range({steps}):
    Fault.armed = step == 1
    model(torch.randn(4, 8)).sum().backward()
dist.barrier()
print("finished", rank)
dist.destroy_process_group()
"""


def run_script(tmp_path, fault="pass", steps="3"):
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT), fault=fault, steps=steps))
    return fork("script.py", ranks=2, cwd=tmp_path, timeout=60)


def test_without_a_fault_all_ranks_finish(tmp_path):
    assert run_script(tmp_path).stdout.count("finished") == 2


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ('raise ValueError("broken on purpose")', 1, "ValueError: broken on purpose"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
    ids=["raises", "is killed"],
)
def test_a_rank_that_fails_in_the_middle_of_backward_ends_the_run(tmp_path, fault, status, words):
    done = run_script(tmp_path, fault)

    assert done.returncode == status
    assert words in done.stderr
    assert "finished" not in done.stdout


def test_a_rank_with_one_batch_fewer_ends_the_run_by_a_timeout(tmp_path):
    done = run_script(tmp_path, steps="3 - rank")

    assert done.returncode != 0
    lost = r"[Tt]imed out|[Tt]imeout|Connection closed by peer|Connection reset"
    assert re.search(lost, done.stderr)
    assert "finished 0" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    {
        "--data nowhere": "--data nowhere: no such file or directory",
        "--data short": "--data short: 65 bytes; a sequence and its targets need 66",
        "--steps 0": "--steps 0: give 1 or more",
    }.items(),
)
def test_a_bad_argument_is_one_line(tmp_path, arguments, words):
    (tmp_path / "short").write_bytes(b"x" * 65)

    done = fork(ROOT / "ddp.py", *arguments.split(), cwd=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {words}\n")


def test_ctrl_c_under_torchrun_prints_no_traceback_of_ours(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node", "2", str(ROOT / "ddp.py"), "--steps", "100000"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **streams)
    assert "ddp" in process.stdout.readline()  # the ranks are running
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert 'ddp.py", line' not in stderr  # torchrun's own traceback does not name our files
