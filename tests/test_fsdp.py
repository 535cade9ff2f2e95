"""fsdp.py bit by bit against one device, and in 16 bits against torch.distributed.fsdp.fully_shard.

What is true of any such implementation, claims.py says; here is what a user of this one may do besides, and its costs.
"""

import copy
import functools
import itertools
from contextlib import nullcontext
from dataclasses import make_dataclass

import claims
import pool
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as pytorchs
import torch.nn as nn
from shared import OPTIMIZERS, Collectives, assert_equal, loss_of, make_batch, make_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp import held_bytes

RESHARD = pytest.mark.parametrize("reshard", [True, False])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.two(torch.tanh(self.one(x)))


class Blocks(nn.Sequential):
    """Blocks and a head. Calls the blocks in `which`, by `how`."""

    def __init__(self, count=4):
        super().__init__(*[Block() for _ in range(count)], nn.Linear(6, 3))

    def forward(self, x, which=None, how=lambda block, x: block(x)):
        for i in range(len(self) - 1) if which is None else which:
            x = how(self[i], x)
        return self[-1](x)


def fully_shard(module, mesh=None, **kwargs):
    return fsdp.fully_shard(module, mesh=mesh, process_group=None if mesh else pool.group(), **kwargs)


def shard(model, fully_shard=fully_shard, **kwargs):
    """A unit of each layer that has parameters but the last, and one of that and the rest."""
    for layer in list(model)[:-1] if isinstance(model, nn.Sequential) else ():
        if list(layer.parameters()):
            fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def pair(reshard=True):
    """A sharded model of blocks, and the plain one."""
    torch.manual_seed(3)
    plain = Blocks()
    return shard(copy.deepcopy(plain), reshard_after_forward=reshard), plain


def assert_same(ours, plain, exact=True):
    """Parameters and gradients of a sharded model are the pieces of a plain one's."""
    for (name, a), (other, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert_equal(a.detach(), a._place.cut(b.detach()), exact, name)
        if b.grad is None or a.numel():  # who has no elements need not have a gradient
            assert_equal(a.grad, None if b.grad is None else a._place.cut(b.grad), exact, f"gradient of {name}")


def loss_of_batch(model, rank, number):
    return loss_of(model(make_batch(rank, number, next(model.parameters()).dtype)))


def one_device(plain, numbers, loss=loss_of_batch):
    """Add to .grad the mean of the ranks' gradients, each over micro-batches of these numbers; ranks in their order."""
    before = {p: p.grad for p in plain.parameters() if p.grad is not None}
    batches = [[(rank, number) for number in numbers] for rank in range(pool.world_size())]
    claims.one_device(plain, batches, lambda model, batch: loss(model, *batch))
    for p, grad in before.items():
        p.grad = grad if p.grad is None else grad + p.grad


def train(ours, plain, loss=loss_of_batch, steps=3, micro_batches=1, sync="last", exact=True):
    """Both, and compare parameters and gradients after each step, the optimizers' state after the last.

    `loss` takes a model, a rank and a micro-batch's number. -> the messages that have been sent
    """
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (ours, plain)]
    with Collectives() as sent:
        for step in range(steps):
            for o in optimizers:
                o.zero_grad()
            numbers = range(step * micro_batches, (step + 1) * micro_batches)
            for number in numbers:
                with nullcontext() if sync == "each" or number == numbers[-1] else fsdp.no_sync(ours):
                    loss(ours, pool.rank(), number).backward()
            assert_at_rest(ours)
            for each in [[number] for number in numbers] if sync == "each" else [numbers]:
                one_device(plain, each, loss)
            for o in optimizers:
                o.step()
            assert_same(ours, plain, exact)
    states = [fsdp.full_optimizer_state_dict(ours, optimizers[0])["state"], optimizers[1].state_dict()["state"]]
    torch.testing.assert_close(*states, **({"rtol": 0, "atol": 0} if exact else {}))
    return sent


def units(model):
    return [module._fsdp_unit for module in model.modules() if hasattr(module, "_fsdp_unit")]


