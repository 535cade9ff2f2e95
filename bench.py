"""Step time of each technique over that of the library class that it mirrors, interleaved in one run.

    python bench.py                 every row
    python bench.py ddp             one
    python bench.py --sequences 4   4 sequences of 64 tokens per rank and step instead of 1: more compute per byte sent

A row's variants run in turn, a step each, in the same processes (2 ranks of one thread each on the CPU), so that what
the machine does meanwhile hits all alike. A step lasts as long as on its slowest rank. Printed are the median step
time, its quartiles, and the median of the ratios taken round by round; last, for every row, `RATIO name value`.
"""

import argparse
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
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
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import activation_checkpoint
import amp
import ddp
import flash_attention
import fsdp
import lora
import pipeline
import tensor_parallel
import zero


def language_model(parameters="14M"):
    torch.manual_seed(0)
    C, heads = {"14M": (384, 6), "27M": (528, 8)}[parameters]
    return ddp.language_model(C=C, heads=heads, layers=8)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def training_step(model, optimizer, sequences, seed, micro_batches=1, after_backward=None):
    """A function that runs one step of `model`, `sequences` of 64 tokens per micro-batch."""
    tokens = torch.randint(
        256, (sequences * micro_batches, 65), generator=torch.Generator().manual_seed(seed)
    )

    def step():
        optimizer.zero_grad()
        for part in tokens.chunk(micro_batches):
            loss = ddp.language_loss(model(part[:, :-1]), part[:, 1:])
            (loss / micro_batches).backward()
        if after_backward:
            after_backward(model)
        optimizer.step()

    return step


def bench_ddp(rank, ranks, sequences):
    """DistributedDataParallel"""
    TorchDDP = nn.parallel.DistributedDataParallel

    def row(wrap, **kwargs):
        model = wrap(language_model())
        return training_step(model, adamw(model), sequences, seed=rank, **kwargs)

    return {
        "ddp": row(ddp.DistributedDataParallel),
        "torch DistributedDataParallel": row(TorchDDP),
        "ddp, gradient_as_bucket_view": row(
            lambda m: ddp.DistributedDataParallel(m, gradient_as_bucket_view=True)
        ),
        "torch, gradient_as_bucket_view": row(lambda m: TorchDDP(m, gradient_as_bucket_view=True)),
        "all_reduce_gradients": row(lambda m: m, after_backward=ddp.all_reduce_gradients),
        "no communication": row(lambda m: m),
        "one device, the same global batch": row(lambda m: m, micro_batches=ranks),
    }


def zero_step(stage, sequences, seed):
    model = language_model()
    return training_step(model, stage(model, torch.optim.AdamW, lr=1e-4), sequences, seed)


def bench_zero(rank, ranks, sequences):
    """Zero1"""
    TorchDDP = nn.parallel.DistributedDataParallel
    replica, sharded = TorchDDP(language_model()), TorchDDP(language_model())
    optimizer = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.AdamW, lr=1e-4)
    return {
        "Zero1": zero_step(zero.Zero1, sequences, rank),
        "torch DDP + ZeroRedundancyOptimizer": training_step(sharded, optimizer, sequences, rank),
        "Zero2": zero_step(zero.Zero2, sequences, rank),
        "Zero3": zero_step(zero.Zero3, sequences, rank),
        "torch DDP + AdamW": training_step(replica, adamw(replica), sequences, rank),
    }


def bench_fsdp(parameters, rank, ranks, sequences):
    """fully_shard"""
    mesh = init_device_mesh("cpu", (ranks,))

    def row(wrap):
        model = wrap(language_model(parameters))
        return training_step(model, adamw(model), sequences, rank)

    def units(fully_shard, **kwargs):
        def wrap(model):
            for block in model[1:-2]:
                fully_shard(block, mesh=mesh, **kwargs)
            return fully_shard(model, mesh=mesh, **kwargs)

        return row(wrap)

    return {
        "fsdp": units(fsdp.fully_shard),
        "torch fully_shard": units(torch_fully_shard),
        "fsdp, reshard_after_forward=False": units(fsdp.fully_shard, reshard_after_forward=False),
        "torch, reshard_after_forward=False": units(torch_fully_shard, reshard_after_forward=False),
        "torch DistributedDataParallel": row(nn.parallel.DistributedDataParallel),
        "ddp": row(ddp.DistributedDataParallel),
    }


class SeparateBlock(ddp.Block):
    """With matrices that parallelize_module can split: q, k and v are three."""

    def __init__(self, C, heads):
        super().__init__(C, heads)
        del self.qkv
        self.q, self.k, self.v = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            m(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for m in (self.q, self.k, self.v)
        )
        x = x + self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


def tensor_parallel_step(model, loss_of, sequences):
    optimizer = adamw(model)
    # Sequence parallelism splits dimension 0, which is the batch here: 4, so that there is something to split.
    tokens = torch.randint(256, (4 * sequences, 65), generator=torch.Generator().manual_seed(0))

    def step():
        optimizer.zero_grad()
        loss_of(model, tokens[:, :-1], tokens[:, 1:])
        optimizer.step()

    return step


