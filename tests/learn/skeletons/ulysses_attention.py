"""Ulysses: each rank has a part of the sequence for all heads. Trade it for all of some heads.

    all-to-all: (batch, H, S/N, D) to (batch, H/N, S, D); attention; and the same back

Autograd must see the all-to-all: its backward is the all-to-all in the other direction. If k has
fewer heads than ranks, heads are repeated. You need: torch.autograd.Function,
torch.distributed.all_to_all_single(output, input), F.scaled_dot_product_attention.
"""

import torch.nn.functional as F


def my_ulysses_attention(q, k, v, causal=False):
    """From this rank's (batch, heads, tokens, D) to the same: attention to all ranks' keys."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
