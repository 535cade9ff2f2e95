"""Mistakes people make in attention, and the claim that catches each."""

from functools import partial

import torch

from flash_attention import FlashAttention


def plain_attention(
    q,
    k,
    v,
    causal=False,
    scale=None,
    *,
    offset=lambda S, Skv: Skv - S,
    largest=lambda scores: scores.amax(-1, keepdim=True),
    rescaled=torch.mul,
    least=1.0,
    share=lambda x, groups: x.repeat_interleave(groups, 1),
):
    """Online softmax over blocks of 64 keys; autograd keeps all of them."""
    k, v = (share(x, q.shape[1] // k.shape[1]) for x in (k, v))
    S, Skv = q.shape[2], k.shape[2]
    hidden = torch.ones(S, Skv, dtype=torch.bool).triu(offset(S, Skv) + 1) & causal
    m, l, O = torch.tensor(-1e300, dtype=torch.float64), torch.zeros(()), torch.zeros(())
    for k_j, v_j, hidden_j in zip(k.split(64, 2), v.split(64, 2), hidden.split(64, 1), strict=True):
        scores = q @ k_j.mT * (q.shape[3] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(hidden_j, -torch.inf)
        before, m = m, torch.maximum(m, largest(scores)).detach()
        P, correction = (scores - m).exp(), (before - m).exp()
        l, O = rescaled(l, correction) + P.sum(-1, keepdim=True), O * correction + P @ v_j
    return O / l.clamp(min=least)


# The running maximum scales O, but not the sum that is there already.
forgets_to_scale_the_sum = partial(plain_attention, rescaled=lambda sum, correction: sum)
# The first query sees the first key only, however many keys there are.
aligned_at_the_start = partial(plain_attention, offset=lambda S, Skv: 0)
# A query that sees nothing is 0/0.
divides_zero_by_zero = partial(plain_attention, least=0.0)
# e^score, of any score.
knows_no_maximum = partial(
    plain_attention, largest=lambda scores: torch.zeros_like(scores[..., :1])
)
# Query heads take the heads of keys in turns.
shares_heads_in_turns = partial(plain_attention, share=lambda x, groups: x.repeat(1, groups, 1, 1))


class DrawsItsMaskAnew(FlashAttention):
    @staticmethod
    def backward(ctx, gradient):
        causal, scale, dropout_p, seed, block_size = ctx.arguments
        ctx.arguments = causal, scale, dropout_p, seed + 1, block_size
        return FlashAttention.backward(ctx, gradient)


def draws_its_mask_anew(q, k, v, causal=False, dropout_p=0.0):
    return DrawsItsMaskAnew.apply(q, k, v, causal, None, dropout_p, torch.randint(2**62, ()), 64)


MISTAKES = {  # of each kind: an implementation, and the claim that does not hold for it
    "attention": {
        "forgets_to_scale_the_sum": "as_dense",
        "aligned_at_the_start": "causal_at_the_end",
        "divides_zero_by_zero": "sees_nothing",
        "shares_heads_in_turns": "shared_heads",
        "knows_no_maximum": "large_scores",
        "draws_its_mask_anew": "dropout",
        "plain_attention": "no_matrix_is_kept",
    },
}
RIGHT = {  # what the mistakes are made in, and the claims that do not hold for it
    "attention": {
        "plain_attention": ["no_matrix_is_kept"],
    },
}
