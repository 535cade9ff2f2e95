"""A fault ends the run soon, with one clear message and a non-zero status. No process stays."""

import os
import re
import signal
import subprocess

import pytest
from launch import ROOT, TORCHRUN, fork, launch

pytestmark = pytest.mark.cpu

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


FAULTS = {
    'raise ValueError("broken on purpose")': "ValueError: broken on purpose",
    "os.kill(os.getpid(), signal.SIGKILL)": "Signal 9 (SIGKILL) received by PID",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_in_the_middle_of_backward(tmp_path, fault):
    done = run_script(tmp_path, fault)

    assert done.returncode != 0
    assert done.stderr.count(FAULTS[fault]) == 1
    assert "finished" not in done.stdout


def test_a_rank_with_one_batch_fewer(tmp_path):
    """A timeout ends the other rank. With as many steps on both, all is well."""
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT), fault="pass", steps="3"))
    assert fork("script.py", ranks=2, cwd=tmp_path).stdout.count("finished") == 2
    done = run_script(tmp_path, steps="3 - rank")
    assert done.returncode != 0
    lost = r"[Tt]imed out|[Tt]imeout|Connection closed by peer|Connection reset"
    assert re.search(lost, done.stderr)
    assert "finished 0" not in done.stdout


BAD = [  # bytes in the file "text", arguments, words of the error
    (None, "--data text", "error: --data text: no such file or directory"),
    (None, "--data .", "error: --data .: is a directory"),
    (0, "--data text", "error: --data text: 0 bytes; a sequence and its targets need 66"),
    (65, "--data text", "error: --data text: 65 bytes; "),
    (66, "--data text --steps 0", "error: --steps 0: give 1 or more"),
    (66, "--steps many", "argument --steps: invalid int value: 'many'"),
    (66, "--device cuda", "argument --device: invalid choice: 'cuda' (choose from"),
]


@pytest.mark.parametrize(("size", "arguments", "words"), BAD)
def test_bad_arguments_are_one_line(tmp_path, size, arguments, words):
    if size is not None:
        (tmp_path / "text").write_bytes(b"x" * size)

    done = fork(ROOT / "ddp.py", *arguments.split(), cwd=tmp_path)

    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert words in done.stderr


def test_data_of_one_sequence_is_enough(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 66)
    done = fork(ROOT / "ddp.py", "--data", "text", "--steps", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_under_torchrun_prints_no_traceback_of_ours(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node", "2", str(ROOT / "ddp.py"), "--steps", "100000"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **streams)
    assert "ddp" in process.stdout.readline()  # the ranks are running
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert 'ddp.py", line' not in stderr  # torchrun's own traceback does not name our files
