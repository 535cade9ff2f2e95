"""fsdp.py bit by bit against one device, and in 16 bits against PyTorch's own; its costs. The rest says tests/claims."""

import copy
import functools
import itertools
from contextlib import nullcontext
from dataclasses import make_dataclass

import pool
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as pytorchs
import torch.nn as nn
from claims.training import one_device
from shared import (
    HOW,
    Block,
    Blocks,
    Collectives,
    Outer,
    Reader,
    Watch,
    batch_loss,
    loss_of,
    make_batch,
    make_model,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp


def fully_shard(module, mesh=None, **kwargs):
    return fsdp.fully_shard(
        module, mesh=mesh, process_group=None if mesh else pool.group(), **kwargs
    )


def shard(model, fully_shard=fully_shard, **kwargs):
    """A unit of each layer that has parameters but the last, of its layers the same; and one of the rest."""
    for layer in list(model)[:-1] if isinstance(model, nn.Sequential) else ():
        if list(layer.parameters()):
            shard(layer, fully_shard, **kwargs)
    return fully_shard(model, **kwargs)


def pair(reshard=True):
    """A sharded model of blocks, and the plain one."""
    torch.manual_seed(3)
    plain = Blocks()
    return shard(copy.deepcopy(plain), reshard_after_forward=reshard), plain


def units(model):
    return [module._fsdp_unit for module in model.modules() if hasattr(module, "_fsdp_unit")]


def groups(model):
    return [group for unit in units(model) for group in unit.groups]


def assert_at_rest(model):
    """Parameters are shards, and nothing of a forward or backward is left."""
    assert not any(unit.needs_reduce for unit in units(model))
    for group in groups(model):
        assert group.unsharded.untyped_storage().nbytes() == 0
        assert (group.gathering, group.gradients, group.received, group.reducing) == (
            [],
            None,
            None,
            None,
        )
        assert group.shard_size * group.unsharded.itemsize % 16 == 0
        for parameter in group.parameters:
            assert parameter.unsharded.grad is None
            assert parameter.start * parameter.unsharded.itemsize % 64 == 0
    assert not any(p.dim() > 1 for p in model.parameters())


def train(ours, plain, loss=batch_loss, steps=3, micro_batches=1, saved=None, **tolerance):
    """Both, from what is `saved`: in the end their states are the same, and the optimizers', who know the gradients.

    A step's micro-batches but the last run in no_sync(). -> the messages that were sent, and what is saved
    """
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, plain)]
    if saved:
        fsdp.load_full_state_dict(ours, saved[0])
        fsdp.load_full_optimizer_state_dict(ours, optimizers[0], saved[1])
        plain.load_state_dict(saved[0])
        optimizers[1].load_state_dict(saved[1])
    with Collectives() as sent:
        for step in range(steps):
            numbers = range(step * micro_batches, (step + 1) * micro_batches)
            optimizers[0].zero_grad()
            for number in numbers:
                with nullcontext() if number == numbers[-1] else fsdp.no_sync(ours):
                    assert all(p.grad is None for p in ours.parameters())
                    loss(ours, pool.rank(), number).backward()
            assert_at_rest(ours)
            batches = [[(rank, number) for number in numbers] for rank in range(pool.world_size())]
            one_device(plain, batches, lambda model, batch: loss(model, *batch))
            for o in optimizers:
                o.step()
    saved = fsdp.full_state_dict(ours), fsdp.full_optimizer_state_dict(ours, optimizers[0])
    expected = copy.deepcopy((plain.state_dict(), optimizers[1].state_dict()))
    for o in optimizers:
        o.step()  # does not change what was saved
    torch.testing.assert_close(saved, expected, **({"rtol": 0, "atol": 0} | tolerance))
    return sent, saved


@pool.on(3)
def test_naive_form():
    N, rank = pool.world_size(), pool.rank()
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    ours = copy.deepcopy(plain).to("meta")  # a skeleton
    pad = lambda p: nn.functional.pad(p.detach().flatten(), (0, -p.numel() % N))  # noqa: E731
    pieces = {
        n: pad(p).chunk(N)[rank].clone().requires_grad_() for n, p in plain.named_parameters()
    }
    loss_of(
        fsdp.forward_sharded(ours, pieces, make_batch(rank, 0), process_group=pool.group())
    ).backward()
    one_device(plain, [[make_batch(r, 0)] for r in range(N)])
    for name, p in plain.named_parameters():
        assert torch.equal(pieces[name].grad, pad(p.grad).chunk(N)[rank])


def calls(m, rank, n, ours, plain, plan=(None,), how="plainly"):
    """The loss of a rank's batch n, by m, which is ours or plain. So are the next ones: ways to call units."""
    return loss_of(m(make_batch(rank, n).requires_grad_(), plan[n % len(plan)], HOW[how]))


