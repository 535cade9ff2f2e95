"""Row-parallel linear: each rank has some columns of the weight, for its part of the input.

    y = Σ over ranks of x_shard W_shardᵀ, + b once       W_shard: columns rank·in/N …

x_shard is what a column-parallel layer returned. The outputs of the ranks add up. In backward all
ranks have the same gradient of y, so nothing is sent. You need:
torch.autograd.Function, torch.distributed.all_reduce(tensor), get_rank().
"""

import torch.nn as nn


class MyRowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def from_full(cls, linear):
        """Take this rank's columns of a whole nn.Linear. All ranks have the whole bias."""
        return cls(linear.weight.detach().clone(), linear.bias)

    def forward(self, x_shard):
        """From (…, in/N), this rank's features, to (…, out), the same on all ranks."""
        return nn.functional.linear(x_shard, self.weight, self.bias)
