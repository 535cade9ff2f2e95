"""The loss over a large vocabulary, without its logits: a chunk of tokens, or of words, at a time.

    loss = mean over tokens of  log Σ_j e^(z_j) - z_target,  z = input · weightᵀ

The logits of a chunk are freed before the next chunk. Forward may compute the gradients at once:
of z it is (softmax(z) - 1 at the target) / number of tokens. Tokens with the target -100 do not
count. You need: torch.autograd.Function, torch.logsumexp, index_add_ or a product of matrices.
"""

import torch


def my_linear_cross_entropy(input, linear_weight, target):
    """From (tokens, H), (words, H) and (tokens) to the mean loss."""
    return torch.zeros((), dtype=input.dtype) * input.sum() * linear_weight.sum()