def our_tensor_parallel(sequences, sequence_parallel=False):
    plan = {"0": "vocab", "*.norm?": "norm", "*.qkv": "qkv", "*.proj": "row"}
    plan |= {"*.linear1": "column", "*.linear2": "row", "9": "norm", "10": "vocab"}
    model = language_model()
    tensor_parallel.parallelize(model, plan, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        model[0].register_forward_hook(
            lambda module, args, output: tensor_parallel.scatter_to_sequence(output)
        )

    def loss_of(model, inputs, targets):
        tensor_parallel.vocab_parallel_cross_entropy(model(inputs), targets).mean().backward()

    return tensor_parallel_step(model, loss_of, sequences)


def torch_tensor_parallel(sequences, ranks):
    model = ddp.language_model(C=384, heads=6, layers=0)
    model = nn.Sequential(model[0], *(SeparateBlock(384, 6) for _ in range(8)), *model[1:])
    names = ["q", "k", "v", "proj", "linear1", "linear2"]
    plan = {
        f"{i}.{n}": RowwiseParallel() if n in ("proj", "linear2") else ColwiseParallel()
        for i in range(1, 9)
        for n in names
    }
    plan["0"] = RowwiseParallel(input_layouts=Replicate())
    plan["10"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)

    def loss_of(model, inputs, targets):
        with loss_parallel():
            ddp.language_loss(model(inputs), targets).backward()

    return tensor_parallel_step(model, loss_of, sequences)


def bench_tensor_parallel(rank, ranks, sequences):
    """parallelize"""
    return {
        "tensor_parallel": our_tensor_parallel(sequences),
        "torch parallelize_module": torch_tensor_parallel(sequences, ranks),
        "tensor_parallel, sequence_parallel": our_tensor_parallel(
            sequences, sequence_parallel=True
        ),
    }


def bench_pipeline(name, schedule_class, rank, ranks, sequences):
    """Forwards and backwards alone, which is what the library's class does.

    With an optimizer after them 1F1B is 2% behind: Pipeline.step lets no rank go before all have succeeded, so the
    last stage does not update its parameters while the first still works.
    """
    m = 8

    def row(run):
        stage = pipeline.split(language_model(), ranks)[rank]
        tokens = torch.randint(256, (sequences * m, 65), generator=torch.Generator().manual_seed(0))
        run_step = run(stage)

        def step():
            stage.zero_grad()
            run_step(tokens[:, :-1], tokens[:, 1:])

        return step

    def theirs(stage):
        stage = PipelineStage(stage, rank, ranks, torch.device("cpu"))
        schedule = schedule_class(stage, m, loss_fn=ddp.language_loss)
        if rank == ranks - 1:
            return lambda inputs, targets: schedule.step(
                *(() if rank else (inputs,)), target=targets
            )
        return lambda inputs, targets: schedule.step(*(() if rank else (inputs,)))

    return {
        f"pipeline {name}": row(
            lambda stage: pipeline.Pipeline(stage, name, m, ddp.language_loss).step
        ),
        f"torch {schedule_class.__name__}": row(theirs),
        "pipeline zero_bubble": row(
            lambda stage: pipeline.Pipeline(stage, "zero_bubble", m, ddp.language_loss).step
        ),
    }


def bench_amp(rank, ranks, sequences):
    """bf16: MixedPrecisionOptimizer, autocast"""

    def row(region=None, wrap=lambda optimizer: optimizer):
        model = language_model()
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        tokens = torch.randint(
            256, (8 * sequences, 65), generator=torch.Generator().manual_seed(rank)
        )

        def step():
            optimizer.zero_grad()
            with region or nullcontext():
                loss = ddp.language_loss(model(tokens[:, :-1]).float(), tokens[:, 1:])
            loss.backward()
            optimizer.step()

        return step

    return {
        "amp MixedPrecisionOptimizer": row(
            wrap=lambda o: amp.MixedPrecisionOptimizer(o, torch.bfloat16)
        ),
        "torch autocast, AdamW in fp32": row(torch.autocast("cpu", torch.bfloat16)),
        "amp autocast": row(amp.autocast(torch.bfloat16)),
        "fp32": row(),
    }


def bench_lora(rank, ranks, sequences):
    """inject_lora, r = 8 on the MLPs; all ranks reduce what trains by lora.average_adapters"""
    import peft

    targets = ["linear1", "linear2"]

    def row(wrap):
        model = wrap(language_model())
        return training_step(
            model, adamw(model), sequences, rank, after_backward=lora.average_adapters
        )

    def ours(quantize=None):
        return row(lambda model: lora.inject_lora(model, target_modules=targets, quantize=quantize))

    def embedding_only(model):
        model.requires_grad_(False)
        model[0].weight.requires_grad_(True)  # the first layer: backward goes all the way down
        return model

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets)
    return {
        "lora": ours(),
        "peft": row(lambda model: peft.get_peft_model(model, config)),
        "a step that trains the embedding": row(embedding_only),
        "lora, 4 bits": ours("nf4"),
        "full fine-tuning": row(lambda model: model),
    }


