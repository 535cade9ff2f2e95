"""Ring attention: each rank has a part of the sequence. Keys and values travel around the ring.

    two results over disjoint keys:  L = log(e^La + e^Lb),  o = oa·e^(La-L) + ob·e^(Lb-L)

In round r, rank i computes its queries against the keys of rank i - r, and sends them on. Causal:
keys of later parts are not needed, and its own part has the mask. In backward, the gradients of
keys and values travel with them, back to their owner. You need: torch.autograd.Function,
torch.distributed.isend(tensor, dst), irecv(tensor, src), torch.logaddexp.
"""

import torch.nn.functional as F


def my_ring_attention(q, k, v, causal=False):
    """From this rank's (batch, heads, tokens, D) to the same: attention to all ranks' keys."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
