"""An implementation of --diloco is called as class(module, optimizer, **options).

The optimizer trains the module's parameters. The options are sync_every (H), outer_lr and
outer_momentum, and in the claims about them num_fragments (P), delay, mix and compress. It also
gets process_group=group, if it has such a name. step() is called after each step of the optimizer.

Fragment p is sent after the steps t with t mod H = (p+1)·H/P mod H, and applied `delay` steps
later. The mean over workers of (outer parameters - own) is the gradient of torch.optim.SGD, with
Nesterov momentum if the momentum is above 0. With a delay, a worker continues from
mix · own + (1 - mix) · outer parameters. If P is above 1, the attribute `fragments` has a list of
names of parameters for each fragment. Claims also use `outer`, {name: outer parameter},
state_dict() and load_state_dict().
"""

import copy
from datetime import timedelta
from functools import partial

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
from shared import OPTIMIZERS, Collectives, loss_of, make_batch, make_model, randn

from claims.registry import (
    NotOffered,
    add_kind,
    call,
    check,
    claim,
    default_group,
    error_from,
    precision,
    same,
    same_on_all,
    say,
    say_in_float64,
)

OPTIONS = {"sync_every": 4, "outer_lr": 0.7, "outer_momentum": 0.9}


class Worker:
    def __init__(self, implementation, module, optimizer="sgd", group=None, **options):
        self.module = module
        self.make_optimizer = OPTIMIZERS[optimizer]
        self.optimizer = self.make_optimizer(module.parameters())
        self.options = OPTIONS | options
        inputs = (module, self.optimizer)
        where = {"process_group": group or pool.group()}
        self.diloco = call(implementation, *inputs, needed=self.options, **where)

    def step(self, batch):
        inner_step(self.module, self.optimizer, batch)
        self.diloco.step()

    def find(self, name):
        if not hasattr(self.diloco, name):
            raise NotOffered(f"no {name}")
        return getattr(self.diloco, name)

    def fragments(self):
        if self.options.get("num_fragments", 1) > 1:
            return self.find("fragments")
        return [[name for name, p in self.module.named_parameters() if p.requires_grad]]


add_kind("diloco", called=__doc__, make=Worker, ours="diloco:DiLoCo", pytorchs="pytorchs:DiLoCo")


def inner_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_of(model(batch))
    loss.backward()
    optimizer.step()


def train(worker, first, last):
    """Steps `first` to last - 1, with this rank's own data."""
    for step in range(first, last):
        batch = make_batch(pool.rank(), step)
        worker.step(batch)


class Workers:
    """One process that simulates all workers, one after the other. They are like `worker`."""

    def __init__(self, worker, module, ranks):
        self.fragments = worker.fragments()
        self.options = {"delay": 0, "mix": 0.5, **worker.options}
        self.number = 0  # of steps
        self.due = {}  # step: {name: mean} of the fragment that is applied after it
        self.models = {rank: copy.deepcopy(module) for rank in ranks}
        self.optimizers = {
            rank: worker.make_optimizer(model.parameters()) for rank, model in self.models.items()
        }
        self.outer = {}
        for name, parameter in module.named_parameters():
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self.outer[name] = parameter.detach().to(dtype, copy=True)
        lr = self.options["outer_lr"]
        momentum = self.options["outer_momentum"]
        self.outer_optimizer = torch.optim.SGD(
            self.outer.values(), lr, momentum, nesterov=momentum > 0
        )

    def step(self, batches):
        """`batches` has a batch for each rank."""
        for rank, model in self.models.items():
            inner_step(model, self.optimizers[rank], batches[rank])
        self.number += 1
        H = self.options["sync_every"]
        with torch.no_grad():
            for p, names in enumerate(self.fragments, 1):
                first = p * H // len(self.fragments)
                if self.number % H == first % H:
                    self.due[self.number + self.options["delay"]] = self.mean(names)
            self.apply(self.due.pop(self.number, {}))

    def mean(self, names):
        means = {}
        for name in names:
            own = [model.get_parameter(name) for model in self.models.values()]
            total = sum(self.outer[name] - parameter for parameter in own)
            means[name] = total / len(own)
        return means

    def apply(self, means):
        for name, mean in means.items():
            self.outer[name].grad = mean
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad()
        for model in self.models.values():
            for name in means:
                own = model.get_parameter(name)
                new = self.outer[name]
                if self.options["delay"]:
                    new = torch.lerp(new, own.to(new.dtype), self.options["mix"])
                own.copy_(new)


def trains_as_workers_in_turn(
    make, model="plain", optimizer="sgd", exact=False, start=0, group=None, **options
):
    """Train for ten steps, with other data on each rank in each step. Compare after each step."""
    ranks = dist.get_process_group_ranks(group or pool.group())
    rank = dist.get_rank()
    dtype = torch.float32 if exact else precision()
    module = make_model(model, dtype)
    simulated = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.data += start * rank  # rank 0's are those that count
    worker = make(module, optimizer, group, **options)
    workers = Workers(worker, simulated, ranks)
    for step in range(10):
        batches = {r: make_batch(r, step, dtype) for r in ranks}
        worker.step(batches[rank])
        workers.step(batches)
        for name, expected in workers.models[rank].named_parameters():
            same(module.get_parameter(name), expected, f"{name} after step {step + 1}", exact)


