"""ring-attention-pytorch==0.5.20: ring_flash_attn, its function for CPUs."""

from ring_attention_pytorch import ring_flash_attn


def swap_head_order(x, groups):
    """Its query heads that share a key head are `groups` apart, and not consecutive."""
    grouped = x.unflatten(2, (groups, -1))
    return grouped.transpose(2, 3).flatten(2, 3)


def ring_attention(q, k, v, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # to (batch, tokens, heads, size)
    shared = k.shape[2]
    output = ring_flash_attn(
        swap_head_order(q, shared),
        k,
        v,
        causal=causal,
        bucket_size=q.shape[1],
        ring_reduce_col=True,
    )
    sharing = q.shape[2] // shared
    return swap_head_order(output, sharing).transpose(1, 2)


ring_attention.fresh = True  # it remembers the number of ranks
