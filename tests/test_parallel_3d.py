"""parallel_3d.py: every grid trains as one device does, goes on where another stopped, and costs what formulas say."""

import argparse
import itertools
import json
import math
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pool
import pytest
import torch
import torch.distributed as dist
from launch import ROOT, TORCHRUN, fork, launch

import checkpoint
import ddp
import parallel_3d
import tensor_parallel
import zero
from parallel_3d import GPT2, MODELS, Grid, Trainer, build_layer, plain_model, train_on_one_device

FILE = ROOT / "parallel_3d.py"
SMALL = GPT2(2, 32, 4, V=37, P=16)  # a vocabulary that neither 2 nor 4 ranks can split evenly
DEEP = SMALL._replace(L=4)
PADDED = SMALL._replace(V=5)  # the last of 4 ranks has padding only


def options(flags="", dtype="float64"):
    """What the command line gives, of small batches of 8 sequences of 8 tokens."""
    parser = argparse.ArgumentParser()
    for flag, keywords in {**parallel_3d.FLAGS, "--seed": {"type": int, "default": 0}}.items():
        parser.add_argument(flag, **keywords)
    sizes = "--sequence-length 8 --global-batch-size 8 --warmup 2 --lr 0.01 --clip-grad 0.5 --dtype"
    return parser.parse_args([*sizes.split(), dtype, *flags.split()])


def batches(config=SMALL, length=8):
    """Four global batches. Targets are -100 where masked, more often in the first sequences than in the last."""
    generator = torch.Generator().manual_seed(7)
    for masked in (0.4, 1.4, 0.0, 100.0):  # some, all of the first sequences, none, all
        tokens = torch.randint(config.V, (8, length + 1), generator=generator)
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:].clone()
        probability = masked * torch.linspace(1.5, 0.1, 8)[:, None]
        targets[torch.rand(8, length, generator=generator) < probability] = -100
        yield inputs, targets


def reference_logits(weights, tokens_bs, config, dropout):
    """GPT-2 as its paper says, with no code of parallel_3d.py. `dropout(x, layer)` seeds itself at each new layer."""

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    length = tokens_bs.shape[1]
    hidden = weights["0.word.weight"][tokens_bs.T.contiguous()]
    hidden = hidden + weights["0.position.weight"][:length, None]
    hidden = dropout(hidden, 0)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for i in range(1, config.L + 1):
        qkv = linear(norm(hidden, f"{i}.norm1"), f"{i}.qkv")
        q, k, v = qkv.unflatten(-1, (3, config.heads, -1)).permute(2, 1, 3, 0, 4)
        scores = q @ k.mT / math.sqrt(config.h / config.heads)
        attention = scores.masked_fill(future, -math.inf).softmax(-1)
        mixed = (dropout(attention, i) @ v).permute(2, 0, 1, 3).flatten(2)
        hidden = hidden + dropout(linear(mixed, f"{i}.proj"))
        y = linear(norm(hidden, f"{i}.norm2"), f"{i}.linear1")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        hidden = hidden + dropout(linear(y, f"{i}.linear2"))
    return norm(hidden, f"{config.L + 1}.norm") @ weights["0.word.weight"].T


def reference_losses(weights, inputs, targets, config, args, micro_batch):
    """The losses of a micro-batch's unmasked tokens: -log softmax."""

    def dropout(values, layer=None):
        if layer is not None:
            torch.manual_seed(args.seed * 2**40 + micro_batch * 2**10 + layer)
        return torch.nn.functional.dropout(values, args.dropout)

    logits = reference_logits(weights, inputs, config, dropout).transpose(0, 1)
    logs = logits - logits.logsumexp(-1, keepdim=True)
    losses = -logs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return losses[targets != -100]


