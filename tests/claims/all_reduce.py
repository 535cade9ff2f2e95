"""An implementation of --all-reduce is called as function(tensor). It changes the tensor in place.

It also gets process_group=group or group=group, if it has such a name.
"""

import pool
import torch
import torch.distributed as dist
from shared import randn

from claims.registry import (
    NotOffered,
    add_kind,
    claim,
    names_of,
    precision,
    same,
    same_on_all,
    say_in_float64,
)


def all_reduce(implementation, tensor, group=None):
    names = {"process_group", "group"} & set(names_of(implementation))
    if group and not names:
        raise NotOffered("no argument process_group")
    where = group or pool.group()
    implementation(tensor, **dict.fromkeys(names, where))
    return tensor


add_kind(
    "all-reduce",
    called=__doc__,
    make=all_reduce,
    ours="collectives:ring_all_reduce",
    pytorchs="torch.distributed:all_reduce",
)


def numbers_of(rank, shape, dtype=None):
    """The tensor that this rank adds."""
    return (100 * randn(shape, seed=rank)).to(dtype or precision())


def total_of(shape, dtype=None, ranks=None):
    ranks = ranks or range(pool.world_size())
    return sum(numbers_of(rank, shape, dtype) for rank in ranks)


def sums_up(make, shape, dtype=None):
    ours = make(numbers_of(pool.rank(), shape, dtype))
    same(ours, total_of(shape, dtype), f"the sum of shape {shape}")


@claim("all-reduce", 1, 2, 3, 4)
def summed(make):
    """Every rank ends with the sum: of scalars, empty tensors, sizes that N does not divide."""
    shapes = [(12,), (7,), (1,), (), (0,), (5, 0), (2, 3, 5), (10_007,)]
    if pool.world_size() == 2:
        shapes.append((2**21 + 1,))  # 16 MB: fits into no buffer
    for shape in shapes:
        sums_up(make, shape)


say_in_float64("all-reduce", "summed")


@claim("all-reduce", 2, 3, may_refuse=True)
def integers(make):
    """Integers are summed exactly."""
    sums_up(make, (101,), torch.int64)


@claim("all-reduce", 2, 3, may_refuse=True)
def strided(make):
    """A strided tensor becomes the sum, and the memory between its elements does not change."""
    for view in (torch.t, lambda x: x[::2, 1::2]):
        mine = numbers_of(pool.rank(), (6, 8))
        expected = mine.clone()
        total = total_of((6, 8))
        view(expected).copy_(view(total))
        make(view(mine))
        same(mine, expected, "the whole memory of a strided tensor")


@claim("all-reduce", 2, 3, 4)
def same_bits(make):
    """All ranks end with the same bits in float32. At two ranks these are those of a + b."""
    ours = make(numbers_of(pool.rank(), (1001,), torch.float32))
    same_on_all(ours, "their sums")
    if pool.world_size() == 2:
        same(ours, total_of((1001,), torch.float32), "the sum", exact=True)


@claim("all-reduce", 4)
def all_reduces_apart(make):
    """Two process groups do not mix, in whatever order their members are listed."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    for shape in ((5,), (10_007,)):
        ours = make(numbers_of(rank, shape), groups[rank % 2])
        expected = total_of(shape, ranks=[rank % 2, rank % 2 + 2])
        same(ours, expected, "the sum")


@claim("all-reduce", 2, 3)
def reused(make):
    """The caller may overwrite the tensor at once, because nothing of it is still to be sent."""
    shape = (2**21 + 1,)  # 16 MB: sending takes longer than the next line
    for number in range(2):
        total = total_of(shape) + number * pool.world_size()
        mine = numbers_of(pool.rank(), shape) + number
        make(mine)
        if (pool.rank() + number) % 2 == 0:
            mine[-1] = torch.nan  # at once, and in the part that would be sent last
        else:
            same(mine, total, f"the sum of call {number + 1}")
