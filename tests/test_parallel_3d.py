"""parallel_3d.py: every grid trains as one device does, and goes on where another stopped."""

import argparse
import json
import math
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import ROOT, TORCHRUN, fork, launch

import checkpoint
import ddp
import parallel_3d
import tensor_parallel
import zero
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


# ---- one device, beside GPT-2 and its training by their formulas, with no code of parallel_3d.py


def reference_logits(weights, tokens, config, dropout):
    """GPT-2 as its paper has it: (batch, sequence) tokens to (sequence, batch, vocab) logits."""

    def of(name):
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], *of(name))

    word = weights["0.word.weight"]
    length = tokens.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    x = F.embedding(tokens.T.contiguous(), word) + weights["0.position.weight"][:length, None]
    x = dropout(x, 0)
    for i in range(1, config.layers + 1):
        qkv = F.linear(norm(x, f"{i}.norm1"), *of(f"{i}.qkv"))
        q, k, v = qkv.unflatten(-1, (3, config.heads, -1)).permute(2, 1, 3, 0, 4)
        scores = q @ k.mT / math.sqrt(config.hidden / config.heads)
        attention = scores.masked_fill(future, -math.inf).softmax(-1)
        y = (dropout(attention, i) @ v).permute(2, 0, 1, 3).flatten(2)
        x = x + dropout(F.linear(y, *of(f"{i}.proj")))
        y = F.linear(norm(x, f"{i}.norm2"), *of(f"{i}.linear1"))
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))  # GELU
        x = x + dropout(F.linear(y, *of(f"{i}.linear2")))
    return norm(x, f"{config.layers + 1}.norm") @ word.T


def reference_training(config, args, batches):
    """Yields (loss, gradients' norm, weights) after each step."""
    weights = plain_model(config, seed=args.seed).double().state_dict()
    del weights[f"{config.layers + 1}.linear.weight"]  # the tied embedding
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    optimizer = getattr(torch.optim, args.optimizer)(weights.values())
    micro_batch = 0

    def dropout(x, layer=None):
        if layer is not None:
            torch.manual_seed(args.seed * 2**40 + micro_batch * 2**10 + layer)
        return F.dropout(x, args.dropout)

    for step, (inputs, targets) in enumerate(batches, start=1):
        losses = []
        for x in inputs.split(args.micro_batch_size):
            logits = reference_logits(weights, x, config, dropout).transpose(0, 1)
            losses.append(-logits.log_softmax(-1))
            micro_batch += 1
        losses = torch.cat(losses)[targets != -100, targets[targets != -100]]
        loss = losses.sum() / max(1, len(losses))
        gradients = torch.autograd.grad(loss, list(weights.values()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
        factor = min(1.0, args.clip_grad / (norm + 1e-6)) if args.clip_grad else 1.0
        for weight, gradient in zip(weights.values(), gradients, strict=True):
            weight.grad = gradient * factor
        warmed_up = step / args.warmup if step < args.warmup else 1.0
        optimizer.param_groups[0]["lr"] = args.lr * warmed_up
        optimizer.step()
        yield loss.item(), norm, weights


ONE_DEVICE = [
    "--optimizer SGD --lr 0.5 --warmup 3 --micro-batch-size 3",
    "--warmup 4 --clip-grad 0 --dropout 0.3 --seed 5",
    "--warmup 0 --clip-grad 0.1 --micro-batch-size 8 --sequence-length 5",
]


@pytest.mark.parametrize("flags", ONE_DEVICE)
def test_one_device_trains_gpt2_by_its_formulas(flags):
    args = options(flags)
    data = list(batches(SMALL, args.sequence_length))
    ours = train_on_one_device(SMALL, args, data)
    theirs = reference_training(SMALL, args, data)
    for (loss, norm, model), expected in zip(ours, theirs, strict=True):
        assert (loss, norm) == pytest.approx(expected[:2], rel=1e-12, abs=1e-15)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weight, expected[2][name], rtol=0, atol=1e-12)


def test_the_model_is_gpt2():
    """It has as many parameters as published. Its weights start as GPT-2's, by their own seeds."""
    published = [MODELS[f"gpt2-{name}"] for name in ("124m", "345m", "774m", "1.5b")]
    with torch.device("meta"):
        models = [plain_model(config) for config in published]
    counts = [sum(map(torch.numel, model.parameters())) for model in models]
    assert counts == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]
    assert counts == [config.parameters() for config in published]
    assert {config.hidden / config.heads for config in published} == {64}
    wide = replace(SMALL, hidden=128)
    block, second, other_seed = (build_layer(wide, *numbers) for numbers in ((1,), (2,), (1, 0, 1)))
    assert not torch.equal(block.qkv.weight, second.qkv.weight)
    assert not torch.equal(block.qkv.weight, other_seed.qkv.weight)
    position = build_layer(wide, 0).position
    matrices = [block.qkv, block.linear1, position, block.proj, block.linear2]
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
    names = [name for name, *_ in tensor_parallel.split_parameters(trainer.stages)]
    split = {trainer.stages.get_parameter(name) for name in names}
    whole = [parameter for parameter in trainer.parameters if parameter not in split]
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
    held = ddp.held(trainer.parameters, trainer.optimizer)
    if args.zero1:
        held = zero.held_by(trainer.optimizer)
    psi = sum(map(torch.numel, trainer.parameters))
    moments = 2 * max(4, size) * (args.optimizer == "AdamW")
    masters = 4 * (size == 2 and args.zero1)
    state = psi * (moments + masters) / (grid.dp if args.zero1 else 1)
    assert held[0] == pytest.approx(psi * size, rel=0.02)
    assert state <= held[2] < 1.02 * state + 2000  # padding of buckets, and the counts of steps
    assert (grid.pp_rank * grid.dp + grid.dp_rank) * grid.tp + grid.tp_rank == pool.rank()


