"""An implementation of --muon is called as class(parameters, **options).

The options are those of torch.optim.Muon. A class that also takes `process_group` averages the
gradients itself. For any other, such as PyTorch's, DistributedDataParallel has averaged them
before the step, and is what is called. All claims compare with torch.optim.Muon on one device,
which torch has from version 2.9 on.
"""

from functools import partial

import pool
import torch
import torch.nn as nn
from shared import Watch, loss_of

from claims import training, zero
from claims.registry import NotOffered, add_kind, call, check, claim, names_of, say

OPTIONS = {"lr": 0.1, "weight_decay": 0.5}


def plain_muon(parameters, **options):
    """On one device."""
    return torch.optim.Muon(parameters, **OPTIONS | options)


class Trainer(training.Trainer):
    """A module of matrices in training. `optimizer` is plain_muon with options."""

    def __init__(self, implementation, module, optimizer=plain_muon, group=None):
        if not hasattr(torch.optim, "Muon"):
            raise NotOffered("torch before 2.9 has no Muon to compare with")
        self.kind = "muon"
        self.module = module
        self.model = module  # what is called in forward
        self.names = [name for name, _ in module.named_parameters()]
        averages = "process_group" in names_of(implementation)
        if group and not averages:
            raise NotOffered("no argument process_group")
        if not averages:
            self.model = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
        options = OPTIONS | getattr(optimizer, "keywords", {})
        where = {"process_group": group or pool.group()}
        parameters = list(module.parameters())
        self.optimizer = call(implementation, parameters, needed=options, **where)


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


def trains(name, sentence, worlds, about="result", **how):
    how = {"model": Matrices, "optimizer": plain_muon, **how}
    say(name, sentence, worlds, "muon", training.trains_as_one_device, about, **how)


trains(
    "mean_gradient",
    "Training continues with the mean of the ranks' gradients, and decays before the update.",
    [2, 3],
)
trains(
    "small_gradients",
    "Below eps, the update is as large as the mean gradient is.",
    [2],
    optimizer=partial(plain_muon, eps=10.0),
)
trains(
    "adjusted_lr",
    "adjust_lr_fn='match_rms_adamw' trains as on one device.",
    [2],
    optimizer=partial(plain_muon, adjust_lr_fn="match_rms_adamw"),
)
trains(
    "bitwise_at_four",
    "Four ranks train bitwise as one device does, in float32.",
    [4],
    "property",
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
    model=partial(Matrices, ranks_differ=True),
)
trains(
    "schedulers",
    "A learning rate that a scheduler changes counts in the next step.",
    [2],
    after=zero.schedule,
)
trains(
    "whole_state_dict",
    "state_dict() is that of torch.optim.Muon, on every rank.",
    [3],
    "property",
    after=zero.states_agree,
)


@claim("muon", 4)
def replicas(make):
    """All ranks hold the same bits after each step, in float32."""
    training.stay_replicas(make(Matrices()))


@claim("muon", 4)
def groups_apart(make):
    """Two process groups train side by side and do not mix."""
    training.trains_in_groups(make, Matrices, optimizer=plain_muon)


def step_on_six_matrices(make):
    """Return the optimizer, and the operators that its step called."""
    layers = [nn.Linear(20, 20, bias=False) for _ in range(6)]
    trainer = make(nn.Sequential(*layers))
    loss_of(trainer.model(torch.randn(4, 20))).backward()
    with Watch(lambda: None) as watch:
        trainer.optimizer.step()
    return trainer.optimizer, [name for name, _ in watch.seen]


@claim("muon", 3, about="property")
def state_is_sharded(make):
    """No rank holds more than its share of the momenta."""
    optimizer, _ = step_on_six_matrices(make)
    states = optimizer.state.values()
    held = zero.on_all_ranks(sum(each.numel() for state in states for each in state.values()))
    check(max(held) <= 2 * 20 * 20, f"ranks hold {held} elements")


@claim("muon", 3, about="property")
def work_is_split(make):
    """No rank computes more than its share of the matrix products of a step."""
    _, called = step_on_six_matrices(make)
    products = zero.on_all_ranks(called.count("aten::mm") + called.count("aten::addmm"))
    check(max(products) <= 2 * 3 * 5, f"ranks compute {products} products")
