"""memory-efficient-attention-pytorch==0.1.6: its function in chunks."""

from memory_efficient_attention_pytorch.memory_efficient_attention import (
    memory_efficient_attention,
)


def attention(q, k, v, causal=False):
    return memory_efficient_attention(q, k, v, causal=causal)
