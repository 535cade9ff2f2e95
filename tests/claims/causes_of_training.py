"""The causes of what --ddp, --zero1, --zero2, --zero3, --fsdp and --muon may get wrong."""

import copy
import functools
import time
from functools import partial
from typing import NamedTuple

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
from shared import loss_of, make_batch, make_model

from claims import training
from claims.causes import ANY, looks_like, seen_directly
from claims.registry import check, precision
from claims.training import ALL, SHARDED, ZERO

TRAINED = f"{ALL} muon"
COMPARED = (  # each step with one device's
    "mean_gradient momentum adamw start_of_rank_0 tied frozen odd_shapes called_twice checkpointed "
    "accumulation accumulation_synchronised unused unused_on_one_rank evaluation clipping replicas "
    "groups_apart unequal_tokens a_rank_without_tokens unequal_micro_batches overflow hybrid "
    "hybrid_copies schedulers"
)


# ---- another sum of the gradients


class Place(NamedTuple):
    """Which gradient: of the micro-batch m of M on rank r of N. `own` is this rank's number."""

    r: int
    m: int
    own: int
    N: int
    M: int
    rows: list  # of each rank's last micro-batch
    active: int  # ranks with a gradient that is not zero


def my_place(N):
    """Return the members of this rank's group of N, and its number. Groups have every other."""
    groups = pool.world_size() // N
    ranks = range(pool.world_size())
    members = [rank for rank in ranks if rank % groups == pool.rank() % groups]
    return members, members.index(pool.rank())


def gradients_of_all(plain, batches, loss):
    """Return [[{name: gradient} of each micro-batch] of each rank], at each rank's own weights."""
    members, own = my_place(len(batches))
    mine = []
    for batch in batches[own]:
        plain.zero_grad()
        loss(plain, batch).backward()
        named = plain.named_parameters()
        mine.append({name: p.grad.cpu() for name, p in named if p.grad is not None})
    plain.zero_grad()
    everyone = [None] * pool.world_size()
    dist.all_gather_object(everyone, mine, group=pool.group())
    return [everyone[member] for member in members], own


def combine(plain, batches, loss, weigh):
    """Give the parameters the sum of all micro-batches' gradients, times weigh(Place)."""
    batches = list(batches)
    gradients, own = gradients_of_all(plain, batches, loss)
    rows = [len(micro_batches[-1]) for micro_batches in batches]
    active = sum(any(g.any() for each in of_rank for g in each.values()) for of_rank in gradients)
    total = {}
    for r, of_rank in enumerate(gradients):
        for m, named in enumerate(of_rank):
            weight = weigh(Place(r, m, own, len(batches), len(of_rank), rows, active))
            for name, gradient in named.items():
                total[name] = total.get(name, 0.0) + weight * gradient
    for name, parameter in plain.named_parameters():
        if name in total:
            parameter.grad = total[name].to(parameter)


def weighing(weigh, **others):
    """What one device computes if each gradient has the weight weigh(Place), not 1/N."""

    def one_device(plain, batches, loss=lambda model, batch: loss_of(model(batch))):
        combine(plain, batches, loss, weigh)

    def one_device_on_tokens(plain, tokens, step):
        factor = len(tokens) / sum(map(sum, tokens))
        batches = [training.rows_with_targets(r, step, n) for r, n in enumerate(tokens)]
        combine(plain, batches, lambda model, x: factor * model(x).square().sum(), weigh)

    replaces = {
        "training.one_device": one_device,
        "training.one_device_on_tokens": one_device_on_tokens,
    }
    return replaces | others


def ignore(*_, **__):
    pass


APART = {"training.same_on_all": ignore}  # that ranks differ is what this mistake does


@looks_like(
    TRAINED,
    "mean_gradient small_gradients",
    "Every gradient is {}: they are summed over the ranks, not averaged.",
    factor=lambda N: N,
    also="overflow",
    variants="summed_each_time",
)
def summed():
    return weighing(lambda g: 1.0)


@looks_like(TRAINED, "", "If each micro-batch is reduced, the earlier ones are summed again.")
def summed_each_time():
    return weighing(lambda g: float(g.N ** (g.M - 1 - g.m)))


