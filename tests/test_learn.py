"""`learn`: a skeleton is wrong as it stands, and our minimal version holds the lesson's claims."""

import re
import sys

import environment
import pytest
from claims import KINDS
from claims.verdicts import judge, names_of_claims
from launch import ROOT, launch
from learn import HINTS, LESSONS, SKELETONS
from learn import __main__ as lessons

MINIMAL = {  # where it is neither of these, our class or function
    "ddp": "section_one:DDP",
    "zero1": "section_one:Zero1",
    "zero2": "section_one:Zero2",
    "zero3": "section_one:Zero3",
    "fsdp": "section_one:fully_shard",
    "column-linear": "section_one:ColumnLinear",
    "row-linear": "section_one:RowLinear",
    "pipeline-schedule": "section_one:gpipe",
    "lora": "section_one:inject_lora",
    "activation-checkpoint": "section_one:checkpoint",
    "attention": "section_one:attention",
    "linear-cross-entropy": "section_one:cross_entropy",
    "all-reduce": "collectives:naive_all_reduce",
    "ring-attention": "context_parallel:naive_ring_attention",
    "muon": "section_one:Muon",
    "fp8-linear": "section_one:fp8_linear",
    "diloco": "section_one:DiLoCo",
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", LESSONS)
def test_a_skeleton_is_wrong_and_our_minimal_version_is_right(name):
    lesson = LESSONS[name]
    skeleton = f"{SKELETONS / name.replace('-', '_')}.py:{lesson.name}"
    minimal = MINIMAL.get(name, KINDS[name].ours)
    claims = lesson.claims.split()

    outcomes = {judge(name, claim, skeleton).outcome for claim in claims[:2]}
    verdicts = {claim: judge(name, claim, minimal) for claim in claims}

    assert outcomes != {"holds"}
    assert {claim: v for claim, v in verdicts.items() if v.outcome != "holds"} == {}


# They put together what the other lessons make, so a lesson is not needed.
BETWEEN_CLASSES = {"clip-grad-norm", "train-step", "checkpoint", "moe-mesh"}


@pytest.mark.cpu
def test_each_kind_is_a_lesson_whose_claims_exist_and_have_hints():
    assert KINDS.keys() - BETWEEN_CLASSES <= LESSONS.keys() <= KINDS.keys()
    for name, lesson in LESSONS.items():
        assert set(lesson.claims.split()) <= set(names_of_claims(name))
        assert set(lesson.claims.split()) <= HINTS.keys()
    used = {claim for lesson in LESSONS.values() for claim in lesson.claims.split()}
    assert used == HINTS.keys()


@pytest.mark.cpu
@pytest.mark.parametrize("name", LESSONS)
def test_a_skeleton_is_short_and_our_file_is_named(name):
    text = (SKELETONS / f"{name.replace('-', '_')}.py").read_text()
    assert 12 <= len(text.splitlines()) <= 40
    assert "You need" in text
    file, _, place = LESSONS[name].ours.partition(",")
    file, _, _ = file.partition(":")
    found = (ROOT / file).read_text()
    for word in re.findall(r"\b[A-Za-z]+_\w+|Sharded\w+|Naive\w+|Zero\w+|Vocab\w+", place):
        assert word in found


RIGHT = """
import torch.distributed as dist


def my_all_reduce(tensor):
    total = tensor.contiguous().clone()
    dist.all_reduce(total)
    tensor.copy_(total)
"""


@pytest.mark.cpu
def test_a_learner_goes_from_nothing_to_all_hold(tmp_path, monkeypatch, capsys):
    def learn(*arguments):
        command = [sys.executable, "-m", "onefile_parallel", "learn", *arguments]
        return launch(command, tmp_path, env={"PYTHONPATH": str(ROOT)})

    assert "all-reduce" in learn().stdout
    assert learn("all-reduce", "--check").returncode == 2  # nothing is there yet
    assert learn("all-reduce").returncode == 0
    begun = learn("all-reduce", "--check")
    (tmp_path / "my_all_reduce.py").write_text(RIGHT)
    monkeypatch.setattr(environment, "CALLED_FROM", str(tmp_path))
    status = lessons.check("all-reduce")  # in this process, whose workers are there already

    assert begun.returncode == 1
    assert "summed                   does not hold yet" in begun.stdout
    assert "Hint: " in begun.stdout
    done = capsys.readouterr().out
    assert status == 0, done
    assert "All hold. Yours has 8 lines." in done
    assert "Next: learn ddp" in done
    assert learn("all-reduce").returncode == 2  # it does not overwrite
