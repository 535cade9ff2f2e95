"""parallel_3d.py: every grid trains as one device does, and sends and holds what the formulas say."""

import argparse
import json
import math
import os
import re
import shutil
import subprocess

import pool
import pytest
import torch
import torch.distributed as dist
from launch import ROOT, TORCHRUN, fork, launch

import ddp
import parallel_3d
import tensor_parallel
import zero
from parallel_3d import GPT2, MODELS, Grid, Trainer, plain_model, train_on_one_device

FILE = ROOT / "parallel_3d.py"
GRIDS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]  # (tp, pp) of 4 ranks
SMALL = GPT2(4, 32, 4, V=37, P=16)  # a vocabulary that neither 2 nor 4 ranks can split evenly
SGD = "--optimizer SGD --lr 0.5"
HALF, ALL = 1.4, 100.0  # of the targets are masked: all of the first sequences, of all


def options(flags="", dtype="float64"):
    """What the command line gives, of small batches of 8 sequences of 8 tokens."""
    parser = argparse.ArgumentParser()
    for flag, keywords in {**parallel_3d.FLAGS, "--seed": {"type": int, "default": 0}}.items():
        parser.add_argument(flag, **keywords)
    sizes = "--sequence-length 8 --global-batch-size 8 --warmup 2 --lr 0.01 --clip-grad 0.5 --dtype"
    return parser.parse_args([*sizes.split(), dtype, *flags.split()])


def batches(args, steps=3, masked=0.0):
    """Global batches, with targets of -100 where masked: more of them in the first sequences than in the last."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        tokens = torch.randint(SMALL.V, (args.global_batch_size, args.sequence_length + 1), generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        chance = masked * torch.linspace(1.5, 0.1, args.global_batch_size)[:, None]
        targets[torch.rand(targets.shape, generator=generator) < chance] = -100
        yield inputs, targets


def assert_same_on(trainer, axis, tensors):
    """Bitwise, on all ranks along an axis."""
    for tensor in tensors:
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(trainer.grid.groups[axis]))]
        dist.all_gather(everyone, tensor.detach().contiguous(), group=trainer.grid.groups[axis])
        assert all(torch.equal(everyone[0], other) for other in everyone), axis


def assert_replicas_agree(trainer):
    """What several ranks hold: the same on all dp, what is not split on all tp, the embedding on both ends of pp."""
    split = {trainer.stages.get_parameter(name) for name, *_ in tensor_parallel.split_parameters(trainer.stages)}
    assert_same_on(trainer, "dp", trainer.parameters)
    assert_same_on(trainer, "tp", [parameter for parameter in trainer.parameters if parameter not in split])
    if trainer.grid.pp > 1 and trainer.tied is not None:
        assert_same_on(trainer, "ends", [trainer.tied])


def body_equal(tp, pp, flags, masked):
    args = options(flags)
    trainer = Trainer(SMALL, Grid(tp, pp), args)
    plain = train_on_one_device(SMALL, args, batches(args, masked=masked))
    for number, batch in enumerate(batches(args, masked=masked)):
        ours, (loss, norm, model) = trainer.step(*batch), next(plain)
        assert ours == pytest.approx((loss, norm), rel=1e-11), number
        assert trainer.optimizer.param_groups[0]["lr"] == args.lr * (0.5 if number == 0 else 1)
        expected = model.state_dict()
        for name, value in trainer.full_state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-11)
    everyone = [None] * 4
    dist.all_gather_object(everyone, list(trainer.full_state_dict()))
    assert set().union(*everyone) == expected.keys()
    assert_replicas_agree(trainer)


EQUAL = [(grid, f"--zero1 --sequence-parallel {SGD}", 0.4) for grid in GRIDS]
EQUAL += [((1, 4), "", 0.0), ((2, 2), "", ALL), ((1, 1), SGD, HALF), ((1, 2), SGD, HALF)]
EQUAL += [((2, 1), "--sequence-parallel --micro-batch-size 1", 0.4), ((2, 1), "--zero1 --clip-grad 0", HALF)]
EQUAL += [((2, 2), f"--schedule {name} --sequence-parallel", 0.4) for name in ("gpipe", "zero_bubble")]
EQUAL += [((2, 2), f"--schedule interleaved_1f1b --stages-per-rank 2 {flag}", 0.0) for flag in ("", "--zero1")]
EQUAL += [((2, 1), "--schedule interleaved_1f1b --stages-per-rank 2", 0.0)]
EQUAL += [((1, pp), "--dropout 0.3", 0.4) for pp in (1, 4)]  # the masks of one device, on any stage and pipeline
EQUAL += [((1, 2), "--dropout 0.3 --schedule zero_bubble --zero1", 0.0)]


@pytest.mark.parametrize(("grid", "flags", "masked"), EQUAL, ids=str)
def test_equal(grid, flags, masked):
    """Losses, gradient norms and parameters are one device's after every step, up to the order of sums."""
    pool.run(4, body_equal, *grid, flags, masked)


