"""deepspeed==0.19.8: Ulysses and activation checkpoints."""

from types import SimpleNamespace

import deepspeed
import torch.nn.functional as F
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups


def local_attention(q, k, v, causal, scale):
    output = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=causal,
        scale=scale,
        enable_gqa=True,
    )
    return output.transpose(1, 2)


def ulysses_attention(q, k, v, causal=False, scale=None, process_group=None):
    deepspeed.init_distributed("gloo")
    groups.mpu = SimpleNamespace(get_sequence_parallel_rank=process_group.rank)
    layer = DistributedAttention(local_attention, process_group, scatter_idx=2, gather_idx=1)
    inputs = [x.transpose(1, 2) for x in (q, k, v)]  # to (batch, tokens, heads, size)
    output = layer(*inputs, batch_dim_idx=0, causal=causal, scale=scale)
    return output.transpose(1, 2)


def activation_checkpoint(function, *arguments):
    return deepspeed.checkpointing.checkpoint(function, *arguments)


ulysses_attention.fresh = True
