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
from launch import ROOT, fork, free_port

import parallel_3d
from estimate import GPT, flops_per_token
from parallel_3d import MODELS, Grid, Trainer, plain_model, train_on_one_device

FILE = ROOT / "parallel_3d.py"
SMALL = GPT(2, 32, 4, 37, 16)  # a vocabulary that neither 2 nor 4 ranks can split evenly
DEEP = replace(SMALL, layers=4)
PADDED = replace(SMALL, vocab=5)  # the last of 4 ranks has padding only


def options(flags="", dtype="float64"):
    """The command line's arguments, for small batches of 8 sequences of 8 tokens."""
    parser = argparse.ArgumentParser()
    flags_of_demos = {"--seed": {"type": int, "default": 0}}
    for flag, keywords in (parallel_3d.FLAGS | flags_of_demos).items():
        parser.add_argument(flag, **keywords)
    sizes = "--sequence-length 8 --global-batch-size 8 --warmup 2 --lr 0.01 --clip-grad 0.5"
    return parser.parse_args([*f"{sizes} --dtype {dtype} {flags}".split()])


def make_batches(config=SMALL, length=8):
    """Four global batches. The first sequences have more masked targets than the last ones."""
    generator = torch.Generator().manual_seed(7)
    for masked in (0.4, 1.4, 0.0, 100.0):  # some, all of the first sequences, none, all
        tokens = torch.randint(config.vocab, (8, length + 1), generator=generator)
        probability = masked * torch.linspace(1.5, 0.1, 8)[:, None]
        is_masked = torch.rand(8, length, generator=generator) < probability
        yield tokens[:, :-1], tokens[:, 1:].masked_fill(is_masked, -100)


def make_trainer(args, config=SMALL):
    grid = Grid(args.tp or 1, args.pp or 1)
    return Trainer(config, grid, args)


# ---- one device


def pytorchs_logits(model, tokens, config, dropout):
    """The logits from PyTorch's transformer layers, with the parameters and seeds of `model`."""
    h = config.hidden
    gelu = partial(F.gelu, approximate="tanh")
    embedding, *blocks, head = model
    length = tokens.shape[1]
    future = torch.full((length, length), -math.inf).double()
    future = future.triu(1)
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
    x = F.layer_norm(x, (h,), head.norm.weight, head.norm.bias)
    return x @ head.linear.weight.T


def test_the_model_computes_what_pytorchs_layers_do():
    model = plain_model(SMALL, dropout=0.3, seed=5).double()
    for tokens, _ in make_batches(length=11):
        expected = pytorchs_logits(model, tokens, SMALL, 0.3)
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-12)


def test_one_device_steps_along_the_gradient_of_the_mean_over_unmasked_tokens():
    args = options("--optimizer SGD --lr 0.5 --warmup 4 --clip-grad 0.1 --micro-batch-size 3")
    inputs, targets = next(make_batches())
    model = plain_model(SMALL).double()
    logits = model(inputs).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.T.flatten())
    expected.backward()
    expected_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    ((loss, norm, trained),) = train_on_one_device(SMALL, args, [(inputs, targets)])
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert norm == pytest.approx(expected_norm.item(), rel=1e-12)
    for before, after in zip(model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(after, before - 0.125 * before.grad, rtol=0, atol=1e-12)


def test_a_document_is_computed_as_if_it_were_alone():
    """Token 3 ends a document. The first one has 4 tokens, the second one 2, the last one 1."""
    model = plain_model(replace(SMALL, vocab=4)).double()
    tokens = torch.tensor([[0, 1, 2, 3, 1, 3, 2]])
    args = options("--reset-attention-mask --reset-position-ids")
    model.fields = parallel_3d.packed_fields(tokens, replace(SMALL, vocab=4), args)
    packed = model(tokens)
    model.fields = [(None, None)]
    alone = torch.cat([model(document) for document in tokens.split([4, 2, 1], 1)])
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)
    assert (packed - model(tokens)).abs().max() > 1e-3


def test_weights_start_as_gpt2s_and_differ_between_layers():
    _, first, second, _ = plain_model(replace(SMALL, hidden=128))
    matrices = [first.qkv, first.linear1, first.proj, first.linear2]
    spread = [matrix.weight.std().item() for matrix in matrices]
    assert spread == pytest.approx([0.02, 0.02, 0.01, 0.01], rel=0.05)
    assert not torch.equal(first.qkv.weight, second.qkv.weight)