def test_dropout_has_a_seed_for_each_layer_and_micro_batch():
    model, tokens, seeds = plain_model(SMALL, dropout=0.3), torch.arange(16).view(2, 8), []
    first = model(tokens)
    assert not torch.equal(first, model(tokens))
    model.microbatch = 0
    for layer in model:
        layer.register_forward_hook(lambda *_: seeds.append(torch.initial_seed()))
    assert torch.equal(first, model(tokens))
    model(tokens)
    assert len(set(seeds)) == 2 * len(model)


def body_dropout(tp, pp, flags):
    args, results = options(f"--dropout 0.3 {flags}"), []
    for _ in range(2):
        trainer = Trainer(SMALL, Grid(tp, pp), args)
        results.append([trainer.step(*batch) for batch in batches(args)])
        assert_replicas_agree(trainer)
    assert results[0] == results[1]  # bitwise from run to run
    block = next(layer for layer in trainer.stages[0] if isinstance(layer, parallel_3d.Block))
    torch.manual_seed(0)
    with block.region():
        inside = torch.rand(8)
    everyone = [torch.empty_like(inside) for _ in range(tp)]
    dist.all_gather(everyone, inside, group=trainer.grid.groups["tp"])
    assert len({tuple(numbers.tolist()) for numbers in everyone}) == tp
    assert_same_on(trainer, "tp", [torch.rand(8)])


@pytest.mark.parametrize(("grid", "flags"), [((2, 1), ""), ((2, 2), "--sequence-parallel --zero1")], ids=str)
def test_dropout(grid, flags):
    """Ranks that hold the same stay the same; the heads of each draw masks of their own."""
    pool.run(4, body_dropout, *grid, flags)


def body_skipped(flags, dtype):
    args = options(f"{flags} --clip-grad 1", dtype)
    trainer = Trainer(SMALL, Grid(2, 2), args)
    scale = trainer.scaler.get_scale()
    for number, batch in enumerate(batches(args, steps=3)):
        before = [parameter.detach().clone() for parameter in trainer.parameters]
        if number == 1 and pool.rank() == 3:
            weight = trainer.stages[0][0].linear1.weight
            hook = weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        _, norm = trainer.step(*batch)
        if number == 1 and pool.rank() == 3:
            hook.remove()
        same = [torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True)]
        assert math.isfinite(norm) == (number != 1)
        assert all(same) if number == 1 else not any(same[:2]), number
    assert trainer.scaler.get_scale() == (scale / 2 if dtype == "float16" else 1)
    assert all(parameter.isfinite().all() for parameter in trainer.parameters)


@pytest.mark.parametrize(("flags", "dtype"), [("", "bfloat16"), ("--zero1", "float32"), ("--zero1", "float16")])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(flags, dtype):
    """One rank's slice of a weight overflows: no rank takes the step, all take the next; fp16 halves its scale."""
    pool.run(4, body_skipped, flags, dtype)


