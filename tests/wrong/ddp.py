"""Mistakes people make in DistributedDataParallel, and the claim that catches each."""

import copy
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn

from wrong.common import changed, summed


class PlainDDP(nn.Module):
    """Averages after backward, when finish_gradient_synchronization() is called: nothing overlaps."""

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
        if self.used(parameter):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = torch.empty_like(parameter).copy_(self.mean(gradient))

    def used(self, parameter):
        return summed(torch.tensor(parameter.grad is not None, dtype=torch.int)) > 0

    def mean(self, gradient):
        return summed(gradient / dist.get_world_size())


SumsGradients = changed(PlainDDP, mean=lambda self, gradient: summed(gradient))
DividesAfterTheSum = changed(
    PlainDDP, mean=lambda self, gradient: summed(gradient) / dist.get_world_size()
)
# A hook gets the parameter, and so the parameter it is that is reduced.
ReducesParameters = changed(
    PlainDDP, average=lambda self, parameter: parameter.data.copy_(self.mean(parameter.data))
)
StartsAnywhere = changed(PlainDDP, start=lambda self: None)
OwnBuffers = changed(PlainDDP, forward=lambda self, *args: self.module(*args))
# A rank without a gradient skips the collective; the others' meets the next parameter's.
LeavesOutUnused = changed(PlainDDP, used=lambda self, parameter: parameter.grad is not None)
# A gradient of zero is not no gradient: weight decay and momentum go on.
ZerosForUnused = changed(PlainDDP, used=lambda self, parameter: True)


class Unties(PlainDDP):
    """Copies layer by layer: a parameter of two layers becomes two."""

    def start(self):
        for name, layer in self.module.named_children():
            setattr(self.module, name, copy.deepcopy(layer))
        super().start()


class LastMicroBatchOnly(PlainDDP):
    """Averages what the synchronised backward adds; what no_sync has left in .grad stays each rank's own."""

    finish_gradient_synchronization, sync = None, True

    def start(self):
        super().start()
        for parameter in filter(
            lambda parameter: parameter.requires_grad, self.module.parameters()
        ):
            parameter.register_hook(
                lambda gradient, p=parameter: self.mean(gradient) if self.due(p) else gradient
            )

    def due(self, parameter):
        return self.sync

    @contextmanager
    def no_sync(self):
        self.sync = False
        yield
        self.sync = True


FirstMicroBatchOnly = changed(
    LastMicroBatchOnly, due=lambda self, parameter: parameter.grad is None
)
SendsUnderNoSync = changed(LastMicroBatchOnly, due=lambda self, parameter: True)

MISTAKES = {  # of each kind: an implementation, and the claim that does not hold for it
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
        "FirstMicroBatchOnly": "accumulation",
        "SendsUnderNoSync": "no_sync_is_silent",
        "PlainDDP": "overlap",
    },
}
RIGHT = {  # what the mistakes are made in, and the claims that do not hold for it
    "ddp": {
        "PlainDDP": ["different_models", "overlap"],
    },
}
