"""All-reduce: every rank has a tensor, and ends with the sum of all ranks' tensors.

Write it with send and receive alone. Go around the ring twice. Cut the tensor into N parts. In
each of N-1 rounds, send a part to the next rank and add what comes from the previous one: then
each rank has one part of the sum. In N-1 more rounds, send these parts on.

Sent by each rank: 2n(N-1)/N bytes of n. You need:
torch.distributed.isend(tensor, dst), irecv(tensor, src), wait() on what they return.
"""

import torch.distributed as dist


def my_all_reduce(tensor):
    """Change the tensor in place. Any number of ranks, any shape."""
    rank = dist.get_rank()
    N = dist.get_world_size()
    following = (rank + 1) % N
    previous = (rank - 1) % N
    # Both sends and receives are in flight at once. Do not touch a tensor before its wait().
    return following, previous, tensor
