"""What the mistakes are made from."""

import torch
import torch.distributed as dist


def changed(right, **methods):
    """A subclass of `right` with these methods instead."""
    return type(f"Changed{right.__name__}", (right,), methods)


def summed(tensor):
    total = tensor.contiguous().clone()
    dist.all_reduce(total)
    return total


def gathered(tensor):
    contiguous = tensor.contiguous()
    everyone = [torch.empty_like(contiguous) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, contiguous)
    return everyone