@looks_like(
    TRAINED,
    "mean_gradient small_gradients",
    "Every gradient is {}: it is divided by the number of ranks twice.",
    factor=lambda N: 1 / N,
    variants="divided_each_time",
)
def divided_twice():
    return weighing(lambda g: 1.0 / g.N**2)


@looks_like(TRAINED, "", "If each micro-batch is reduced, the earlier ones are divided again.")
def divided_each_time():
    return weighing(lambda g: 1.0 / g.N ** (g.M - g.m + 1))


@looks_like(
    TRAINED,
    "mean_gradient",
    "Every rank trains with the gradient of its own batch: gradients are not reduced over the "
    "ranks.",
)
def not_reduced():
    return weighing(lambda g: float(g.r == g.own), **APART)


@looks_like(
    TRAINED,
    "mean_gradient small_gradients",
    "Every gradient is this rank's own, divided by the number of ranks: they are never added up, "
    "or the sum is not waited for.",
)
def not_added_up():
    return weighing(lambda g: (g.r == g.own) / g.N, **APART)


@looks_like(
    TRAINED,
    "mean_gradient",
    "All ranks train with the gradient of rank 0's batch alone: its data or its gradients go to "
    "all ranks, and the others' do not count.",
)
def rank_0_only():
    return weighing(lambda g: float(g.r == 0))


@looks_like(
    TRAINED,
    "mean_gradient",
    "All ranks train with 1/N of the gradient of rank 0's batch: the others' do not count.",
)
def rank_0_divided():
    return weighing(lambda g: (g.r == 0) / g.N)


@looks_like(
    ALL,
    "unequal_tokens",
    "Ranks count by their numbers of rows, 1/9, 3/9 and 5/9: the loss is divided by the number of "
    "tokens already, so each rank counts 1/3.",
)
def weighted_by_rows():
    return weighing(lambda g: g.rows[g.r] / sum(g.rows))


@looks_like(
    ALL,
    "a_rank_without_tokens",
    "The sum is divided by the number of ranks that have a gradient. A rank without one counts, "
    "too: divide by the number of all ranks.",
)
def idle_ranks_left_out():
    return weighing(lambda g: 1.0 / max(1, g.active))


ACCUMULATED = "accumulation accumulation_synchronised unequal_micro_batches"


@looks_like(
    ALL,
    ACCUMULATED,
    "Only the last micro-batch counts: the gradients of those before it are lost.",
)
def last_micro_batch_only():
    return weighing(lambda g: (g.m == g.M - 1) / g.N)


@looks_like(
    ALL,
    ACCUMULATED,
    "Only the first micro-batch counts: the gradients of those after it are lost.",
)
def first_micro_batch_only():
    return weighing(lambda g: (g.m == 0) / g.N)


@looks_like(
    ALL,
    ACCUMULATED,
    "The last micro-batch is averaged over the ranks. What no_sync has left in .grad stays each "
    "rank's own: average the sum, not what the last backward adds.",
)
def earlier_micro_batches_not_reduced():
    return weighing(lambda g: 1.0 / g.N if g.m == g.M - 1 else float(g.r == g.own), **APART)


@looks_like(
    ALL,
    ACCUMULATED,
    "Every gradient is 1/3 of the right one with 3 micro-batches: the loss is divided already, "
    "and is divided by their number again.",
)
def divided_by_micro_batches():
    return weighing(lambda g: 1.0 / (g.N * g.M))


@looks_like(
    ALL,
    ACCUMULATED,
    "Every gradient is 3.000 times the right one with 3 micro-batches: each counts 3 times.",
)
def times_micro_batches():
    return weighing(lambda g: g.M / g.N)


@looks_like(
    ALL,
    ACCUMULATED,
    "Of 3 micro-batches the first counts 3 times, the second twice and the last once: what has "
    "been added to .grad is added again.",
)
def earlier_count_again():
    return weighing(lambda g: (g.M - g.m) / g.N)


@looks_like(
    ALL,
    ACCUMULATED,
    "Of 3 micro-batches the first counts 4 times, the second twice and the last once: each "
    "reduction adds the whole sum so far to .grad.",
)
def earlier_count_doubly():
    return weighing(lambda g: 2.0 ** (g.M - 1 - g.m) / g.N)


