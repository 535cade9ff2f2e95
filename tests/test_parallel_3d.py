"""parallel_3d.py: every grid trains as one device does, and goes on where another stopped."""

import argparse
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from launch import ROOT, TORCHRUN, fork, free_port, launch

import checkpoint
import parallel_3d
from estimate import GPT, flops_per_token
from parallel_3d import MODELS, Grid, Trainer, build_layer, plain_model, train_on_one_device

FILE = ROOT / "parallel_3d.py"
SMALL = GPT(2, 32, 4, 37, 16)  # a vocabulary that neither 2 nor 4 ranks can split evenly
DEEP = replace(SMALL, layers=4)
PADDED = replace(SMALL, vocab=5)  # the last of 4 ranks has padding only


def options(flags="", dtype="float64"):
    """The command line's arguments, for small batches of 8 sequences of 8 tokens."""
    parser = argparse.ArgumentParser()
    for flag, keywords in {**parallel_3d.FLAGS, "--seed": {"type": int, "default": 0}}.items():
        parser.add_argument(flag, **keywords)
    sizes = "--sequence-length 8 --global-batch-size 8 --warmup 2 --lr 0.01 --clip-grad 0.5 --dtype"
    return parser.parse_args([*sizes.split(), dtype, *flags.split()])


def batches(config=SMALL, length=8):
    """Four global batches. The first sequences have more masked targets than the last ones."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    for masked in (0.4, 1.4, 0.0, 100.0):  # some, all of the first sequences, none, all
        tokens = torch.randint(config.vocab, (8, length + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        probability = masked * torch.linspace(1.5, 0.1, 8)[:, None]
        targets[torch.rand(8, length, generator=generator) < probability] = -100
        yield tokens[:, :-1], targets


# ---- one device


def pytorchs_logits(model, tokens, config, dropout):
    """The logits from PyTorch's transformer layers, with the parameters and seeds of `model`."""
    h = config.hidden
    gelu = partial(F.gelu, approximate="tanh")
    embedding, *blocks, head = model
    length = tokens.shape[1]
    future = torch.full((length, length), -math.inf).triu(1).double()
    torch.manual_seed(model.seed * 2**40 + model.micro_batch * 2**10)
    x = F.embedding(tokens.T.contiguous(), head.linear.weight)
    x = F.dropout(x + embedding.position.weight[:length, None], dropout)
    for number, block in enumerate(blocks, start=1):
        layer = nn.TransformerEncoderLayer(h, config.heads, 4 * h, dropout, gelu, norm_first=True)
        layer.dropout = nn.Identity()  # GPT-2 has none between the two matrices
        layer.self_attn.in_proj_weight = block.qkv.weight
        layer.self_attn.in_proj_bias = block.qkv.bias
        layer.self_attn.out_proj = block.proj
        for name in ("norm1", "norm2", "linear1", "linear2"):
            setattr(layer, name, getattr(block, name))
        torch.manual_seed(model.seed * 2**40 + model.micro_batch * 2**10 + number)
        x = layer(x, future)
    return F.layer_norm(x, (h,), head.norm.weight, head.norm.bias) @ head.linear.weight.T


def test_the_model_computes_what_pytorchs_layers_do():
    model = plain_model(SMALL, dropout=0.3, seed=5).double()
    for number, (tokens, _) in enumerate(batches(length=11)):
        assert model.micro_batch == number
        expected = pytorchs_logits(model, tokens, SMALL, 0.3)
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-12)


