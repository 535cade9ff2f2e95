"""An implementation of --all-reduce is called as function(tensor), and changes the tensor in place.

It also gets process_group= or group=, if it has such a name.
"""

import pool
import torch
import torch.distributed as dist

from claims.registry import (
    NotOffered,
    add_kind,
    claim,
    names_of,
    same,
    same_on_all,
)


def all_reduce(implementation, tensor, group=None):
    names = {"process_group", "group"} & set(names_of(implementation))
    if group and not names:
        raise NotOffered("no argument process_group")
    implementation(tensor, **dict.fromkeys(names, group or pool.group()))
    return tensor


add_kind(
    "all-reduce",
    called=__doc__,
    make=all_reduce,
    ours="collectives:ring_all_reduce",
    pytorchs="torch.distributed:all_reduce",
)


def numbers_of(rank, shape, dtype=torch.float64):
    return (
        100 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    ).to(dtype)


def total_of(ranks, *what):
    return sum(numbers_of(r, *what) for r in ranks)


@claim("all-reduce", 1, 2, 3, 4)
def summed(make):
    """Every rank ends with the sum of all ranks' tensors, of any shape: those that N does not divide, empty, scalar."""
    shapes = [(12,), (7,), (1,), (), (0,), (5, 0), (2, 3, 5), (10_007,)]
    shapes += [(2**21 + 1,)] * (pool.world_size() == 2)  # in no buffer
    for shape, dtype in [
        *((shape, torch.float64) for shape in shapes),
        ((101,), torch.int64),
        ((101,), torch.int32),
    ]:
        total = total_of(range(pool.world_size()), shape, dtype)
        same(
            make(numbers_of(pool.rank(), shape, dtype)),
            total,
            f"the sum of shape {shape} in {dtype}",
        )


@claim("all-reduce", 2, 3)
def strided(make):
    """A tensor that is not contiguous becomes the sum, all of it, and what lies between its elements stays."""
    for view in (torch.t, lambda x: x[:, 1], lambda x: x[::2, 1::2]):
        mine, before = (numbers_of(pool.rank(), (6, 8)) for _ in range(2))
        make(view(mine))
        view(before).copy_(view(total_of(range(pool.world_size()), (6, 8))))
        same(mine, before, "a strided tensor's whole memory")


@claim("all-reduce", 2, 3, 4)
def same_bits(make):
    """In float32 all ranks end with the same bits; two, with those of the one's plus the other's."""
    same_on_all(ours := make(numbers_of(pool.rank(), (1001,), torch.float32)), "their sums")
    if pool.world_size() == 2:
        same(ours, total_of(range(2), (1001,), torch.float32), "the sum", exact=True)


@claim("all-reduce", 4)
def all_reduces_apart(make):
    """Two groups side by side never meet, whatever their members' order."""
    rank, groups = dist.get_rank(), [dist.new_group([0, 2]), dist.new_group([3, 1])]
    for shape in ((5,), (10_007,)):
        same(
            make(numbers_of(rank, shape), groups[rank % 2]),
            total_of((rank % 2, rank % 2 + 2), shape),
            "the sum",
        )


@claim("all-reduce", 2, 3)
def reused(make):
    """The tensor may be overwritten right after: nothing of it is still to be sent."""
    shape, ranks = (2**21 + 1,), range(pool.world_size())  # 16 MB: takes longer than the next line
    for call in range(2):
        total, mine = (
            total_of(ranks, shape) + call * len(ranks),
            numbers_of(pool.rank(), shape) + call,
        )
        make(mine)
        if (pool.rank() + call) % 2 == 0:
            mine[-1] = torch.nan  # at once, and what would be sent last
        else:
            same(mine, total, f"the sum of call {call + 1}")
