"""Mistakes in expert parallelism, and the claim that catches each."""

import torch
import torch.distributed as dist

from expert_parallel import MoE, average_gradients, clip_grad_norm_, parallelize  # noqa: F401


class ExpertsNotDivided(MoE):
    @staticmethod
    def average_gradients(module):
        average_gradients(module)
        for parameter in module.experts.parameters():
            parameter.grad *= dist.get_world_size()


class RouterNotAveraged(MoE):
    @staticmethod
    def average_gradients(module):
        own = module.gate.weight.grad.clone()
        average_gradients(module)
        module.gate.weight.grad.copy_(own)


class LocalBalance(MoE):
    """The balance of each rank's own tokens."""

    @property
    def aux_loss(self):
        groups = self.experts.groups
        self.experts.groups = None
        aux_loss = super().aux_loss
        self.experts.groups = groups
        return aux_loss


class NoRenormalisation(MoE):
    def __init__(self, *args, **options):
        super().__init__(*args, **{**options, "norm_topk_prob": False})


class NoWeights(MoE):
    def route(self, tokens, mask=None):
        weights, chosen = super().route(tokens, mask)
        return torch.ones_like(weights), chosen


class WrongOrder(MoE):
    """Rows come back in the order in which experts have them."""

    def run_experts(self, rows, counts):
        return super().run_experts(rows, counts).roll(1, 0)


class RawAllToAll(MoE):
    """The exchange has no gradient."""

    def run_experts(self, rows, counts):
        return super().run_experts(rows.detach(), counts)


class NormOfThisRank(MoE):
    """Forgets the other ranks' experts."""

    @staticmethod
    def clip_grad_norm_(module, max_norm):
        return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)


MISTAKES = {
    "moe": {
        "ExpertsNotDivided": "as_one_device",
        "RouterNotAveraged": "trains",
        "LocalBalance": "balance_over_all_tokens",
        "NoRenormalisation": "as_one_device",
        "NoWeights": "as_one_device",
        "WrongOrder": "as_one_device",
        "RawAllToAll": "as_one_device",
        "NormOfThisRank": "whole_norm",
    },
}
CAUSES = {
    "moe": {
        "ExpertsNotDivided": "experts_times_n",
        "NoRenormalisation": "not_renormalised",
        "NoWeights": "not_weighted",
        "RawAllToAll": "exchange_without_gradient",
    },
}
