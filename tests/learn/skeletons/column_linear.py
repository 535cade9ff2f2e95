"""Column-parallel linear: each rank has some rows of the weight, and so some output features.

    y_shard = x W_shardᵀ + b_shard        W_shard: rows rank·out/N … (rank+1)·out/N - 1

All ranks have the same x. In backward each rank has only its part of x's gradient, and the parts
add up. An all-reduce that autograd does not see is forgotten in backward. You need:
torch.autograd.Function, torch.distributed.all_reduce(tensor), get_rank().
"""

import torch.nn as nn


class MyColumnLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def from_full(cls, linear):
        """Take this rank's rows of a whole nn.Linear."""
        return cls(linear.weight.detach().clone(), linear.bias)

    def forward(self, x):
        """From (…, in), the same on all ranks, to (…, out/N)."""
        return nn.functional.linear(x, self.weight, self.bias)
