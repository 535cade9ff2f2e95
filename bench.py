"""Step time of each technique over that of the library class that it mirrors.

    python bench.py                              every row, on the GPU if there is one
    python bench.py ddp zero                     two of them
    python bench.py --device cuda --dtype bf16   in bf16 instead of fp32
    python bench.py --sequences 4                4 sequences per rank: more compute per byte sent

The variants of a row take turns, one step each, in the same processes, so that a busy machine slows
all of them alike. A step lasts as long as on its slowest rank. For each variant the script prints
the median step time, its quartiles, and the median of the ratios taken round by round; on a GPU
also the most memory that the variant adds. It prints each row when it is measured. The last lines
are a table, then `RATIO name value`. A row takes a minute at most: if its steps are long, it has
fewer rounds, and says so.

On a CPU each rank has one thread and 1 sequence of 64 tokens, and the model has 8 layers of width
384. On a GPU a rank has 8 sequences of 512 tokens, the model has 8 layers of width 1024, and fp32
products use TF32. NCCL is the backend if each rank has a GPU of its own, or if
NCCL_MULTI_RANK_GPU_ENABLE=1 says that ranks may share one; otherwise it is gloo.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import os
import platform
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import activation_checkpoint
import amp
import checkpoint
import context_parallel
import ddp
import expert_parallel
import flash_attention
import fsdp
import linear_cross_entropy
import lora
import muon
import pipeline
import tensor_parallel
import zero

# --------------------------------------------------------------------------------------------------
# 1. What every row uses.


@dataclass
class Bench:
    """What a row needs to know to build its variants."""

    rank: int
    ranks: int
    device: torch.device
    dtype: torch.dtype
    width: int
    sequences: int  # per rank and step
    time: int  # tokens in a sequence

    def model(self, dtype=None):
        """The same language model on every rank: 14 M parameters on a CPU, 101 M on a GPU."""
        torch.manual_seed(0)
        model = ddp.language_model(C=self.width, heads=self.width // 64, layers=8)
        return model.to(self.device, dtype or self.dtype)

    def tokens(self, sequences, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(256, (sequences, self.time + 1), generator=generator).to(self.device)

    def adamw(self, model):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(parameters, lr=1e-4, fused=self.on_gpu)

    @property
    def on_gpu(self):
        return self.device.type == "cuda"

    def mesh(self):
        return init_device_mesh(self.device.type, (self.ranks,))

    def training_step(self, model, optimizer=None, micro_batches=1, after_backward=None):
        """Return a function that runs one step on this rank's tokens."""
        optimizer = optimizer or self.adamw(model)
        tokens = self.tokens(self.sequences * micro_batches, seed=self.rank)

        def step():
            optimizer.zero_grad()
            for part in tokens.chunk(micro_batches):
                loss = language_loss(model(part[:, :-1]), part[:, 1:])
                (loss / micro_batches).backward()
            if after_backward:
                after_backward(model)
            optimizer.step()

        return step


def language_loss(logits, targets):
    return ddp.language_loss(logits.float(), targets)


def unchanged(model):
    return model


# --------------------------------------------------------------------------------------------------
# 2. The rows. Each returns {variant: a function that builds it and returns its step}: first ours,
#    then the library's, then others to compare with.


def bench_ddp(bench):
    """DistributedDataParallel"""

    def variant(wrap, **options):
        return lambda: bench.training_step(wrap(bench.model()), **options)

    views = {"gradient_as_bucket_view": True}
    return {
        "ddp": variant(ddp.DistributedDataParallel),
        "torch DistributedDataParallel": variant(TorchDDP),
        "ddp, bucket views": variant(partial(ddp.DistributedDataParallel, **views)),
        "torch, bucket views": variant(partial(TorchDDP, **views)),
        "all_reduce_gradients": variant(unchanged, after_backward=ddp.all_reduce_gradients),
        "no communication": variant(unchanged),
        "one device, the global batch": variant(unchanged, micro_batches=bench.ranks),
    }