def two_graphs_alive(m, rank, n, ours, plain):
    if m is plain or n % 2 == 0:
        now, m.later = batch_loss(m, rank, n), batch_loss(m, rank, n + 1)
    return m.later if m is ours and n % 2 else now


def evaluated(m, rank, n, ours, plain):
    """After a step, between forward and backward, and, when the plain one's turn comes, after that."""
    losses, x = [], make_batch(0, 9)
    for _ in range(2):
        for mode in (torch.inference_mode, nullcontext):  # the last one leaves a graph
            with mode():
                assert torch.equal(ours(x), plain(x))
                assert torch.equal(ours[1](x), plain[1](x))  # a part
        losses.append(batch_loss(m, rank, n))
    return losses[0]


def frozen(m, rank, n, ours, plain):
    """One unit as a whole; of others a half, then the other."""
    m[0].requires_grad_(False)
    for block in list(m)[1:4]:
        block.one.requires_grad_(n < 2)
        block.two.requires_grad_(n >= 2)
    return batch_loss(m, rank, n)


def raising(m, rank, n, ours, plain, where, then):
    """Nothing is left of what raised."""

    def how(block, x):
        if block is ours[2]:
            1 / 0 if where == "forward" else x.register_hook(lambda _: 1 / 0)
        return block(x)

    zero_grad = torch.optim.SGD(ours.parameters()).zero_grad
    earlier = batch_loss(m, rank, n) if then == "that before" or m is plain else None
    if m is ours:
        with pytest.raises(ZeroDivisionError):
            loss_of(ours(make_batch(rank, 7), None, how)).backward()
        zero_grad()
        if then == "saved":
            torch.testing.assert_close(
                fsdp.full_state_dict(ours), dict(plain.state_dict()), rtol=0, atol=0
            )
    return earlier or batch_loss(ours, rank, n)


