"""Mistakes in splitting a vocabulary, and the claim that catches each."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from wrong.common import changed, summed


class Sum(torch.autograd.Function):
    """Every rank goes on from the sum to the same loss, so its gradient is that of each part."""

    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# The gradient of each rank is summed as well: N times too large.
SumBothWays = changed(Sum, backward=Sum.forward)


def plain(logits, target, label_smoothing=0.0, vocab_size=None, add=Sum, wrong=""):
    """In PyTorch's functions and one sum. `wrong` names a mistake."""
    columns = logits.shape[-1]
    first = dist.get_rank() * columns
    V = vocab_size or columns * dist.get_world_size()
    is_word = first + torch.arange(columns) < (V if wrong != "padding" else 10**9)
    if wrong != "bfloat16":
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits.masked_fill(~is_word, -torch.inf)
    largest = logits.detach().amax(-1, keepdim=True)
    if wrong != "own maximum":
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    largest *= wrong != "no maximum"
    shifted = logits - largest
    ignored = target == -100
    place = target.masked_fill(ignored, 0).unsqueeze(-1) - first
    is_here = (place >= 0) & (place < columns)
    of_target = shifted.gather(-1, place.where(is_here, 0)).where(is_here, 0.0)
    total = add.apply(shifted.exp().sum(-1))
    counted = columns * dist.get_world_size() if wrong == "smooths padding" else V
    mean = shifted.masked_fill(~is_word, 0.0).sum(-1) / counted
    mean = add.apply(mean)
    if wrong == "local vocabulary":
        mean = shifted.mean(-1)
    if wrong == "Megatron's smoothing":
        label_smoothing *= V / (V - 1)
    of_target = add.apply(of_target.squeeze(-1))
    chosen = of_target + label_smoothing * (mean - of_target)
    loss = total.log() - chosen
    return loss if wrong == "ignored count" else loss.masked_fill(ignored, 0.0)


no_maximum = partial(plain, wrong="no maximum")
own_maximum = partial(plain, wrong="own maximum")
local_vocabulary = partial(plain, wrong="local vocabulary")
megatrons_smoothing = partial(plain, wrong="Megatron's smoothing")
smooths_over_padding = partial(plain, wrong="smooths padding")
padding_counts = partial(plain, wrong="padding")
ignored_count = partial(plain, wrong="ignored count")
in_bfloat16 = partial(plain, wrong="bfloat16")
gradients_times_n = partial(plain, add=SumBothWays)


def divides_by_the_targets(logits, target):
    """0/0 if all are ignored."""
    count = (target != -100).sum()
    return plain(logits, target) * (count / count)


class PlainEmbedding(nn.Embedding):
    add = Sum
    hides = True  # the rows of other ranks' tokens

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None):
        rows = -(-num_embeddings // dist.get_world_size())
        super().__init__(rows, embedding_dim)
        self.first = rows * dist.get_rank()
        self.size = num_embeddings
        self.padding = padding_idx

    def forward(self, tokens):
        if tokens.max() >= self.size:
            raise IndexError(f"token {tokens.max()} is not in a vocabulary of {self.size}")
        place = tokens - self.first
        is_here = (place >= 0) & (place < self.num_embeddings)
        row = place.where(is_here, 0)
        x = F.embedding(row, getattr(self, "rows", self.weight))
        if self.hides:
            x = x * is_here.unsqueeze(-1)
        if self.padding is not None:
            is_padding = (tokens == self.padding).unsqueeze(-1)
            x = x.detach().where(is_padding, x)
        return self.add.apply(x)


class ForgetsPaddingIdx(PlainEmbedding):
    def __init__(self, num_embeddings, embedding_dim, padding_idx=None):
        super().__init__(num_embeddings, embedding_dim)


class AcceptsUnknownTokens(PlainEmbedding):
    def forward(self, tokens):
        self.size = 10**9
        return super().forward(tokens)


class ForgetsTheRest(PlainEmbedding):
    """Its first row is that of a vocabulary that the ranks divide."""

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None):
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.first = num_embeddings // dist.get_world_size() * dist.get_rank()


class KeepsItsOwnGradient(PlainEmbedding):
    """It adds up its gradients itself, and writes them over those of the head."""

    def forward(self, tokens):
        self.rows = self.weight.detach().requires_grad_()
        self.rows.register_hook(self.write)
        return super().forward(tokens)

    def write(self, gradient):
        self.total = getattr(self, "total", 0.0) + gradient
        self.weight.grad = self.total


AddsFirstRows = changed(PlainEmbedding, hides=False)
SumsGradientsToo = changed(PlainEmbedding, add=SumBothWays)


MISTAKES = {
    "vocab-cross-entropy": {
        "no_maximum": "large_logits",
        "own_maximum": "loss",
        "local_vocabulary": "label_smoothing",
        "megatrons_smoothing": "label_smoothing",
        "padding_counts": "padding",
        "smooths_over_padding": "smoothing_with_padding",
        "ignored_count": "ignored",
        "gradients_times_n": "loss",
        "divides_by_the_targets": "all_ignored",
        "in_bfloat16": "computes_in_float32",
    },
    "vocab-embedding": {
        "AddsFirstRows": "embedding",
        "SumsGradientsToo": "embedding",
        "ForgetsPaddingIdx": "padding_idx",
        "ForgetsTheRest": "embedding_with_padding",
        "KeepsItsOwnGradient": "tied_with_a_head",
        "AcceptsUnknownTokens": "unknown_tokens",
    },
}
CAUSES = {
    "vocab-cross-entropy": {
        "no_maximum": "overflows",
        "own_maximum": "own_maximum",
        "local_vocabulary": "local_vocabulary",
        "megatrons_smoothing": "megatrons_smoothing",
        "padding_counts": "padding_counts",
        "ignored_count": "ignored_tokens_count",
        "gradients_times_n": "gradients_times_n",
        "divides_by_the_targets": "mean_of_nothing",
    },
    "vocab-embedding": {
        "AddsFirstRows": "first_rows_added",
        "SumsGradientsToo": "gradients_times_n",
        "ForgetsPaddingIdx": "padding_idx_trains",
    },
}
RIGHT = {
    "vocab-cross-entropy": {"plain": []},
    "vocab-embedding": {"PlainEmbedding": []},
}