def test_one_device_steps_along_the_gradient_of_the_mean_over_unmasked_tokens():
    args = options("--optimizer SGD --lr 0.5 --warmup 4 --clip-grad 0.1 --micro-batch-size 3")
    rates = [parallel_3d.learning_rate(args, step) for step in (1, 2, 4, 5)]
    assert rates == [0.125, 0.25, 0.5, 0.5]
    inputs, targets = next(batches())
    model = plain_model(SMALL).double()
    expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.T.flatten())
    expected.backward()
    expected_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    ((loss, norm, trained),) = train_on_one_device(SMALL, args, [(inputs, targets)])
    assert (loss, norm) == pytest.approx((expected.item(), expected_norm.item()), rel=1e-12)
    for before, after in zip(model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(after, before - 0.125 * before.grad, rtol=0, atol=1e-12)


def test_the_model_is_gpt2():
    """It has as many parameters as published. Its weights start as GPT-2's, by their own seeds."""
    sizes = {"124m": 124_439_808, "345m": 354_823_168, "774m": 774_030_080, "1.5b": 1_557_611_200}
    for name, parameters in sizes.items():
        config = MODELS[f"gpt2-{name}"]
        with torch.device("meta"):
            model = plain_model(config)
        assert sum(map(torch.numel, model.parameters())) == config.parameters() == parameters
        assert config.hidden / config.heads == 64
    wide = replace(SMALL, hidden=128)
    block = build_layer(wide, 1)
    for other in (build_layer(wide, 2), build_layer(wide, 1, seed=1)):
        assert not torch.equal(block.qkv.weight, other.qkv.weight)
    matrices = [block.qkv, block.linear1, build_layer(wide, 0).position, block.proj, block.linear2]
    spread = [matrix.weight.std().item() for matrix in matrices]
    assert spread == pytest.approx([0.02, 0.02, 0.02, 0.01, 0.01], rel=0.05)
    assert not block.linear1.bias.any()


# ---- every grid, beside one device


def along(group, tensor):
    """The tensor of every rank of a group."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group=group)
    return everyone


def assert_replicas_agree(trainer):
    """Bitwise: all parameters along dp, whole ones along tp, the embedding at both ends of pp."""
    grid = trainer.grid
    whole = [parameter for parameter in trainer.parameters if parameter not in trainer.split]
    replicas = [(grid.dp_group, trainer.parameters), (grid.tp_group, whole)]
    if grid.ends_group is not None and trainer.tied is not None:
        replicas.append((grid.ends_group, [trainer.tied]))
    for group, parameters in replicas:
        mine = torch.cat([parameter.detach().flatten() for parameter in parameters])
        assert all(torch.equal(mine, theirs) for theirs in along(group, mine))


def assert_costs(trainer, sent):
    """Bytes sent and held are the formulas', and ranks are numbered as Megatron's."""
    args, grid, size = trainer.args, trainer.grid, trainer.dtype.itemsize
    for axis, expected in parallel_3d.sent_by_formula(trainer).items():
        # Above it are single numbers, such as losses; in ZeRO a byte per parameter, and padding.
        above = sent.by_axis[axis] - expected
        assert 0 <= above < (300 if axis == "dp" and args.zero1 else 100), axis
    assert sum(sent.by_axis.values()) == sent.total
    params, _, state = parallel_3d.held_bytes(trainer)
    psi = sum(map(torch.numel, trainer.parameters))
    moments = 2 * max(4, size) * (args.optimizer == "AdamW")
    masters = 4 * (size == 2)
    expected = psi * (moments + masters) / (grid.dp if args.zero1 else 1)
    assert params == pytest.approx(psi * size, rel=0.02)
    assert expected <= state < 1.02 * expected + 2000  # padding of buckets, and the steps' counts
    assert (grid.pp_rank * grid.dp + grid.dp_rank) * grid.tp + grid.tp_rank == pool.rank()


def start(args, config=SMALL, folder=None):
    """Make a trainer, and load the checkpoint in `folder`: it would save the same again."""
    trainer = Trainer(config, Grid(args.tp or 1, args.pp or 1), args)
    if folder is None:
        return trainer
    with torch.no_grad():
        torch._foreach_mul_(trainer.parameters, 1.5)  # not what the seed gives
    parallel_3d.load(trainer, folder)
    parallel_3d.save(trainer, folder / "again")
    saved = checkpoint.load_whole(folder)
    again = checkpoint.load_whole(folder / "again")
    assert all(torch.equal(saved[name], again[name]) for name in saved | again)
    return trainer


SGD = "--optimizer SGD --lr 0.5"
INTERLEAVED = "--schedule interleaved_1f1b --stages-per-rank 2"
SEQUENCE = "--sequence-parallel"
ZERO_BUBBLE = "--schedule zero_bubble"
RUNS = [  # options of the whole run, of its first two steps, and of the next two
    (SMALL, SGD, "--zero1", f"--tp 4 --zero1 {SEQUENCE} --micro-batch-size 4"),
    (SMALL, SGD, f"--tp 2 --zero1 {SEQUENCE} --micro-batch-size 1", "--pp 2"),
    (SMALL, "", f"--tp 2 --pp 2 --zero1 {SEQUENCE}", ""),
    (SMALL, "", "--tp 4 --micro-batch-size 4", f"--tp 2 --pp 2 {ZERO_BUBBLE} {SEQUENCE}"),
    (PADDED, "--warmup 3 --sequence-length 16", "--tp 4", "--pp 2 --zero1"),
    (PADDED, "--warmup 0 --sequence-length 7", "--tp 2 --pp 2", "--tp 4 --zero1"),
    (SMALL, "--dropout 0.3 --sequence-length 1", "--zero1", f"--pp 2 {ZERO_BUBBLE} --zero1"),
    (DEEP, "--dropout 0.3", "--pp 4", ""),  # one device's masks, on any stage and pipeline
    (DEEP, "--clip-grad 0", "--pp 4 --zero1 --schedule gpipe", f"--tp 2 --zero1 {INTERLEAVED}"),
    (DEEP, "--schedule gpipe", f"--tp 2 --pp 2 {SEQUENCE}", f"--pp 2 --zero1 {INTERLEAVED}"),
    (DEEP, INTERLEAVED, "--tp 2 --pp 2", f"--tp 2 --pp 2 --zero1 {SEQUENCE}"),
    (SMALL, "--dtype bfloat16", "--pp 2", "--tp 2 --zero1"),
    (SMALL, "", "--dtype bfloat16 --tp 2 --zero1", "--dtype float16 --pp 2"),
    (SMALL, SGD, "--dtype float16 --tp 2", "--dtype float16 --pp 2 --zero1"),
]


@pytest.mark.parametrize("run", RUNS, ids=[" then ".join(run[1:]) for run in RUNS])
@pool.on(4)
def test_trains_and_goes_on_at_another_grid_as_one_device(run, tmp_path):
    """Loss, norm and parameters within 1e-12. In 16 bits loss and norm, within a few roundoffs."""
    config, shared, *parts = run
    args = options(f"{shared} {parts[0]}")
    data = list(batches(config, args.sequence_length))
    steps = zip(data, train_on_one_device(config, args, data), strict=True)
    for number, part in enumerate(parts):
        args = options(f"{shared} {part}")
        trainer = start(args, config, tmp_path if number else None)
        exact = args.dtype == "float64"
        within = {"float64": 1e-12, "bfloat16": 2**-6, "float16": 2**-9}[args.dtype]
        for _ in range(2):
            batch, (loss, norm, plain) = next(steps)
            with parallel_3d.SentByAxis(trainer.grid) as sent:  # the first step also sends shapes
                ours = trainer.step(*batch)
            assert ours[0] == pytest.approx(loss, rel=within)
            if exact or trainer.steps == 1:  # in 16 bits, later norms are of other weights
                assert ours[1] == pytest.approx(norm, rel=within)
            assert exact or ours[0] != loss or loss == 0
        expected = plain.state_dict()
        mine = trainer.full_state_dict()
        everyone = [None] * 4
        dist.all_gather_object(everyone, set(mine))
        assert set().union(*everyone) == expected.keys()
        for name, value in mine.items() if exact else ():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
        assert_replicas_agree(trainer)
        assert_costs(trainer, sent)
        parallel_3d.save(trainer, tmp_path)


TWICE = [
    "--dtype float32 --tp 2 --zero1 --dropout 0.3",
    f"--dtype bfloat16 --tp 2 --pp 2 {SEQUENCE} --dropout 0.3",
    f"--dtype float16 --pp 2 --zero1 {INTERLEAVED}",
]


@pytest.mark.parametrize("flags", TWICE)
@pool.on(4)
def test_a_run_and_another_that_is_stopped_are_the_same(flags, tmp_path):
    """Bitwise: dropout, masters, loss scale. An overflow on one rank skips the step on all."""
    args = options(flags)
    runs = [start(args, DEEP) for _ in range(2)]
    grid = runs[0].grid
    blocks = [next(layer for layer in run.stages[0] if hasattr(layer, "qkv")) for run in runs]

    def overflow(gradient):
        return gradient + (math.inf if (step, pool.rank()) == (1, 3) else 0.0)

    for block in blocks:
        block.linear1.weight.register_hook(overflow)
    for step, batch in enumerate(batches()):
        if step == 2:
            parallel_3d.save(runs[0], tmp_path)
            runs[1] = start(args, DEEP, tmp_path)
        before = [parameter.detach().clone() for parameter in runs[1].parameters]
        first, second = (run.step(*batch) for run in runs)
        assert first == second
        assert all(map(torch.equal, before, runs[1].parameters)) == (step == 1)
        assert math.isfinite(first[1]) == (step != 1)
    assert all(map(torch.equal, runs[0].parameters, runs[1].parameters))
    scale = 2**15 if args.dtype == "float16" else 1  # halved once
    assert [run.scaler.get_scale() for run in runs] == [scale, scale]
    assert_replicas_agree(runs[1])
    torch.manual_seed(0)
    with blocks[0].dropout_region():  # each tensor-parallel rank draws masks for its own heads
        assert len(set(map(float, along(grid.tp_group, torch.rand(1))))) == grid.tp
    assert len(set(map(float, along(grid.tp_group, torch.rand(1))))) == 1


WRONG = [  # options, changes to the model, the error when it goes on where "--tp 2 --pp 2" stopped
    ("--tp 3", {}, "--tp 3 × --pp 1 = 3 ranks must divide the world of 4"),
    ("--tp -1", {}, "--tp -1 × --pp 1 = -1 ranks must divide"),
    ("--pp -2", {}, "--tp 1 × --pp -2 = -2 ranks must divide"),
    ("--global-batch-size 12", {}, "multiple of --micro-batch-size 2 × 4 data-parallel ranks"),
    ("--global-batch-size 0", {}, "--global-batch-size 0 must be a multiple"),
    ("--micro-batch-size 0", {}, "multiple of --micro-batch-size 0"),
    ("--pp 4", {}, "4 stages on 4 ranks; the model has 2 blocks"),
    ("--stages-per-rank 0", {}, "0 stages on 1 ranks"),
    ("--sequence-length 17", {}, "--sequence-length 17; the model has 16 positions"),
    ("--sequence-length 0", {}, "--sequence-length 0; the model has 16 positions"),
    (f"--tp 4 {SEQUENCE} --sequence-length 6", {}, "6 positions are not divisible by 4 tensor-par"),
    ("--tp 4", {"heads": 2}, "2 attention heads are not divisible by 4"),
    ("--clip-grad -1", {}, "--clip-grad -1.0; it must be positive"),
    ("--global-batch-size 16", {}, r"--global-batch-size 16: the run in .* has 8"),
    ("", {"hidden": 64}, r"0.word.weight is .*, but \['float64', \[37, 64\]\] here"),
    ("--dtype float16", {}, r"is \['float64', .*, but \['float32', .* here"),  # its masters
]


@pool.on(4)
def test_what_is_wrong_is_refused(tmp_path):
    parallel_3d.save(start(options("--tp 2 --pp 2")), tmp_path)
    for flags, changed, message in WRONG:
        with pytest.raises(ValueError, match=message):
            parallel_3d.load(start(options(flags), replace(SMALL, **changed)), tmp_path)


# ---- the command line


def session(ranks=1, flags="", config=SMALL):
    """A Session without a command line and a world."""
    session = parallel_3d.Session.__new__(parallel_3d.Session)
    session.args = options(flags)
    session.ranks = ranks
    session.config = config
    session.device = torch.device("cpu")
    return session


GRIDS = [  # ranks, flags, the grids (tp, pp) to train on; dp is what is left
    (1, "", [(1, 1)]),
    (2, "", [(2, 1)]),
    (3, "", [(1, 1)]),
    (6, "", [(2, 1)]),
    (8, "", [(2, 2)]),
    (4, "--tp 1", [(1, 1)]),  # data parallelism only
    (8, "--tp 4", [(4, 1)]),
    (4, "--pp 4", [(1, 4)]),
    (8, "--compare --stages-per-rank 2", [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)]),  # 1 × 1: dp 8
    (
        8,
        "--compare --sequence-parallel --sequence-length 2",
        [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4)],
    ),
]


@pytest.mark.parametrize(("ranks", "flags", "grids"), GRIDS)
def test_the_grids_that_flags_choose(ranks, flags, grids):
    assert session(ranks, flags, DEEP).grids() == grids


def test_a_batch_has_texts_from_anywhere_and_their_next_bytes_as_targets():
    batches = session(flags="--global-batch-size 30")
    batches.is_indexed = False
    batches.text = torch.arange(12, dtype=torch.uint8)
    inputs, targets = batches.batch(0)
    assert inputs.shape == (30, 8)
    assert torch.equal(targets, inputs + 1)
    assert set(inputs[:, 0].tolist()) == {0, 1, 2, 3}  # the last target is the last byte
    assert not torch.equal(inputs, batches.batch(1)[0])


EQUAL = r"vs 1 device loss, .* and parameters equal within 1e-09: \de-1\d over \d steps"
MB = MODELS["gpt2-tiny"].parameters() * 8 / 1e6
STEPS = "--steps 2 --sequence-length 8 --global-batch-size"
DEFAULT = [
    r"grid +tp 2 × pp 2 × dp 2 · gpt2-tiny · float64",
    r"step 1/2   loss (\S+) .*\nstep 2/2   loss (\S+) .*\nloss +\1 → \2",
    EQUAL,
    rf"held/rank .*\(1 device: {MB:.1f} / {MB:.1f} / {2 * MB:.1f}\)",
    r"sent/rank +(\S+) MB per step +formula tp\+pp\+dp = \1 MB",
    r"time +[1-9]\d* ms per step +\(1 device: [1-9]\d*\)",
]
HELD = r"params (\S+) MB   grads (\S+) MB   optimizer (\S+) MB"
DIFFERENT = [
    r"vs 1 device loss, .* NOT equal within 0.05: .*",
    rf"held/rank   {HELD}      \(1 device: \1 / \2 / \3\)",
]
COMMANDS = [  # flags, ranks, status, and what is printed
    ("--load nowhere", 1, 2, ["error: --load nowhere: it has no checkpoint"]),
    ("--compare --save nowhere", 1, 2, ["error: --save is for one grid; leave it out, or .*"]),
    ("--compare --global-batch-size 0", 1, 2, ["error: --compare: no grid fits; .*"]),
    ("--save-interval 0", 1, 2, ["error: --save-interval 0: give 1 or more"]),
    ("--sequence-length 100 --data short", 1, 2, ["error: --data short: 100 bytes; .* need 101"]),
    (f"--compare {STEPS} 6", 3, 0, [EQUAL, r" *1 × 1 × 3 .* ok", r" *1 × 3 × 1 .* ok"]),
    (f"--sequence-parallel --zero1 {STEPS} 8", 8, 0, DEFAULT),
    ("--dtype bfloat16 --lr 1 --steps 2", 1, 1, DIFFERENT),  # so fast that it diverges
]


@pytest.mark.parametrize(("flags", "ranks", "status", "printed"), COMMANDS)
def test_a_command_prints(flags, ranks, status, printed, tmp_path):
    (tmp_path / "short").write_text("x" * 100)
    done = fork(FILE, *flags.split(), ranks=ranks, cwd=tmp_path)
    assert done.returncode == status
    assert len(done.stderr.splitlines()) == (1 if status == 2 else 0)
    for line in printed:
        assert re.search(f"^{line}$", done.stdout + done.stderr, re.M), line


def test_a_run_that_began_in_16_bits_is_compared_as_such(tmp_path):
    """Its weights are rounded already, so a wider dtype does not bring it closer to one device."""
    for steps, dtype in enumerate(("bfloat16", "float32"), start=1):
        flags = f"--dtype {dtype} --steps {steps} --lr 0.003 --save {tmp_path}"
        done = fork(FILE, *flags.split(), ranks=1)
    found = re.search(r"^vs 1 device .* equal within 0.05: (\S+) over", done.stdout, re.M)
    assert done.returncode == 0, done.stdout
    assert float(found[1]) > 0.001  # the bound for float32


def test_the_peak_of_a_known_gpu_needs_no_flag(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    on_gpu = session(ranks=2)
    on_gpu.device = torch.device("cuda")
    rate, share = on_gpu.speed(seconds=0.5)
    flops = 8 * 8 / 0.5 * flops_per_token(replace(SMALL, sequence=8))
    assert (rate, share) == (8 * 8 / 0.5, pytest.approx(flops / (2 * 989e12)))


HURT = """
import os, signal, sys, checkpoint, parallel_3d
write, restarts = checkpoint.write, os.environ.get("TORCHELASTIC_RESTART_COUNT")

def hurt(path, pieces):
    if path.name == "1.bin" and restarts is None:  # while it saves step 1
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    if path.name == "1.bin" and restarts == "0" and (path.parent.parent / "3").exists():  # step 4
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path, pieces)
checkpoint.write = hurt
sys.exit(parallel_3d.main())
"""


def launch_on_two_machines(command):
    """Run it with a rank on each, for which two torchruns at two local addresses stand."""
    env = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    flags = "--nnodes 2 --nproc-per-node 1 --max-restarts 1 --rdzv-backend c10d"
    flags += f" --rdzv-endpoint 127.0.0.1:{free_port()}"
    runs = []
    with ThreadPoolExecutor() as threads:
        for i in (1, 2):
            own = f"--local-addr 127.0.0.{i} --rdzv-conf is_host={i == 1}"
            line = [*TORCHRUN[:-1], *flags.split(), *own.split(), *command.split()]
            runs.append(threads.submit(launch, line, ROOT, 240, env))
    return [run.result() for run in runs]


def test_stopped_and_killed_on_two_machines(tmp_path):
    """Ctrl-C and SIGTERM to one rank end all of them with a checkpoint and status 0.

    Torchrun restarts a rank that was killed while it saved. All of it equals one device.
    """
    documents = [[i % 7 * 30 + j for j in range(40)] for i in range(30)]
    parallel_3d.data.write_indexed(tmp_path / "corpus", documents, 257)
    (tmp_path / "hurt.py").write_text(HURT)
    command = f"{tmp_path}/hurt.py --data={tmp_path}/corpus --save {tmp_path}/saved --steps 5"
    command += " --save-interval 1 --sequence-length 16 --global-batch-size 4"
    command += f" --peak 2 --metrics {tmp_path}/m"
    done = fork(*command.split(), ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"saved       {tmp_path}/saved after step 2, stopped by a signal\n")
    both = launch_on_two_machines(f"{command} --pp 2")
    assert [each.returncode for each in both] == [0, 0], both[0].stderr + both[1].stderr
    output = both[0].stdout + both[1].stdout
    assert re.findall(r"^loaded .*saved after step (\d)$", output, re.M) == ["2", "3"]
    assert re.search(f"^{EQUAL}$", output, re.M)
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5]
    model = replace(MODELS["gpt2-tiny"], sequence=16)
    for line in lines:
        assert line.keys() >= {"loss", "grad_norm", "lr", "max_memory_allocated", "tp", "pp", "dp"}
        assert line["tokens_per_second"] == pytest.approx(4 * 16 / line["seconds"])
        flops = line["tokens_per_second"] * flops_per_token(model)
        assert line["share_of_peak"] == pytest.approx(flops / 2 / 2e12)
