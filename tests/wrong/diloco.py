"""Mistakes in DiLoCo, and the claim that catches each."""

import copy

import torch

from diloco import DiLoCo
from wrong.common import changed


def with_mean(self, message, mean):
    message.mean = mean
    DiLoCo._apply(self, message)


# torchft #233 had this sign.
MovesBackwards = changed(
    DiLoCo, _apply=lambda self, message: with_mean(self, message, -message.wait())
)


class OwnMomentum(DiLoCo):
    """Each worker's outer momentum comes from its own pseudo-gradients."""

    def _apply(self, message):
        own = [(self.outer[name] - self._own[name]).detach() for name in message.names]
        super()._apply(message)
        parts = message.wait().split([each.numel() for each in own])
        for name, each, mean in zip(message.names, own, parts, strict=True):
            buffer = self._outer_optimizer.state[self.outer[name]]["momentum_buffer"]
            buffer += each - mean.view_as(each)


class ResetsTheInnerState(DiLoCo):
    def __init__(self, module, optimizer, **options):
        super().__init__(module, optimizer, **options)
        self.optimizer = optimizer

    def _apply(self, message):
        super()._apply(message)
        self.optimizer.state.clear()


class MeanOfParameters(DiLoCo):
    """All workers continue from the mean of their parameters."""

    def __init__(self, *args, **options):
        super().__init__(*args, **{**options, "outer_lr": 1.0, "outer_momentum": 0.0})


class AllMomentaMove(DiLoCo):
    """The fragments that were not sent have gradients of zero."""

    def _apply(self, message):
        for tensor in self.outer.values():
            tensor.grad = torch.zeros_like(tensor)
        super()._apply(message)


class MixesTheOtherWay(DiLoCo):
    def __init__(self, *args, mix=0.5, **options):
        super().__init__(*args, mix=1 - mix, **options)


class KeepsItsOwnPartExact(DiLoCo):
    """A worker's own share of the mean is not rounded."""

    def _apply(self, message):
        own = [(self.outer[name] - self._own[name]).flatten() for name in message.names]
        exact = torch.cat(own).detach()
        share = (exact - exact.bfloat16().to(exact.dtype)) / message.N
        with_mean(self, message, message.wait() + share)


class StartsAnywhere(DiLoCo):
    def __init__(self, module, *args, **options):
        before = copy.deepcopy(module.state_dict())
        super().__init__(module, *args, **options)
        module.load_state_dict(before)


# torchft #238 saved no outer parameters. This one saves no message.
ForgetsMessages = changed(
    DiLoCo, state_dict=lambda self: {**DiLoCo.state_dict(self), "in_flight": []}
)


MISTAKES = {
    "diloco": {
        "MovesBackwards": "outer_step",
        "OwnMomentum": "replicas",
        "ResetsTheInnerState": "inner_state",
        "MeanOfParameters": "outer_step",
        "AllMomentaMove": "fragments",
        "MixesTheOtherWay": "several_in_flight",
        "KeepsItsOwnPartExact": "compressed_messages",
        "StartsAnywhere": "start_of_rank_0",
        "ForgetsMessages": "resumed",
    },
}
CAUSES = {
    "diloco": {
        "MovesBackwards": "outer_step_backwards",
        "ResetsTheInnerState": "inner_state_reset",
        "MeanOfParameters": "mean_of_parameters",
        "AllMomentaMove": "all_momenta_move",
        "MixesTheOtherWay": "mixed_the_other_way",
    },
}
