"""Run commands as a user would, bounded, and see that no process outlives them."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_TECHNIQUES = {"bench.py", "data.py", "estimate.py"}  # they train nothing, and so have no demo
TECHNIQUES = sorted(path for path in ROOT.glob("*.py") if path.name not in NOT_TECHNIQUES)
ALONE = [path for path in TECHNIQUES if path.name != "parallel_3d.py"]  # whose point is to import the others
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def launch(command, cwd, timeout=120, env=None):
    """-> CompletedProcess with stdout and stderr as text; AssertionError on timeout, or when a process is left."""
    mark = f"LAUNCHED_BY_TEST={uuid.uuid4().hex}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), **dict([mark.split("=")])}
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for pid in descendants(mark):
            os.kill(pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"{command} ran longer than {timeout} s\n{stdout}\n{stderr}") from None
    end = time.monotonic() + 5
    while (left := descendants(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"{command} left processes {left}"
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def descendants(mark):
    """Processes that inherited `mark`, NAME=value, in their environment (where there is a /proc to see it in)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0") and (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