@torch.no_grad()
def reference_update(weight, gradient, state, args, step):
    """SGD, or AdamW with PyTorch's defaults; the learning rate rises linearly over the first `warmup` steps."""
    lr = args.lr * (step / args.warmup if step < args.warmup else 1.0)
    if args.optimizer == "SGD":
        weight -= lr * gradient
        return
    state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * gradient
    state["square"] = 0.999 * state.get("square", 0.0) + 0.001 * gradient**2
    mean = state["mean"] / (1 - 0.9**step)
    square = state["square"] / (1 - 0.999**step)
    weight -= lr * 0.01 * weight
    weight -= lr * mean / (square.sqrt() + 1e-8)


def reference_training(config, args, batches):
    """Yields (loss, gradients' norm, weights) after each step."""
    weights = plain_model(config, seed=args.seed).double().state_dict()
    del weights[f"{config.L + 1}.linear.weight"]  # the tied embedding
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    states = {name: {} for name in weights}
    micro_batch = 0
    for step, (inputs, targets) in enumerate(batches, start=1):
        loss = 0.0
        for first in range(0, len(inputs), args.micro_batch_size):
            part = slice(first, first + args.micro_batch_size)
            losses = reference_losses(
                weights, inputs[part], targets[part], config, args, micro_batch
            )
            loss = loss + losses.sum() / max(1, int((targets != -100).sum()))
            micro_batch += 1
        gradients = torch.autograd.grad(loss, list(weights.values()))
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
        factor = min(1.0, args.clip_grad / (norm + 1e-6)) if args.clip_grad else 1.0
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            reference_update(weight, gradient * factor, states[name], args, step)
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


def along(trainer, axis, tensor):  # -> every rank's
    everyone = [
        torch.empty_like(tensor) for _ in range(dist.get_world_size(trainer.grid.groups[axis]))
    ]
    dist.all_gather(everyone, tensor, group=trainer.grid.groups[axis])
    return everyone


def assert_replicas_agree(trainer):
    """Bitwise: all parameters along dp, those that are not split along tp, the embedding at both ends of pp."""
    split = {
        trainer.stages.get_parameter(name)
        for name, *_ in tensor_parallel.split_parameters(trainer.stages)
    }
    held = {"dp": trainer.parameters, "tp": [p for p in trainer.parameters if p not in split]}
    if trainer.grid.pp > 1 and trainer.tied is not None:
        held["ends"] = [trainer.tied]
    for axis, parameters in held.items():
        mine = torch.cat([parameter.detach().flatten() for parameter in parameters])
        assert all(torch.equal(mine, theirs) for theirs in along(trainer, axis, mine)), axis


def assert_costs(trainer, sent):
    """Bytes sent, by axis, and held are the formulas'; every parameter is in the norm once; ranks are as Megatron's."""
    args, grid, config, size = trainer.args, trainer.grid, trainer.config, trainer.dtype.itemsize
    for axis, expected in parallel_3d.sent_by_formula(trainer).items():
        # What is above it are numbers: losses, norms, who failed; in ZeRO a byte per parameter, and paddings.
        assert 0 <= sent.by_axis[axis] - expected < (300 if axis == "dp" and args.zero1 else 100), (
            axis
        )
    assert sum(sent.by_axis.values()) == sent.total
    psi = sum(map(torch.numel, trainer.parameters))
    held = (
        zero.held_by(trainer.optimizer)
        if args.zero1
        else ddp.held(trainer.parameters, trainer.optimizer)
    )
    assert held[0] == pytest.approx(psi * size, rel=0.02)
    moments, masters = (
        2 * max(4, size) * (args.optimizer == "AdamW"),
        4 * (size == 2 and args.zero1),
    )
    state = psi * (moments + masters) / (grid.dp if args.zero1 else 1)
    assert (
        state <= held[2] < 1.02 * state + 2000
    )  # the paddings of its buckets, and the counts of steps
    counted, padding = (
        torch.tensor(float(sum(map(torch.numel, trainer.counted)))),
        (-config.V % grid.tp) * config.h,
    )
    assert (
        grid.sum(counted, "tp", "pp")
        == sum(map(torch.numel, plain_model(config).parameters())) + padding
    )
    assert (grid.at["pp"] * grid.dp + grid.at["dp"]) * grid.tp + grid.at["tp"] == pool.rank()


