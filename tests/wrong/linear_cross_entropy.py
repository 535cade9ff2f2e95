"""Mistakes in the loss over a large vocabulary, and the claim that catches each."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from linear_cross_entropy import NaiveLinearCrossEntropy, vocab_parallel_linear_cross_entropy
from tensor_parallel import gather_from_region


def plain(input, linear_weight, target, *, linear_bias=None, **options):
    """Right, with all logits."""
    logits = F.linear(input, linear_weight, linear_bias)
    return F.cross_entropy(logits, target, **options)


def mean_of_means(input, linear_weight, target, reduction="mean"):
    """Each chunk of tokens weighs as much, however many of its targets count."""
    chunks = zip(input.split(8), target.split(8), strict=True)
    losses = [plain(x, linear_weight, y, reduction=reduction) for x, y in chunks]
    return torch.stack(losses).nanmean()


def counts_ignored_tokens(input, linear_weight, target, reduction="mean"):
    total = plain(input, linear_weight, target, reduction="sum")
    return total / len(target) if reduction == "mean" else total


def gradients_without_their_factor(input, linear_weight, target):
    """Gradients that forward computes are those of the sum, not of the mean."""
    counts = target != -100
    total = NaiveLinearCrossEntropy.apply(input[counts], linear_weight, target[counts], 8)
    return total - (total * (1 - 1 / counts.sum())).detach()


def from_logits(logits_shard, target, label_smoothing=0.0, vocab_size=None, *, process_group=None):
    """vocab_parallel_linear_cross_entropy with the logits as input, and the identity as weight."""
    x = gather_from_region(logits_shard, process_group)
    columns = logits_shard.shape[-1]
    own = slice(
        columns * dist.get_rank(process_group), columns * (1 + dist.get_rank(process_group))
    )
    return vocab_parallel_linear_cross_entropy(
        x,
        torch.eye(x.shape[-1], dtype=x.dtype)[own],
        target,
        reduction="none",
        label_smoothing=label_smoothing,
        vocab_size=vocab_size,
        process_group=process_group,
    )


MISTAKES = {
    "linear-cross-entropy": {
        "mean_of_means": "as_plain",
        "counts_ignored_tokens": "as_plain",
        "gradients_without_their_factor": "as_plain",
    },
}
RIGHT = {
    "linear-cross-entropy": {"plain": ["no_logits_are_kept"]},
    "vocab-cross-entropy": {"from_logits": []},
}