def test_the_next_seed_gives_other_weights_to_every_layer():
    models = [plain_model(SMALL, seed=seed) for seed in (0, 1)]
    sums = [block.linear1.weight.sum().item() for model in models for block in model[1:-1]]
    assert len(set(sums)) == len(sums) == 4


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


def train_beside_one_device(trainers, args, config=SMALL):
    """Train each trainer for two steps: loss, norm and parameters are within 1e-12."""
    batches = list(make_batches(config, args.sequence_length))
    plain = train_on_one_device(config, args, batches)
    steps = zip(batches, plain, strict=True)
    for trainer in trainers:
        for _ in range(2):
            batch, (loss, norm, model) = next(steps)
            assert trainer.step(*batch) == pytest.approx((loss, norm), rel=1e-12)
        expected = model.state_dict()
        for name, value in trainer.full_state_dict().items():
            torch.testing.assert_close(value, expected.pop(name), rtol=0, atol=1e-12)
        assert trainer.grid.pp > 1 or not expected
        assert_replicas_agree(trainer)


SGD = "--optimizer SGD --lr 0.5"
INTERLEAVED = "--schedule interleaved_1f1b --stages-per-rank 2"
SEQUENCE = "--sequence-parallel"
FUSED = "--fused-loss"
ZERO_BUBBLE = "--schedule zero_bubble"
PACKED = "--reset-attention-mask --reset-position-ids"
FEW = replace(SMALL, vocab=4)  # so that many tokens end a document
RUNS = [  # options of the whole run, of its first two steps, and of the next two
    (SMALL, SGD, "--zero1", f"--tp 4 --zero1 {SEQUENCE} --micro-batch-size 4"),
    (PADDED, "--warmup 0 --sequence-length 7", "--tp 4", "--pp 2 --zero1"),
    (SMALL, "--dropout 0.3 --sequence-length 1", "--zero1", f"--pp 2 {ZERO_BUBBLE} --zero1"),
    (DEEP, "--clip-grad 0", "--pp 4 --zero1 --schedule gpipe", f"--tp 2 --zero1 {INTERLEAVED}"),
    (DEEP, INTERLEAVED, "--tp 2 --pp 2", f"--tp 2 --pp 2 --zero1 {SEQUENCE}"),
    (PADDED, FUSED, "--tp 4", f"--pp 2 {ZERO_BUBBLE} --zero1"),
    (
        SMALL,
        f"{FUSED} {SGD}",
        f"--tp 2 --pp 2 {SEQUENCE}",
        f"--tp 4 {SEQUENCE} --micro-batch-size 4",
    ),
    (FEW, PACKED, f"--tp 2 --zero1 {SEQUENCE}", f"--pp 2 {ZERO_BUBBLE} --micro-batch-size 1"),
]


@pytest.mark.parametrize("run", RUNS, ids=[" then ".join(run[1:]) for run in RUNS])
@pool.on(4)
def test_trains_and_goes_on_at_another_grid_as_one_device(run, tmp_path):
    config, shared, first, second = run

    def trainers():
        trainer = make_trainer(options(f"{shared} {first}"), config)
        yield trainer
        parallel_3d.save(trainer, tmp_path)
        trainer = make_trainer(options(f"{shared} --seed 0 {second}"), config)
        with torch.no_grad():
            torch._foreach_mul_(trainer.parameters, 1.5)  # not what the seed gives
        parallel_3d.load(trainer, tmp_path)
        yield trainer

    train_beside_one_device(trainers(), options(shared), config)


@pool.on(4)
def test_bf16_stays_within_a_few_roundoffs_of_one_device():
    args = options("--dtype bfloat16 --tp 2 --zero1")
    trainer = make_trainer(args)
    batches = list(make_batches())
    steps = train_on_one_device(SMALL, args, batches)
    for batch, (loss, norm, _) in zip(batches, steps, strict=True):
        our_loss, our_norm = trainer.step(*batch)
        assert our_loss == pytest.approx(loss, rel=2**-6)
        if trainer.steps == 1:  # later norms are of other weights
            assert our_norm == pytest.approx(norm, rel=2**-6)
    assert_replicas_agree(trainer)