def start(args, config=SMALL, folder=None):
    """-> a trainer; with all that is in a checkpoint: it would save the same, and computes with its weights."""
    trainer = Trainer(config, Grid(args.tp or 1, args.pp or 1), args)
    if folder:
        with torch.no_grad():
            torch._foreach_mul_(trainer.parameters, 1.5)  # not what the seed gives
        parallel_3d.load(trainer, folder)
        loaded = {
            name: value.clone() for name, value in trainer.full_state_dict().items()
        }  # at once: all is there
        parallel_3d.save(trainer, folder / "again")
        saved, again = checkpoint.load_whole(folder), checkpoint.load_whole(folder / "again")
        assert all(torch.equal(saved[name], again[name]) for name in saved | again)
        for name, value in loaded.items():  # the head is saved as the embedding that it is
            assert torch.equal(
                value, saved.get(f"weight/{name}", saved["weight/0.word.weight"]).to(value.dtype)
            ), name
    return trainer


SGD, INTERLEAVED = "--optimizer SGD --lr 0.5", "--schedule interleaved_1f1b --stages-per-rank 2"
RUNS = [  # options of all the run, of its first two steps, and of the next two, where it goes on
    (SMALL, SGD, "--zero1", "--tp 4 --zero1 --sequence-parallel --micro-batch-size 4"),
    (SMALL, SGD, "--tp 2 --zero1 --sequence-parallel --micro-batch-size 1", "--pp 2"),
    (SMALL, "", "--tp 2 --pp 2 --zero1 --sequence-parallel", ""),
    (
        SMALL,
        "",
        "--tp 4 --micro-batch-size 4",
        "--tp 2 --pp 2 --schedule zero_bubble --sequence-parallel",
    ),
    (PADDED, "--warmup 3 --sequence-length 16", "--tp 4", "--pp 2 --zero1"),
    (PADDED, "--warmup 0 --sequence-length 7", "--tp 2 --pp 2", "--tp 4 --zero1"),
    (
        SMALL,
        "--dropout 0.3 --sequence-length 1",
        "--zero1",
        "--pp 2 --schedule zero_bubble --zero1",
    ),
    (DEEP, "--dropout 0.3", "--pp 4", ""),  # the masks of one device, on any stage and pipeline
    (
        DEEP,
        "--clip-grad 0",
        "--pp 4 --zero1 --schedule gpipe --micro-batch-size 1",
        f"--tp 2 --zero1 {INTERLEAVED}",
    ),
    (
        DEEP,
        "--schedule gpipe",
        "--tp 2 --pp 2 --sequence-parallel",
        f"--pp 2 --zero1 {INTERLEAVED}",
    ),
    (DEEP, INTERLEAVED, "--tp 2 --pp 2", "--tp 2 --pp 2 --zero1 --sequence-parallel"),
    (SMALL, "--dtype bfloat16", "--pp 2", "--tp 2 --zero1"),
    (SMALL, "", "--dtype bfloat16 --tp 2 --zero1", "--dtype float16 --pp 2"),
    (SMALL, SGD, "--dtype float16 --tp 2", "--dtype float16 --pp 2 --zero1"),
]
TWICE = [
    "--dtype float32 --tp 2 --zero1 --dropout 0.3",
    "--dtype bfloat16 --tp 2 --pp 2 --sequence-parallel --dropout 0.3",
    f"--dtype float16 --pp 2 --zero1 {INTERLEAVED}",
]


