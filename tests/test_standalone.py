"""Each file works alone, in an empty directory. Its demo can fail. Text, lint, format."""

import ast
import re
import shutil
import subprocess
import sys

import environment
import pytest
from launch import ALONE, ROOT, SET_UP, TORCHRUN, fork, launch, ranks_of

NUMBER = r"(\d+\.\d)"
LINES = [
    r"[\w ]+{idea} · {ranks} ranks · {device}/\w+ · \d+\.\dM parameters in {dtype} · {steps} steps",
    r"step 1/{steps}   loss \d+\.\d{{3}}",
    r"loss        \d+\.\d{{3}} → \d+\.\d{{3}}",
    r"vs 1 device loss, gradients and parameters "
    r"(bitwise equal|equal within 1e-09: \de-\d\d) over {steps} steps",
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
    # Three ranks add in another order than one device, so ddp trains in float64.
    ranks = 3 if path.name == "ddp.py" else ranks_of(path)
    steps = 3 if path.name == "checkpoint.py" else 2  # it stops after 1/3 and 2/3

    done = fork(path.name, "--steps", steps, *flags, ranks=ranks, cwd=folder)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no warning, no progress in a log, no thread that outlives its group
    assert [left.name for left in folder.iterdir()] == [path.name]
    lines = iter(done.stdout.splitlines())
    names = {"idea": " idea" * len(flags), "ranks": ranks, "device": environment.DEVICE_TYPE}
    names["steps"] = steps
    is_bitwise = "parameters bitwise equal" in done.stdout
    for line_of_any in LINES:  # in this order, with others between them
        pattern = line_of_any.format(**names, dtype="float32" if is_bitwise else "float64")
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
    assert re.search(r"vs 1 device .* NOT equal within \S+: \de-\d\d over 1 step\n", done.stdout)


@pytest.mark.cpu
def test_torchrun_ends_with_the_error_of_a_demo(tmp_path):
    """It comes first, too, but torchrun reports 40 lines after it."""
    command = [*TORCHRUN, "--nproc-per-node", 2, ROOT / "ddp.py", "--steps", 0]

    done = launch(command, tmp_path)

    lines = done.stderr.strip().splitlines()
    # A slow rank is ended by torchrun, which warns of that.
    first, *_, last, rule = [line for line in lines if not line.startswith("W")]
    assert first == "error: --steps 0: give 1 or more"
    assert last.endswith(first)
    assert set(rule) == {"="}


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["zero", "parallel_3d", "parallel_5d"])
def test_help_says_what_the_file_runs(name):
    words = {"zero": "Zero1, then", "parallel_3d": "GPT-2 on a grid", "parallel_5d": "Mixtral on"}
    done = fork(ROOT / f"{name}.py", "--help")
    assert words[name] in done.stdout


@pytest.mark.cpu
def test_the_demos_set_up_is_one_short_text():
    texts = {path.read_text().partition(SET_UP)[2] for path in ALONE}
    (text,) = texts
    set_up, _, _ = text.partition('if __name__ == "__main__":')
    assert 100 < len(set_up.splitlines()) <= 237


# ---- a reader who stops at the end of the technique has read all that runs so far

RULE = "# " + "-" * 98
LAST = re.compile(r"to\s+section\s+(\d+)\s+for\s+the\s+technique")
TECHNIQUES = [path for path in sorted(ROOT.glob("*.py")) if LAST.search(path.read_text())]


def functions_and_classes(text):
    """Yield (number of its section, node) for each of them, up to the demo."""
    text, _, _ = text.partition(f"\n{RULE}\n# Demo")
    titles = list(re.finditer(rf"^{RULE}\n# (\d+)\.", text, re.MULTILINE))
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            line_of = {int(title[1]): text.count("\n", 0, title.start()) for title in titles}
            before = [number for number, line in line_of.items() if line < node.lineno]
            yield max(before, default=0), node


def names_in(node):
    """Yield the names in the code, except in methods of one statement: they hand on."""
    if isinstance(node, ast.Name):
        yield node.id
    for child in ast.iter_child_nodes(node):
        is_method = isinstance(node, ast.ClassDef) and isinstance(child, ast.FunctionDef)
        if not (is_method and len(child.body) == 1):
            yield from names_in(child)


def called_from_below(text):
    """Return what the technique calls of the sections after it, without checks."""
    last = int(LAST.search(text)[1])
    called = set()
    below = set()
    for number, node in functions_and_classes(text):
        if number > last:
            below.add(node.name)
        elif number > 0:
            called.update(names_in(node))
    return {name for name in called & below if not name.startswith("check_")}


@pytest.mark.cpu
@pytest.mark.parametrize("path", TECHNIQUES, ids=lambda path: path.name)
def test_the_technique_calls_nothing_that_stands_below_it_except_checks(path):
    assert called_from_below(path.read_text()) == set()


@pytest.mark.cpu
def test_a_call_of_something_below_is_seen():
    text = (ROOT / "ddp.py").read_text()
    changed = text.replace("check_gradient(self, parameter)", "GradBucket(self, parameter)")
    assert called_from_below(changed) == {"GradBucket"}
    assert {path.name for path in ALONE} <= {path.name for path in TECHNIQUES}


@pytest.mark.cpu
def test_checks_return_nothing_and_one_of_them_has_one_text():
    texts = set()
    for path in TECHNIQUES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("check_"):
                returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
                assert not any(returned), f"{path.name}: {node.name} returns something"
                if node.name == "check_same_on_all_ranks":
                    texts.add(ast.get_source_segment(text, node))
    assert len(texts) == 1


@pytest.mark.cpu
@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(arguments):
    pytest.importorskip("ruff", reason="ruff is not installed (requirements.txt has it)")
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