def trains(name, sentence, worlds, about="result", **how):
    say(name, sentence, worlds, "diloco", trains_as_workers_in_turn, about, **how)


trains(
    "outer_step",
    "Every H steps workers go on from the outer step along the mean of their pseudo-gradients.",
    [2, 3],
)
say_in_float64("diloco", "outer_step")
trains("inner_state", "The state of AdamW stays with its worker.", [2], optimizer="adamw")
trains("start_of_rank_0", "All workers start from the weights of rank 0.", [3], start=1)
may_refuse = partial(trains, may_refuse=True)
may_refuse("frozen", "Frozen parameters do not change, and the others train.", [2], model="frozen")
may_refuse("tied", "A parameter that two layers share stays one parameter.", [2], model="tied")
may_refuse(
    "odd_shapes", "Scalar, empty, strided and one-element parameters train.", [3], model="odd"
)
trains(
    "fragments",
    "P fragments are sent in turn, H/P steps apart. Only the fragment's momenta move.",
    [2, 3],
    num_fragments=2,
)
trains(
    "several_in_flight",
    "With a delay above H/P, several fragments travel at once, and are applied by `mix`.",
    [3],
    num_fragments=2,
    delay=3,
    mix=0.25,
)
trains(
    "bitwise",
    "Workers are bitwise those that one process simulates, because sums are in rank order.",
    [2, 4],
    "property",
    optimizer="adamw",
    exact=True,
)


def flat_parameters(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@claim("diloco", 4)
def replicas(make):
    """All workers hold the same bits after each round, in float32."""
    worker = make(make_model("plain"), "adamw")
    train(worker, 0, 8)
    same_on_all(flat_parameters(worker.module), "parameters after the second round")


@claim("diloco", 3)
def compressed_messages(make):
    """An outer step is off by at most two roundings, and the same on all workers."""
    gone = [randn((20, 20), rank, precision()) for rank in range(3)]
    largest = max(each.abs().max() for each in gone)
    for compress, unit in (("bf16", 2**-8), ("int8", 1 / 254)):
        module = nn.Linear(20, 20, bias=False, dtype=precision())
        weight = nn.init.zeros_(module.weight).detach()
        worker = make(module, compress=compress, sync_every=1, outer_lr=1.0, outer_momentum=0.0)
        weight -= gone[pool.rank()]
        worker.diloco.step()
        error = (weight + sum(gone) / 3).abs().max()
        check(error <= 2.01 * unit * largest, f"the step is off by {error:.1e} in {compress}")
        same_on_all(weight, f"parameters after a step in {compress}")


@claim("diloco", 2)
def resumed(make):
    """Training continues exactly from a state of between send and apply."""
    options = {"num_fragments": 2, "delay": 3}
    worker = make(make_model("plain"), "adamw", **options)
    other = make(make_model("plain", seed=2), "adamw", **options)
    worker.find("state_dict")
    train(worker, 0, 7)
    for part in ("module", "optimizer", "diloco"):
        state = getattr(worker, part).state_dict()
        getattr(other, part).load_state_dict(copy.deepcopy(state))
    for step in range(7, 14):
        train(worker, step, step + 1)
        train(other, step, step + 1)
        expected = flat_parameters(worker.module)
        same(flat_parameters(other.module), expected, f"step {step + 1}", exact=True)


@claim("diloco", 4)
def groups_apart(make):
    """Two process groups train side by side and do not mix."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    trains_as_workers_in_turn(make, group=groups[dist.get_rank() % 2])


def calls_of_each_step(worker, steps):
    calls = []
    for step in range(steps):
        with Collectives() as seen:
            train(worker, step, step + 1)
        calls.append(seen.calls)
    return calls


@claim("diloco", 2, about="property")
def silent_between_messages(make):
    """Only one step in H/P communicates."""
    worker = make(make_model("plain"), num_fragments=2)
    talking = [number for number, calls in enumerate(calls_of_each_step(worker, 8), 1) if calls]
    check(talking == [2, 4, 6, 8], f"steps {talking} communicate")


@claim("diloco", 2, about="property")
def starts_before_it_is_due(make):
    """With a delay, both halves of the all-reduce start before the step that applies the mean."""
    worker = make(make_model("plain"), delay=3)
    calls = calls_of_each_step(worker, 7)
    check(not calls[6], f"the step that applies the mean starts {calls[6]}")


@claim("diloco", 2, about="property")
def different_workers(make):
    """Other shapes or options on one worker are an error on all, at construction."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    rank = pool.rank()
    with default_group(group):
        make(nn.Linear(2, 2), group=group)
        with error_from("a Linear(2, 2) on one worker and a Linear(2, 3) on the other"):
            make(nn.Linear(2, 2 + rank), group=group)
        with error_from("H = 4 on one worker and H = 5 on the other"):
            make(nn.Linear(2, 2), group=group, sync_every=4 + rank)
