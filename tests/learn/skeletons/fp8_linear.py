"""FP8: a linear layer whose products multiply 8-bit numbers.

    y = (x / s).to(8 bits) @ (W / t).to(8 bits)ᵀ · s · t       s = largest of |x| / largest number

The products of backward are dx = dy W and dW = dyᵀ x. The largest number of torch.float8_e4m3fn is
448, and that of torch.float8_e5m2 is 57344. You need: torch.autograd.Function, torch.finfo(dtype).
Multiply what you have cast back to float32: only GPUs multiply 8-bit numbers themselves.
"""

import torch
import torch.nn.functional as F


def my_fp8_linear(model):
    """The model is nn.Sequential(nn.Linear(…)). Change what its layer computes. Return it."""
    (layer,) = model

    def forward(x):
        x8 = x.to(torch.float8_e4m3fn)
        weight8 = layer.weight.to(torch.float8_e4m3fn)
        return F.linear(x8.float(), weight8.float(), layer.bias)

    layer.forward = forward
    return model
