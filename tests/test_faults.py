"""What goes wrong ends with one clear message and a non-zero status, soon, and leaves no process behind."""

import re
import socket
import sys

import pytest
import torch
from launch import ROOT, TORCHRUN, fork, launch

SCRIPT = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist, torch.nn as nn
sys.path.insert(0, {root!r})
from ddp import DDP

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
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
    return launch([*TORCHRUN, "--nproc-per-node", 2, "script.py"], tmp_path, timeout=60)


def test_a_rank_that_raises_in_the_middle_of_backward(tmp_path):
    done = run_script(tmp_path, 'raise ValueError("broken on purpose")')
    assert done.returncode != 0
    assert done.stderr.count("ValueError: broken on purpose") == 1
    assert "finished" not in done.stdout


def test_a_rank_that_is_killed(tmp_path):
    done = run_script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL) received by PID" in done.stderr
    assert "finished" not in done.stdout


def test_a_rank_with_one_batch_fewer(tmp_path):
    """As many steps on each, and all is well; one fewer on one, and a timeout ends the other."""
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT), fault="pass", steps="3"))
    assert fork("script.py", ranks=2, cwd=tmp_path).stdout.count("finished") == 2
    done = run_script(tmp_path, steps="3 - rank")
    assert done.returncode != 0
    assert re.search(r"[Tt]imed out|[Tt]imeout|Connection closed by peer|Connection reset", done.stderr)
    assert "finished 0" not in done.stdout


def demo(tmp_path, *arguments, name="ddp.py"):
    done = fork(ROOT / name, *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


@pytest.mark.parametrize("size", [None, 0, 65])
def test_data_that_is_too_short(tmp_path, size):
    if size is not None:
        (tmp_path / "text").write_bytes(b"x" * size)
    words = f"error: --steps 30, --data text, {size or 0} bytes: needs 1 step, 66 bytes"
    assert words in demo(tmp_path, "--data", "text")


def test_data_of_one_sequence_is_enough(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 66)
    done = fork(ROOT / "ddp.py", "--data", "text", "--steps", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_numbers_that_make_no_sense(tmp_path):
    assert "--steps 0, " in demo(tmp_path, "--steps", "0")
    assert "argument --steps: invalid int value: 'many'" in demo(tmp_path, "--steps", "many")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there(tmp_path):
    assert "argument --device: invalid choice: 'cuda' (choose from" in demo(tmp_path, "--device", "cuda")


def test_a_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
        done = launch([*command, ROOT / "ddp.py"], tmp_path, timeout=60)
    assert done.returncode != 0
    assert "address already in use" in done.stderr.lower()
    assert str(port) in done.stderr
