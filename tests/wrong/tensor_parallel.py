"""Mistakes in splitting a linear layer, and the claim that catches each."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from wrong.common import changed, summed


class Column(nn.Linear):
    """Computes its features right, but each rank's gradient of the input knows no other rank."""

    def __init__(self, in_features, out_features, bias=True):
        super().__init__(in_features, out_features // dist.get_world_size(), bias)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# The conjugate of the sum is the identity, because every rank has the output's whole gradient.
SumBothWays = changed(Sum, backward=Sum.forward)


class PlainRow(nn.Linear):
    sum = Sum

    def __init__(self, in_features, out_features, bias=True):
        super().__init__(in_features // dist.get_world_size(), out_features, bias)

    def forward(self, x):
        y = self.sum.apply(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class AddsTheBiasOnEveryRank(PlainRow):
    def forward(self, x):
        y = super(PlainRow, self).forward(x)
        return self.sum.apply(y)


SumsGradientsToo = changed(PlainRow, sum=SumBothWays)


MISTAKES = {
    "column-linear": {"Column": "column"},
    "row-linear": {"AddsTheBiasOnEveryRank": "row", "SumsGradientsToo": "row"},
}
CAUSES = {
    "column-linear": {"Column": "input_gradient_not_summed"},
    "row-linear": {
        "AddsTheBiasOnEveryRank": "bias_on_every_rank",
        "SumsGradientsToo": "gradients_times_n",
    },
}
RIGHT = {"row-linear": {"PlainRow": []}}
