"""Mistakes in experts on a mesh, and the claim that catches each."""

import torch
import torch.distributed as dist
from claims.moe_mesh import MoE

import expert_parallel


def scale_experts(module, factor):
    for parameter in module.experts.parameters():
        parameter.grad *= factor


def replicas_of(mesh):
    return mesh.size() // mesh.get_group("ep").size()


class DividedByExpertRanks(MoE):
    """Experts' gradients are divided by the size of their group, not of the world."""

    @staticmethod
    def average_gradients(module, mesh):
        MoE.average_gradients(module, mesh)
        scale_experts(module, replicas_of(mesh))


class DividedByReplicas(MoE):
    @staticmethod
    def average_gradients(module, mesh):
        MoE.average_gradients(module, mesh)
        scale_experts(module, mesh.get_group("ep").size())


class ReplicasNotReduced(MoE):
    """Each replica of an expert has the gradient of its own tokens."""

    @staticmethod
    def average_gradients(module, mesh):
        own = [parameter.grad / mesh.size() for parameter in module.experts.parameters()]
        MoE.average_gradients(module, mesh)
        for parameter, gradient in zip(module.experts.parameters(), own, strict=True):
            parameter.grad.copy_(gradient * replicas_of(mesh))


class RouterOverExpertRanks(MoE):
    """The router's gradient is averaged over the ranks that share experts alone."""

    @staticmethod
    def average_gradients(module, mesh):
        group = mesh.get_group("ep")
        own = module.gate.weight.grad.clone()
        dist.all_reduce(own, group=group)
        MoE.average_gradients(module, mesh)
        module.gate.weight.grad.copy_(own / group.size())


class SumsOverTensorRanks(MoE):
    """The same tokens count on each tensor-parallel rank."""

    @staticmethod
    def average_gradients(module, mesh):
        MoE.average_gradients(module, mesh)
        if "tp" in mesh.mesh_dim_names:
            scale_experts(module, mesh.get_group("tp").size())


class MeanOfRanksWithTokens(MoE):
    """A rank without tokens does not count."""

    def forward(self, x):
        self.has_tokens = len(x) > 0
        return super().forward(x)

    @staticmethod
    def average_gradients(module, mesh):
        MoE.average_gradients(module, mesh)
        number = torch.tensor(float(module.has_tokens))
        dist.all_reduce(number)
        for parameter in module.parameters():
            parameter.grad *= mesh.size() / number


class InFloat32(MoE):
    @staticmethod
    def average_gradients(module, mesh):
        MoE.average_gradients(module, mesh)
        for parameter in module.parameters():
            parameter.grad.copy_(parameter.grad.float())


class NormOfReplicas(MoE):
    """Replicas of an expert count each."""

    @staticmethod
    def clip_grad_norm_(module, max_norm, mesh):
        total = torch.zeros((), dtype=torch.float64)
        for parameter in module.experts.parameters():
            gradient = parameter.grad.double()
            total += gradient.square().sum()
        dist.all_reduce(total)
        gate = module.gate.weight.grad.double()
        norm = (total + gate.square().sum()).sqrt()
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
        return norm


class BalanceOfExpertRanks(MoE):
    """Each row of the mesh balances its own tokens."""

    @property
    def aux_loss(self):
        groups = self.experts.groups
        self.experts.groups = expert_parallel.Groups(groups.axes[0], None)
        aux_loss = super().aux_loss
        self.experts.groups = groups
        return aux_loss


class LastMicroBatch(MoE):
    def forward(self, *args):
        if self.training:
            self.zero_grad()
        return super().forward(*args)


class NoGradientWithoutTokens(MoE):
    """An expert that no token chose keeps a gradient from before."""

    @staticmethod
    def average_gradients(module, mesh):
        for parameter in module.experts.parameters():
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad += 1.0
        MoE.average_gradients(module, mesh)


MISTAKES = {
    "moe-mesh": {
        "DividedByExpertRanks": "replicated_experts",
        "DividedByReplicas": "experts",
        "ReplicasNotReduced": "neighbours_are_replicas",
        "RouterOverExpertRanks": "replicated_experts",
        "SumsOverTensorRanks": "tensor_ranks",
        "MeanOfRanksWithTokens": "ranks_without_tokens",
        "InFloat32": "float64",
        "NormOfReplicas": "clipping",
        "BalanceOfExpertRanks": "balance_on_any_mesh",
        "LastMicroBatch": "accumulation",
        "NoGradientWithoutTokens": "experts_without_tokens",
    },
}