@pytest.mark.parametrize(
    "flags",
    [
        f"--tp 2 --zero1 {SEQUENCE} --micro-batch-size 1",
        "--pp 4 --dtype bfloat16",
        f"--tp 2 {SEQUENCE} {FUSED}",
        f"--tp 4 {FUSED}",
    ],
)
@pool.on(4)
def test_bytes_sent_and_held_are_those_of_the_docstring(flags):
    args = options(flags)
    trainer = make_trainer(args, DEEP)
    first, second, *_ = make_batches()
    trainer.step(*first)  # it also sends shapes
    with parallel_3d.SentByAxis(trainer.grid) as sent:
        trainer.step(*second)
    for axis, expected in parallel_3d.sent_by_formula(trainer).items():
        # Above it are single numbers, such as losses; in ZeRO a byte per parameter, and padding.
        above = sent.by_axis[axis] - expected
        assert 0 <= above < (300 if axis == "dp" and args.zero1 else 100), axis
    assert sum(sent.by_axis.values()) == sent.total
    params, _, state = parallel_3d.held_bytes(trainer)
    size = trainer.dtype.itemsize
    psi = sum(map(torch.numel, trainer.parameters))
    moments_and_masters = 2 * max(4, size) + 4 * (size == 2)
    expected = psi * moments_and_masters / (trainer.grid.dp if args.zero1 else 1)
    assert params == pytest.approx(psi * size, rel=0.02)
    assert expected <= state < 1.02 * expected + 2000  # padding of buckets, and the steps' counts


@pytest.mark.parametrize(
    "flags",
    [
        f"--dtype bfloat16 --tp 2 --pp 2 {SEQUENCE} --dropout 0.3",
        f"--dtype float16 --pp 2 --zero1 {INTERLEAVED}",
    ],
)
@pool.on(4)
def test_a_run_that_was_stopped_goes_on_bitwise(flags, tmp_path):
    """With dropout, masters and a loss scale that is not the first one."""
    first = make_trainer(options(flags), DEEP)
    first.scaler.load_state_dict(first.scaler.state_dict() | {"scale": 2.0**10})
    batches = list(make_batches())
    for batch in batches[:2]:
        first.step(*batch)
    parallel_3d.save(first, tmp_path)
    second = make_trainer(options(flags), DEEP)
    parallel_3d.load(second, tmp_path)
    for batch in batches[2:]:
        assert first.step(*batch) == second.step(*batch)
    assert all(map(torch.equal, first.parameters, second.parameters))
    assert first.scaler.get_scale() == second.scaler.get_scale()


@pool.on(4)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale():
    trainer = make_trainer(options("--dtype float16 --pp 2 --zero1"))
    scale = trainer.scaler.get_scale()
    before = [parameter.detach().clone() for parameter in trainer.parameters]
    infinite = math.inf if pool.rank() == 3 else 0.0
    block = next(layer for layer in trainer.stages[0] if hasattr(layer, "linear1"))
    block.linear1.weight.register_hook(lambda gradient: gradient + infinite)
    _, norm = trainer.step(*next(make_batches()))
    assert not math.isfinite(norm)
    assert all(map(torch.equal, before, trainer.parameters))
    assert trainer.scaler.get_scale() == scale / 2


@pool.on(4)
def test_tensor_parallel_ranks_draw_other_masks_for_their_own_heads_only():
    trainer = make_trainer(options("--tp 4 --dropout 0.3"))
    torch.manual_seed(0)
    with trainer.stages[0][1].dropout_region():
        inside = along(trainer.grid.tp_group, torch.rand(1))
    outside = along(trainer.grid.tp_group, torch.rand(1))
    assert len(set(map(float, inside))) == 4
    assert len(set(map(float, outside))) == 1


# ---- wrong use


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--global-batch-size 12", "multiple of --micro-batch-size 2 × 4"),
        ("--sequence-length 17", "17; the model has 16 positions"),
        ("--clip-grad -1", "--clip-grad -1"),
    ],
)
@pool.on(4)
def test_flags_that_do_not_fit_are_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        make_trainer(options(flags))


@pool.on(4)
def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    parallel_3d.save(make_trainer(options("--tp 2 --pp 2")), tmp_path)
    refused = {"--global-batch-size 16": "has 8", "--dtype float16": "float32"}
    for flags, words in refused.items():
        trainer = make_trainer(options(flags))
        with pytest.raises(ValueError, match=words):
            parallel_3d.load(trainer, tmp_path)


# ---- the command line


def test_a_batch_has_texts_from_anywhere_and_their_next_bytes_as_targets():
    session = parallel_3d.Session.__new__(parallel_3d.Session)  # without a command line and a world
    session.args = options("--global-batch-size 30")
    session.is_indexed = False
    session.text = torch.arange(12, dtype=torch.uint8)
    inputs, targets = session.batch(0)
    assert inputs.shape == (30, 8)
    assert torch.equal(targets, inputs + 1)
    assert set(inputs[:, 0].tolist()) == {0, 1, 2, 3}  # the last target is the last byte
    assert not torch.equal(inputs, session.batch(1)[0])