@pytest.mark.parametrize("run", RUNS, ids=str)
@pool.on(4)
def test_trains_and_goes_on_at_another_grid_as_one_device(run, tmp_path):
    """Loss, norm and parameters, up to the order of sums; in 16 bits, loss and norm up to a few units of roundoff."""
    config, shared, *parts = run
    args = options(f"{shared} {parts[0]}")
    data = list(batches(config, args.sequence_length))
    steps = zip(data, train_on_one_device(config, args, data), strict=True)
    for part in parts:
        args = options(f"{shared} {part}")
        trainer = start(args, config, tmp_path if part is parts[1] else None)
        exact, within = (
            args.dtype == "float64",
            {"float64": 1e-12, "bfloat16": 2**-6, "float16": 2**-9}[args.dtype],
        )
        for batch, (loss, norm, model) in itertools.islice(steps, 2):
            with parallel_3d.SentByAxis(
                trainer.grid
            ) as sent:  # in the first step ranks tell each other shapes, too
                ours = trainer.step(*batch)
            assert ours[0] == pytest.approx(loss, rel=within)
            if exact or trainer.steps == 1:  # later ones are of other weights
                assert ours[1] == pytest.approx(norm, rel=within)
            assert exact or ours[0] != loss or loss == 0
            expected = model.state_dict()
        if exact:
            everyone = [None] * 4
            dist.all_gather_object(everyone, mine := trainer.full_state_dict())
            assert set().union(*everyone) == expected.keys()
            for name, value in mine.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
        assert_replicas_agree(trainer)
        assert_costs(trainer, sent)
        parallel_3d.save(trainer, tmp_path)


@pytest.mark.parametrize("flags", TWICE)
@pool.on(4)
def test_a_run_and_another_that_is_stopped_are_the_same(flags, tmp_path):
    """Bit by bit: heads' dropout, masters, loss scale. A gradient that overflows on one rank skips the step on all."""
    args = options(flags)
    runs = [start(args, DEEP) for _ in range(2)]
    blocks = [
        next(layer for layer in trainer.stages[0] if isinstance(layer, parallel_3d.Block))
        for trainer in runs
    ]
    for block in blocks:
        block.linear1.weight.register_hook(
            lambda x: x + (math.inf if (number, pool.rank()) == (1, 3) else 0.0)
        )
    for number, batch in enumerate(batches()):
        if number == 2:
            parallel_3d.save(runs[0], tmp_path)
            runs[1] = start(args, DEEP, tmp_path)
        before = [parameter.detach().clone() for parameter in runs[1].parameters]
        first, second = (trainer.step(*batch) for trainer in runs)
        assert first == second
        assert all(map(torch.equal, before, runs[1].parameters)) == (number == 1)
        assert math.isfinite(first[1]) == (number != 1)
    assert all(map(torch.equal, runs[0].parameters, runs[1].parameters))
    assert {trainer.scaler.get_scale() for trainer in runs} == {
        2**15 if args.dtype == "float16" else 1
    }  # halved
    assert_replicas_agree(runs[1])
    torch.manual_seed(0)
    with blocks[0].region():  # where heads draw masks, each rank's its own
        assert len(set(map(float, along(runs[0], "tp", torch.rand(1))))) == runs[0].grid.tp
    assert len(set(map(float, along(runs[0], "tp", torch.rand(1))))) == 1


def test_dropout_has_a_seed_for_each_layer_and_micro_batch():
    model, seeds = plain_model(SMALL, dropout=0.3), []
    for layer in model:
        layer.register_forward_hook(lambda *_: seeds.append(torch.initial_seed()))
    for _ in range(2):
        model(torch.zeros(2, 8, dtype=torch.long))
    assert len(set(seeds)) == 2 * len(model)


WRONG = [  # options, what is another of the model, what is said when it goes on where "--tp 2 --pp 2" stopped
    ("--tp 3", {}, "--tp 3 × --pp 1 = 3 ranks must divide the world of 4"),
    (
        "--global-batch-size 12 --micro-batch-size 5",
        {},
        "multiple of --micro-batch-size 5 × 4 data-parallel ranks",
    ),
    ("--micro-batch-size 0", {}, "multiple of --micro-batch-size 0"),
    ("--pp 4", {}, "4 stages on 4 ranks; the model has 2 blocks"),
    ("--sequence-length 17", {}, "--sequence-length 17; the model has 16 positions"),
    ("--sequence-length 0", {}, "--sequence-length 0; the model has 16 positions"),
    (
        "--tp 4 --sequence-parallel --sequence-length 6",
        {},
        "6 positions do not divide by 4 tensor-parallel ranks",
    ),
    ("--tp 4", {"heads": 2}, "2 attention heads do not divide by 4"),
    ("--clip-grad -1", {}, "--clip-grad -1.0; it must be positive"),
    ("--global-batch-size 16", {}, r"--global-batch-size 16: the run in .* has 8"),
    ("", {"h": 64}, r"of weight/0.word.weight, but \['float64', \[37, 64\]\] is wanted"),
    ("--dtype float16", {}, r"has \['float64', .* but \['float32', .* is wanted"),  # its masters
]


