"""Mistakes people make in column and row linear, and the claim that catches each."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from wrong.common import changed, summed


class Column(nn.Linear):
    """Computes its features right; its backward knows of no others."""

    def __init__(self, in_features, out_features, bias=True):
        super().__init__(in_features, out_features // dist.get_world_size(), bias)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# The sum's conjugate is the identity: every rank has the whole gradient of the output already.
SumBothWays = changed(Sum, backward=Sum.forward)


class Row(nn.Linear):
    """Right."""

    sum = Sum

    def __init__(self, in_features, out_features, bias=True):
        super().__init__(in_features // dist.get_world_size(), out_features, bias)

    def forward(self, x):
        return self.sum.apply(F.linear(x, self.weight)) + (0 if self.bias is None else self.bias)


AddsTheBiasOnEveryRank = changed(
    Row, forward=lambda self, x: Sum.apply(F.linear(x, self.weight, self.bias))
)
SumsGradientsToo = changed(Row, sum=SumBothWays)

MISTAKES = {  # of each kind: an implementation, and the claim that does not hold for it
    "column-linear": {
        "Column": "column",
    },
    "row-linear": {
        "AddsTheBiasOnEveryRank": "row",
        "SumsGradientsToo": "row",
    },
}
RIGHT = {  # what the mistakes are made in, and the claims that do not hold for it
    "row-linear": {
        "Row": [],
    },
}
