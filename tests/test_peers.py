"""The table of docs/peers.md: how it is made, without the libraries, and what it says."""

import ast
import re

import pytest
from launch import ROOT
from peers import table
from test_readme import run_script

PAGE = (ROOT / "docs" / "peers.md").read_text()
README = (ROOT / "README.md").read_text()
ROW = r"^\| ([\w-]+) \| ([\w.]+) \| ([\w-]+) \| (\d[\d |]*) \|$"
ROWS = [
    (*names, list(map(int, re.findall(r"\d+", cells))))
    for *names, cells in re.findall(ROW, PAGE, re.MULTILINE)
]
REPRODUCTIONS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("path", table.adapters(), ids=lambda path: path.stem)
def test_an_adapter_names_a_version_and_has_at_most_25_lines(path):
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text))
    lines = [line for line in text.splitlines() if line and docstring not in line]

    assert table.peers_in(path)
    assert len(lines) <= 25


ADAPTER = '''"""{}==1.0: in truth, this project's own lora."""
import lora as ours
def lora(*arguments, **how):
    return ours.inject_lora(*arguments, **how)
'''


def test_a_library_that_is_installed_is_tried(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table, "HERE", tmp_path)
    (tmp_path / "mine.py").write_text(ADAPTER.format("hypothesis"))

    table.main(["hypothesis/lora"])

    number = len(table.verdicts.names_of_claims("lora"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("| hypothesis | ")
    assert last.endswith(f" | lora | {number} | 0 | 0 | 0 | 0 |")


def test_a_library_that_is_missing_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table, "HERE", tmp_path)
    (tmp_path / "mine.py").write_text(ADAPTER.format("no-such-library"))

    table.main(["no-such-library"])

    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "not installed: pip install no-such-library==1.0"


def test_the_option_of_run_all():
    done = run_script(ROOT / "run_all.sh", "tests", "--peers", "no-such-library")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("\n| library | version | kind |")


# ---- the page


def test_the_page_has_a_row_for_each_adapter_and_counts_each_claim():
    found = {
        (f"{library}=={version}", kind): sum(counts) for library, version, kind, counts in ROWS
    }
    peers = table.all_peers()
    assert found.keys() == {(peer.requirement, peer.kind) for peer in peers}
    for (_, kind), number in found.items():
        assert number == len(table.verdicts.names_of_claims(kind)), kind


@pytest.mark.parametrize("text", REPRODUCTIONS, ids=lambda text: text.split()[-1])
def test_a_reproduction_is_short_and_needs_nothing_of_this_project(text):
    lines = text.splitlines()
    imported = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)

    ast.parse(text)
    assert len(lines) <= 30
    assert re.match(r"# .*(python|torchrun) .*\w+\.py$", lines[0])
    assert not any((ROOT / f"{name}.py").exists() for name in imported)


BETWEEN_CLASSES = (
    "vocab-cross-entropy",
    "vocab-embedding",
    "tp-block",
    "clip-grad-norm",
    "train-step",
    "checkpoint",
    "moe-mesh",
)


def test_the_page_begins_with_the_sums_of_what_lies_between_classes():
    rows = [counts for *_, kind, counts in ROWS if kind in BETWEEN_CLASSES]
    holds, wrong, refuses, lacks, not_offered = map(sum, zip(*rows, strict=True))
    number = sum(map(sum, rows))
    start = "".join(PAGE.splitlines()[:10])
    assert f"{number} claims about {len(rows)} implementations" in start
    refused = "is" if refuses == 1 else "are"
    assert f"{holds} hold, {wrong} are wrong, {refuses} {refused} refused" in start
    assert f"{lacks} are lacking, and {not_offered} are not offered" in start


def test_the_page_begins_with_what_holds_by_library():
    start = "".join(PAGE.splitlines()[:10])
    for library in {library for library, _, kind, _ in ROWS if kind in BETWEEN_CLASSES}:
        rows = [row[3] for row in ROWS if row[0] == library and row[2] in BETWEEN_CLASSES]
        holds = sum(counts[0] for counts in rows)
        number = sum(map(sum, rows))
        name = {"torch": "PyTorch", "deepspeed": "DeepSpeed"}.get(library, library)
        assert f"{name} {holds} of {number}" in start


def test_the_readme_has_the_sums_of_the_page():
    counts = [counts for *_, counts in ROWS]
    holds, wrong, refuses, lacks, not_offered = map(sum, zip(*counts, strict=True))
    assert f"{holds} hold, {wrong} are wrong, {refuses} are refused" in README
    assert f"{lacks} are lacking, and {not_offered} are not offered" in README
