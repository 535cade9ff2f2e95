"""Each file works alone, in an empty directory. Its demo can fail. Text, lint, format."""

import re
import shutil
import subprocess
import sys

import environment
import pytest
from launch import ALONE, ROOT, fork

NUMBER = r"(\d+\.\d)"
LINES = [
    r"[\w ]+{idea} · {ranks} ranks · {device}/\w+ · \d+\.\dM parameters · 3 steps",
    r"step 1/3   loss \d+\.\d{{3}}",
    r"loss        \d+\.\d{{3}} → \d+\.\d{{3}}",
    r"vs 1 device loss, gradients and parameters "
    r"(bitwise equal|equal within 1e-09: \de-\d\d) over 3 steps",
    rf"held/rank   params {NUMBER} MB   grads {NUMBER} MB   optimizer {NUMBER} MB"
    r"      \(1 device: .*\)",
    rf"sent/rank   {NUMBER} MB per step      formula .+ = {NUMBER} MB",
    r"time        \d+ ms per step      \(1 device: \d+\)",
]


@pytest.mark.parametrize("flags", [[], ["--idea"]], ids=["technique", "idea"])
@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.name)
def test_demo(path, flags, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(path, folder)
    ranks = 3 if path.name == "ddp.py" else 2  # three add in another order: it trains in float64

    done = fork(path.name, "--steps", 3, *flags, ranks=ranks, cwd=folder)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no warning, no progress in a log, no thread that outlives its group
    assert [left.name for left in folder.iterdir()] == [path.name]
    lines = iter(done.stdout.splitlines())
    names = {"idea": " idea" * len(flags), "ranks": ranks, "device": environment.DEVICE_TYPE}
    for line_of_any in LINES:  # in this order, with others between them
        pattern = line_of_any.format(**names)
        matches = (re.fullmatch(pattern, line) for line in lines)
        match = next(filter(None, matches), None)
        assert match, f"no line {pattern!r} in\n{done.stdout}"
        if "sent" in pattern:
            assert match[1] == match[2]


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.name)
def test_a_gradient_that_is_off_by_a_thousandth_is_seen(path, tmp_path):
    """The demo ends with status 1 and says by how much it is off."""
    text = path.read_text()
    plain = "plain = self.step_on_one_device(*batch)"
    assert plain in text
    changed = f"{plain}; plain[2].mul_(1.001)"  # the gradient of the second parameter
    (tmp_path / path.name).write_text(text.replace(plain, changed))

    done = fork(path.name, "--steps", 1, cwd=tmp_path)

    assert done.returncode == 1
    assert re.search(r"vs 1 device .* NOT equal within \S+: \de-\d\d over 1 steps", done.stdout)


@pytest.mark.cpu
def test_the_demos_set_up_is_one_short_text():
    title = "# Demo, set-up: a small language model on real text"
    texts = {path.read_text().partition(title)[2] for path in ALONE}
    (text,) = texts
    set_up, _, _ = text.partition('if __name__ == "__main__":')
    assert 100 < len(set_up.splitlines()) <= 237


@pytest.mark.cpu
@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(arguments):
    pytest.importorskip("ruff", reason="ruff is not installed (requirements.txt has it)")
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