def body_low_precision(tp, pp, flags, dtype):
    args, exact = options(flags, dtype), options(flags, "float32")
    trainer = Trainer(SMALL, Grid(tp, pp), args)
    roundoff = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
    plain = train_on_one_device(SMALL, exact, batches(exact))
    for number, (batch, (loss, norm, _)) in enumerate(zip(batches(args), plain, strict=True)):
        ours = trainer.step(*batch)
        assert ours[0] != loss
        assert abs(ours[0] - loss) < 4 * roundoff * loss, number
        assert number > 0 or abs(ours[1] - norm) < 4 * roundoff * norm  # later ones are of other weights
    assert_replicas_agree(trainer)


LOW = [((2, 1), SGD, "float16"), ((1, 2), "", "bfloat16"), ((1, 2), f"--zero1 {SGD}", "float16")]


@pytest.mark.parametrize(("grid", "flags", "dtype"), [*LOW, ((2, 1), "--zero1", "bfloat16")], ids=str)
def test_low_precision(grid, flags, dtype):
    """Within a few units of roundoff of float32; with SGD, which sees a gradient that is still scaled."""
    pool.run(4, body_low_precision, *grid, flags, dtype)


def body_grids():
    rank, pair, apart = pool.rank(), pool.rank() // 2 * 2, pool.rank() % 2
    for tp, pp, near, far in ((2, 1, "tp", "dp"), (1, 2, "dp", "pp"), (2, 2, "tp", "pp")):
        grid = Grid(tp, pp)
        neighbours = {axis: dist.get_process_group_ranks(group) for axis, group in grid.groups.items() if group}
        assert (neighbours[near], neighbours[far]) == ([pair, pair + 1], [apart, apart + 2])
        assert (grid.at[near], grid.at[far]) == (apart, pair // 2)
        assert grid.sum(torch.tensor(float(rank)), "tp", "dp", "pp") == 6


def test_rank_order():
    """Megatron's: tensor innermost, then data, then pipeline."""
    pool.run(4, body_grids)


def steps_of(trainer, numbers, args):
    return [trainer.step(*batch) for number, batch in enumerate(batches(args, steps=6)) if number in numbers]


def body_goes_on(folder, save_at, save_flags, load_at, load_flags, dtype):
    """Save after three steps and go on; load, and go on. -> whether they are bitwise equal, how much losses differ"""
    args = options(save_flags, dtype)
    undisturbed = Trainer(SMALL, Grid(*save_at), args)
    results = steps_of(undisturbed, range(3), args)
    undisturbed.scaler.update(4.0)  # in fp16
    parallel_3d.save(undisturbed, folder)
    ours, results = list(results), results + steps_of(undisturbed, range(3, 6), args)
    args = options(load_flags, dtype)
    trainer = Trainer(SMALL, Grid(*load_at), args)
    with torch.no_grad():
        for parameter in trainer.parameters:
            parameter.mul_(1.5)  # not what the seed gives
    parallel_3d.load(trainer, folder)
    ours += steps_of(trainer, range(3, 6), args)
    assert_replicas_agree(trainer)
    assert trainer.scaler.get_scale() == undisturbed.scaler.get_scale()
    if save_at != load_at:
        plain = list(train_on_one_device(SMALL, args, batches(args, steps=6)))
        for (loss, norm), theirs in zip(ours, plain, strict=True):
            assert (loss, norm) == pytest.approx(theirs[:2], rel=1e-12)
        for name, value in trainer.full_state_dict().items():
            torch.testing.assert_close(value, plain[-1][2].state_dict()[name], rtol=0, atol=1e-12)
    same = all(torch.equal(a, b) for a, b in zip(trainer.parameters, undisturbed.parameters, strict=False))
    return same and ours == results, max(abs(a[0] - b[0]) for a, b in zip(ours, results, strict=True))


INTERLEAVED = "--schedule interleaved_1f1b --stages-per-rank 2"
GOES_ON = [
    ((1, 1), "--zero1 --dropout 0.3", (1, 4), "--dropout 0.3"),  # the same masks on any stage and pipeline
    ((2, 1), "--zero1", (2, 2), "--sequence-parallel"),
    ((1, 4), "", (2, 1), "--zero1"),
    ((2, 1), "", (1, 2), f"--zero1 {INTERLEAVED}"),
    ((2, 2), "", (1, 1), ""),
]


@pytest.mark.parametrize(("save_at", "save_flags", "load_at", "load_flags"), GOES_ON, ids=str)
def test_a_run_goes_on_at_another_grid(save_at, save_flags, load_at, load_flags, tmp_path):
    """Within 1e-12 of one device that never stopped: weights, moments, step counts, lr, place in data, dropout."""
    pool.run(4, body_goes_on, tmp_path, save_at, save_flags, load_at, load_flags, "float64")


@pytest.mark.parametrize(
    ("grid", "flags", "dtype"),
    [
        ((2, 1), "--zero1 --dropout 0.3", "float64"),
        ((2, 2), "--dropout 0.3 --sequence-parallel", "bfloat16"),
        ((1, 2), f"--zero1 {INTERLEAVED}", "float16"),
    ],
    ids=str,
)
def test_a_run_goes_on_bit_by_bit_at_the_same_grid(grid, flags, dtype, tmp_path):
    """Dropout of tensor-parallel heads, fp32 masters and the loss scale included."""
    assert all(same for same, _ in pool.run(4, body_goes_on, tmp_path, grid, flags, grid, flags, dtype))


@pytest.mark.parametrize(("flags", "to"), [("", "--zero1"), ("--zero1", "")])
def test_masters_are_kept_with_and_without_zero1(flags, to, tmp_path):
    """In bf16: had they been rounded to it, the next steps would be further apart than the sums' order makes them."""
    for _, difference in pool.run(4, body_goes_on, tmp_path, (2, 1), flags, (2, 1), to, "bfloat16"):
        assert difference < 0.01


def body_refused(folder):
    args = options()
    trainer = Trainer(SMALL, Grid(2, 2), args)
    trainer.scaler = parallel_3d.amp.GradScaler("cpu", init_scale=8.0)
    parallel_3d.save(trainer, folder)
    other = Trainer(SMALL, Grid(1, 1), options("--global-batch-size 16"))
    with pytest.raises(ValueError, match=r"--global-batch-size 16: the run in .* has 8"):
        parallel_3d.load(other, folder)
    larger = Trainer(SMALL._replace(h=64), Grid(1, 1), args)
    with pytest.raises(ValueError, match=r"of weight/0.word.weight, but \['float64', \[37, 64\]\] is wanted"):
        parallel_3d.load(larger, folder)
    half = Trainer(SMALL, Grid(1, 1), options(dtype="float16"))
    with pytest.raises(ValueError, match=r"has \['float64', .* but \['float32', .* is wanted"):  # its masters
        parallel_3d.load(half, folder)


def test_another_run_is_refused(tmp_path):
    pool.run(4, body_refused, tmp_path)


def body_wrong(flags, message):
    args, config = options(flags.removesuffix(" of 2 heads")), SMALL._replace(heads=2) if "heads" in flags else SMALL
    with pytest.raises(ValueError, match=message):
        Trainer(config, Grid(args.tp or 1, args.pp or 1), args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp 3", "--tp 3 × --pp 1 = 3 ranks must divide the world of 4"),
        ("--global-batch-size 12 --micro-batch-size 5", "multiple of --micro-batch-size 5 × 4 data-parallel ranks"),
        ("--micro-batch-size 0", "multiple of --micro-batch-size 0"),
        ("--pp 4 --stages-per-rank 2", "8 stages on 4 ranks; the model has 4 blocks"),
        ("--sequence-length 17", "--sequence-length 17; the model has 16 positions"),
        ("--tp 4 --sequence-parallel --sequence-length 6", "6 positions do not divide by 4 tensor-parallel ranks"),
        ("--tp 4 of 2 heads", "2 attention heads do not divide by 4"),
        ("--clip-grad -1", "--clip-grad -1.0; it must be positive"),
    ],
)
def test_wrong_arguments(flags, message):
    pool.run(4, body_wrong, flags, message)


