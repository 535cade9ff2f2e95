"""compare.py: right runs agree, and the origin of a planted mistake is named."""

import copy
import itertools
import re
import shutil

import compared
import pool
import pytest
import torch
import torch.distributed as dist
from claims.registry import default_group
from launch import ROOT, fork

import compare

RUNS = [value for value in vars(compared).values() if isinstance(value, type)]
WRONG = [run for run in RUNS if hasattr(run, "origin")]
RIGHT = [run for run in RUNS if hasattr(run, "one") and run not in WRONG]


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
    if run_class.shards and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip(f"torch {torch.__version__} has fully_shard for GPUs only")
    found = compared_runs(run_class, precision, tmp_path)
    assert not isinstance(found, compare.CannotCompare), found
    origin, lines = found
    assert origin is None, "\n".join(lines)


def errors_of_seeds(folder):
    """Return the largest error with each of ten noise runs, on the first rank."""
    how = compared.PRECISIONS["fp32"]
    with default_group(pool.group()):
        train(folder / "many", compared.FusedTensorParallel(*how))
        dist.barrier()
        if pool.rank():
            return None
        train(folder / "one", compared.OneFused(*how))
        errors = []
        for seed in range(1, 11):
            train(folder / "noise", compared.OneFused(*how), noise=seed)
            found = compare.compare(
                folder / "one",
                folder / "many",
                grid="tp=2",
                noise=folder / "noise",
            )
            largest = max(result.error for result in found.results)
            errors.append(largest)
    return errors


def test_a_right_run_agrees_with_every_seed_of_the_noise(tmp_path):
    """Adam makes a whole step of a gradient that is nearly zero, so few numbers move far."""
    errors = pool.run(2, errors_of_seeds, tmp_path)[0]
    assert max(errors) < 4


def with_a_precision():
    """Each mistake has one."""
    precisions = itertools.cycle(["fp32", "fp64", "bf16"])
    return list(zip(WRONG, precisions, strict=False))


def name_of(value):
    return getattr(value, "__name__", value)


@pytest.mark.parametrize(("run_class", "precision"), with_a_precision(), ids=name_of)
def test_the_origin_of_a_mistake_is_named(run_class, precision, tmp_path):
    found = compared_runs(run_class, precision, tmp_path)
    assert not isinstance(found, compare.CannotCompare), found
    origin, lines = found
    text = "\n".join(lines)
    assert origin is not None, text
    kind, name, *words = run_class.origin
    assert re.fullmatch(kind, origin.kind), text
    assert re.fullmatch(name, origin.name), text
    for word in words:
        assert word in origin.note, text


# ---- what the tool refuses, and what it does not change


class Pair(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 16)
        self.drop = torch.nn.Dropout(dropout)
        self.second = torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.second(self.drop(self.first(x).tanh()))


