"""Step time of each technique over that of the library class that it mirrors, interleaved in one run.

    python bench.py                 every row
    python bench.py ddp             one

A row's variants run in turn, a step each, in the same processes (2 ranks of one thread each on the CPU), so that what
the machine does meanwhile hits all alike. A step lasts as long as on its slowest rank. Printed are the median step
time, its quartiles, and the median of the ratios taken round by round; last, for every row, `RATIO name value`.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import ddp
import fsdp
import zero


def language_model_step(wrap, rank, ranks, micro_batches=1, after_backward=None):
    """A function that runs one AdamW step of a 14M-parameter language model, 4 sequences of 64 per micro-batch."""
    torch.manual_seed(0)
    model = wrap(ddp.language_model(C=384, heads=6, layers=8, T=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(256, (4 * micro_batches, 65), generator=torch.Generator().manual_seed(rank))

    def step():
        optimizer.zero_grad()
        for part in tokens.chunk(micro_batches):
            loss = ddp.language_loss(model(part[:, :-1]), part[:, 1:])
            (loss / micro_batches).backward()
        if after_backward:
            after_backward(model)
        optimizer.step()

    return step


def bench_ddp(rank, ranks):
    """DistributedDataParallel"""

    def row(*args, **kwargs):
        return language_model_step(*args, rank=rank, ranks=ranks, **kwargs)

    return {
        "ddp": row(ddp.DistributedDataParallel),
        "torch DistributedDataParallel": row(nn.parallel.DistributedDataParallel),
        "ddp, gradient_as_bucket_view": row(lambda m: ddp.DistributedDataParallel(m, gradient_as_bucket_view=True)),
        "torch, gradient_as_bucket_view": row(
            lambda m: nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True)
        ),
        "all_reduce_gradients": row(lambda m: m, after_backward=ddp.all_reduce_gradients),
        "no communication": row(lambda m: m),
        "one device, the same global batch": row(lambda m: m, micro_batches=ranks),
    }


def bench_zero(rank, ranks):
    """Zero1, Zero2, Zero3"""
    TorchDDP = nn.parallel.DistributedDataParallel

    def row(wrap, make_optimizer):
        torch.manual_seed(0)
        model = wrap(ddp.language_model(C=384, heads=6, layers=8, T=64))
        optimizer = make_optimizer(model)
        tokens = torch.randint(256, (1, 65), generator=torch.Generator().manual_seed(rank))

        def step():
            optimizer.zero_grad()
            ddp.language_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            optimizer.step()

        return step

    def ours(stage, **arguments):
        return row(lambda model: model, lambda model: stage(model, torch.optim.AdamW, lr=1e-4, **arguments))

    def sharded(model):
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)

    return {
        "Zero1": ours(zero.Zero1),
        "torch DDP + ZeroRedundancyOptimizer": row(TorchDDP, sharded),
        "Zero2": ours(zero.Zero2),
        "Zero3": ours(zero.Zero3),
        "torch DDP + AdamW": row(TorchDDP, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4)),
    }


def bench_fsdp(rank, ranks):
    """fully_shard"""
    mesh = init_device_mesh("cpu", (ranks,))

    def row(fully_shard, **kwargs):
        def wrap(model):
            for block in model[1:-2]:
                fully_shard(block, mesh=mesh, **kwargs)
            return fully_shard(model, mesh=mesh, **kwargs)

        return language_model_step(wrap, rank, ranks)

    return {
        "fsdp": row(fsdp.fully_shard),
        "torch fully_shard": row(torch_fully_shard),
        "fsdp, reshard_after_forward=False": row(fsdp.fully_shard, reshard_after_forward=False),
        "torch, reshard_after_forward=False": row(torch_fully_shard, reshard_after_forward=False),
        "torch DistributedDataParallel": language_model_step(nn.parallel.DistributedDataParallel, rank, ranks),
        "ddp": language_model_step(ddp.DistributedDataParallel, rank, ranks),
    }


ROWS = {"ddp": bench_ddp, "zero": bench_zero, "fsdp": bench_fsdp}


def worker(rank, ranks, names, rounds, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for name in names:
        variants = ROWS[name](rank, ranks)
        times = {variant: [] for variant in variants}
        for number in range(-2, rounds):
            order = list(variants.items())
            shift = number % len(order)  # no variant always runs after the same one
            for variant, step in order[shift:] + order[:shift]:
                dist.barrier()
                start = time.perf_counter()
                step()
                took = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if number >= 0:  # two rounds of warm-up
                    times[variant].append(1e3 * took.item())
        if rank == 0:
            show(name, times)
    dist.barrier()
    dist.destroy_process_group()


def show(name, times):
    ours = next(iter(times))
    print(f"{name}: {ROWS[name].__doc__}, median of {len(times[ours])} interleaved steps")
    for variant, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        ratios = [a / b for a, b in zip(times[ours], values, strict=True)]
        r_low, ratio, r_high = statistics.quantiles(ratios, n=4)
        spread = f"({low:.1f} to {high:.1f})"
        print(f"  {variant:36} {middle:7.1f} ms {spread:20} {ours} / it {ratio:.3f} ({r_low:.3f} to {r_high:.3f})")
    library = list(times)[1]
    ratio = statistics.median(a / b for a, b in zip(times[ours], times[library], strict=True))
    print(f"RATIO {name} {ratio:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"rows to run: {', '.join(ROWS)} (default: all)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if unknown := set(args.names) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args.ranks, args.names or list(ROWS), args.rounds, folder), nprocs=args.ranks)


if __name__ == "__main__":
    main()