def body_costs(tp, pp, flags):
    args = options(flags)
    trainer = Trainer(SMALL, Grid(tp, pp), args)
    for batch in batches(args, steps=2):  # in the first step ranks tell each other shapes
        with parallel_3d.SentByAxis(trainer.grid) as sent:
            trainer.step(*batch)
    for axis, expected in parallel_3d.sent_by_formula(trainer).items():
        # What is above it are numbers: losses, norms, who failed; in ZeRO a byte per parameter, and paddings.
        assert 0 <= sent.by_axis[axis] - expected < 1200, (axis, sent.by_axis, expected)
    assert sum(sent.by_axis.values()) == sent.total
    psi = sum(parameter.numel() for parameter in trainer.parameters)
    held = zero.held_by(trainer.optimizer) if args.zero1 else ddp.held(trainer.parameters, trainer.optimizer)
    state = 2 * 8 * psi / (trainer.grid.dp if args.zero1 else 1)
    assert held[0] == pytest.approx(8 * psi, rel=0.02)
    assert state <= held[2] < 1.02 * state + 2000  # the paddings of its buckets, and the counts of steps
    counted = torch.tensor(float(sum(parameter.numel() for parameter in trainer.counted)))
    whole = sum(parameter.numel() for parameter in plain_model(SMALL).parameters())
    assert trainer.grid.sum(counted, "tp", "pp") == whole + (-SMALL.V % tp) * SMALL.h  # each once