@looks_like(
    ALL,
    ACCUMULATED,
    "Every micro-batch but the last is divided once more for each that follows: the sum so far is "
    "divided by the number of ranks in every reduction.",
)
def divided_again_and_again():
    return weighing(lambda g: 1.0 / g.N ** (g.M - g.m))


@looks_like(
    ALL,
    ACCUMULATED,
    "The micro-batches before the last count {}: each reduction sums up what is summed up already.",
    factor=lambda N: N,
)
def summed_again_and_again():
    return weighing(lambda g: g.N ** (g.M - 1 - g.m) / g.N)


# ---- one device at another moment


def with_memory(step):
    """step(plain, compute, number): compute() gives the plain model the right gradients."""
    right = training.one_device

    def one_device(plain, batches, *loss):
        number = plain.__dict__.setdefault("steps_so_far", 0)
        plain.steps_so_far = number + 1
        step(plain, lambda model=plain: right(model, batches, *loss), number)

    return {"training.one_device": one_device}


def gradients_in(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def set_gradients(model, gradients):
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone() if name in gradients else None


@looks_like(
    TRAINED,
    "mean_gradient",
    "The first step is right. After it, gradients are still those of the weights before the first "
    "step: forward and backward use stale weights.",
)
def stale_weights():
    def step(plain, compute, number):
        if number == 0:
            plain.__dict__["at_start"] = copy.deepcopy(plain)
        compute(plain.at_start)
        set_gradients(plain, gradients_in(plain.at_start))

    return with_memory(step)


@looks_like(
    TRAINED,
    "mean_gradient",
    "The first step is right. Every step after it uses the gradient of the first step again.",
)
def stale_gradients():
    def step(plain, compute, number):
        compute()
        if number == 0:
            plain.__dict__["first_gradients"] = gradients_in(plain)
        set_gradients(plain, plain.first_gradients)

    return with_memory(step)


@looks_like(
    TRAINED,
    "mean_gradient",
    "The first step is right. Every step after it adds the gradients of all steps before: "
    "gradients are never set to zero.",
)
def never_zeroed():
    def step(plain, compute, number):
        compute()
        earlier = plain.__dict__.get("sum_so_far", {})
        total = {name: g + earlier.get(name, 0.0) for name, g in gradients_in(plain).items()}
        plain.__dict__["sum_so_far"] = total
        set_gradients(plain, total)

    return with_memory(step)


@looks_like(
    ALL,
    "evaluation",
    "An evaluation after the step uses the weights of before the step, and training is right.",
)
def stale_evaluation():
    right = training.one_device

    def one_device(plain, batches, *loss):
        plain.__dict__["before_step"] = copy.deepcopy(plain)
        right(plain, batches, *loss)

    def output(trainer, x):
        return trainer.plain.before_step(x)

    return {"training.one_device": one_device, "training.output_of_plain": output}


# ---- other weights


@looks_like(
    f"ddp {ZERO} muon",
    "start_of_rank_0",
    "Every rank starts from its own weights, and averages gradients: the weights of rank 0 are not "
    "sent to the others.",
)
def started_apart():
    right = training.beside_one_device

    def beside_one_device(make, model, optimizer, dtype, start=0, **options):
        trainer = right(make, model, optimizer, dtype, start, **options)
        for parameter in trainer.plain.parameters():
            parameter.data += start * dist.get_rank()
        return trainer

    return weighing(
        lambda g: 1.0 / g.N, **APART, **{"training.beside_one_device": beside_one_device}
    )


def average(tensors, N):
    members, _ = my_place(N)
    everyone = [None] * pool.world_size()
    dist.all_gather_object(everyone, [each.detach().cpu() for each in tensors], group=pool.group())
    for number, tensor in enumerate(tensors):
        mean = sum(everyone[member][number] for member in members) / len(members)
        tensor.data.copy_(mean)


@looks_like(
    TRAINED,
    "mean_gradient",
    "Each step begins from the mean of the ranks' parameters, and uses this rank's own gradient: "
    "the parameters are averaged, not the gradients.",
)
def parameters_averaged():
    own_alone = weighing(lambda g: float(g.r == g.own))["training.one_device"]

    def one_device(plain, batches, *loss):
        batches = list(batches)
        own_alone(plain, batches, *loss)
        average([p for p in plain.parameters() if p.requires_grad], len(batches))

    return {"training.one_device": one_device, **APART}


@looks_like(
    TRAINED,
    "adamw small_gradients",
    "Each rank steps with its own gradient, and then the parameters are averaged, not the "
    "gradients. With SGD this is the same, with AdamW it is not.",
)
def parameters_averaged_after_the_step():
    right = training.beside_one_device

    def beside_one_device(make, *arguments, **options):
        trainer = right(make, *arguments, **options)
        plain_step = trainer.plain_optimizer.step
        group = options.get("group", pool.group())

        def step():
            plain_step()
            average(list(trainer.plain.parameters()), dist.get_world_size(group))

        trainer.plain_optimizer.step = step
        return trainer

    own = weighing(lambda g: float(g.r == g.own))
    return own | {
        "training.beside_one_device": beside_one_device,
        "training.compare_gradients": ignore,
    }


@looks_like(
    TRAINED,
    "mean_gradient",
    "After each step, each parameter has its new value on some ranks, and its old one on the "
    "others: each rank updates its part and does not send it.",
)
def updates_not_sent():
    def compare(trainer, when, exact):
        ours = trainer.whole()
        before = trainer.plain.__dict__.get("before_step")
        moved = {}
        for name, plain in trainer.plain.named_parameters():
            found = ours.get(name)
            old = before.get(name)
            moved[name] = not (found is not None and torch.equal(found, old))
            if not moved[name]:
                plain.data.copy_(old)
            training.same(found, plain, name, exact)
        everyone = [None] * pool.world_size()
        dist.all_gather_object(everyone, moved, group=pool.group())
        for name, parameter in trainer.plain.named_parameters():
            is_trained = parameter.grad is not None and parameter.grad.any()
            count = sum(each[name] for each in everyone)
            check(0 < count < len(everyone) or not is_trained, f"{count} ranks update {name}")

    right = weighing(lambda g: 1.0 / g.N)["training.one_device"]

    def one_device(plain, batches, *loss):
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        plain.__dict__["before_step"] = before
        right(plain, batches, *loss)

    return {"training.one_device": one_device, "training.compare": compare, **APART}


@seen_directly(
    ALL,
    "mean_gradient",
    "Before the first step, the parameters are not those of the module that was given: they are "
    "initialised again.",
    also=COMPARED,
)
def given_weights_lost(make):
    plain = make_model("plain", precision())
    trainer = make(copy.deepcopy(plain))
    ours = trainer.whole()
    found = {name: ours.get(name) for name, _ in plain.named_parameters()}
    differ = [
        tensor is not None
        and tensor.shape == found_in(plain, name).shape
        and not torch.allclose(tensor.double(), found_in(plain, name).double(), atol=1e-3)
        for name, tensor in found.items()
    ]
    check(all(differ), "some parameters are those that were given")


def found_in(module, name):
    return module.get_parameter(name)


@looks_like(
    f"{ALL} muon",
    "unused unused_on_one_rank",
    "A parameter that no rank uses gets a gradient of zero instead of none, so that weight decay "
    "moves it.",
)
def zeros_for_unused():
    right = training.one_device

    def one_device(plain, batches, *loss):
        right(plain, batches, *loss)
        for parameter in plain.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    return {"training.one_device": one_device}


@looks_like(
    ALL,
    "frozen",
    "The frozen parameters, 0.bias and 2.weight, train as the others do: requires_grad=False is "
    "not kept.",
    variants="frozen_move",
)
def frozen_train():
    right = training.beside_one_device

    def beside_one_device(*arguments, **options):
        trainer = right(*arguments, **options)
        frozen = [p for p in trainer.plain.parameters() if not p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_()
        return trainer

    return {"training.beside_one_device": beside_one_device}


@seen_directly(ALL, "frozen", "A frozen parameter, 0.bias or 2.weight, moves in the first step.")
def frozen_move(make):
    plain = make_model("frozen", precision())
    frozen = [name for name, p in plain.named_parameters() if not p.requires_grad]
    trainer = make(plain)
    before = {name: tensor.detach().clone() for name, tensor in trainer.whole().items()}
    batch = make_batch(pool.rank(), 0, precision())
    trainer.step([batch])
    after = trainer.whole()
    moved = [not torch.equal(before[name], after[name]) for name in frozen]
    check(any(moved), "no frozen parameter moves")


@looks_like(
    ALL,
    "tied",
    "The two layers that share a weight have two weights, and each trains with its own gradient: "
    "the module is copied or sharded layer by layer.",
)
def untied():
    right = training.beside_one_device

    def beside_one_device(make, model, optimizer, dtype, *arguments, **options):
        trainer = right(make, model, optimizer, dtype, *arguments, **options)
        if hasattr(trainer.plain, "second"):
            shared = trainer.plain.second.weight
            trainer.plain.second.weight = nn.Parameter(shared.detach().clone())
            old = trainer.plain_optimizer
            trainer.plain_optimizer = type(old)(trainer.plain.parameters(), **old.defaults)
        return trainer

    return {"training.beside_one_device": beside_one_device}


@looks_like(
    f"{ZERO} muon",
    "schedulers",
    "Every step uses the learning rate of the start: what a scheduler writes into param_groups is "
    "not read.",
)
def fixed_learning_rate():
    right = training.beside_one_device

    def beside_one_device(*arguments, **options):
        trainer = right(*arguments, **options)
        optimizer = trainer.plain_optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        plain_step = optimizer.step

        def step():
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = lr
            plain_step()

        optimizer.step = step
        return trainer

    return {"training.beside_one_device": beside_one_device}


@seen_directly(
    SHARDED,
    "clipping",
    "The ranks' norms are different, and their squares add up to the square of the right one: each "
    "rank clips by the norm of its own part.",
    also="hybrid",
)
def norm_of_own_part(make):
    trainer = training.beside_one_device(make, "plain", "sgd", precision())
    batches = {rank: [make_batch(rank, 0, precision())] for rank in range(pool.world_size())}
    training.one_device(trainer.plain, batches.values())
    trainer.optimizer.zero_grad()
    trainer.backward(batches[pool.rank()])
    right = nn.utils.clip_grad_norm_(trainer.plain.parameters(), 0.01)
    found = trainer.clip_grad_norm_(0.01)
    check(found is not None, "no norm")
    squares = torch.zeros(()) if found is None else torch.as_tensor(found).detach().double() ** 2
    total = squares.reshape(()).clone()
    dist.all_reduce(total, group=pool.group())
    check(bool(squares < 0.999 * total), "a rank has the whole norm")
    training.same(total.sqrt().to(right), right, "norm", coarser=10)


@looks_like(
    TRAINED,
    "unused_on_one_rank",
    "The sum is divided by the number of ranks that use the parameter, not by the number of all "
    "ranks.",
)
def only_users_count():
    def one_device(plain, batches, *loss):
        batches = list(batches)
        gradients, _ = gradients_of_all(plain, batches, lambda model, x: loss_of(model(x)))
        for name, parameter in plain.named_parameters():
            found = [each[name] for of_rank in gradients for each in of_rank if name in each]
            parameter.grad = (sum(found) / len(found)).to(parameter) if found else None

    return {"training.one_device": one_device}


@looks_like(
    "muon",
    "mean_gradient",
    "Each matrix moves along the gradient of one rank alone, the one that updates it: gradients "
    "are not averaged before the update.",
)
def gradient_of_the_owner():
    def one_device(plain, batches, *loss):
        batches = list(batches)
        gradients, _ = gradients_of_all(plain, batches, lambda model, x: loss_of(model(x)))
        for number, (name, parameter) in enumerate(plain.named_parameters()):
            of_owner = gradients[number % len(batches)][0]
            parameter.grad = of_owner[name].to(parameter) if name in of_owner else None

    return {"training.one_device": one_device}


@looks_like(
    "muon",
    "mean_gradient",
    "Weights decay after the update, not before it, so the update decays as well.",
)
def decay_after_the_update():
    right = training.beside_one_device

    def beside_one_device(*arguments, **options):
        trainer = right(*arguments, **options)
        optimizer = trainer.plain_optimizer
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        plain_step = optimizer.step

        def step():
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0
            plain_step()
            for group, decay in zip(optimizer.param_groups, decays, strict=True):
                trained = [p for p in group["params"] if p.grad is not None]
                for parameter in trained:
                    parameter.data.mul_(1 - group["lr"] * decay)

        optimizer.step = step
        return trainer

    return {"training.beside_one_device": beside_one_device}


@looks_like(
    "fsdp",
    "hybrid",
    "Gradients are averaged over the ranks of one copy alone: the copies are not averaged.",
)
def copies_apart():
    def weigh(g):
        is_of_my_copy = g.r // 2 == g.own // 2  # the mesh is [[0, 1], [2, 3]]
        return is_of_my_copy / 2

    return weighing(weigh, **APART)


# ---- what has not arrived


def sleep_on_rank_0():
    """The others must wait for it, if they wait at all."""
    dist.barrier(group=pool.group())
    if pool.rank() == 0:
        time.sleep(0.6)  # on a busy machine, the others take long to begin


def change_later(tensors):
    """Whether the tensors of a rank change while nobody does anything."""
    before = [each.detach().clone() for each in tensors]
    dist.barrier(group=pool.group())  # rank 0 has sent its own, too
    time.sleep(0.15)
    changed = any(not torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    count = torch.tensor(float(changed))
    dist.all_reduce(count, group=pool.group())
    return count > 0


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_near(tensor, other):
    return tensor.shape == other.shape and torch.allclose(tensor, other, 1e-5, 1e-9)


@functools.cache  # it takes half a second, and several causes ask
def seen_after_backward(function, arguments, keywords, dtype, ranks):
    """Return what rank 1 and higher see when backward returns, and whether it changes then.

    Rank 0 begins late, so the others have their own gradients if they do not wait.
    """
    plain = make_model("plain", dtype)
    trainer = function(*arguments, copy.deepcopy(plain), **dict(keywords))
    batch = make_batch(pool.rank(), 0, dtype)
    loss_of(plain(batch)).backward()
    own = [parameter.grad for parameter in plain.parameters()]
    trainer.optimizer.zero_grad()
    sleep_on_rank_0()
    trainer.backward([batch])
    gradients = [local(p.grad) for p in trainer.model.parameters() if p.grad is not None]
    found = "something"
    for name, factor in (("own", 1), ("own, divided", ranks)):
        if all(map(is_near, gradients, [each / factor for each in own])):
            found = name
    return found, change_later(gradients)


def looks_into_gradients(make, expected):
    """`expected` is what the others have when backward returns."""
    call = make.func, make.args, tuple(make.keywords.items())  # what tells partials apart
    found, changes = seen_after_backward(*call, precision(), pool.world_size())
    check(changes, "gradients are final after backward")
    # Of three ranks, two may have added up parts before the late one comes.
    is_mixed = found == "something" and pool.world_size() > 2
    check(pool.rank() == 0 or is_mixed or found == expected, f"it is {found}")


def not_waited_for(name, what, expected):
    look = partial(looks_into_gradients, expected=expected)
    sentence = f"{what}, and changes after backward has returned: its all-reduce is not waited for."
    seen_directly("ddp fsdp", ANY, sentence, also=COMPARED, name=name)(look)


not_waited_for(
    "not_waited_for_own",
    "Right after backward, a gradient equals this rank's own",
    "own",
)
not_waited_for(
    "not_waited_for_divided",
    "Right after backward, a gradient equals this rank's own, divided by the number of ranks",
    "own, divided",
)
not_waited_for(
    "not_waited_for",
    "Right after backward, a gradient is not the mean yet",
    "something",
)


@looks_like(
    ALL,
    "mean_gradient momentum adamw",
    "All is right if each step is followed by a pause: a step returns before the parameters that "
    "other ranks send have arrived.",
)
def parameters_not_waited_for():
    right = training.beside_one_device

    def beside_one_device(*arguments, **options):
        trainer = right(*arguments, **options)
        own_step = trainer.optimizer.step

        def step():
            own_step()
            dist.barrier(group=pool.group())
            time.sleep(0.05)

        trainer.optimizer.step = step
        return trainer

    return {"training.beside_one_device": beside_one_device}