def record_pair(
    directory,
    noise=0,
    lr=0.1,
    scale=1.0,
    dropout=0.0,
    rename=None,
    steps=1,
    make=Pair,
):
    """Train on one device, and record it."""
    model = make(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(noise)
    with compare.record(directory, model, noise=noise, rename=rename) as recording:
        for _ in range(steps):
            optimizer.zero_grad()
            output = model(torch.randn(6, 8, generator=generator))
            loss = scale * output.square().mean()
            recording.see("loss", loss)
            loss.backward()
            optimizer.step()
    return model


@pytest.fixture
def runs(tmp_path):
    record_pair(tmp_path / "one")
    record_pair(tmp_path / "noise", noise=1)
    return tmp_path


def origin_of(folder, many="many", **options):
    one = folder / "one"
    return compare.compare(one, folder / many, noise=folder / "noise", **options).origin


def refusal(*arguments, **options):
    with pytest.raises(compare.CannotCompare) as caught:
        compare.compare(*arguments, **options)
    return str(caught.value)


def test_recording_changes_no_bit_and_no_random_number(tmp_path):
    """Without its hooks, the same training leaves the same weights, and the same next number."""
    recorded = record_pair(tmp_path / "one", dropout=0.5, steps=3)
    number = torch.rand(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("see", "on_output", "before_step", "after_step", "before_forward", "finish"):
            patch.setattr(compare.Recording, name, lambda *_: None)
        plain = record_pair(tmp_path / "two", dropout=0.5, steps=3)
    assert torch.equal(number, torch.rand(1))
    expected = dict(plain.named_parameters())
    for name, parameter in recorded.named_parameters():
        assert torch.equal(parameter, expected[name])


def test_a_recording_is_read_with_weights_only(runs):
    page = torch.load(runs / "one" / "rank0.pt", weights_only=True)
    kinds = {kind for _, kind, _ in page["tensors"]}
    assert kinds == set(compare.KINDS)
    assert (0, "forward", "first") in page["tensors"]


def test_a_run_agrees_with_itself_without_noise(runs):
    assert compare.compare(runs / "one", runs / "one").origin is None


def test_without_noise_a_difference_cannot_be_judged(runs):
    record_pair(runs / "many", scale=1.5)
    assert "--noise" in refusal(runs / "one", runs / "many")


@pytest.mark.parametrize("scale", [4.0, 50.0, 96.0])
def test_gradients_that_are_a_whole_number_of_times_larger_are_scaled(scale, runs):
    record_pair(runs / "many", scale=scale)
    found = compare.compare(runs / "one", runs / "many", noise=[runs / "noise"])
    states = {each.state for each in found.results if each.kind == "backward"}
    assert states == {"right"}


def test_several_ranks_are_no_single_device(runs):
    shutil.copy(runs / "one" / "rank0.pt", runs / "one" / "rank1.pt")
    assert "ONE has 2 ranks" in refusal(runs / "one", runs / "noise")


def test_a_grid_of_another_size(runs):
    assert "not of 1 ranks" in refusal(runs / "one", runs / "one", "dp=2,tp=2")


def test_a_noise_run_without_noise(runs):
    assert "noise=1" in refusal(runs / "one", runs / "one", noise=runs / "one")


def test_names_that_match_nothing(runs):
    record_pair(runs / "many", rename={"first": "a", "second": "b", "drop": "c"})
    text = refusal(runs / "one", runs / "many", noise=runs / "noise")
    assert "no counterpart" in text
    rename = {"a": "first", "b": "second", "c": "drop"}
    assert origin_of(runs, rename=rename) is None
    back = {old: new for new, old in rename.items()}
    assert origin_of(runs, rename=back) is None


def test_one_layer_that_matches_nothing(runs):
    record_pair(runs / "many", rename={"second": "b"})
    assert "no counterpart" in refusal(runs / "one", runs / "many", noise=runs / "noise")


def test_gradients_that_are_all_zero(tmp_path):
    record_pair(tmp_path / "one", scale=0.0)
    assert "zero" in refusal(tmp_path / "one", tmp_path / "one")


def test_nothing_that_trains(tmp_path):
    record_pair(tmp_path / "one", lr=0.0)
    assert "no parameter changes" in refusal(tmp_path / "one", tmp_path / "one")


def test_nan_on_both_sides(tmp_path):
    record_pair(tmp_path / "one", scale=float("nan"))
    assert "NaN" in refusal(tmp_path / "one", tmp_path / "one")


@pytest.mark.parametrize("scale", ["nan", "inf"])
def test_numbers_that_are_not_finite_are_a_difference(scale, runs):
    record_pair(runs / "many", scale=float(scale))
    origin = origin_of(runs)
    where = (origin.kind, origin.name)
    assert where == ("forward", "loss")
    assert origin.note == "NaN or infinite numbers on rank 0"


class Masked(Pair):
    """A module returns a mask with infinities."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.mask = torch.nn.Identity()

    def forward(self, x):
        infinities = torch.full((6, 4), -torch.inf)
        mask = self.mask(infinities.triu(1))
        return (super().forward(x) + mask).softmax(-1)


@pytest.mark.parametrize("shift", [0, 1])
def test_integers_may_be_shown(shift, tmp_path):
    for name in ("one", "noise", "many"):
        torch.manual_seed(0)
        model = Pair()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        noise = int(name == "noise")
        with compare.record(tmp_path / name, model, noise=noise) as recording:
            numbers = torch.arange(6)
            if name == "many":
                numbers += shift
            recording.see("numbers", numbers)
            output = model(torch.randn(6, 8))
            loss = output.square().mean()
            loss.backward()
            optimizer.step()
    origin = origin_of(tmp_path)
    if shift:
        assert origin.name == "numbers"
    else:
        assert origin is None


class Checkpointed(Pair):
    def forward(self, x):
        hidden = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
        return self.second(hidden.tanh())


def test_noise_of_a_model_with_checkpoints(tmp_path):
    """A checkpoint counts the tensors that are kept for backward."""
    record_pair(tmp_path / "one", make=Checkpointed)
    record_pair(tmp_path / "noise", noise=1, make=Checkpointed)
    assert origin_of(tmp_path, many="one") is None


class InTurn(torch.nn.Module):
    """Both modules are called twice, so that each depends on the other."""

    share = 1.0  # of the input that a rank has

    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8, bias=False)
        self.second = torch.nn.Linear(8, 8, bias=False)
        self.act = torch.nn.Tanh()

    def forward(self, x):
        x = x * self.share
        for _ in range(2):
            x = self.second(self.first(x))
        return self.act(x)


def test_the_origin_is_found_among_modules_that_depend_on_each_other(tmp_path, monkeypatch):
    record_pair(tmp_path / "one", make=InTurn)
    record_pair(tmp_path / "noise", noise=1, make=InTurn)
    many = tmp_path / "many"
    monkeypatch.setattr(InTurn, "share", 0.75)
    record_pair(many, make=InTurn)
    shutil.move(many / "rank0.pt", many / "rank1.pt")
    monkeypatch.setattr(InTurn, "share", 0.25)
    record_pair(many, make=InTurn)
    origin = origin_of(tmp_path, grid="tp=2")
    assert (origin.kind, origin.name) == ("forward", "first")
    assert "all-reduce is missing" in origin.note


def test_infinities_of_a_mask_are_equal(tmp_path):
    record_pair(tmp_path / "one", make=Masked)
    record_pair(tmp_path / "noise", noise=1, make=Masked)
    assert origin_of(tmp_path, many="one") is None


class Routed(Pair):
    """A token goes one way or another. On one device there is a tie, which rounding breaks."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.twin = copy.deepcopy(self.first)

    def forward(self, x):
        here = self.first(x)
        is_less = here[:, :1] < self.twin(x)[:, :1]
        return self.second(here * (1.0 - 2.0 * is_less))


def test_routing_that_rounding_decides_is_refused(tmp_path):
    record_pair(tmp_path / "one", make=Routed)
    record_pair(tmp_path / "noise", noise=1, make=Routed)
    record_pair(tmp_path / "many", scale=1e3, make=Routed)
    text = refusal(tmp_path / "one", tmp_path / "many", noise=tmp_path / "noise")
    assert "other experts, in step 0 second" in text


def drop_tokens(folder):
    """Capacity is per rank, so that two ranks keep other tokens than one device does."""
    with default_group(pool.group()):
        run = compared.ExpertParallel(*compared.PRECISIONS["fp32"])
        limit_capacity(run)
        train(folder / "many", run)
        dist.barrier()
    if pool.rank() == 0:
        for name in ("one", "noise"):
            run = compared.OneMoE(*compared.PRECISIONS["fp32"])
            limit_capacity(run)
            train(folder / name, run, noise=int(name == "noise"))


def limit_capacity(run):
    for block in run.net.blocks:
        block.mlp.capacity_factor = 0.75


def test_a_capacity_that_drops_other_tokens_is_refused(tmp_path):
    pool.run(2, drop_tokens, tmp_path)
    text = refusal(tmp_path / "one", tmp_path / "many", "dp=2", tmp_path / "noise")
    assert "a capacity to None" in text
    assert "blocks.0.mlp.capacity_factor = 0.75" in text


def test_dropout_is_refused_if_the_runs_differ(tmp_path):
    record_pair(tmp_path / "one", dropout=0.5)
    record_pair(tmp_path / "many", noise=2, dropout=0.5)
    text = refusal(tmp_path / "one", tmp_path / "many")
    assert "dropout" in text
    assert "drop.p = 0.5" in text


def test_a_noise_run_with_another_mask_is_no_measure(tmp_path):
    record_pair(tmp_path / "one", dropout=0.5)
    record_pair(tmp_path / "noise", noise=1, dropout=0.5)
    text = refusal(tmp_path / "one", tmp_path / "one", noise=tmp_path / "noise")
    assert "more than rounding" in text


def test_the_command_and_its_exit_statuses(runs):
    record_pair(runs / "many", scale=1.5)
    command = [ROOT / "compare.py", runs / "one", runs / "many"]
    differ = fork(*command, "--noise", runs / "noise", "--followers", 1)
    assert differ.returncode == 1
    assert "\n> step 0  forward   loss " in differ.stdout
    assert differ.stdout.splitlines()[-1].endswith("more")
    assert fork(*command).returncode == 2
    assert fork(*command, "--grid", "dp").returncode == 2
    same = fork(ROOT / "compare.py", runs / "one", runs / "one", "--noise", runs / "noise")
    assert same.returncode == 0, same.stdout
    assert same.stdout.splitlines()[-1] == "AGREE."


@pytest.mark.parametrize("flags", [[], ["--idea"]], ids=["technique", "idea"])
def test_the_demo_finds_what_it_plants(flags, tmp_path):
    shutil.copy(ROOT / "compare.py", tmp_path)
    done = fork("compare.py", *flags, ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "> " in done.stdout
    assert done.stdout.endswith("planted     layers.1.down found\n")