ZERO = "--sequence-parallel --schedule gpipe --micro-batch-size 1 --zero1"


@pytest.mark.parametrize(
    ("grid", "flags"), [((4, 1), ""), ((2, 2), ""), *((grid, ZERO) for grid in GRIDS[3:])], ids=str
)
def test_sent_and_held_bytes(grid, flags):
    """By axis what the formulas say; every parameter is in the norm once."""
    pool.run(4, body_costs, *grid, flags)


def test_numbers_of_parameters():
    """As published: 124M, 345M, 774M and 1.5B."""
    with torch.device("meta"):
        models = [plain_model(MODELS[f"gpt2-{name}"]) for name in ("124m", "345m", "774m", "1.5b")]
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    assert counts == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]


def test_a_block_is_pytorchs_encoder_layer():
    block, gelu = parallel_3d.build_layer(SMALL, 1).double(), torch.nn.GELU("tanh")
    theirs = torch.nn.TransformerEncoderLayer(32, 4, 128, 0.0, gelu, norm_first=True, dtype=torch.float64)
    state = block.state_dict()
    names = [name.replace("qkv.", "self_attn.in_proj_").replace("proj.", "self_attn.out_proj.") for name in state]
    theirs.load_state_dict(dict(zip(names, state.values(), strict=True)))
    x, mask = torch.randn(8, 2, 32, dtype=torch.float64), torch.nn.Transformer.generate_square_subsequent_mask(8)
    torch.testing.assert_close(block(x), theirs(x, src_mask=mask.double(), is_causal=True), rtol=1e-12, atol=1e-12)


def run(*flags, ranks=4):
    done = fork(FILE, "--steps", 3, *flags, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_all_grids_of_3_ranks():
    output = run("--compare", "--global-batch-size", 12, "--sequence-length", 16, ranks=3)
    largest = re.findall(r"^vs 1 device loss, .* and parameters equal within 1e-09: (\S+) over 3 steps$", output, re.M)
    assert len(largest) == len(re.findall(r" × .* ok$", output, re.M)) == 2
    assert all(float(difference) < 1e-11 for difference in largest)


def test_the_default_on_8_ranks(tmp_path):
    """2 × 2 × 2, on cores that they share; and what the metrics say."""
    output = run("--sequence-parallel", "--zero1", "--metrics", tmp_path / "m", ranks=8)
    assert re.search(r"^grid +tp 2 × pp 2 × dp 2 · gpt2-tiny · float64$", output, re.M)
    assert re.search(r"^sent/rank +(\S+) MB per step +formula tp\+pp\+dp = \1 MB$", output, re.M)
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line.keys() >= {"loss", "grad_norm", "lr", "tokens_per_second", "tp", "pp", "dp"} for line in lines)
    assert re.search(rf"^loss +{lines[0]['loss']:.3f} → {lines[-1]['loss']:.3f}$", output, re.M)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", 3], "--tp 3 × --pp 1 = 3 ranks must divide the world of 1"),
        (["--compare", "--save", "nowhere"], "--save-interval 100: must be at least 1; --save not with --compare"),
    ],
)
def test_a_wrong_command_line(flags, message):
    done = fork(FILE, *flags)
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


