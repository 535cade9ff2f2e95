"""Each file works alone: copied into an empty directory, under torchrun and without it."""

import re
import shutil
import sys

import pytest
from launch import ALONE, ROOT, TORCHRUN, launch

LINES = [
    r"\w+ · {ranks} · cpu/gloo · \d+\.\dM parameters · 3 steps",
    r"loss        \d+\.\d{{3}} → \d+\.\d{{3}}",
    r"vs 1 device (loss, gradients and parameters bitwise equal over 3 steps|max .*, equal within .*)",
    r"held/rank   params \S+ MB   grads \S+ MB   optimizer \S+ MB      \(1 device: \S+ / \S+ / \S+\)",
    r"sent/rank   (\S+) MB per step      formula \S+ = (\S+) MB",
    r"time        \d+ ms per step      \(1 device: \d+\)",
]


# `python FILE …`, and what the process is left with at its end.
WATCHED = """
import atexit, pathlib, runpy, sys

@atexit.register
def look():
    threads = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").glob("*")]
    print("gloo's threads:", [thread for thread in threads if "gloo" in thread])

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
NO_THREAD = "gloo's threads: []"  # one that runs on while Python ends aborts the process now and then


@pytest.mark.parametrize("launcher", ["torchrun", "python"])
@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.name)
def test_demo(path, launcher, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(path, folder)
    torchrun = launcher == "torchrun"
    command = [*TORCHRUN, "--nproc-per-node", "2"] if torchrun else [sys.executable, "-W", "error", "-c", WATCHED]
    done = launch([*command, path.name, "--steps", "3"], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no warnings, no progress in a log
    lines = done.stdout.splitlines()
    for line, pattern in zip(lines, LINES, strict=False):
        match = re.fullmatch(pattern.format(ranks="2 ranks" if torchrun else "1 rank"), line)
        assert match, f"{line!r} is not {pattern!r}"
        if "sent" in pattern:
            assert match.group(1) == match.group(2)
    assert len(lines) >= len(LINES)
    assert torchrun or lines[-1] == NO_THREAD
    assert [left.name for left in folder.iterdir()] == [path.name]


def test_no_thread_outlives_the_group_of_all_together():
    done = launch([sys.executable, "-c", WATCHED, "parallel_3d.py", "--steps", "1"], ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == NO_THREAD


def test_a_difference_is_seen(tmp_path):
    """The demo of a file that forgets to average ends with status 1 and says by how much it is off."""
    text = (ROOT / "ddp.py").read_text()
    broken = text.replace("1.0 / self._divisor)", "1.0)")
    assert broken != text
    (tmp_path / "ddp.py").write_text(broken)
    done = launch([*TORCHRUN, "--nproc-per-node", "2", "ddp.py", "--steps", "3"], tmp_path)
    assert done.returncode == 1
    assert re.search(r"vs 1 device .*max \|Δgradient\| \d\S+, .*NOT equal within 0", done.stdout)


def test_three_ranks(tmp_path):
    """More than two ranks sum in another order: the demo goes over to float64, and says what it found."""
    done = launch([*TORCHRUN, "--nproc-per-node", "3", ROOT / "ddp.py", "--steps", "2"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"vs 1 device max .*, equal within 1e-09 in float64", done.stdout)
