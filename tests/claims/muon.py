"""An implementation of --muon is called as class(parameters, **options).

The options are those of torch.optim.Muon. A class that also takes `process_group` averages the
gradients itself. For any other, such as PyTorch's, DistributedDataParallel has averaged them
before the step. All claims compare with torch.optim.Muon on one device, which torch has from
version 2.9 on.
"""

import copy

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
from shared import Watch, loss_of, make_batch
from torch.optim.lr_scheduler import ExponentialLR

from claims.registry import NotOffered, add_kind, check, claim, names_of, same, same_on_all, say
from claims.training import one_device

OPTIONS = {"lr": 0.1, "weight_decay": 0.5}


class Trainer:
    """A module of matrices in training. `optimizer` is the implementation."""

    def __init__(self, implementation, module, group=None, **options):
        if not hasattr(torch.optim, "Muon"):
            raise NotOffered("torch before 2.9 has no Muon to compare with")
        self.module = module
        self.model = module  # what is called in forward
        options = OPTIONS | options
        if "process_group" in names_of(implementation):
            options["process_group"] = group or pool.group()
        elif group:
            raise NotOffered("no argument process_group")
        else:
            self.model = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
        self.optimizer = implementation(list(module.parameters()), **options)

    def step(self, batch):
        self.optimizer.zero_grad()
        loss_of(self.model(batch)).backward()
        self.optimizer.step()


add_kind(
    "muon",
    called=__doc__,
    make=Trainer,
    ours="muon:Muon",
    pytorchs="torch.optim:Muon",
)


class Matrices(nn.Module):
    """A tall, a wide and a square matrix, and `nobody`, which is never used.

    If `ranks_differ`, the data decide whether a rank uses the square one.
    """

    def __init__(self, ranks_differ=False, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.tall = nn.Linear(6, 33, bias=False)
        self.square = nn.Linear(33, 33, bias=False)
        self.wide = nn.Linear(33, 5, bias=False)
        self.nobody = nn.Linear(7, 4, bias=False)
        self.ranks_differ = ranks_differ

    def forward(self, x):
        hidden = torch.tanh(self.tall(x))
        if not self.ranks_differ or x[0, 0] > 0:
            hidden = torch.tanh(self.square(hidden))
        return self.wide(hidden)


def do_nothing(trainer):
    pass


def trains_as_one_device(
    make,
    ranks_differ=False,
    seed=1,
    dtype=torch.float64,
    exact=False,
    start=0,
    after=do_nothing,
    group=None,
    **options,
):
    """Train for four steps, with other data on each rank, and compare after each step.

    Ranks begin `start` times their number apart. `after(trainer)` is called after each step.
    """
    plain = Matrices(ranks_differ, seed).to(dtype)
    module = copy.deepcopy(plain)
    for parameter in module.parameters():
        parameter.data += start * dist.get_rank()
    trainer = make(module, group=group, **options)
    trainer.plain_optimizer = torch.optim.Muon(plain.parameters(), **OPTIONS | options)
    ranks = dist.get_process_group_ranks(group or pool.group())
    for step in range(4):
        batches = {rank: [make_batch(rank, step, dtype)] for rank in ranks}
        one_device(plain, batches.values())
        trainer.step(*batches[dist.get_rank()])
        trainer.plain_optimizer.step()
        for name, parameter in plain.named_parameters():
            ours = trainer.module.get_parameter(name)
            same(ours, parameter, f"{name} after step {step + 1}", exact)
        after(trainer)


def trains(name, sentence, worlds, about="result", **how):
    say(name, sentence, worlds, "muon", trains_as_one_device, about, **how)


def halve_learning_rates(trainer):
    if not hasattr(trainer, "schedulers"):
        optimizers = [trainer.optimizer, trainer.plain_optimizer]
        trainer.schedulers = [ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
        return
    for scheduler in trainer.schedulers:
        scheduler.step()


def states_agree(trainer):
    ours = trainer.optimizer.state_dict()["state"]
    plain = trainer.plain_optimizer.state_dict()["state"]
    check(list(ours) == list(plain), f"it has the state of parameters {list(ours)}")
    for index, entry in plain.items():
        mine = ours.get(index, {}).get("momentum_buffer", torch.tensor(torch.nan))
        same(mine, entry["momentum_buffer"], f"momentum {index}")


trains(
    "mean_gradient",
    "Training continues with the mean of the ranks' gradients, and decays before the update.",
    [2, 3],
)
trains(
    "small_gradients",
    "Below eps, the update is as large as the mean gradient is.",
    [2],
    eps=10.0,
)
trains("without_nesterov", "nesterov=False trains as on one device.", [2], nesterov=False)
trains(
    "adjusted_lr",
    "adjust_lr_fn='match_rms_adamw' trains as on one device.",
    [2],
    adjust_lr_fn="match_rms_adamw",
)
trains(
    "bitwise",
    "Two ranks train bitwise as one device does, in float32.",
    [2],
    "property",
    dtype=torch.float32,
    exact=True,
)
trains(
    "bitwise_at_four",
    "Four ranks train bitwise as one device does, in float32.",
    [4],
    "property",
    dtype=torch.float32,
    exact=True,
)
trains(
    "start_of_rank_0",
    "Ranks that were seeded differently start from the weights of rank 0.",
    [3],
    start=1,
)
trains(
    "unused_on_one_rank",
    "A matrix that some ranks use gets the mean over all ranks. One that no rank uses stays.",
    [3],
    ranks_differ=True,
)
trains(
    "schedulers",
    "A learning rate that a scheduler changes counts in the next step.",
    [2],
    after=halve_learning_rates,
)
trains(
    "whole_state_dict",
    "state_dict() is that of torch.optim.Muon, on every rank.",
    [3],
    "property",
    after=states_agree,
)


@claim("muon", 4)
def replicas(make):
    """All ranks hold the same bits after each step, in float32."""
    trainer = make(Matrices())
    for step in range(3):
        trainer.step(make_batch(pool.rank(), step))
        flat = torch.cat([parameter.flatten() for parameter in trainer.module.parameters()])
        same_on_all(flat, f"parameters after step {step + 1}")


@claim("muon", 4)
def groups_apart(make):
    """Two process groups train side by side and do not mix."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    side = dist.get_rank() % 2
    trains_as_one_device(make, seed=side, group=groups[side])


def of_all_ranks(number):
    numbers = [None] * pool.world_size()
    dist.all_gather_object(numbers, number, group=pool.group())
    return numbers


def six_square_matrices():
    return nn.Sequential(*[nn.Linear(20, 20, bias=False) for _ in range(6)])


@claim("muon", 3, about="property")
def state_is_sharded(make):
    """No rank holds more than its share of the momenta."""
    trainer = make(six_square_matrices())
    trainer.step(torch.randn(4, 20))
    states = trainer.optimizer.state.values()
    mine = sum(tensor.numel() for state in states for tensor in state.values())
    everyone = of_all_ranks(mine)
    check(set(everyone) == {2 * 20 * 20}, f"ranks hold {everyone} of {6 * 20 * 20} elements")


@claim("muon", 3, about="property")
def work_is_split(make):
    """No rank computes more than its share of the matrix products of a step."""
    trainer = make(six_square_matrices())
    loss_of(trainer.model(torch.randn(4, 20))).backward()
    with Watch(lambda: None) as watch:
        trainer.optimizer.step()
    mine = sum(name in ("aten::mm", "aten::addmm") for name, _ in watch.seen)
    everyone = of_all_ranks(mine)
    check(max(everyone) <= 2 * 3 * 5, f"ranks compute {everyone} products, of {6 * 3 * 5}")