TWICE = [[0, 1, 1, 2, 0, 3, 1]]
WAYS = {  # and how many micro-batches: what a backward reaches twice, it reduces twice, and so adds up in another order
    **{how: (functools.partial(calls, how=how), 2) for how in HOW},
    "not all of them": (functools.partial(calls, plan=[[0, 2, 3], [0, 2], [3, 2, 1, 0], []]), 2),
    "twice, with others between": (functools.partial(calls, plan=TWICE), 1),
    "twice, checkpointed": (functools.partial(calls, plan=TWICE, how="checkpointed"), 1),
    "two graphs, one backward": (
        lambda m, rank, n, **_: batch_loss(m, rank, n) + batch_loss(m, rank, n + 50),
        1,
    ),
    "two graphs alive": (two_graphs_alive, 2),
    "evaluated": (evaluated, 1),
    "frozen": (frozen, 2),
}
RAISED = itertools.product(("forward", "backward"), ("another forward", "that before", "saved"))
WAYS |= {
    f"raised in {a}, then {b}": (functools.partial(raising, where=a, then=b), 1) for a, b in RAISED
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pool.on(2)
def test_units_are_called_as_one_likes(way, reshard):
    (ours, plain), (loss, micro_batches) = pair(reshard), WAYS[way]
    sizes = [group.shard.nbytes for group in groups(ours)]  # the root's first
    sent, _ = train(ours, plain, functools.partial(loss, ours=ours, plain=plain), 2, micro_batches)
    sent, passes = (
        (sent.bytes_of("send") + sent.bytes_of("alltoall_base_") / 2) / 2,
        2 * (1 + reshard) + 1,
    )  # a step's: of two forwards, and one reduction
    exact = way in ("plainly", "checkpointed") or (
        way == "reentrant" and reshard
    )  # what it gathers, backward uses
    alone = (
        (2 * reshard + 1) * sizes[1] if way == "frozen" else 0
    )  # gathered for forward alone, and not reduced
    assert not (exact or alone) or sent == passes * sum(sizes) - alone


def of_all_kinds():
    model = nn.Sequential(
        Block(), nn.BatchNorm1d(6).eval(), Block(), make_model("tied"), make_model("odd")
    )
    model[1].running_mean.fill_(pool.world_size())
    model[3].second.bias.requires_grad_(False)
    return model


MODELS = {
    "all kinds": (of_all_kinds, batch_loss),
    "16 bits": (functools.partial(make_model, "plain", torch.bfloat16), batch_loss),
    "two dtypes in one unit": (functools.partial(make_model, "mixed"), batch_loss),
    "outputs of every kind, nested units": (Outer, batch_loss),
    "used by some ranks": (functools.partial(Reader, [6, 1, 40, 3, 1, 17]), Reader.__call__),
}


def body_part_of_chain(model, reshard, saved):
    make, loss = MODELS[model]
    plain, saved = make(), copy.deepcopy(saved)  # which ranks share
    return train(
        shard(copy.deepcopy(plain), reshard_after_forward=reshard), plain, loss, saved=saved
    )[1]


@pytest.mark.parametrize("model", MODELS)
def test_models_train_in_any_world_and_other_worlds_go_on(model):
    """4 → 3 → 1 ranks, as the plain model and optimizer do from the same state."""
    saved = None
    for N in (4, 3, 1):
        saved = pool.run(N, body_part_of_chain, model, N > 3, saved)[-1]


@pool.on(2)
def test_clipping_where_a_rank_has_nothing_and_a_square_or_a_sum_would_overflow():
    layer = fully_shard(nn.Linear(1, 1, bias=False).half())
    layer(torch.full((1, 1), 40000.0).half()).sum().backward()
    for max_norm, after in ((1e6, 40000.0), (20000.0, 20000.0)):
        assert fsdp.clip_grad_norm_(layer, max_norm).item() == 40000.0
        assert layer.weight.grad.tolist() == [after] * (pool.rank() == 0)


ON_A_CPU, BF16 = hasattr(torch.cpu.Stream, "record_event"), torch.bfloat16


@pytest.mark.skipif(
    not ON_A_CPU, reason=f"PyTorch's fully_shard does not run on a CPU in torch {torch.__version__}"
)
@pytest.mark.parametrize(
    ("dtypes", "offload"), [((BF16, torch.float32), 0), ((BF16, None), 1), ((None, BF16), 0)]
)
@pool.on(2)
def test_mixed_precision_as_pytorchs(dtypes, offload):
    """Gradients of two micro-batches, the first within no_sync, where they are added in the reduce dtype."""
    ours, mesh = Blocks(), DeviceMesh.from_group(pool.group(), "cpu")
    theirs, theirs_of = copy.deepcopy(ours), functools.partial(pytorchs.fully_shard, mesh=mesh)
    shard(theirs, theirs_of, mp_policy=pytorchs.MixedPrecisionPolicy(*dtypes))
    shard(
        ours,
        mp_policy=fsdp.MixedPrecisionPolicy(*dtypes),
        offload_policy=(None, fsdp.CPUOffloadPolicy())[offload],
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for number in range(4):
        theirs.set_requires_gradient_sync(last := number % 2 == 1)
        with nullcontext() if last else fsdp.no_sync(ours):
            outputs = [m(make_batch(pool.rank(), number)) for m in (ours, theirs)]
            assert torch.equal(*outputs)
            for output in outputs:
                loss_of(output.float()).backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True) if last else ():
            assert a.dtype == a.grad.dtype == torch.float32
            assert torch.equal(a.grad, a._sharded_parameter.shard_of(b.grad.full_tensor()))
        for o in optimizers if last else ():
            o.step()
            o.zero_grad()


@pool.on(2)
def test_a_model_on_the_meta_device_becomes_real_unit_by_unit():
    """Under other seeds on other ranks; no rank holds more than the largest unit, and one module more."""
    with torch.device("meta"):
        model, plain = Blocks(5), Blocks(5)
        for m in (model, plain):
            m[1].norm = nn.BatchNorm1d(3)
    model[-1].bias.requires_grad_(False)
    torch.manual_seed(0)
    plain.to_empty(device="cpu").apply(
        lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None
    )
    torch.manual_seed(pool.rank())
    with Watch(
        lambda: fsdp.held_bytes([p for p in model.parameters() if p.dim() > 1 and not p.is_meta])
    ) as watch:
        shard(model)
    assert max(held for _, held in watch.seen) <= 2 * 4 * sum(
        p.numel() for p in Block().parameters()
    )
    assert_at_rest(model)
    torch.testing.assert_close(
        fsdp.full_state_dict(model), dict(plain.state_dict()), rtol=0, atol=0
    )
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["5.bias"]
    batch_loss(model, 0, 0).backward()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("N", [2, 1024])
def test_costs(N, reshard, request):
    """In this process, the last of N ranks, in a world that moves no data; of 1024 by the collectives that NCCL has."""
    dist.init_process_group("fake", store=FakeStore(), rank=N - 1, world_size=N)
    request.addfinalizer(dist.destroy_process_group)
    model, x = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(6)]), torch.randn(1, 40)
    for layer in (*model, model):
        fsdp.fully_shard(layer, reshard_after_forward=reshard)
    layers, numbers = groups(model), range(6)
    unit = layers[0].unsharded.nbytes
    assert 4 * 40 * 40 <= unit < 4 * 40 * 40 + 32 * N

    def see():
        gradients = [
            p.unsharded.grad for u in layers for p in u.parameters if p.unsharded.grad is not None
        ]
        gradients += [t for u in layers for t in (u.gradients, u.received) if t is not None]
        under_way = (
            [n for n in numbers if layers[n].gathering],
            [n for n in numbers if layers[n].reducing],
        )
        return (
            fsdp.held_bytes([u.unsharded for u in layers]) / unit,
            fsdp.held_bytes(gradients) / unit,
            under_way,
        )

    losses = []  # graphs that nobody goes through, and earlier steps, hold up nothing
    for _ in range(2):  # the first time nobody knows what is next
        losses.append(model(x).sum())
        with fsdp.SentBytes() as sent, Watch(see) as watch:
            losses.append(model(x).square().mean())
            losses[-1].backward()
        assert sent.total == pytest.approx((2 + reshard) * 6 * unit * (N - 1) / N)
        gathered, gradients, _ = zip(*(seen for _, seen in watch.seen), strict=True)
        assert max(gathered) == (2 if reshard else 6)
        assert 2 <= max(gradients) <= 3 or N > 2  # NCCL adds what arrives
        assert see() == (0, 0, ([], []))
    # While a unit computes, the next is on its way; in backward, which has two products, also the last one's gradients.
    order = [([n + 1] * (n < 5), []) for n in numbers]
    for n in reversed(numbers):
        order += [([n - 1] * (n > 0 and reshard), [n + 1] * (n < 5))] * (1 + (n > 0))
    assert [under_way for name, (_, _, under_way) in watch.seen if name == "aten::mm"] == order
    assert (
        fsdp.held_bytes(model.parameters())
        == fsdp.held_bytes([p.grad for p in model.parameters()])
        == 6 * unit / N
    )


