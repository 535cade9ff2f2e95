"""Mistakes in scaling the loss, and the claim that catches each."""

import torch

import amp
from wrong.common import changed

Scaler = amp.GradScaler
EachRankForItself = torch.amp.GradScaler  # it expects gradients that are the same on all ranks
StepsAnyway = changed(
    Scaler, step=lambda self, optimizer: (Scaler.step(self, optimizer), optimizer.step())
)
ForgetsItsCount = changed(
    Scaler, state_dict=lambda self: {**Scaler.state_dict(self), "_growth_tracker": 0}
)


class NeverUnscales(Scaler):
    """Looks for an overflow, and steps with the scaled gradients."""

    def step(self, optimizer):
        (weight,) = optimizer.param_groups[0]["params"]
        scaled = weight.grad.clone()
        self.unscale_(optimizer)
        weight.grad = scaled
        super().step(optimizer)


MISTAKES = {
    "grad-scaler": {
        "EachRankForItself": "shared_overflow",
        "StepsAnyway": "skipped",
        "NeverUnscales": "scaled_and_unscaled",
        "ForgetsItsCount": "resumed",
    },
}
CAUSES = {"grad-scaler": {"NeverUnscales": "never_unscaled"}}
