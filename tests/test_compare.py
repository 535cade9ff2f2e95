"""compare.py: right runs agree, and the origin of a planted mistake is named."""

import re

import compared
import pool
import pytest
import torch
import torch.distributed as dist
from claims.registry import default_group

import compare

RUNS = [value for value in vars(compared).values() if isinstance(value, type)]
RIGHT = [run for run in RUNS if hasattr(run, "one") and not hasattr(run, "origin")]
WRONG = [run for run in RUNS if hasattr(run, "origin")]


def train(directory, run, steps=2, noise=0):
    torch.manual_seed(0)
    how = {"rename": run.rename, "state": run.state, "noise": noise}
    with compare.record(directory, run.model, **how) as recording:
        for number in range(steps):
            run.step(number, recording)


def body(name, precision, folder):
    """Train on all ranks, and twice on the first. Return its Comparison, without the tensors."""
    run_class = getattr(compared, name)
    how = compared.PRECISIONS[precision]
    with default_group(pool.group()):
        train(folder / "many", run_class(*how))
        dist.barrier()
        if pool.rank():
            return None
        train(folder / "one", run_class.one(*how))
        train(folder / "noise", run_class.one(*how), noise=1)
    try:
        found = compare.compare(folder / "one", folder / "many", run_class.grid, folder / "noise")
    except compare.CannotCompare as error:
        return error
    return found.origin, compare.report(found)


def compared_runs(run_class, precision, folder):
    ranks = len(run_class.grid) * 2
    return pool.run(ranks, body, run_class.__name__, precision, folder)[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("run_class", RIGHT, ids=lambda run: run.__name__)
def test_right_runs_agree(run_class, precision, tmp_path):
    found = compared_runs(run_class, precision, tmp_path)
    assert not isinstance(found, compare.CannotCompare), found
    origin, lines = found
    assert origin is None, "\n".join(lines)


@pytest.mark.parametrize(
    ("run_class", "precision"),
    [(run, ["fp32", "fp64", "bf16"][number % 3]) for number, run in enumerate(WRONG)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_origin_of_a_mistake_is_named(run_class, precision, tmp_path):
    found = compared_runs(run_class, precision, tmp_path)
    assert not isinstance(found, compare.CannotCompare), found
    origin, lines = found
    assert origin is not None, "\n".join(lines)
    kind, name, *words = run_class.origin
    text = "\n".join(lines)
    assert re.fullmatch(kind, origin.kind), text
    assert re.fullmatch(name, origin.name), text
    for word in words:
        assert word in origin.note, text