def assert_at_rest(model):
    """Parameters are shards, and nothing of a forward or backward is left."""
    assert held_bytes([unit.gathered for unit in units(model)]) == 0
    for unit in units(model):
        assert unit.works is unit.kept is unit.sent is None
        assert unit.reached == -1
        assert all(place.whole.grad is None for place in unit.places)
        assert all(place.layout[2] * place.whole.itemsize % 64 == 0 for place in unit.places)  # as torch aligns
    assert not any(p.dim() > 1 for p in model.parameters())


@pytest.mark.parametrize(("N", "kind"), [(1, "tied"), (3, "plain"), (4, "odd")])
def test_bitwise_equal_to_one_device_at_every_world_size(N, kind):
    pool.run(N, body_train, kind, *((torch.bfloat16, "last") if kind == "plain" else (torch.float32, "each")))


def body_train(kind, dtype, sync):
    ours = make_model(kind, dtype, seed=1 + pool.rank())  # rank 0's values count
    train(shard(ours, reshard_after_forward=kind != "odd"), make_model(kind, dtype), micro_batches=2, sync=sync)


@pool.on(3)
def test_naive_form():
    N, rank = pool.world_size(), pool.rank()
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    ours = copy.deepcopy(plain).to("meta")  # a skeleton
    pad = lambda p: nn.functional.pad(p.detach().flatten(), (0, -p.numel() % N))  # noqa: E731
    pieces = {n: pad(p).chunk(N)[rank].clone().requires_grad_() for n, p in plain.named_parameters()}
    loss_of(fsdp.forward_sharded(ours, pieces, make_batch(rank, 0), process_group=pool.group())).backward()
    one_device(plain, [0])
    for name, p in plain.named_parameters():
        assert torch.equal(pieces[name].grad, pad(p.grad).chunk(N)[rank])


CALLS = {  # by step
    "as registered": [None] * 3,
    "one is not called on some steps": [None, [0, 2, 3], [3, 2, 1, 0], None, [], None],
    "twice, with others between": [[0, 1, 1, 2, 0, 3, 1]] * 3,
}
AGAIN = functools.partial(checkpoint, use_reentrant=False)
HOW = {
    "plainly": lambda f, x: f(x),
    "checkpointed": AGAIN,
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
}
COMBINATIONS = [("plainly", calls) for calls in CALLS] + [(how, "as registered") for how in (*HOW, "in segments")[1:]]


@RESHARD
@pytest.mark.parametrize(("how", "calls"), [*COMBINATIONS, ("checkpointed", "twice, with others between")])
@pool.on(2)
def test_units_are_called_as_one_likes(how, calls, reshard):
    plan, (ours, plain) = CALLS[calls], pair(reshard)

    def run(m, rank, number):
        x = make_batch(rank, number).requires_grad_()
        if how == "in segments":  # a checkpoint of three units
            return loss_of(m(x, [0, 1], lambda f, x: f(x) if f is m[0] else AGAIN(lambda x: m[3](m[2](f(x))), x)))
        return loss_of(m(x, plan[number], HOW[how]))

    sent = train(ours, plain, run, len(plan))
    if calls == "as registered" and (reshard or how != "reentrant"):  # what the checkpoint gathers, backward uses
        assert sent.bytes_of("send") == len(plan) * (3 if reshard else 2) * sum(u.flat.nbytes for u in units(ours))


@RESHARD
@pool.on(2)
def test_two_graphs_alive(reshard):
    """One backward for both, then one for each."""
    (ours, plain), alive = pair(reshard), []
    train(ours, plain, lambda m, rank, n: loss_of_batch(m, rank, n) + loss_of_batch(m, rank, n + 50))

    def loss(model, rank, number):
        if model is ours and not alive:
            alive.extend(loss_of_batch(model, rank, n) for n in (number, number + 1))
        return alive.pop(0) if model is ours else loss_of_batch(model, rank, number)

    train(ours, plain, loss, micro_batches=2, sync="each")


