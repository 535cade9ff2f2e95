"""An implementation of --moe-mesh is called as Class(hidden, ffn_hidden, num_experts, top_k=2).

It has the parameters of --moe. Its functions get a DeviceMesh as their last argument:
parallelize(module, mesh), which leaves each rank E/N experts along the dimension "ep",
average_gradients(module, mesh), and
clip_grad_norm_(module, max_norm, mesh). Along "dp" ranks have the same experts and other tokens.
Along "tp" they have the same experts and the same tokens. The loss is the mean of the ranks'
losses. average_gradients() is called once for each step, after all backwards.
"""

import pool
import torch
import torch.nn as nn
from torch.optim import SGD

import expert_parallel
from claims.meshes import make_mesh, place_along
from claims.moe import Ours, loss_of, plain_moe, tokens_of, whole_weights
from claims.registry import NotOffered, add_kind, check, claim, precision, same, say, say_in_float64


class MoE(expert_parallel.MoE):
    """Ours: the rows of the mesh are process groups, and the columns `edp_group`s."""

    @staticmethod
    def parallelize(module, mesh):
        return expert_parallel.parallelize(module, *groups_of(mesh))

    @staticmethod
    def average_gradients(module, mesh):
        expert_parallel.average_gradients(module, *groups_of(mesh))

    @staticmethod
    def clip_grad_norm_(module, max_norm, mesh):
        return expert_parallel.clip_grad_norm_(module, max_norm, *groups_of(mesh))


def groups_of(mesh):
    others = tuple(name for name in mesh.mesh_dim_names if name != "ep")
    if len(others) < 2:
        return [mesh.get_group(name) for name in ("ep", *others)]
    replicas = mesh[others]._flatten("replicas")
    return [mesh.get_group("ep"), replicas.get_group()]


class OnMesh(Ours):
    def __init__(self, implementation, weights, mesh):
        self.mesh = mesh
        super().__init__(implementation, weights)

    def call(self, name, *args):
        return super().call(name, *args, self.mesh)

    def mine(self, name, whole):
        place, size = place_along(self.mesh, "ep")
        return whole.chunk(size)[place] if name.startswith("experts.") else whole

    def compare(self, weights, when):
        for name, whole in weights.items():
            parameter = self.parameter(name)
            same(parameter.grad, self.mine(name, whole.grad), f"gradient of {name} {when}")
            same(parameter, self.mine(name, whole), f"{name} {when}")

    def compare_replicas(self):
        """Bitwise. What the ranks of one place along "ep" have must be equal."""
        flat = nn.utils.parameters_to_vector(self.module.parameters()).detach().cpu()
        everyone = [None] * pool.world_size()
        place, _ = place_along(self.mesh, "ep")
        torch.distributed.all_gather_object(everyone, (place, flat), group=pool.group())
        alike = [torch.equal(flat, other) for where, other in everyone if where == place]
        check(all(alike), "ranks with the same experts differ")


add_kind("moe-mesh", called=__doc__, make=OnMesh, ours="claims.moe_mesh:MoE")


def readers(mesh):
    """Return this rank's number among those that have other tokens, and how many these are."""
    replica, replicas = place_along(mesh, "dp")
    place, size = place_along(mesh, "ep")
    return replica * size + place, replicas * size


def batch(reader, counts, step, positive):
    x = tokens_of(reader, counts[reader], step)
    return x.detach().abs() if positive else x


def trains_as_one_device(make, sizes, counts, micro=1, positive=False, clip=None):
    """Three steps of SGD with momentum. If `positive`, no token chooses the last two experts."""
    mesh = make_mesh(**sizes)
    mine, number = readers(mesh)
    weights = whole_weights()
    if positive:
        weights["gate.weight"].data.abs_()[2:] *= -1
    ours = make(weights, mesh)
    optimizers = [
        SGD(each, lr=0.05, momentum=0.9) for each in (weights.values(), ours.module.parameters())
    ]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for each in range(step * micro, (step + 1) * micro):
            for reader in range(number):
                output = plain_moe(batch(reader, counts, each, positive), weights)
                (loss_of(output, reader) / number).backward()
            output = ours.module(batch(mine, counts, each, positive))
            loss_of(output, mine).backward()
        ours.call("average_gradients")
        if clip:
            norm = nn.utils.clip_grad_norm_(weights.values(), clip)
            same(ours.call("clip_grad_norm_", clip), norm, f"norm in step {step + 1}")
        ours.compare(weights, f"in step {step + 1}")
        for optimizer in optimizers:
            optimizer.step()
    ours.compare(weights, "after three steps")
    ours.compare_replicas()


