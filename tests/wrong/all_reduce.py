"""Mistakes people make in all-reduce, and the claim that catches each."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from wrong.common import gathered


def plain_all_reduce(tensor):
    """Right: every rank adds up all of them in rank order."""
    first, *others = gathered(tensor)
    tensor.copy_(sum(others, first))


def own_first(tensor):
    """Each rank adds the others' to its own: replicas drift apart, by roundings."""
    everyone, rank = gathered(tensor), dist.get_rank()
    tensor.copy_(sum(everyone[:rank] + everyone[rank + 1 :], everyone[rank]))


def ring_off_by_one(tensor):
    """The second round begins where the first began, one part too early."""
    rank, N = dist.get_rank(), dist.get_world_size()
    parts = list(F.pad(tensor.flatten(), (0, -tensor.numel() % N)).chunk(N))
    for step in range(2 * (N - 1)) if tensor.numel() else ():
        first, incoming = rank - (step if step < N - 1 else step - 1), torch.empty_like(parts[0])
        sent = dist.isend(parts[first % N], (rank + 1) % N)
        dist.recv(incoming, (rank - 1) % N)
        sent.wait()
        parts[(first - 1) % N] = incoming + (parts[(first - 1) % N] if step < N - 1 else 0)
    tensor.copy_(torch.cat(parts)[: tensor.numel()].view_as(tensor))


def never_folds_in(tensor):
    """As of recursive doubling among the first two of three ranks: the third takes the sum, and gives nothing."""
    everyone = gathered(tensor)
    tensor.copy_(sum(everyone[: 1 << (len(everyone).bit_length() - 1)]))


def leaves_before_it_is_sent(tensor):
    """Rank 0 hands the sum out, and returns while it is on its way."""
    dist.reduce(tensor, 0)
    if dist.get_rank() == 0:
        kept.extend(dist.isend(tensor, to) for to in range(1, dist.get_world_size()))
    else:
        time.sleep(0.2)  # so that it is not luck whether it is still on its way
        dist.recv(tensor, 0)


kept = []  # what is in flight: without its handle it might not arrive at all


def forgets_the_strides(tensor):
    """A contiguous copy is summed up, and the tensor stays as it was."""
    plain_all_reduce(tensor.contiguous())


def whole_world(tensor, process_group=None):
    plain_all_reduce(tensor)


MISTAKES = {  # of each kind: an implementation, and the claim that does not hold for it
    "all-reduce": {
        "ring_off_by_one": "summed",
        "never_folds_in": "summed",
        "own_first": "same_bits",
        "leaves_before_it_is_sent": "reused",
        "forgets_the_strides": "strided",
        "whole_world": "all_reduces_apart",
    },
}
RIGHT = {  # what the mistakes are made in, and the claims that do not hold for it
    "all-reduce": {
        "plain_all_reduce": [],
    },
}