def start(args, config=SMALL, folder=None):
    """Make a trainer, and load the checkpoint in `folder`: it would save the same again."""
    trainer = Trainer(config, Grid(args.tp or 1, args.pp or 1), args)
    if folder is None:
        return trainer
    with torch.no_grad():
        torch._foreach_mul_(trainer.parameters, 1.5)  # not what the seed gives
    parallel_3d.load(trainer, folder)
    loaded = {name: value.clone() for name, value in trainer.full_state_dict().items()}
    parallel_3d.save(trainer, folder / "again")
    saved, again = checkpoint.load_whole(folder), checkpoint.load_whole(folder / "again")
    assert all(torch.equal(saved[name], again[name]) for name in saved | again)
    for name, value in loaded.items():  # the head is saved as the embedding that it is
        expected = saved.get(f"weight/{name}", saved["weight/0.word.weight"])
        assert torch.equal(value, expected.to(value.dtype)), name
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
            batch, (loss, norm, model) = next(steps)
            with parallel_3d.SentByAxis(trainer.grid) as sent:  # the first step also sends shapes
                ours = trainer.step(*batch)
            assert ours[0] == pytest.approx(loss, rel=within)
            if exact or trainer.steps == 1:  # in 16 bits, later norms are of other weights
                assert ours[1] == pytest.approx(norm, rel=within)
            assert exact or ours[0] != loss or loss == 0
        if exact:
            mine, expected, everyone = trainer.full_state_dict(), model.state_dict(), [None] * 4
            dist.all_gather_object(everyone, set(mine))
            assert set().union(*everyone) == expected.keys()
            for name, value in mine.items():
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
    blocks = [next(layer for layer in run.stages[0] if hasattr(layer, "qkv")) for run in runs]
    for block in blocks:
        block.linear1.weight.register_hook(
            lambda x: x + (math.inf if (step, pool.rank()) == (1, 3) else 0.0)
        )
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
    grid = runs[0].grid
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
    (f"--tp 4 {SEQUENCE} --sequence-length 6", {}, "6 positions do not divide by 4 tensor-par"),
    ("--tp 4", {"heads": 2}, "2 attention heads do not divide by 4"),
    ("--clip-grad -1", {}, "--clip-grad -1.0; it must be positive"),
    ("--global-batch-size 16", {}, r"--global-batch-size 16: the run in .* has 8"),
    ("", {"hidden": 64}, r"of weight/0.word.weight, but \['float64', \[37, 64\]\] is wanted"),
    ("--dtype float16", {}, r"has \['float64', .* but \['float32', .* is wanted"),  # its masters
]