def trains(name, sentence, worlds=(4,), **how):
    say(name, sentence, worlds, "moe-mesh", trains_as_one_device, **how)


trains("experts", "Every rank has other experts.", sizes={"ep": 4}, counts=[4, 2, 0, 5])
trains(
    "replicated_experts",
    "Two data-parallel ranks have the same experts: their gradients add up, and once.",
    sizes={"dp": 2, "ep": 2},
    counts=[4, 2, 3, 5],
)
say_in_float64("moe-mesh", "replicated_experts")
trains(
    "neighbours_are_replicas",
    "The same if neighbouring ranks have the same experts.",
    sizes={"ep": 2, "dp": 2},
    counts=[4, 2, 3, 5],
)
trains(
    "tensor_ranks",
    "Tensor-parallel ranks have the same tokens, which count once.",
    sizes={"tp": 2, "ep": 2},
    counts=[4, 3],
)
trains(
    "ranks_without_tokens",
    "Both ranks of one place have no tokens.",
    sizes={"dp": 2, "ep": 2},
    counts=[0, 2, 0, 5],
)
trains(
    "experts_without_tokens",
    "No token chooses the experts of half of the ranks. Their gradients are zero.",
    sizes={"dp": 2, "ep": 2},
    counts=[4, 2, 3, 5],
    positive=True,
)
trains(
    "accumulation",
    "Gradients of three micro-batches add up before they are averaged.",
    sizes={"dp": 2, "ep": 2},
    counts=[4, 2, 3, 5],
    micro=3,
)
trains(
    "clipping",
    "The norm is that of one device: each expert counts once, and so does the router.",
    sizes={"dp": 2, "ep": 2},
    counts=[4, 2, 3, 5],
    clip=0.5,
)


def balances(make, sizes, counts):
    mesh = make_mesh(**sizes)
    mine, number = readers(mesh)
    weights = whole_weights()
    gate = weights["gate.weight"]
    inputs = [tokens_of(reader, counts[reader]) for reader in range(number)]
    logits = torch.cat(inputs) @ gate.T
    probabilities = logits.softmax(-1)
    chosen = nn.functional.one_hot(probabilities.topk(2).indices, len(gate)).to(precision())
    aux_loss = len(gate) * (chosen.mean((0, 1)) * probabilities.mean(0)).sum()
    z_loss = logits.logsumexp(-1).square().mean()
    (aux_loss + 3 * z_loss).backward()

    ours = make(weights, mesh)
    module = ours.module
    module(inputs[mine])
    if not hasattr(module, "z_loss"):
        raise NotOffered("no aux_loss and z_loss")
    (module.aux_loss + 3 * module.z_loss).backward()
    ours.call("average_gradients")

    same(module.aux_loss, aux_loss, f"aux_loss on {sizes}")
    same(module.z_loss, z_loss, f"z_loss on {sizes}")
    same(ours.parameter("gate.weight").grad, gate.grad, f"gradient of gate.weight on {sizes}")


@claim("moe-mesh", 4)
def balance_on_any_mesh(make):
    """Auxiliary losses and their gradients do not depend on the mesh."""
    balances(make, {"ep": 4}, [4, 2, 0, 5])
    balances(make, {"dp": 2, "ep": 2}, [4, 2, 0, 5])
    balances(make, {"tp": 2, "ep": 2}, [4, 5])


@claim("moe-mesh", 8)
def three_dimensions(make):
    """On dp × tp × ep training, the norm and the auxiliary losses are those of one device."""
    sizes = {"dp": 2, "tp": 2, "ep": 2}
    trains_as_one_device(make, sizes, [4, 2, 0, 5], clip=0.5)
    balances(make, sizes, [4, 2, 0, 5])
