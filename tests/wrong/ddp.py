"""Mistakes in averaging gradients, and the claim that catches each."""

import copy
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn

from wrong.common import changed, summed


class PlainDDP(nn.Module):
    """Averages after backward, in finish_gradient_synchronization(). Nothing overlaps."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.start()

    def start(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.data, 0)

    def forward(self, *args):
        if torch.is_grad_enabled():
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0)
        return self.module(*args)

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                self.average(parameter)

    def average(self, parameter):
        if self.is_used(parameter):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = torch.empty_like(parameter).copy_(self.mean(gradient))

    def is_used(self, parameter):
        """On any rank."""
        return summed(torch.tensor(parameter.grad is not None, dtype=torch.int)) > 0

    def mean(self, gradient):
        return summed(gradient / dist.get_world_size())


SumsGradients = changed(PlainDDP, mean=lambda self, gradient: summed(gradient))
DividesAfterTheSum = changed(
    PlainDDP, mean=lambda self, gradient: summed(gradient) / dist.get_world_size()
)
# A hook gets the parameter, and the parameter is what this one reduces.
ReducesParameters = changed(
    PlainDDP, average=lambda self, parameter: parameter.data.copy_(self.mean(parameter.data))
)
StartsAnywhere = changed(PlainDDP, start=lambda self: None)
OwnBuffers = changed(PlainDDP, forward=lambda self, *args: self.module(*args))
# A rank without a gradient skips the all-reduce. Its next one meets the others' for this parameter.
LeavesOutUnused = changed(PlainDDP, is_used=lambda self, parameter: parameter.grad is not None)
# A gradient of zero is not the same as none: weight decay and momentum go on.
ZerosForUnused = changed(PlainDDP, is_used=lambda self, parameter: True)


class Unties(PlainDDP):
    """Copies layer by layer, so a parameter of two layers becomes two parameters."""

    def start(self):
        for name, layer in self.module.named_children():
            setattr(self.module, name, copy.deepcopy(layer))
        super().start()


class LastMicroBatchOnly(PlainDDP):
    """Averages the gradient that the last backward adds, but not what no_sync has left in .grad."""

    finish_gradient_synchronization = None
    sync = True

    def start(self):
        super().start()
        for parameter in self.module.parameters():
            parameter.register_hook(self.on_gradient)

    def on_gradient(self, gradient):
        return self.mean(gradient) if self.sync else gradient

    @contextmanager
    def no_sync(self):
        self.sync = False
        yield
        self.sync = True


SendsUnderNoSync = changed(
    LastMicroBatchOnly, on_gradient=lambda self, gradient: self.mean(gradient)
)


class WeighsRanksByRows(PlainDDP):
    """Takes each rank's loss for a mean over its rows. Here it is divided already."""

    def forward(self, x):
        self.rows = torch.tensor(float(len(x)))
        return super().forward(x)

    def mean(self, gradient):
        return summed(gradient * self.rows) / summed(self.rows)


class LeavesOutIdleRanks(PlainDDP):
    """Divides by the number of ranks that have a gradient. A rank without tokens counts as well."""

    def mean(self, gradient):
        active = summed(gradient.any().float())
        return summed(gradient) / active.clamp(min=1)


class AveragesMicroBatches(PlainDDP):
    """Divides by the number of micro-batches. The loss may be divided already."""

    micro_batches = 1

    @contextmanager
    def no_sync(self):
        self.micro_batches += 1
        yield

    def mean(self, gradient):
        return super().mean(gradient) / self.micro_batches

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        self.micro_batches = 1


MISTAKES = {
    "ddp": {
        "SumsGradients": "mean_gradient",
        "ReducesParameters": "mean_gradient",
        "DividesAfterTheSum": "overflow",
        "StartsAnywhere": "start_of_rank_0",
        "LeavesOutUnused": "unused_on_one_rank",
        "ZerosForUnused": "unused",
        "Unties": "tied",
        "OwnBuffers": "buffers",
        "LastMicroBatchOnly": "accumulation",
        "SendsUnderNoSync": "no_sync_is_silent",
        "WeighsRanksByRows": "unequal_tokens",
        "LeavesOutIdleRanks": "a_rank_without_tokens",
        "AveragesMicroBatches": "unequal_micro_batches",
    },
}
CAUSES = {  # that the oracle names. It names none for the other mistakes
    "ddp": {
        "SumsGradients": "summed",
        "ReducesParameters": "parameters_averaged",
        "StartsAnywhere": "started_apart",
        "ZerosForUnused": "zeros_for_unused",
        "Unties": "untied",
        "LastMicroBatchOnly": "earlier_micro_batches_not_reduced",
        "WeighsRanksByRows": "weighted_by_rows",
        "LeavesOutIdleRanks": "idle_ranks_left_out",
        "AveragesMicroBatches": "divided_by_micro_batches",
    },
}
RIGHT = {"ddp": {"PlainDDP": ["overlap", "different_models"]}}