def bench_activation_checkpoint(rank, ranks, sequences):
    """checkpoint, around each block; no communication"""

    def row(run=lambda forward, x: forward(x)):
        model = language_model()
        for block in model[1:-2]:
            block.forward = partial(run, block.forward)
        return training_step(model, adamw(model), sequences, rank)

    return {
        "checkpoint": row(activation_checkpoint.checkpoint),
        "torch checkpoint": row(partial(torch_checkpoint, use_reentrant=False)),
        "nothing is checkpointed": row(),
    }


def bench_flash_attention(rank, ranks, sequences):
    """flash_attention, causal, 8 heads of 64 on 1024 tokens, forward and backward; no communication"""
    q, k, v = (torch.randn(sequences, 8, 1024, 64, requires_grad=True) for _ in range(3))

    def row(attention, **causal):
        return lambda: attention(q, k, v, **causal).sum().backward()

    return {
        "flash_attention": row(flash_attention.flash_attention, causal=True),
        "torch scaled_dot_product_attention": row(F.scaled_dot_product_attention, is_causal=True),
        "naive_attention": row(flash_attention.naive_attention, causal=True),
    }


ROWS = {
    "ddp": bench_ddp,
    "zero": bench_zero,
    "fsdp": partial(bench_fsdp, "14M"),
    "fsdp_27m": partial(bench_fsdp, "27M"),
    "tensor_parallel": bench_tensor_parallel,
    "pipeline_gpipe": partial(bench_pipeline, "gpipe", ScheduleGPipe),
    "pipeline_1f1b": partial(bench_pipeline, "1f1b", Schedule1F1B),
    "amp": bench_amp,
    "lora": bench_lora,
    "activation_checkpoint": bench_activation_checkpoint,
    "flash_attention": bench_flash_attention,
}


def worker(rank, ranks, names, rounds, sequences, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    results = []
    for name in names:
        try:
            variants = ROWS[name](rank, ranks, sequences)
        except ModuleNotFoundError as error:
            if rank == 0:
                print(f"{name}: not run, for it needs {error.name}: pip install {error.name}")
            continue
        times = {variant: [] for variant in variants}
        for number in range(-2, rounds):
            order = random.Random(number).sample(
                list(variants), len(variants)
            )  # none always runs after the same one
            for variant in order:
                dist.barrier()
                start = time.perf_counter()
                variants[variant]()
                took = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if number >= 0:  # two rounds of warm-up
                    times[variant].append(1e3 * took.item())
        if rank == 0:
            results.append(show(name, times))
    if rank == 0 and results:
        what = f"{ranks} ranks of one thread, {64 * sequences} tokens for each"
        print(f"\n{machine()}\n{what}; {rounds} rounds, and the middle half of their ratios")
        print(f"{'row':22} {'ours':28} {'theirs':36} {'ms':>6} {'ms':>6}     ratio   range")
        print(*(row for row, _ in results), *(line for _, line in results), sep="\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(
        0
    )  # at once: library classes hold the group, and its threads may abort the process as Python ends


def show(name, times):
    """-> of ours over the library's: the row of the table, and the ratio."""
    ours, library, *_ = times
    print(f"{name}: median of {len(times[ours])} interleaved steps")
    for variant, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        ratios = [a / b for a, b in zip(times[ours], values, strict=True)]
        r_low, ratio, r_high = statistics.quantiles(ratios, n=4)
        spread = f"({low:.1f} to {high:.1f})"
        print(
            f"  {variant:36} {middle:7.1f} ms {spread:20} {ours} / it {ratio:.3f} ({r_low:.3f} to {r_high:.3f})",
            flush=True,
        )
    ratios = [a / b for a, b in zip(times[ours], times[library], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    ms = [statistics.median(times[variant]) for variant in (ours, library)]
    row = f"{name:22} {ours:28} {library:36} {ms[0]:6.0f} {ms[1]:6.0f} {ratio:9.2f}   {low:.2f} to {high:.2f}"
    return row, f"RATIO {name} {ratio:.3f}"


def machine():
    names = (
        re.findall(r"model name\s*: (.*)", info.read_text())
        if (info := Path("/proc/cpuinfo")).exists()
        else []
    )
    return f"{os.cpu_count()} cores of {names[0] if names else platform.processor()}, torch {torch.__version__}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"rows to run: {', '.join(ROWS)} (default: all)"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sequences", type=int, default=1, help="of 64 tokens, per rank and step")
    args = parser.parse_args()
    if unknown := set(args.names) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.ranks, args.names or list(ROWS), args.rounds, args.sequences, folder)
        mp.spawn(worker, arguments, nprocs=args.ranks)


if __name__ == "__main__":
    main()
