"""Mistakes in Muon over several ranks, and the claim that catches each."""

import torch
import torch.distributed as dist

from muon import add_to_momentum, apply_update, orthogonalize
from wrong.common import changed


class PlainMuon(torch.optim.Optimizer):
    """Each rank updates every N-th matrix and broadcasts it."""

    def __init__(self, parameters, process_group=None, **options):
        plain = torch.optim.Muon(parameters, **options)
        super().__init__(plain.param_groups, plain.defaults)
        self.group = process_group
        self.N = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        for parameter in self.param_groups[0]["params"]:
            self.send(parameter, 0)

    def send(self, parameter, owner):
        dist.broadcast(parameter.data, group=self.group, group_src=owner)

    @torch.no_grad()
    def step(self):
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            gradient = self.mean(parameter)
            if gradient is None:
                continue
            if self.owns(number):
                self.update(parameter, gradient, self.param_groups[0])
            self.send(parameter, number % self.N)

    def mean(self, parameter):
        """Add up the gradients in rank order."""
        everyone = [None] * self.N
        dist.all_gather_object(everyone, parameter.grad, group=self.group)
        found = [gradient for gradient in everyone if gradient is not None]
        return self.divide(sum(found), parameter) if found else None

    def divide(self, total, parameter):
        return total / self.N

    def owns(self, number):
        return number % self.N == self.rank

    def update(self, parameter, gradient, options):
        direction = add_to_momentum(self.state[parameter], gradient, options)
        update = orthogonalize(direction, options)
        apply_update(parameter, update, parameter.shape, options)


class DecaysAfterTheUpdate(PlainMuon):
    def update(self, parameter, gradient, options):
        super().update(parameter, gradient, options | {"weight_decay": 0.0})
        parameter.mul_(1 - options["lr"] * options["weight_decay"])


class KeepsItsOwnMomentum(PlainMuon):
    """The momentum is that of the owner's own gradients."""

    def divide(self, total, parameter):
        return total / self.N if parameter.grad is None else parameter.grad


class LearningRateOfTheStart(PlainMuon):
    def update(self, parameter, gradient, options):
        super().update(parameter, gradient, self.defaults)


EveryRankDoesAll = changed(PlainMuon, owns=lambda self, number: True)
AddsUpOnly = changed(PlainMuon, divide=lambda self, total, parameter: total)

MISTAKES = {
    "muon": {
        "KeepsItsOwnMomentum": "mean_gradient",
        "AddsUpOnly": "small_gradients",
        "DecaysAfterTheUpdate": "mean_gradient",
        "EveryRankDoesAll": "work_is_split",
        "LearningRateOfTheStart": "schedulers",
    },
}
CAUSES = {
    "muon": {
        "KeepsItsOwnMomentum": "gradient_of_the_owner",
        "AddsUpOnly": "summed",
        "DecaysAfterTheUpdate": "decay_after_the_update",
        "LearningRateOfTheStart": "fixed_learning_rate",
    },
}
RIGHT = {"muon": {"PlainMuon": ["whole_state_dict"]}}