def test_grids_to_compare():
    """All that fit the world, the heads and, with two stages on each rank, the blocks."""
    args = argparse.Namespace(tp=None, pp=None, compare=True, stages_per_rank=2)
    session = argparse.Namespace(ranks=8, config=SMALL, args=args)
    assert parallel_3d.Session.grids(session) == [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)]


HURT = """
import os, signal, sys
import checkpoint, parallel_3d

step, write, first = parallel_3d.Trainer.step, checkpoint.write, os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"

def told_to_stop(trainer, *batch):
    if os.environ["RANK"] == "1" and trainer.steps == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(trainer, *batch)

def killed(path, pieces):
    if path.name == "1.bin" and first and os.path.exists(path.parent.parent / "3"):  # while it saves step 4
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path, pieces)

parallel_3d.Trainer.step, checkpoint.write = told_to_stop, killed
sys.exit(parallel_3d.main())
"""


def test_stopped_and_killed(tmp_path):
    """SIGTERM to one rank saves, and ends all with status 0; one killed while it saves is started again, and goes on.

    On data.py's files; what is compared is one device that never stopped.
    """
    documents = [[i % 7 * 30 + j for j in range(40)] for i in range(30)]
    parallel_3d.data.write_indexed(tmp_path / "corpus", documents, 257)
    (tmp_path / "hurt.py").write_text(HURT)
    flags = [f"--data={tmp_path}/corpus", "--save", tmp_path / "saved", "--save-interval", 1, "--steps", 5]
    flags += ["--sequence-length", 16, "--global-batch-size", 4, "--metrics", tmp_path / "m"]
    done = fork(tmp_path / "hurt.py", *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"saved       {tmp_path}/saved after step 2, told to stop\n")
    flags += ["--tp", 1, "--zero1"]
    env = {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*TORCHRUN, "--nproc-per-node", 2, "--max-restarts", 1, tmp_path / "hurt.py", *flags]
    done = launch(command, ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^loaded .*saved after step (\d)$", done.stdout, re.M) == ["2", "3"]
    assert re.search(r"^vs 1 device .* equal within 1e-09: \de-1\d over 5 steps$", done.stdout, re.M)
    steps = [json.loads(line)["step"] for line in (tmp_path / "m").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 4, 5]  # what is done again has another line


def ip(command):
    return subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)


@pytest.fixture
def two_machines():
    """The names of two network namespaces, joined by a cable, with the addresses 10.77.0.1 and 10.77.0.2."""
    a, b = names = [f"p3d{os.getpid()}{side}" for side in "ab"]
    commands = [f"netns add {a}", f"netns add {b}", f"link add cable netns {a} type veth peer name cable netns {b}"]
    for i, name in enumerate(names):
        commands += [f"-n {name} address add 10.77.0.{i + 1}/24 dev cable"]
        commands += [f"-n {name} link set {device} up" for device in ("cable", "lo")]
    try:
        for command in commands:
            if (done := ip(command)).returncode:
                pytest.skip(f"may not make network namespaces: ip {command}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            ip(f"netns del {name}")


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the command ip (iproute2)")
def test_two_machines(two_machines, tmp_path):
    """Two ranks on each of two machines that reach each other by their addresses alone go on where one device was."""
    assert fork(FILE, "--steps", 1, "--save", tmp_path).returncode == 0
    env, processes = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}, []
    for i, name in enumerate(two_machines):
        flags = "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29500"
        flags += f" --local-addr 10.77.0.{i + 1} --rdzv-conf is_host={i == 0}"  # no name resolves to these addresses
        command = ["ip", "netns", "exec", name, *TORCHRUN[:-1], *flags.split(), str(FILE), "--steps", "3"]
        command += ["--load", str(tmp_path)]
        processes.append(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "equal within 1e-09" in "".join(output for output, _ in outputs)