@RESHARD
@pool.on(2)
def test_eval_at_any_time_sees_the_present_weights(reshard):
    """After a step, between forward and backward, and after that; of the model and of a part; with a graph, too."""
    (ours, plain), x = pair(reshard), make_batch(0, 9)

    def look():
        for mode in (torch.inference_mode, nullcontext):  # the last one leaves a graph
            with mode():
                assert torch.equal(ours(x), plain(x))
                assert torch.equal(ours[1](x), plain[1](x))

    def loss(model, rank, number):
        look()  # when the plain one's turn comes, ours has done its backward
        result = loss_of_batch(model, rank, number)
        look()
        return result

    train(ours, plain, loss)


@pytest.mark.parametrize("then", ["another forward", "another graph", "saved"])
@pytest.mark.parametrize(("where", "reshard"), [("forward", True), ("forward", False), ("backward", True)])
@pool.on(2)
def test_nothing_is_left_of_what_raised(where, reshard, then):
    ours, plain = pair(reshard)
    zero_grad = torch.optim.SGD(ours.parameters()).zero_grad

    def raises(*_):
        raise KeyboardInterrupt

    def how(block, x):
        if block is ours[2]:
            raises() if where == "forward" else x.register_hook(raises)
        return block(x)

    def loss(model, rank, number):
        if model is plain:
            return loss_of_batch(model, rank, number)
        earlier = loss_of_batch(ours, rank, number) if then == "another graph" else None
        with pytest.raises(KeyboardInterrupt):
            loss_of(ours(make_batch(rank, 7), None, how)).backward()
        zero_grad()
        if then == "saved":
            assert all(torch.equal(v, plain.state_dict()[n]) for n, v in fsdp.full_state_dict(ours).items())
            assert_at_rest(ours)
        return earlier or loss_of_batch(ours, rank, number)

    train(ours, plain, loss)


class Outputs(Block):
    """Outputs in containers, one of them a view, one not used, one the input itself; an input by keyword."""

    def forward(self, *, x):
        return {"a": [self.one(x)], "b": (self.two(self.one(x)).view(2, -1, 3), None), "x": x}


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.nested = Outputs(), Outputs(), nn.Sequential(Block(), Block())

    def forward(self, x):
        first = self.first(x=x[:4])
        first["a"][0].mul_(2.0)  # changed in place
        second = self.second(x=first["b"][0].reshape(4, 6) + first["a"][0].sum())
        return self.nested(second["a"][0][:, :6] + second["x"])


@pool.on(2)
def test_outputs_of_every_kind_and_nested_units():
    plain = Outer()
    ours = copy.deepcopy(plain)
    for m in (ours.first, ours.second, ours.nested[1], ours.nested, ours):  # nested: a unit in a unit in a unit
        fully_shard(m)
    train(ours, plain)


@pool.on(2)
def test_frozen_and_trained_parameters_in_one_unit():
    """They may change places; the unit that is frozen as a whole is gathered once."""
    ours, plain = pair()
    for model in (ours, plain):
        model[0].requires_grad_(False)
    for trained, frozen in (("one", "two"), ("two", "one")):
        for block in (*list(ours)[1:4], *list(plain)[1:4]):
            getattr(block, trained).requires_grad_(True)
            getattr(block, frozen).requires_grad_(False)
        sizes = [unit.flat.nbytes for unit in units(ours)]  # the root's first, then the frozen one's
        assert train(ours, plain, steps=2).bytes_of("send") == 2 * (3 * sum(sizes) - 2 * sizes[1])


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(rows, 6)) for rows in (5, 6, 1))

    def forward(self, x, names, by=1.0):
        return by * sum((x @ getattr(self, name).t()).sum(1) for name in names)


@pool.on(3)
def test_parameters_that_no_rank_or_one_rank_uses():
    """None where no rank has a gradient, the mean with zeros where one has; what trains follows."""
    names, plain = [["a", "ab"], ["b", "b"], ["c", "a"], ["abc", "abc"], ["b", "a"]], Choice()
    ours = fully_shard(copy.deepcopy(plain))
    run = lambda model, rank, n: loss_of(model(make_batch(rank, n), names[n][rank % 2]))  # noqa: E731
    train(ours, plain, run, steps=len(names))
    ours.zero_grad()  # gradients of -0.0 are gradients: not None
    (ours(torch.ones(1, 6), "a") if pool.rank() else ours(torch.ones(1, 6), "abc", -0.0)).sum().backward()
    assert all(p.grad is not None for p in ours.parameters() if p.numel())


