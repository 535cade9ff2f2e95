"""Mistakes in ZeRO-1 over gradients that are averaged already, and the claim that catches each."""

import torch
import torch.distributed as dist

from wrong.common import changed


class PlainZero1(torch.optim.Optimizer):
    """Each rank updates every N-th parameter and broadcasts it."""

    def __init__(self, parameters, optimizer_class, **arguments):
        self.parameters = list(parameters)
        self.mine = self.parameters[dist.get_rank() :: dist.get_world_size()] or self.parameters[:1]
        super().__init__(self.parameters, arguments)
        self.optimizer = self.make(optimizer_class, arguments)

    def make(self, optimizer_class, arguments):
        return optimizer_class(self.mine, **arguments)

    def pass_on_options(self):
        self.optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"]

    def step(self):
        self.pass_on_options()
        self.optimizer.step()
        for i, parameter in enumerate(self.parameters):
            self.send(parameter, i % dist.get_world_size())

    def send(self, parameter, src):
        dist.broadcast(parameter.data, src)


SavesItsOwnPart = changed(PlainZero1, state_dict=lambda self: self.optimizer.state_dict())
KeepsItsUpdates = changed(PlainZero1, send=lambda self, parameter, src: None)
# A scheduler changes the groups of the outer optimizer, and the inner one does not notice.
FixedLearningRate = changed(PlainZero1, pass_on_options=lambda self: None)
KeepsTheWholeState = changed(
    PlainZero1, make=lambda self, optimizer, options: optimizer(self.parameters, **options)
)

MISTAKES = {
    "zero1": {
        "KeepsItsUpdates": "mean_gradient",
        "SavesItsOwnPart": "whole_state_dict",
        "FixedLearningRate": "schedulers",
        "KeepsTheWholeState": "state_is_sharded",
    },
}
CAUSES = {
    "zero1": {"KeepsItsUpdates": "updates_not_sent", "FixedLearningRate": "fixed_learning_rate"},
}
RIGHT = {"zero1": {"PlainZero1": ["whole_state_dict", "bitwise_at_four"]}}
