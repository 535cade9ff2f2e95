"""Mistakes in attention by blocks, and the claim that catches each."""

from functools import partial

import torch
import torch.nn.functional as F

from flash_attention import Dropout, FlashAttention


def from_the_end(S, Skv):
    return Skv - S


def largest_of(scores):
    return scores.amax(-1, keepdim=True)


def consecutive(x, groups):
    return x.repeat_interleave(groups, 1)


def renumbered(documents):
    """Where the number changes, a document ends: 1 0 1 are three."""
    ends = documents.diff(dim=1) != 0
    return F.pad(ends, (1, 0)).cumsum(1)


def is_later(scores, offset):
    first_hidden = offset(*scores.shape[2:]) + 1
    return torch.ones_like(scores, dtype=torch.bool).triu(first_hidden)


def differ(ids):
    """Whether a query and a key are of different documents: (batch, 1, queries, keys)."""
    differences = ids[:, :, None] != ids[:, None, :]
    return differences[:, None]


def online_softmax(blocks, values, largest, rescale):
    """Return the sum of exponentials, and the sum of values weighted by them."""
    m = torch.tensor(-1e300, dtype=torch.float64)  # the running maximum
    l = torch.zeros(())
    O = torch.zeros(())
    for scores, v_j in zip(blocks, values, strict=True):
        m_new = torch.maximum(m, largest(scores)).detach()
        P = (scores - m_new).exp()
        correction = (m - m_new).exp()
        l = rescale(l, correction) + P.sum(-1, keepdim=True)
        O = O * correction + P @ v_j
        m = m_new
    return l, O


def plain_attention(
    q,
    k,
    v,
    causal=False,
    scale=None,
    documents=None,
    *,
    offset=from_the_end,  # of the causal mask's diagonal
    largest=largest_of,  # what is subtracted from the scores
    rescale=torch.mul,  # the running sum, when the maximum grows
    least=1.0,  # the smallest sum to divide by
    share=consecutive,  # heads of keys among heads of queries
    number=renumbered,
):
    """Online softmax over blocks of 64 keys. Autograd keeps all blocks."""
    k, v = (share(x, q.shape[1] // x.shape[1]) for x in (k, v))
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    hidden = is_later(scores, offset) & causal
    if documents is not None:
        hidden = hidden | differ(number(documents))
    blocks = scores.masked_fill(hidden, -torch.inf).split(64, 3)
    l, O = online_softmax(blocks, v.split(64, 2), largest, rescale)
    # Not clamp(): from torch 2.14 on, it passes no whole gradient on where l is 1 exactly.
    return O / l.masked_fill(l < least, least)


# A new maximum rescales the output, but not the sum so far.
forgets_to_scale_the_sum = partial(plain_attention, rescale=lambda total, correction: total)
# The first query sees the first key only, however many keys there are.
aligned_at_the_start = partial(plain_attention, offset=lambda S, Skv: 0)
# A query that sees nothing is 0/0.
divides_zero_by_zero = partial(plain_attention, least=0.0)
# The exponential of a large score overflows.
knows_no_maximum = partial(
    plain_attention, largest=lambda scores: torch.zeros_like(scores[..., :1])
)
# Heads of queries take the heads of keys in turns.
shares_heads_in_turns = partial(plain_attention, share=lambda x, groups: x.repeat(1, groups, 1, 1))

# In 1 0 1, the first document sees the last.
merges_equal_ids = partial(plain_attention, number=lambda ids: ids)


def without_padding(documents):
    ids = renumbered(documents).double()
    return ids.masked_fill(documents < 0, torch.nan)  # which equals no id


# The rows of padding are -inf alone, so they are 0/0.
hides_padding = partial(plain_attention, number=without_padding, least=0.0)


class DrawsItsMaskAnew(Dropout):
    def mask(self, weights, rows, cols):
        self.seed += 1
        return super().mask(weights, rows, cols)


def draws_its_mask_anew(q, k, v, causal=False, dropout_p=0.0):
    dropout = DrawsItsMaskAnew(dropout_p, q.device)
    return FlashAttention.apply(q, k, v, causal, None, dropout)


MISTAKES = {
    "attention": {
        "forgets_to_scale_the_sum": "as_dense",
        "aligned_at_the_start": "causal_at_the_end",
        "divides_zero_by_zero": "sees_nothing",
        "shares_heads_in_turns": "shared_heads",
        "knows_no_maximum": "large_scores",
        "draws_its_mask_anew": "dropout",
        "merges_equal_ids": "documents",
        "hides_padding": "documents",
        "plain_attention": "documents_are_independent",
    },
}
CAUSES = {
    "attention": {
        "shares_heads_in_turns": "heads_in_turns",
        "merges_equal_ids": "equal_numbers_merged",
    },
}
RIGHT = {"attention": {"plain_attention": ["no_matrix_is_kept", "documents_are_independent"]}}