@pool.on(2)
def test_no_sync_sends_nothing_and_loses_nothing():
    """Not even where the last backward leaves out units that have gradients."""
    (ours, plain), which = pair(), [None, [0, 2]]
    run = lambda model, rank, number: loss_of(model(make_batch(rank, number), which[number % 2]))  # noqa: E731
    train(ours, plain, run, steps=2, micro_batches=2)
    ours.zero_grad()
    with Collectives() as sent, fsdp.no_sync(ours):
        run(ours, 0, 0).backward()
    assert len(sent.calls) == 2 * 2 * len(units(ours))  # both gathers, to and from the other rank
    assert all(p.grad is None for p in ours.parameters())


@pool.on(2)
def test_clipping_where_a_rank_has_nothing_and_a_square_or_a_sum_would_overflow():
    layer = fully_shard(nn.Linear(1, 1, bias=False).half())
    layer(torch.full((1, 1), 40000.0).half()).sum().backward()
    for max_norm, after in ((1e6, 40000.0), (20000.0, 20000.0)):
        assert fsdp.clip_grad_norm_(layer, max_norm).item() == 40000.0
        assert layer.weight.grad.tolist() == [after] * (pool.rank() == 0)
    with pytest.raises(ValueError, match=r"^weight: in no unit"):
        fsdp.clip_grad_norm_(nn.Linear(1, 1, bias=False), 1.0)


ON_A_CPU = hasattr(torch.cpu.Stream, "record_event")


@pytest.mark.skipif(not ON_A_CPU, reason=f"PyTorch's fully_shard does not run on a CPU in torch {torch.__version__}")
@pytest.mark.parametrize(
    ("param", "reduce", "offload"),
    [(torch.bfloat16, torch.float32, False), (torch.bfloat16, None, True), (None, torch.bfloat16, False)],
    ids=str,
)
@pool.on(2)
def test_mixed_precision_as_pytorchs(param, reduce, offload):
    """Gradients of two micro-batches, the first within no_sync, where they are added in the reduce dtype."""
    ours, mesh = pair()[1], DeviceMesh.from_group(pool.group(), "cpu")
    theirs, theirs_of = copy.deepcopy(ours), functools.partial(pytorchs.fully_shard, mesh=mesh)
    policy = pytorchs.CPUOffloadPolicy(pin_memory=False) if offload else pytorchs.OffloadPolicy()
    shard(theirs, theirs_of, mp_policy=pytorchs.MixedPrecisionPolicy(param, reduce), offload_policy=policy)
    policy = fsdp.CPUOffloadPolicy() if offload else None
    shard(ours, mp_policy=fsdp.MixedPrecisionPolicy(param, reduce), offload_policy=policy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for step in range(2):
        for micro in range(2):
            theirs.set_requires_gradient_sync(micro == 1)
            with nullcontext() if micro == 1 else fsdp.no_sync(ours):
                outputs = [m(make_batch(pool.rank(), 2 * step + micro)) for m in (ours, theirs)]
                assert torch.equal(*outputs)
                for output in outputs:
                    loss_of(output.float()).backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert a.dtype == a.grad.dtype == torch.float32
            assert torch.equal(a.grad, a._place.cut(b.grad.full_tensor()))
        for o in optimizers:
            o.step()
            o.zero_grad()


@pool.on(4)
def test_hybrid_sharding():
    """2 × 2: as one device; the replicas exchange shards of gradients only."""
    rank, mesh = pool.rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, ours = make_model("plain", torch.float64), make_model("plain", torch.float64, seed=1 + rank)
    sent = train(shard(ours, mesh=mesh), plain, exact=False)
    assert sent.bytes_of("allreduce_") == 3 * sum(u.flat.nbytes for u in units(ours))
    norm = fsdp.clip_grad_norm_(ours, 0.01)
    assert_equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.01), False, "norm")
    assert_same(ours, plain, exact=False)
    with pytest.raises(ValueError, match="ranks must hold the same model"):
        fully_shard(nn.Linear(3 + (rank == 3), 2), mesh=mesh)


