"""A mixture of experts, split over ranks: each token goes to the ranks that have its experts.

    y = Σ over the top_k experts e of p_e · down_e(silu(gate_e x) · up_e x)
    p = softmax(W_gate x), of the chosen ones divided by their sum

One all-to-all sends tokens, another brings the results back. Experts' gradients are sums over all
ranks' tokens already: divide them by N, but do not all-reduce them. You need:
torch.distributed.all_to_all_single(output, input, output_split_sizes, input_split_sizes).
"""

import torch
import torch.nn as nn


class MyMoE(nn.Module):
    def __init__(self, hidden, ffn_hidden, num_experts, top_k=2):
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.Module()
        gate_up = torch.randn(num_experts, 2 * ffn_hidden, hidden) / hidden**0.5
        self.experts.gate_up_proj = nn.Parameter(gate_up)
        down = torch.randn(num_experts, hidden, ffn_hidden) / ffn_hidden**0.5
        self.experts.down_proj = nn.Parameter(down)

    def forward(self, x):  # (tokens, hidden) to the same
        return x


def parallelize(module):
    """Leave this rank its num_experts/N experts, in the order of ranks."""


def average_gradients(module):
    """Called between backward and step."""