@pool.on(4)
def test_what_is_wrong_is_refused(tmp_path):
    parallel_3d.save(start(options("--tp 2 --pp 2")), tmp_path)
    for flags, changed, message in WRONG:
        with pytest.raises(ValueError, match=message):
            parallel_3d.load(start(options(flags), SMALL._replace(**changed)), tmp_path)


def test_the_model_is_gpt2():
    """As many parameters as published, and heads of 64; a block is PyTorch's encoder layer, initialised as GPT-2's."""
    published = [MODELS[f"gpt2-{name}"] for name in ("124m", "345m", "774m", "1.5b")]
    with torch.device("meta"):
        counts = [sum(map(torch.numel, plain_model(config).parameters())) for config in published]
    assert counts == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]
    assert {config.h / config.heads for config in published} == {64}
    block, gelu = build_layer(SMALL, 1).double(), torch.nn.GELU("tanh")
    assert [x.weight.std().item() for x in (block.qkv, block.linear2)] == pytest.approx(
        [0.02, 0.01], rel=0.1
    )
    theirs = torch.nn.TransformerEncoderLayer(
        32, 4, 128, 0.0, gelu, norm_first=True, dtype=torch.float64
    )
    state = block.state_dict()
    names = [
        name.replace("qkv.", "self_attn.in_proj_").replace("proj.", "self_attn.out_proj.")
        for name in state
    ]
    theirs.load_state_dict(dict(zip(names, state.values(), strict=True)))
    x, mask = (
        torch.randn(8, 2, 32, dtype=torch.float64),
        torch.nn.Transformer.generate_square_subsequent_mask(8),
    )
    torch.testing.assert_close(
        block(x), theirs(x, src_mask=mask.double(), is_causal=True), rtol=1e-12, atol=1e-12
    )


def test_compare():
    """All grids that fit the world, the heads and, with two stages on each rank, the blocks; never with --save."""
    session = argparse.Namespace(
        ranks=8, config=DEEP, args=options("--compare --stages-per-rank 2")
    )
    assert parallel_3d.Session.grids(session) == [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)]
    done = fork(
        FILE, "--compare", "--steps", 2, "--sequence-length", 8, "--global-batch-size", 6, ranks=3
    )
    assert (done.returncode, done.stderr) == (0, "")
    equal = re.findall(
        r"^vs 1 device loss, .* and parameters equal within 1e-09: \de-1\d over", done.stdout, re.M
    )
    assert len(equal) == len(re.findall(r" × .* ok$", done.stdout, re.M)) == 2
    done = fork(FILE, "--load", "nowhere")
    assert (done.returncode, done.stderr) == (2, "error: --load nowhere: it has no checkpoint\n")
    done = fork(FILE, "--compare", "--save", "nowhere")
    assert (done.returncode, done.stderr.count("at least 1; --save not with --compare\n")) == (2, 1)


def test_the_default_on_8_ranks(tmp_path):
    """2 × 2 × 2, on cores that they share; and what the metrics say."""
    flags = f"--sequence-parallel --zero1 --steps 2 --sequence-length 8 --global-batch-size 8 --metrics {tmp_path}/m"
    done = fork(FILE, *flags.split(), ranks=8)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^grid +tp 2 × pp 2 × dp 2 · gpt2-tiny · float64$", done.stdout, re.M)
    assert re.search(
        r"^sent/rank +(\S+) MB per step +formula tp\+pp\+dp = \1 MB$", done.stdout, re.M
    )
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(
        line.keys() >= {"loss", "grad_norm", "lr", "tokens_per_second", "tp", "pp", "dp"}
        for line in lines
    )
    assert re.search(
        rf"^loss +{lines[0]['loss']:.3f} → {lines[-1]['loss']:.3f}$", done.stdout, re.M
    )