def body_continued(saved, steps, sharded=True):
    """-> what is saved after these steps, on data that are the same on all ranks: their number does not matter."""
    # tied weights, a frozen parameter, odd ones, buffers
    model = nn.Sequential(Block(), nn.BatchNorm1d(6), Block(), make_model("tied"), make_model("odd"))
    model[3].second.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW((shard(model) if sharded else model).parameters(), lr=0.3 if saved else 0.1)
    if saved and sharded:
        fsdp.load_full_state_dict(model, saved[0])
        fsdp.load_full_optimizer_state_dict(model, optimizer, saved[1])
    elif saved:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for step in steps:
        optimizer.zero_grad()
        loss_of_batch(model, 0, step).backward()
        optimizer.step()
    if not sharded:
        return model.state_dict(), optimizer.state_dict()
    saved = fsdp.full_state_dict(model), fsdp.full_optimizer_state_dict(model, optimizer)
    loss_of_batch(model, 0, 9).backward()
    optimizer.step()  # does not change what was saved
    return saved


def test_save_at_four_ranks_and_load_at_three_and_into_the_plain_model():
    run = lambda N, *arguments: pool.run(N, body_continued, *arguments)[-1]  # noqa: E731
    saved, after = run(4, None, [0, 1]), run(4, None, [0, 1, 2])
    torch.testing.assert_close(run(1, saved, [], False), saved, rtol=0, atol=0)
    torch.testing.assert_close(run(4, saved, [2]), after, rtol=0, atol=0)
    torch.testing.assert_close(run(3, saved, [2]), after, rtol=1e-5, atol=1e-6)


@pool.on(2)
def test_a_model_on_the_meta_device_becomes_real_unit_by_unit():
    """Under other seeds on other ranks; no rank holds more than the largest unit, and one module more."""
    with torch.device("meta"):
        model, plain = Blocks(5), Blocks(5)
        for m in (model, plain):
            m[1].norm = nn.BatchNorm1d(3)
    model[-1].bias.requires_grad_(False)
    torch.manual_seed(0)
    plain.to_empty(device="cpu").apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    torch.manual_seed(pool.rank())
    with Peak(lambda: held_bytes([p for p in model.parameters() if p.dim() > 1 and not p.is_meta])) as peak:
        shard(model)
    assert peak.peak <= 2 * 4 * sum(p.numel() for p in Block().parameters())
    assert_at_rest(model)
    for name, value in fsdp.full_state_dict(model).items():
        assert torch.equal(value, plain.state_dict()[name]), name
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["5.bias"]
    loss_of_batch(model, 0, 0).backward()


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """The most that `measure` returns after any operator."""

    def __init__(self, measure):
        super().__init__()
        self.measure, self.peak = measure, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, self.measure())
        return result


@RESHARD
@pool.on(2)
def test_memory_at_rest_and_at_its_peak(reshard):
    count, unit = 12, 4 * 40 * 40
    model, x = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(count)]), torch.randn(1, 40)
    for layer in (*model, model):
        fully_shard(layer, reshard_after_forward=reshard)

    gathered = lambda: held_bytes([unit.gathered for unit in units(model)])  # noqa: E731

    def gradients():  # made, sent, arriving
        made = [place.whole.grad for u in units(model) for place in u.places if place.whole.grad is not None]
        return held_bytes(made + [term for u in units(model) if u.sent for term in u.sent[1]])

    losses = []  # of earlier steps, and graphs that nobody goes through, hold up nothing
    for most in (1, 2):  # the first backward does not know what is next
        model.zero_grad()
        losses.append(model(x).sum())
        with Peak(gathered) as forward:
            losses.append(model(x).square().mean())
        with Peak(gathered) as backward, Peak(gradients) as peak_of_gradients:
            losses[-1].backward()
        assert forward.peak == (2 if reshard else count) * unit
        assert backward.peak == (most if reshard else count) * unit
        assert 2 * unit <= peak_of_gradients.peak <= 3 * unit
        assert gathered() == gradients() == 0
    assert held_bytes(model.parameters()) == held_bytes([p.grad for p in model.parameters()]) == count * unit // 2


