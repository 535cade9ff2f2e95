"""yunchang==0.6.4: UlyssesAttention. Its own kernels need a GPU; PyTorch's takes their place."""

import torch.nn.functional as F
from yunchang.kernels import AttnType
from yunchang.ulysses import UlyssesAttention


def local_attention(q, k, v, causal, softmax_scale, **_):
    output = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=causal,
        scale=softmax_scale,
        enable_gqa=True,
    )
    return output.transpose(1, 2)


def ulysses_attention(q, k, v, causal=False, scale=None, process_group=None):
    layer = UlyssesAttention(process_group, attn_type=AttnType.TORCH_FLASH)
    layer.attn_fn = local_attention
    inputs = [x.transpose(1, 2) for x in (q, k, v)]  # to (batch, tokens, heads, size)
    output = layer(*inputs, causal=causal, softmax_scale=scale)
    return output.transpose(1, 2)