@pool.on(4)
def test_what_is_wrong_is_refused(tmp_path):
    parallel_3d.save(start(options("--tp 2 --pp 2")), tmp_path)
    for flags, changed, message in WRONG:
        with pytest.raises(ValueError, match=message):
            parallel_3d.load(start(options(flags), replace(SMALL, **changed)), tmp_path)


# ---- the command line


def test_compare():
    """It tries all grids that fit the world, the heads and, with two stages a rank, the blocks."""
    args = options("--compare --stages-per-rank 2")
    session = argparse.Namespace(ranks=8, config=DEEP, args=args)
    expected = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)]
    assert parallel_3d.Session.fitting_grids(session) == expected
    sizes = "--steps 2 --sequence-length 8 --global-batch-size 6"
    done = fork(FILE, "--compare", *sizes.split(), ranks=3)
    assert (done.returncode, done.stderr) == (0, "")
    equal = r"^vs 1 device loss, .* and parameters equal within 1e-09: \de-1\d over 2 steps$"
    assert len(re.findall(equal, done.stdout, re.M)) == 2
    assert len(re.findall(r"^ *\d × \d × \d .* ok$", done.stdout, re.M)) == 2


STOPPED = [
    ("--load nowhere", "--load nowhere: it has no checkpoint"),
    ("--compare --save nowhere", "--save is for one grid; leave it out, or leave out --compare"),
    ("--save-interval 0", "--save-interval 0: give 1 or more"),
    ("--sequence-length 100 --data short", "--data short: 100 bytes; .* need 101"),
]