def bench_zero(bench):
    """Zero1. In bf16 ours keeps fp32 master weights, and the library's does not."""
    options = {"lr": 1e-4, "fused": bench.on_gpu}

    def ours(stage):
        model = bench.model()
        return bench.training_step(model, stage(model, torch.optim.AdamW, **options))

    def theirs():
        model = TorchDDP(bench.model())
        parameters = model.parameters()
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **options)
        return bench.training_step(model, optimizer)

    return {
        "Zero1": partial(ours, zero.Zero1),
        "torch DDP + ZeroRedundancyOptimizer": theirs,
        "Zero2": partial(ours, zero.Zero2),
        "Zero3": partial(ours, zero.Zero3),
        "torch DDP + AdamW": lambda: bench.training_step(TorchDDP(bench.model())),
    }


def bench_muon(bench):
    """Muon for the blocks' matrices, with AdamW for all else. It needs torch 2.9."""

    def variant(make_muon, wrap=unchanged, average=unchanged):
        model = bench.model()
        matrices, others = muon.split_parameters(model)
        adamw = torch.optim.AdamW(others, lr=1e-4, fused=bench.on_gpu)
        optimizer = muon.Optimizers(make_muon(matrices), adamw)
        rest = nn.ParameterList(others)
        return bench.training_step(wrap(model), optimizer, after_backward=lambda _: average(rest))

    return {
        "Muon": partial(variant, muon.Muon, average=ddp.all_reduce_gradients),
        "torch DDP + torch Muon": partial(variant, torch.optim.Muon, TorchDDP),
        "torch Muon, no communication": partial(variant, torch.optim.Muon),
    }


def bench_fsdp(bench):
    """fully_shard. In bf16 both keep fp32 parameters and gather them in bf16."""
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    dtypes = {} if bench.dtype == torch.float32 else bf16

    def variant(fully_shard, policy, **options):
        options |= {"mesh": bench.mesh(), "mp_policy": policy(**dtypes)}
        model = bench.model(torch.float32)
        for block in model[1:-2]:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return bench.training_step(model)

    ours = partial(variant, fsdp.fully_shard, fsdp.MixedPrecisionPolicy)
    theirs = partial(variant, torch_fully_shard, TorchMixedPrecisionPolicy)
    return {
        "fsdp": ours,
        "torch fully_shard": theirs,
        "fsdp, reshard_after_forward=False": partial(ours, reshard_after_forward=False),
        "torch, reshard_after_forward=False": partial(theirs, reshard_after_forward=False),
        "torch DistributedDataParallel": lambda: bench.training_step(TorchDDP(bench.model())),
    }


