"""Run commands as a user would, bounded, and see that no process outlives them."""

import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from pathlib import Path

from pool import forkserver

ROOT = Path(__file__).parent.parent
NOT_TECHNIQUES = {"bench.py", "data.py", "estimate.py"}  # they train nothing, and so have no demo
TECHNIQUES = sorted(path for path in ROOT.glob("*.py") if path.name not in NOT_TECHNIQUES)
ALONE = [
    path for path in TECHNIQUES if path.name != "parallel_3d.py"
]  # whose point is to import the others
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def launch(command, cwd, timeout=120, env=None):
    """-> CompletedProcess with stdout and stderr as text; AssertionError on timeout, or when a process is left."""
    mark = f"LAUNCHED_BY_TEST={uuid.uuid4().hex}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), **dict([mark.split("=")])}
    streams = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    process = subprocess.Popen(
        list(map(str, command)), cwd=cwd, env=environment, start_new_session=True, **streams
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
            if (
                mark.encode() in (folder / "environ").read_bytes().split(b"\0")
                and (folder / "cmdline").read_bytes()
            ):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def fork(path, *arguments, ranks=1, cwd=ROOT, timeout=120):
    """As launch(torchrun … path arguments), where torchrun itself is not what is tested: nobody imports torch anew."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("localhost", 0))
        world = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": free.getsockname()[1],
            "WORLD_SIZE": ranks,
        }
        world = world | {"LOCAL_WORLD_SIZE": ranks} if ranks > 1 else {}
        free.close()
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        command, processes = [str(path), *map(str, arguments)], []
        for rank in range(ranks):
            environment = {**world, "RANK": rank, "LOCAL_RANK": rank} if world else {}
            processes.append(
                forkserver.Process(target=_run_as_main, args=(command, cwd, environment, outputs))
            )
            processes[-1].start()
        end = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        hanging = [process for process in processes if process.is_alive()]
        for process in hanging:
            process.kill()
            process.join()
        texts = [output.read_text() for output in outputs]
        assert not hanging, f"{command} ran longer than {timeout} s\n{texts[0]}\n{texts[1]}"
        return subprocess.CompletedProcess(
            command, max(process.exitcode for process in processes), *texts
        )


def _run_as_main(command, cwd, environment, outputs):
    for stream, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(cwd)
    os.environ.update({name: str(value) for name, value in environment.items()})
    sys.argv, sys.path[0] = command, str(Path(command[0]).resolve().parent)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ResourceWarning)  # as ever
    gc.disable()  # what holds a group in a cycle is to be seen each time, not now and then
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        threads = [
            (task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")
        ]
        if left := [
            thread for thread in threads if "gloo" in thread
        ]:  # now and then they abort a process at its end
            print("gloo's threads run on:", left, file=sys.stderr)