@pool.on(2)
def test_errors_on_every_rank():
    late, (model, plain), (moved, _), (replaced, _), batch = (
        pool.rank() == 1,
        pair(),
        pair(),
        pair(),
        make_batch(0, 0),
    )
    tied, box, saved = (
        nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8)),
        Block(),
        fsdp.full_state_dict(model),
    )
    tied[1].weight = tied[0].weight
    box.forward = make_dataclass("Box", ["y"])
    sharded, moved[1], replaced[-1].bias = (
        fully_shard(tied[0]),
        moved[1].double(),
        nn.Parameter(torch.zeros(3)),
    )
    grid = DeviceMesh("cpu", torch.arange(2).view(1, 2), _init_backend=False)
    less, short = {"0.one.bias": saved["0.one.bias"]}, saved | {"4.bias": torch.ones(1)}
    for error, words, do in [
        (ValueError, "has 2 dimensions", lambda: fsdp.fully_shard(nn.Linear(2, 2), mesh=grid)),
        (ValueError, r"differ in .*weight: \(2, 3\)", lambda: fully_shard(nn.Linear(3 + late, 2))),
        (
            ValueError,
            "differ in .*bias",
            lambda: fully_shard(nn.Linear(3, 2).requires_grad_(not late)),
        ),
        (ValueError, "1.weight of Sequential is tied to another unit's", lambda: fully_shard(tied)),
        (ValueError, "ModuleList has no forward", lambda: fully_shard(nn.ModuleList([Block()]))),
        (ValueError, "a unit already", lambda: fully_shard(sharded)),
        (
            ValueError,
            "over other ranks",
            lambda: fsdp.fully_shard(nn.Sequential(model)),
        ),  # all four
        (
            ValueError,
            "returns a Box; return tensors in lists",
            lambda: fully_shard(box)(torch.ones(6, 6)),
        ),
        (
            ValueError,
            "^weight: in no unit",
            lambda: fsdp.clip_grad_norm_(nn.Linear(1, 1, bias=False), 1.0),
        ),
        (RuntimeError, r"Missing key.*4\.bias", lambda: fsdp.load_full_state_dict(model, less)),
        (ValueError, r"is \(3,\), not \(1,\)", lambda: fsdp.load_full_state_dict(model, short)),
        (RuntimeError, "call full_state_dict", model.state_dict),
        (ValueError, r"Linear\.weight was moved or replaced", lambda: moved(batch)),
        (ValueError, r"Linear\.bias was moved or replaced", lambda: replaced(batch)),
    ]:
        with pytest.raises(error, match=words):
            do()
    with (
        pytest.raises(ValueError, match="rank 1 is not in process_group") if late else nullcontext()
    ):
        fsdp.fully_shard(nn.Linear(2, 2), process_group=pool._groups[1])  # of rank 0 alone
    fsdp.load_full_state_dict(
        model.to("cpu").float(), {n: v.double() for n, v in saved.items()}
    )  # changes nothing
    assert torch.equal(model(batch), plain(batch))