class SeparateBlock(ddp.Block):
    """A block that parallelize_module can split: q, k and v have a matrix each."""

    def __init__(self, C, heads):
        super().__init__(C, heads)
        del self.qkv
        self.q = nn.Linear(C, C)
        self.k = nn.Linear(C, C)
        self.v = nn.Linear(C, C)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = map(self.split_heads, (self.q(y), self.k(y), self.v(y)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.linear1(self.norm2(x)))
        return x + self.linear2(hidden)


def tensor_parallel_model(bench, sequence_parallel):
    plan = {"0": "vocab", "*.norm?": "norm", "*.qkv": "qkv", "*.proj": "row"}
    plan |= {"*.linear1": "column", "*.linear2": "row", "9": "norm", "10": "vocab"}
    model = bench.model()
    tensor_parallel.parallelize(model, plan, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        model[0].register_forward_hook(
            lambda module, args, output: tensor_parallel.scatter_to_sequence(output)
        )
    return model


def library_tensor_parallel_model(bench):
    plain = ddp.language_model(C=bench.width, layers=0)
    blocks = [SeparateBlock(bench.width, bench.width // 64) for _ in range(8)]
    model = nn.Sequential(plain[0], *blocks, *plain[1:]).to(bench.device, bench.dtype)
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        "10": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for block in range(1, 9):
        plan |= {f"{block}.{name}": ColwiseParallel() for name in ("q", "k", "v", "linear1")}
        plan |= {f"{block}.{name}": RowwiseParallel() for name in ("proj", "linear2")}
    return parallelize_module(model, bench.mesh(), plan)


def bench_tensor_parallel(bench):
    """parallelize"""
    # Every rank has the whole batch. Sequence parallelism splits it, so it has 4 sequences or more.
    tokens = bench.tokens(max(4, bench.sequences))

    def training_step(model, backward):
        optimizer = bench.adamw(model)

        def step():
            optimizer.zero_grad()
            backward(model, tokens[:, :-1], tokens[:, 1:])
            optimizer.step()

        return step

    def our_backward(model, inputs, targets):
        losses = tensor_parallel.vocab_parallel_cross_entropy(model(inputs), targets)
        losses.mean().backward()

    def ours(sequence_parallel=False):
        return training_step(tensor_parallel_model(bench, sequence_parallel), our_backward)

    def their_backward(model, inputs, targets):
        with loss_parallel():
            loss = ddp.language_loss(model(inputs), targets)
            loss.backward()

    def theirs():
        return training_step(library_tensor_parallel_model(bench), their_backward)

    return {
        "tensor_parallel": ours,
        "torch parallelize_module": theirs,
        "tensor_parallel, sequence_parallel": partial(ours, sequence_parallel=True),
    }


def bench_pipeline(name, schedule_class, bench):
    """Forwards and backwards alone, because the library's class does no more."""
    m = 8  # micro-batches, which hold the sequences of all ranks
    tokens = bench.tokens(m * max(1, bench.sequences * bench.ranks // m))
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]

    def variant(make_step):
        stage = pipeline.split(bench.model(), bench.ranks)[bench.rank]
        run = make_step(stage)

        def step():
            stage.zero_grad()
            run()

        return step

    def ours(schedule, stage):
        return partial(pipeline.Pipeline(stage, schedule, m, language_loss).step, inputs, targets)

    def theirs(stage):
        stage = PipelineStage(stage, bench.rank, bench.ranks, bench.device)
        schedule = schedule_class(stage, m, loss_fn=language_loss)
        args = [inputs] if bench.rank == 0 else []
        is_last = bench.rank == bench.ranks - 1
        return partial(schedule.step, *args, **({"target": targets} if is_last else {}))

    return {
        f"pipeline {name}": partial(variant, partial(ours, name)),
        f"torch {schedule_class.__name__}": partial(variant, theirs),
        "pipeline zero_bubble": partial(variant, partial(ours, "zero_bubble")),
    }


def bench_amp(bench):
    """bf16: MixedPrecisionOptimizer, autocast. No communication."""
    tokens = bench.tokens(max(8, bench.sequences), seed=bench.rank)

    def variant(region=None, masters=False):
        model = bench.model(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if masters:
            optimizer = amp.MixedPrecisionOptimizer(optimizer, torch.bfloat16)

        def step():
            optimizer.zero_grad()
            with region or nullcontext():
                loss = language_loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()

        return step

    torch_autocast = torch.autocast(bench.device.type, torch.bfloat16)
    return {
        "amp MixedPrecisionOptimizer": partial(variant, masters=True),
        "torch autocast, AdamW in fp32": partial(variant, torch_autocast),
        "amp autocast": partial(variant, amp.autocast(torch.bfloat16)),
        "fp32": variant,
    }


def bench_lora(bench):
    """inject_lora, r = 8 on the MLPs. All variants reduce by lora.average_adapters."""
    import peft

    targets = ["linear1", "linear2"]
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets)

    def variant(wrap):
        model = wrap(bench.model())
        return bench.training_step(model, after_backward=lora.average_adapters)

    def ours(quantize=None):
        inject = partial(lora.inject_lora, target_modules=targets, quantize=quantize)
        return variant(inject)

    def embedding_only(model):
        model.requires_grad_(False)
        model[0].weight.requires_grad_(True)  # the first layer: backward goes all the way down
        return model

    return {
        "lora": ours,
        "peft": lambda: variant(lambda model: peft.get_peft_model(model, config)),
        "a step that trains the embedding": partial(variant, embedding_only),
        "lora, 4 bits": partial(ours, "nf4"),
        "full fine-tuning": partial(variant, unchanged),
    }


def bench_activation_checkpoint(bench):
    """checkpoint, around each block. No communication."""

    def variant(run=None):
        model = bench.model()
        if run:
            for block in model[1:-2]:
                block.forward = partial(run, block.forward)
        return bench.training_step(model)

    return {
        "checkpoint": partial(variant, activation_checkpoint.checkpoint),
        "torch checkpoint": partial(variant, partial(torch_checkpoint, use_reentrant=False)),
        "nothing is checkpointed": variant,
    }


def bench_flash_attention(bench):
    """flash_attention, causal, heads of 64, forward and backward. On a GPU the kernels, in bf16."""
    shape = (4, 16, 4096, 64) if bench.on_gpu else (1, 8, 1024, 64)
    dtype = torch.bfloat16 if bench.on_gpu else bench.dtype

    def variant(attention, **causal):
        torch.manual_seed(0)
        inputs = [torch.randn(shape, device=bench.device, dtype=dtype) for _ in range(3)]
        grad_output = torch.randn_like(inputs[0])
        for x in inputs:
            x.requires_grad_()

        def step():
            torch.autograd.grad(attention(*inputs, **causal), inputs, grad_output)

        return step

    ours = flash_attention.flash_attention
    theirs = F.scaled_dot_product_attention
    loop = partial(ours, kernel="torch")
    ways = {
        "flash_attention": partial(variant, ours, causal=True),
        "torch scaled_dot_product_attention": partial(variant, theirs, is_causal=True),
        "naive_attention": partial(variant, flash_attention.naive_attention, causal=True),
    }
    if bench.on_gpu:
        ways["flash_attention, kernel='torch'"] = partial(variant, loop, causal=True)
    return ways


def bench_linear_cross_entropy(hidden, bench):
    """linear_cross_entropy, 1,024 tokens, 16,384 words, forward and backward, over plain."""
    tokens, words = (8192, 131_072) if bench.on_gpu else (1024, 16_384)
    dtype = torch.bfloat16 if bench.on_gpu else bench.dtype

    def plain(x, weight, target):
        return F.cross_entropy(F.linear(x, weight), target)

    def variant(loss_of):
        torch.manual_seed(0)
        options = {"device": bench.device, "dtype": dtype}
        x = torch.randn(tokens, hidden, **options)
        weight = torch.randn(words, hidden, **options) / hidden**0.5
        inputs = [x.requires_grad_(), weight.requires_grad_()]
        target = torch.randint(words, (tokens,), device=bench.device)
        return lambda: torch.autograd.grad(loss_of(*inputs, target), inputs)

    ours = linear_cross_entropy.linear_cross_entropy
    ways = {
        "linear_cross_entropy": partial(variant, ours),
        "torch linear, cross_entropy": partial(variant, plain),
    }
    if hasattr(nn, "LinearCrossEntropyOptions"):  # from torch 2.13 on
        chunked = partial(F.linear_cross_entropy, options=nn.LinearCrossEntropyOptions())
        ways["torch linear_cross_entropy, chunked"] = partial(variant, chunked)
    return ways


def library_context_parallel(mesh, length, device):
    """In this context, PyTorch's attention is ring attention over `mesh`."""
    from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

    # The context wants a tensor to split. q, k and v are split already.
    buffer = torch.empty(1, length, device=device)
    return torch_context_parallel(
        mesh, buffers=[buffer], buffer_seq_dims=[1], no_restore_buffers={buffer}
    )


def attention_on_one_device(q, k, v):
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


def bench_context_parallel(bench):
    """ring_attention with zigzag, causal, heads of 64, forward and backward.

    The library's context_parallel needs NCCL. Elsewhere the row compares with the library's
    attention over the whole sequence on one device, which computes N times as much.
    """
    shape = (2, 16, 8192, 64) if bench.on_gpu else (1, 8, 2048, 64)

    def variant(attend, ranks):
        """`attend(q, k, v)` runs forward and backward. `ranks` share the sequence."""
        B, H, S, D = shape
        torch.manual_seed(bench.rank)
        q, k, v = torch.randn(3, B, H, S // ranks, D, device=bench.device, dtype=bench.dtype)
        for x in (q, k, v):
            x.requires_grad_()
        return partial(attend, q, k, v)

    def ours(attention, q, k, v):
        attention(q, k, v, causal=True).sum().backward()

    mesh = bench.mesh()

    def theirs(q, k, v):
        with library_context_parallel(mesh, shape[2], bench.device):
            attention_on_one_device(q, k, v)

    ring = partial(ours, context_parallel.ring_attention)
    contiguous = partial(ours, partial(context_parallel.ring_attention, zigzag=False))
    ulysses = partial(ours, context_parallel.ulysses_attention)
    variants = {"ring_attention, zigzag": partial(variant, ring, bench.ranks)}
    if dist.get_backend() == "nccl":
        variants["torch context_parallel"] = partial(variant, theirs, bench.ranks)
    variants["torch attention on one device"] = partial(variant, attention_on_one_device, 1)
    variants["ring_attention, contiguous"] = partial(variant, contiguous, bench.ranks)
    variants["ulysses_attention"] = partial(variant, ulysses, bench.ranks)
    return variants


def library_mixture_of_experts(hidden_size, intermediate_size):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


def bench_expert_parallel(bench):
    """A layer of 8 experts, forward and backward, over transformers' block on one device."""
    hidden = bench.width
    ffn_hidden = 2 * hidden
    torch.manual_seed(bench.rank)
    shape = (8 * bench.sequences, bench.time, hidden)
    x = torch.randn(shape, device=bench.device, dtype=bench.dtype, requires_grad=True)

    def variant(layer):
        def step():
            layer.zero_grad()
            layer(x).sum().backward()

        return step

    def ours(split):
        layer = expert_parallel.MoE(hidden, ffn_hidden, num_experts=8)
        layer = layer.to(bench.device, bench.dtype)
        return variant(expert_parallel.parallelize(layer) if split else layer)

    def theirs():
        layer = library_mixture_of_experts(hidden, ffn_hidden)
        return variant(layer.to(bench.device, bench.dtype))

    return {
        "expert_parallel": partial(ours, split=True),
        "transformers, all experts": theirs,
        "expert_parallel, all experts": partial(ours, split=False),
    }


def bench_checkpoint(bench):
    """A step that also saves 100 MB of each rank, over the same step alone."""
    directory = tempfile.TemporaryDirectory()
    everyone = [directory.name]
    dist.broadcast_object_list(everyone)
    tensors = {f"{i}/{bench.rank}": torch.ones(10**6, device=bench.device) for i in range(25)}

    def variant(**how):
        step = bench.training_step(bench.model(), micro_batches=4)

        def step_and_save():
            step()
            checkpoint.save(everyone[0], tensors, **how)
            return directory  # which lives as long as the variant

        return step_and_save if how else step

    return {
        "step and background save": partial(variant, background=True),
        "step": variant,
        "step and save": partial(variant, background=False),
    }


ROWS = {
    "ddp": bench_ddp,
    "zero": bench_zero,
    "muon": bench_muon,
    "fsdp": bench_fsdp,
    "tensor_parallel": bench_tensor_parallel,
    "pipeline_gpipe": partial(bench_pipeline, "gpipe", ScheduleGPipe),
    "pipeline_1f1b": partial(bench_pipeline, "1f1b", Schedule1F1B),
    "amp": bench_amp,
    "lora": bench_lora,
    "activation_checkpoint": bench_activation_checkpoint,
    "flash_attention": bench_flash_attention,
    "linear_cross_entropy": partial(bench_linear_cross_entropy, 64),
    "linear_cross_entropy_256": partial(bench_linear_cross_entropy, 256),
    "context_parallel": bench_context_parallel,
    "expert_parallel": bench_expert_parallel,
    "checkpoint": bench_checkpoint,
}

# --------------------------------------------------------------------------------------------------
# 3. The measurement.


def worker(rank, args, port):
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.set_float32_matmul_precision("high")  # TF32
    world = {"RANK": rank, "WORLD_SIZE": args.ranks, "MASTER_ADDR": "localhost"}
    os.environ |= {name: str(value) for name, value in (world | {"MASTER_PORT": port}).items()}
    ddp.join_world(device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    bench = Bench(rank, args.ranks, device, dtype, args.width, args.sequences, args.time)
    rows = []
    for name in args.names or ROWS:
        try:
            variants = ROWS[name](bench)
        except ModuleNotFoundError as error:
            if rank == 0:
                needs = f"{name}: not run, it needs {error.name}: pip install {error.name}"
                print(needs, flush=True)
            continue
        times, memory = measure(bench, variants, args.rounds)
        if rank == 0:
            rows.append(show(name, times, memory, args.rounds))
    if rank == 0 and rows:
        show_table(bench, args, rows)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # at once: the library's classes hold the group, whose threads can abort at exit


LIMIT = 60.0  # seconds for the rounds of a row


def measure(bench, variants, rounds):
    """Return {variant: milliseconds of each round} and {variant: bytes that it adds at most}."""
    steps = {}
    memory = {}
    round_seconds = 0.0
    for variant, build in variants.items():
        before = torch.cuda.memory_allocated() if bench.on_gpu else 0
        steps[variant] = build()
        seconds = timed(bench, steps[variant])  # the first step, which allocates and compiles
        if seconds < LIMIT / 30:
            if bench.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            timed(bench, steps[variant])
            seconds = timed(bench, steps[variant])
        round_seconds += seconds
        memory[variant] = torch.cuda.max_memory_allocated() - before if bench.on_gpu else 0
    times = {variant: [] for variant in variants}
    for number in range(min(rounds, max(3, int(LIMIT / round_seconds)))):
        order = list(variants)
        random.Random(number).shuffle(order)  # no variant always follows the same one
        for variant in order:
            times[variant].append(1e3 * timed(bench, steps[variant]))
    return times, memory


def timed(bench, step):
    """Take a step. Return its seconds on the slowest rank, the same number on all ranks."""
    dist.barrier()
    start = now(bench)
    step()
    took = torch.tensor(now(bench) - start, device=bench.device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def now(bench):
    if bench.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def ratio_of(times, ours, theirs):
    """The quartiles of the ratios taken round by round."""
    ratios = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
    return statistics.quantiles(ratios, n=4)


def show(name, times, memory, rounds):
    """Print a row's variants. Return its line in the table and its RATIO line."""
    ours, theirs = list(times)[:2]
    taken = len(times[ours])
    fewer = f" (not {rounds}: they are long)" if taken < rounds else ""
    print(f"{name}: median of {taken} interleaved steps{fewer}")
    for variant, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        spread = f"({low:.1f} to {high:.1f})"
        ratio_low, ratio, ratio_high = ratio_of(times, ours, variant)
        line = f"  {variant:36} {middle:7.1f} ms {spread:20} {megabytes(memory[variant]):>9}"
        line += f"  {ours} / it {ratio:.3f} ({ratio_low:.3f} to {ratio_high:.3f})"
        print(line, flush=True)
    low, ratio, high = ratio_of(times, ours, theirs)
    line = f"{name:22} {ours:28} {theirs:36}"
    for variant in (ours, theirs):
        line += f" {statistics.median(times[variant]):6.0f}"
    for variant in (ours, theirs):
        line += f" {megabytes(memory[variant]):>9}"
    return f"{line} {ratio:8.2f}   {low:.2f} to {high:.2f}", f"RATIO {name} {ratio:.3f}"


def megabytes(size):
    return f"{size / 1e6:,.0f} MB" if size else "-"


def show_table(bench, args, rows):
    tokens = bench.sequences * bench.time
    ranks = f"{bench.ranks} ranks over {dist.get_backend()}"
    what = f"{ranks}, {tokens} tokens for each, width {bench.width}"
    print(f"\n{machine(bench)}\n{what}, {args.dtype}")
    print(f"{args.rounds} rounds or less; the ratio is their median, the range the middle half")
    header = f"{'row':22} {'ours':28} {'theirs':36} {'ms':>6} {'ms':>6} {'memory':>9} {'memory':>9}"
    print(f"{header}    ratio   range")
    for line, _ in rows:
        print(line)
    for _, ratio in rows:
        print(ratio)


def machine(bench):
    if bench.on_gpu:
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    name = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*: (.*)", info.read_text())
        name = found.group(1) if found else name
    return f"{os.cpu_count()} cores of {name}, torch {torch.__version__}"


def main():
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = f"rows to run: {', '.join(ROWS)} (default: all)"
    parser.add_argument("names", nargs="*", metavar="name", help=names)
    parser.add_argument("--device", choices=["cpu", "cuda"][: 1 + on_gpu])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument(
        "--rounds", type=int, default=15, help="timed steps of each variant (default: 15)"
    )
    parser.add_argument("--sequences", type=int, help="per rank and step (CPU: 1, GPU: 8)")
    parser.add_argument("--time", type=int, help="tokens in a sequence (CPU: 64, GPU: 512)")
    parser.add_argument("--width", type=int, help="a multiple of 64 (CPU: 384, GPU: 1024)")
    args = parser.parse_args()
    args.device = args.device or ("cuda" if on_gpu else "cpu")
    defaults = {"cpu": (1, 64, 384), "cuda": (8, 512, 1024)}[args.device]
    for name, default in zip(("sequences", "time", "width"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, default)
    if unknown := set(args.names) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: quartiles need 2 or more")
    if args.width % 64:
        parser.error(f"--width {args.width}: give a multiple of 64")
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(worker, (args, port), nprocs=args.ranks)


if __name__ == "__main__":
    main()