@RESHARD
@pytest.mark.parametrize("N", [1, 8, 1024])
def test_cost_at_scale(N, reshard):
    """In this process, the last of N ranks: torch's fake process group moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=N - 1, world_size=N)
    try:
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(2)])
        psi = held_bytes(model.parameters())
        for layer in (*model, model):
            fsdp.fully_shard(layer, reshard_after_forward=reshard)
        with fsdp.SentBytes() as sent:
            model(torch.randn(2, 1024)).sum().backward()
        assert sent.total == (3 if reshard else 2) * psi * (N - 1) / N
        assert held_bytes(model.parameters()) == psi / N
    finally:
        dist.destroy_process_group()


@pool.on(2)
def test_communication_is_issued_early_and_waited_for_late():
    """The next gather is issued before this unit computes; a reduction is waited for after the next has computed."""
    (model, _), moves = pair(), []
    loss_of_batch(model, 0, 0).backward()

    def noted(unit, name, move):
        move()
        moves.append((unit, name))

    blocks = units(model)[1:]
    for unit, name in itertools.product(blocks, ("gather", "unshard", "reduce", "add_gradients")):
        setattr(unit, name, functools.partial(noted, unit, name, getattr(unit, name)))
    for unit, block in zip(blocks, model, strict=False):
        block.one.register_forward_hook(lambda *_, u=unit: moves.append((u, "forward")))
        block.one.register_full_backward_hook(lambda *_, u=unit: moves.append((u, "backward")))
    loss = loss_of_batch(model, 0, 0)
    for this, following in itertools.pairwise(blocks):
        order = [(following, "gather"), (this, "forward"), (following, "unshard")]
        assert sorted(order, key=moves.index) == order
    moves.clear()
    loss.backward()
    for this, following in itertools.pairwise(blocks[::-1]):
        for order in (
            [(following, "gather"), (this, "backward"), (following, "unshard")],
            [(this, "reduce"), (following, "backward"), (this, "add_gradients")],
        ):
            assert sorted(order, key=moves.index) == order


@pool.on(2)
def test_errors_on_every_rank():
    late, model = pool.rank() == 1, Blocks()
    tied = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8, bias=False))
    tied[2].weight = tied[0].weight
    sharded = fully_shard(tied[0])
    for module, words in [
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), r"Sequential has parameters of .*make a unit for"),
        (nn.Linear(3 + late, 2), r"differ in .*weight: \(2, 3\)"),
        (nn.Linear(3, 2).requires_grad_(not late), "differ in .*bias"),
        (tied, r"2.weight of Sequential is tied to another unit's"),
        (nn.ModuleList([model]), "ModuleList has no forward"),
        (sharded, "a unit already"),
    ]:
        with pytest.raises(ValueError, match=words):
            fully_shard(module)
    model[0].forward = make_dataclass("Box", ["y"])
    with pytest.raises(ValueError, match="returns a Box; return tensors in lists"):
        fully_shard(model[0])(torch.ones(6, 6))
    with pytest.raises(ValueError, match="Invalid process group") if late else nullcontext():
        fsdp.fully_shard(nn.Linear(2, 2), process_group=pool._groups[1])  # of rank 0 alone
    with pytest.raises(ValueError, match="over other ranks"):
        fsdp.fully_shard(model)  # over all four ranks of the default group
    (model, plain), batch = pair(), make_batch(0, 0)
    saved = fsdp.full_state_dict(model)
    with pytest.raises(RuntimeError, match=r"Missing key.*4.bias"):
        fsdp.load_full_state_dict(model, {name: value for name, value in saved.items() if name != "4.bias"})
    with pytest.raises(ValueError, match=r"is \(3,\), not \(1,\)"):
        fsdp.load_full_state_dict(model, saved | {"4.bias": torch.ones(1)})
    with pytest.raises(RuntimeError, match="call full_state_dict"):
        model.state_dict()
    fsdp.load_full_state_dict(model.to("cpu").float(), {n: v.double() for n, v in saved.items()})  # changes nothing
    assert torch.equal(model(batch), plain(batch))
    model[1].double()
    with pytest.raises(ValueError, match=r"Linear\.weight was moved or replaced"):
        model(batch)
    model, _ = pair()
    model[-1].bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"Linear\.bias"):
        model(batch)
