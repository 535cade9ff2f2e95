"""Attention by blocks: never more than a block of the scores at once (Dao 2022).

    for a block of keys with scores s:  m' = max(m, max s),  l' = l·e^(m-m') + Σ e^(s-m'),
    o' = o·e^(m-m') + e^(s-m') V;  at the end o / l

Begin with the whole matrix, softmax(q kᵀ / √D) v, and then go block by block. causal: query i sees
keys up to i + (keys - queries). k and v may have fewer heads. You need: torch.exp, torch.maximum,
torch.autograd.Function if nothing of size queries × keys may be kept.
"""


def my_attention(q, k, v, causal=False, scale=None):
    """From (batch, heads, queries, D) and (batch, heads or fewer, keys, D) to the shape of q."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return q * scale