def test_an_end_of_document_as_input_has_no_loss():
    session = parallel_3d.Session.__new__(parallel_3d.Session)
    session.args = options("--eod-mask-loss --sequence-length 3 --global-batch-size 1")
    session.config = replace(SMALL, vocab=4)
    session.is_indexed = False
    session.text = torch.tensor([0, 3, 1, 3], dtype=torch.uint8)
    inputs, targets = session.batch(0)
    assert inputs.tolist() == [[0, 3, 1]]
    assert targets.tolist() == [[3, -100, 3]]


def test_a_text_has_no_ends_of_documents(tmp_path):
    done = fork(FILE, "--reset-position-ids", cwd=tmp_path)
    assert done.returncode == 2
    assert "--reset-position-ids: a text has no ends of documents" in done.stderr


def test_a_wrong_command_is_one_line(tmp_path):
    done = fork(FILE, "--load", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch("error: --load nowhere: it has no checkpoint.*\n", done.stderr)


EQUAL = r"vs 1 device loss, .* and parameters equal within 1e-09: \de-1\d over \d steps?"
STEPS = "--steps 1 --sequence-length 8 --global-batch-size"


def test_eight_ranks_train_on_a_grid_of_three_axes(tmp_path):
    flags = f"--sequence-parallel --zero1 {STEPS} 8"
    done = fork(FILE, *flags.split(), ranks=8, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "parameters in float64" in done.stdout
    assert "tp 2 × pp 2 × dp 2 · gpt2-tiny" in done.stdout
    assert re.search(f"^{EQUAL}$", done.stdout, re.M)
    assert re.search(r"^sent/rank +(\S+) MB .* = \1 MB$", done.stdout, re.M)
    held = MODELS["gpt2-tiny"].parameters() * 8 / 1e6
    assert f"(1 device: {held:.1f} / {held:.1f} / {2 * held:.1f})" in done.stdout


def test_compare_trains_on_each_grid(tmp_path):
    done = fork(FILE, "--compare", *f"{STEPS} 6".split(), ranks=3, cwd=tmp_path)
    assert done.returncode == 0
    assert re.findall(r"^ *(\d × \d × \d) .* ok$", done.stdout, re.M) == ["1 × 1 × 3", "1 × 3 × 1"]


def test_a_run_that_diverges_from_one_device_fails(tmp_path):
    flags = "--dtype bfloat16 --lr 1 --steps 2"  # so fast that it diverges
    done = fork(FILE, *flags.split(), cwd=tmp_path)
    assert done.returncode == 1
    assert "NOT equal within 0.05: " in done.stdout


# ---- ranks that are stopped

HURT = f"""
import os, signal, sys
sys.path.insert(0, "{ROOT}")
import checkpoint, parallel_3d
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


TORCHRUN = """
import os
from torch.distributed.run import main
os.environ |= dict(GLOO_SOCKET_IFNAME="lo", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
main()
"""


def run_on_two_machines(folder, command):
    """With a rank on each, for which two torchruns at two local addresses stand."""
    script = folder / "torchrun.py"
    script.write_text(TORCHRUN)
    flags = "--nnodes 2 --nproc-per-node 1 --max-restarts 1 --rdzv-backend c10d"
    flags += f" --rdzv-endpoint 127.0.0.1:{free_port()}"
    runs = []
    with ThreadPoolExecutor() as threads:
        for i in (1, 2):
            own = f"--local-addr 127.0.0.{i} --rdzv-conf is_host={i == 1}"
            runs.append(threads.submit(fork, script, *f"{flags} {own} {command}".split()))
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
    both = run_on_two_machines(tmp_path, f"{command} --pp 2")
    for each in both:
        assert each.returncode == 0, each.stderr
    output = both[0].stdout + both[1].stdout
    assert re.findall(r"^loaded .*saved after step (\d)$", output, re.M) == ["2", "3"]
    assert re.search(f"^{EQUAL}$", output, re.M)
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5]
    flops = 4 * 16 * flops_per_token(replace(MODELS["gpt2-tiny"], sequence=16))
    for line in lines:
        assert line.keys() >= {"loss", "grad_norm", "lr", "max_memory_allocated", "tp", "pp", "dp"}
        assert line["share_of_peak"] == pytest.approx(flops / line["seconds"] / 2 / 2e12)
