"""Run commands as a user does, for a bounded time, and assert that no process outlives them."""

import gc
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from contextlib import suppress
from pathlib import Path

from environment import free_port as free_port
from environment import of_torchrun
from pool import forkserver

ROOT = Path(__file__).parent.parent
SET_UP = "# Demo, set-up: a small language model on real text"
ALONE = sorted(path for path in ROOT.glob("*.py") if SET_UP in path.read_text())
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def ranks_of(path):
    """Return how many ranks run_all.sh starts for the file."""
    found = re.search(r"^RANKS = (\d+)", path.read_text(), re.MULTILINE)
    return int(found[1]) if found else 2


def launch(command, cwd, timeout=120, env=None):
    """Return a CompletedProcess. It is an AssertionError to take too long or leave a process."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, "LAUNCHED_BY_TEST": mark, **(env or {})},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(descendants(mark))
        stdout, stderr = process.communicate()
        raise AssertionError(f"{command} ran longer than {timeout} s\n{stdout}\n{stderr}") from None
    end = time.monotonic() + 20
    while (left := descendants(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    kill(left)
    assert not left, f"{command} left processes {left}"
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def kill(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def descendants(mark):
    """Return the processes that have `mark` in their environment; without a /proc, none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_alive = (folder / "cmdline").read_bytes() != b""
            if is_alive and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def fork(path, *arguments, ranks=1, cwd=ROOT, timeout=120):
    """As launch(torchrun … path arguments), without torchrun and without an import of torch."""
    command = [str(path), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / "stdout", Path(folder) / "stderr"]
        processes = []
        for environ in of_torchrun(ranks) if ranks > 1 else [{}]:
            run = (command, cwd, environ, outputs)
            processes.append(forkserver.Process(target=_run_as_main, args=run))
            processes[-1].start()
        status = status_of(processes, timeout)
        stdout, stderr = (output.read_text() for output in outputs)
    assert status is not None, f"{command} ran longer than {timeout} s\n{stdout}\n{stderr}"
    return subprocess.CompletedProcess(command, status, stdout, stderr)


def status_of(processes, timeout):
    """Return that of a rank that failed, which ends the others; 0; None if they take longer."""
    end = time.monotonic() + timeout
    statuses = [None]  # None: it runs
    while None in statuses and not any(statuses) and time.monotonic() < end:
        time.sleep(0.02)
        statuses = [process.exitcode for process in processes]
    failures = filter(None, statuses)
    failed = max(failures, key=abs, default=None)  # a rank that only loses a peer exits with 1
    time.sleep(0.3 if failed else 0)  # the others may print their last line
    for process in processes:
        process.kill()
        process.join()
    return failed or (None if None in statuses else 0)


def _run_as_main(command, cwd, environ, outputs):
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(cwd)
    os.environ.update(environ)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ResourceWarning)  # as in any process
    gc.disable()  # a cycle that holds a process group shows every time, not now and then
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        left = [thread for thread in threads if "gloo" in thread]
        if left:  # now and then such a thread aborts a process at its end
            print("gloo's threads run on:", left, file=sys.stderr)
