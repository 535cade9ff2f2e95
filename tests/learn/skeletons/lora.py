"""LoRA: the weight W is frozen, and a product of two thin matrices is trained beside it.

    y = W x + (lora_alpha / r) · B A x        A: (r, in), random; B: (out, r), zero at first

So the model is unchanged at first, and r(in + out) numbers train instead of in · out. You need:
nn.Module.get_submodule(name) and setattr of its parent, nn.Parameter, requires_grad_(False).
"""

import torch.nn as nn


class MyLoRALinear(nn.Module):
    def __init__(self, base, r, lora_alpha):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x)


def my_lora(model, r, lora_alpha, target_modules):
    """Freeze the model. Replace each nn.Linear that is named in target_modules. Return the model.

    The only trainable parameters are A and then B of each layer.
    """
    return model
