"""Mistakes in all-reducing, and the claim that catches each."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from wrong.common import gathered


def plain_all_reduce(tensor):
    """Every rank adds up all tensors in rank order."""
    first, *others = gathered(tensor)
    tensor.copy_(sum(others, first))


def own_first(tensor):
    """Each rank adds the others' to its own, so replicas drift apart by rounding."""
    everyone = gathered(tensor)
    own = everyone.pop(dist.get_rank())
    tensor.copy_(sum(everyone, own))


def ring_off_by_one(tensor):
    """The second round begins one part too early, where the first began."""
    if tensor.numel() == 0:
        return
    rank = dist.get_rank()
    N = dist.get_world_size()
    padded = F.pad(tensor.flatten(), (0, -tensor.numel() % N))
    parts = list(padded.chunk(N))
    for step in range(2 * (N - 1)):
        is_reducing = step < N - 1
        first = rank - (step if is_reducing else step - 1)
        incoming = torch.empty_like(parts[0])
        sent = dist.isend(parts[first % N], (rank + 1) % N)
        dist.recv(incoming, (rank - 1) % N)
        sent.wait()
        before = (first - 1) % N
        parts[before] = incoming + parts[before] if is_reducing else incoming
    tensor.copy_(torch.cat(parts)[: tensor.numel()].view_as(tensor))


in_flight = []  # without its handle a message might not arrive at all


def leaves_before_it_is_sent(tensor):
    """Rank 0 returns while the sum is on its way to the others."""
    dist.reduce(tensor, 0)
    if dist.get_rank() == 0:
        others = range(1, dist.get_world_size())
        in_flight.extend(dist.isend(tensor, to) for to in others)
    else:
        time.sleep(0.2)  # so that it is certainly still on its way
        dist.recv(tensor, 0)


def forgets_the_strides(tensor):
    """Sums up a contiguous copy and leaves the tensor as it was."""
    plain_all_reduce(tensor.contiguous())


def whole_world(tensor, process_group=None):
    plain_all_reduce(tensor)


MISTAKES = {
    "all-reduce": {
        "ring_off_by_one": "summed",
        "own_first": "same_bits",
        "leaves_before_it_is_sent": "reused",
        "forgets_the_strides": "strided",
        "whole_world": "all_reduces_apart",
    },
}
CAUSES = {
    "all-reduce": {
        "ring_off_by_one": "sums_of_some_ranks",
        "forgets_the_strides": "strided_copy",
        "whole_world": "whole_world",
    },
}
RIGHT = {"all-reduce": {"plain_all_reduce": []}}