@pytest.mark.parametrize(("flags", "message"), STOPPED)
def test_a_wrong_command_is_one_line(flags, message, tmp_path):
    (tmp_path / "short").write_text("x" * 100)
    done = fork(FILE, *flags.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(f"error: {message}\n", done.stderr)


def test_the_peak_of_a_known_gpu_needs_no_flag(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    gpu = torch.device("cuda")
    session = argparse.Namespace(args=options(), config=SMALL, device=gpu, ranks=2)
    rate, share = parallel_3d.Session.speed(session, seconds=0.5)
    assert rate == 8 * 8 / 0.5
    flops = rate * flops_per_token(replace(SMALL, sequence=8))
    assert share == pytest.approx(flops / (2 * 989e12))


DIFFERENT = """
import sys, parallel_3d
loss_fn = parallel_3d.Trainer.loss_fn
parallel_3d.Trainer.loss_fn = lambda *arguments: 1.2 * loss_fn(*arguments)
sys.exit(parallel_3d.main())
"""


def test_a_difference_from_one_device_ends_with_status_1(tmp_path):
    """In 16 bits, where a rank of its own also holds what one device holds."""
    (tmp_path / "different.py").write_text(DIFFERENT)
    done = fork(tmp_path / "different.py", "--dtype", "bfloat16", "--steps", 1)
    assert done.returncode == 1
    assert re.search(r"^vs 1 device loss, .* NOT equal within 0.05: ", done.stdout, re.M)
    held = r"params (\S+) MB   grads (\S+) MB   optimizer (\S+) MB"
    assert re.search(rf"^held/rank   {held}      \(1 device: \1 / \2 / \3\)$", done.stdout, re.M)


def test_the_default_on_8_ranks(tmp_path):
    """2 × 2 × 2, on cores that they share; and what the lines and the metrics say."""
    flags = "--sequence-parallel --zero1 --steps 2 --sequence-length 8 --global-batch-size 8"
    flags += f" --peak 2 --metrics {tmp_path}/m"
    done = fork(FILE, *flags.split(), ranks=8)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    model = replace(MODELS["gpt2-tiny"], sequence=8)
    for line in lines:
        assert line.keys() >= {"loss", "grad_norm", "lr", "max_memory_allocated", "tp", "pp", "dp"}
        assert line["tokens_per_second"] == pytest.approx(64 / line["seconds"])
        share = line["tokens_per_second"] * flops_per_token(model) / 8 / 2e12
        assert line["share_of_peak"] == pytest.approx(share)
    psi = MODELS["gpt2-tiny"].parameters() / 1e6
    for pattern in (
        r"grid +tp 2 × pp 2 × dp 2 · gpt2-tiny · float64",
        rf"loss +{lines[0]['loss']:.3f} → {lines[1]['loss']:.3f}",
        rf"held/rank .*\(1 device: {psi * 8:.1f} / {psi * 8:.1f} / {psi * 16:.1f}\)",
        r"sent/rank +(\S+) MB per step +formula tp\+pp\+dp = \1 MB",
        r"time +[1-9]\d* ms per step +\(1 device: [1-9]\d*\)",
    ):
        assert re.search(f"^{pattern}$", done.stdout, re.M), pattern


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
CABLE = """
ip netns add {0} && ip netns add {1}
ip link add cable netns {0} type veth peer name cable netns {1}
ip -n {0} address add 10.77.0.1/24 dev cable && ip -n {1} address add 10.77.0.2/24 dev cable
for name in {0} {1}; do ip -n $name link set cable up && ip -n $name link set lo up; done
"""


def shell(script):
    return subprocess.run(["sh", "-ec", script], check=False, capture_output=True, text=True)


def launch_on_two_machines(command):
    """Run it in two network namespaces with a cable between them, or without, and say why."""
    names = [f"p3d{os.getpid()}{side}" for side in "ab"]
    cable = shell(CABLE.format(*names))
    net, device = ("127.0.0.", "lo") if cable.returncode else ("10.77.0.", "cable")
    env = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": device}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    flags = "--nnodes 2 --nproc-per-node 1 --max-restarts 1 --rdzv-backend c10d"
    flags += f" --rdzv-endpoint {net}1:{20000 + os.getpid() % 10000}"
    runs = []
    with ThreadPoolExecutor() as threads:
        for i, name in enumerate(names, start=1):
            place = [] if cable.returncode else ["ip", "netns", "exec", name]
            own = f"--local-addr {net}{i} --rdzv-conf is_host={i == 1}"  # no name resolves to it
            line = [*place, *TORCHRUN[:-1], *flags.split(), *own.split(), *command.split()]
            runs.append(threads.submit(launch, line, ROOT, env=env))
    shell(f"ip netns del {names[0]}; ip netns del {names[1]}")
    return [run.result() for run in runs], cable.stderr.strip()


def test_stopped_and_killed_on_two_machines(tmp_path):
    """Ctrl-C and SIGTERM to one rank end all of them with a checkpoint and status 0.

    Torchrun restarts a rank that was killed while it saved. All of it equals one device.
    """
    documents = [[i % 7 * 30 + j for j in range(40)] for i in range(30)]
    parallel_3d.data.write_indexed(tmp_path / "corpus", documents, 257)
    (tmp_path / "hurt.py").write_text(HURT)
    command = f"{tmp_path}/hurt.py --data={tmp_path}/corpus --save {tmp_path}/saved --steps 5"
    command += " --save-interval 1 --sequence-length 16 --global-batch-size 4"
    command += f" --metrics {tmp_path}/m"
    done = fork(*command.split(), ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"saved       {tmp_path}/saved after step 2, told to stop\n")
    both, no_cable = launch_on_two_machines(f"{command} --pp 2")
    assert [each.returncode for each in both] == [0, 0], both[0].stderr + both[1].stderr
    output = both[0].stdout + both[1].stdout
    assert re.findall(r"^loaded .*saved after step (\d)$", output, re.M) == ["2", "3"]
    assert re.search(r"^vs 1 device .* equal within 1e-09: \de-1\d over 5 steps$", output, re.M)
    lines = (tmp_path / "m").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 4, 5]
    if no_cable:
        pytest.skip(f"all is well, but on one machine: {no_cable}")
