"""Mistakes people make in GradScaler, and the claim that catches each."""

import torch

import amp
from wrong.common import changed

Scaler = amp.GradScaler
EachRankForItself = torch.amp.GradScaler  # leaves it to who has summed the gradients
NeverUnscales = changed(Scaler, step=lambda self, optimizer: optimizer.step())
StepsAnyway = changed(
    Scaler, step=lambda self, optimizer: (Scaler.step(self, optimizer), optimizer.step())
)
ForgetsItsCount = changed(
    Scaler, state_dict=lambda self: {**Scaler.state_dict(self), "_growth_tracker": 0}
)

MISTAKES = {  # of each kind: an implementation, and the claim that does not hold for it
    "grad-scaler": {
        "EachRankForItself": "shared_overflow",
        "StepsAnyway": "skipped",
        "NeverUnscales": "scaled_and_unscaled",
        "ForgetsItsCount": "resumed",
    },
}