HURT = """
import os, signal, sys, checkpoint, parallel_3d
write, restarts = checkpoint.write, os.environ.get("TORCHELASTIC_RESTART_COUNT")

def hurt(path, pieces):
    if path.name == "1.bin" and restarts is None:  # while it saves step 1
        os.kill(os.getpid(), signal.SIGTERM)
    if path.name == "1.bin" and restarts == "0" and (path.parent.parent / "3").exists():  # step 4
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path, pieces)
checkpoint.write = hurt
sys.exit(parallel_3d.main())
"""
CABLE = """
ip netns add {0} && ip netns add {1} && ip link add cable netns {0} type veth peer name cable netns {1}
ip -n {0} address add 10.77.0.1/24 dev cable && ip -n {1} address add 10.77.0.2/24 dev cable
for name in {0} {1}; do ip -n $name link set cable up && ip -n $name link set lo up; done
"""


def test_stopped_and_killed_on_two_machines(tmp_path):
    """SIGTERM to one rank saves, and ends all with status 0. One killed while it saves is started again, and goes on:
    between two machines that reach each other by their addresses alone, on data.py's files, as on one device."""
    parallel_3d.data.write_indexed(
        tmp_path / "corpus", [[i % 7 * 30 + j for j in range(40)] for i in range(30)], 257
    )
    (tmp_path / "hurt.py").write_text(HURT)
    command = f"{tmp_path}/hurt.py --data={tmp_path}/corpus --save {tmp_path}/saved --save-interval 1 --steps 5"
    command += f" --sequence-length 16 --global-batch-size 4 --metrics {tmp_path}/m"
    done = fork(*command.split(), ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"saved       {tmp_path}/saved after step 2, told to stop\n")
    names, both = [f"p3d{os.getpid()}{side}" for side in "ab"], []
    cable = subprocess.run(
        ["sh", "-ec", CABLE.format(*names)], check=False, capture_output=True, text=True
    )
    net, device = ("127.0.0.", "lo") if cable.returncode else ("10.77.0.", "cable")
    env = {
        "PYTHONPATH": str(ROOT),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": device,
    }
    with ThreadPoolExecutor() as threads:
        for i, name in enumerate(names, start=1):  # no name resolves to these addresses
            flags = f"--nnodes 2 --nproc-per-node 1 --max-restarts 1 --local-addr {net}{i} --rdzv-conf is_host={i == 1}"
            flags += f" --rdzv-backend c10d --rdzv-endpoint {net}1:{20000 + os.getpid() % 10000} {command} --pp 2"
            place = [] if cable.returncode else ["ip", "netns", "exec", name]
            both.append(
                threads.submit(launch, [*place, *TORCHRUN[:-1], *flags.split()], ROOT, env=env)
            )
    subprocess.run(
        ["sh", "-c", "ip netns del {}; ip netns del {}".format(*names)],
        check=False,
        capture_output=True,
    )
    output = "".join(each.result().stdout for each in both)
    assert [each.result().returncode for each in both] == [0, 0], "".join(
        each.result().stderr for each in both
    )
    assert re.findall(r"^loaded .*saved after step (\d)$", output, re.M) == ["2", "3"]
    assert re.search(r"^vs 1 device .* equal within 1e-09: \de-1\d over 5 steps$", output, re.M)
    assert [json.loads(line)["step"] for line in (tmp_path / "m").read_text().splitlines()] == [
        1,
        2,
        3,
        4,
        4,
        5,
    ]
    if cable.returncode:
        pytest.skip(f"all is well, but on one machine: {cable.stderr.strip()}")
