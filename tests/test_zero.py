"""zero.py against one device, bit by bit. What is true of any such implementation, tests/claims says; here is the rest."""

import contextlib
import copy
import functools
import gc
import itertools
import weakref

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import HOW, MODELS, Blocks, Outer, Reader, Watch, batch_loss, make_batch, make_model
from torch.testing._internal.distributed.fake_pg import FakeStore

import amp
import zero

STAGES = (zero.Zero1, zero.Zero2, zero.Zero3)
each_stage = pytest.mark.parametrize("stage", STAGES)
OPTIONS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
}
bitwise = functools.partial(torch.testing.assert_close, rtol=0, atol=0)  # of whole structures


def full(optimizer):
    return getattr(optimizer, "full_parameters", contextlib.nullcontext)()


def whole_bytes(optimizer):
    """What has memory now of whole parameters."""
    return sum(bucket.flat.untyped_storage().nbytes() for bucket in optimizer._buckets)


def same_parameters(optimizer, model, plain):
    with full(optimizer):
        ours = list(model.parameters())
        bitwise(ours, [p.to(q.dtype) for p, q in zip(plain.parameters(), ours, strict=True)])


def one_device_backward(plain, rounds, dtype=torch.float32, loss=batch_loss):
    """Leave the mean over ranks in .grad; a rank adds up a round's gradients first. In 16 bits, `plain` has masters."""
    low, sums, N = (
        copy.deepcopy(plain).to(dtype) if dtype.itemsize < 4 else plain,
        {},
        pool.world_size(),
    )
    plain.zero_grad()
    for numbers in rounds:
        for rank in range(N):
            for number in numbers:
                loss(low, rank, number).backward()
            for p, q in zip(plain.parameters(), low.parameters(), strict=True):
                if q.grad is not None:
                    sums[p], q.grad = sums.get(p, 0) + q.grad.to(p.dtype), None
    for p, q in zip(plain.parameters(), low.parameters(), strict=True):
        p.grad = (sums[p] / N).to(q.dtype).to(p.dtype) if p in sums else None


def train(
    stage, make, name="AdamW", micros=(1, 0), groups=nn.Module.parameters, loss=batch_loss,
    before=lambda step, optimizer, model: None, saved=None, **arguments,
):  # fmt: skip
    """Train both from rank 0's weights: after each step they have the same parameters, and at the end the same state.

    Of the `micros` backwards in a step, the first so many run in no_sync(). `saved`: what to go on from, and returned.
    """
    N, rank, cls, options = (
        pool.world_size(),
        pool.rank(),
        getattr(torch.optim, name),
        OPTIONS.get(name, {"lr": 0.01}),
    )
    model = make()
    low = (dtype := next(model.parameters()).dtype).itemsize < 4
    plain = copy.deepcopy(model).to(torch.float32 if low else None)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(rank)
    optimizer = stage(model, cls, pool.group(), params=groups(model), **arguments, **options)
    theirs = cls(groups(plain), **options)
    for each, module in ((optimizer, model), (theirs, plain)) if saved else ():
        each.load_state_dict(saved[1])
        with full(each):
            module.load_state_dict(saved[0])  # masters: as 16 bits they change nothing
    bitwise(list(model.buffers()), list(plain.buffers()))
    psi_bytes = (
        sum(bucket.flat.nbytes for bucket in optimizer._buckets) if stage is zero.Zero3 else 0
    )
    for step, inside in enumerate((False, True, False)):
        for each, module in ((optimizer, model), (theirs, plain)):
            before(step, each, module)
            with full(each):  # what is written stays, and the rest keeps its fp32 digits
                next(module.parameters()).data.fill_((step + 1) / 8)
        optimizer.zero_grad()
        batches = range(step * micros[0], (step + 1) * micros[0])
        at_once = micros[1] or stage is zero.Zero1  # a rank adds up first
        one_device_backward(
            plain, [batches] if at_once else [[batch] for batch in batches], dtype, loss
        )
        with full(optimizer) if inside else contextlib.nullcontext():
            with optimizer.no_sync(), optimizer.no_sync(), zero.SentBytes() as sent:
                for batch in batches[: micros[1]]:
                    loss(model, rank, batch).backward()
            assert (
                inside or sent.total == 2 * micros[1] * psi_bytes * (N - 1) / N
            )  # Zero3's gathers, and no gradients
            for batch in batches[micros[1] :]:
                loss(model, rank, batch).backward()
                assert stage is zero.Zero1 or all(
                    p.grad is None for of in optimizer.param_groups for p in of["params"]
                )
            if inside:
                norm = nn.utils.clip_grad_norm_(
                    [p for group in theirs.param_groups for p in group["params"]], 1e9
                )
                assert abs(optimizer.clip_grad_norm_(1e9) - norm) <= (1e-2 if low else 1e-6) * norm
            optimizer.step()
        theirs.step()
        same_parameters(optimizer, model, plain)
    held, state, expected = zero.held_by(optimizer), optimizer.state_dict(), theirs.state_dict()
    for number, master in enumerate(plain.parameters()) if low else ():
        expected["state"].setdefault(number, {})["master"] = master
    saved = copy.deepcopy((plain.state_dict(), expected))
    optimizer.step()  # again
    theirs.step()
    same_parameters(optimizer, model, plain)
    bitwise(state, saved[1])  # also now: it is a copy
    optimizer.load_state_dict(state)
    bitwise(optimizer.state_dict(), state, check_dtype=False)  # torch.optim casts NAdam's scalar
    # A shard, and nothing of the whole: torch.optim casts a scalar of NAdam's to the parameter's type.
    numbers = 8 * len(list(model.parameters()))
    assert all(0 <= a - b <= numbers for a, b in zip(zero.held_by(optimizer), held, strict=True))
    assert stage is not zero.Zero3 or whole_bytes(optimizer) == 0
    for bucket in optimizer._buckets:
        size = bucket.flat.itemsize
        assert not any(slot.start * size % 64 for slot in bucket.slots)  # as torch allocates
        assert bucket.shard.nbytes % 16 == 0  # as NCCL wants messages
    return optimizer, model, plain, (saved[0], state)


@pool.on(3)
def test_the_naive_form():
    ours = make_model("plain")
    plain, shard = (
        copy.deepcopy(ours),
        zero.flatten(ours.parameters(), 3).chunk(3)[pool.rank()].clone(),
    )
    optimizer, theirs = torch.optim.AdamW([shard]), torch.optim.AdamW(plain.parameters())
    for step in range(3):
        ours.zero_grad()
        batch_loss(ours, pool.rank(), step).backward()
        zero.sharded_step(ours.parameters(), shard, optimizer, pool.group())
        one_device_backward(plain, [[step]])
        theirs.step()
        bitwise(list(ours.parameters()), list(plain.parameters()))


def two_groups(model):
    """One with options of its own; and a bias in no group."""
    matrices, vectors = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    return [{"params": matrices}, {"params": vectors[1:], "weight_decay": 0.1, "lr": 0.05}]


def change_groups(step, optimizer, model):
    optimizer.param_groups[1]["weight_decay"] = 0.3 if step == 2 else 0.0
    model[2].weight.requires_grad_(step != 1)


def raise_in_backward(step, optimizer, model):
    hidden = model[:2](make_batch(0, 0))
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model[2:](hidden).sum().backward()


def large_loss(model, rank, step):
    """Three ranks' fp16 gradients have a sum beyond 65504, and a mean within."""
    return 16000 * model(make_batch(rank, step, torch.float16)).square().sum()


SMALL, OFFLOAD, plain_model = (
    {"bucket_cap_mb": 1e-3},
    {"offload": "cpu"},
    functools.partial(make_model, "plain"),
)
WHAT = itertools.product(STAGES, [Outer, *(functools.partial(make_model, kind) for kind in MODELS)])
HOWS = itertools.cycle([SMALL, SMALL | OFFLOAD, OFFLOAD, {}])
SPECIAL = [
    (plain_model, "SGD", SMALL | {"groups": two_groups, "before": change_groups, "micros": (2, 0)}),
    (functools.partial(plain_model, torch.float16), "Adam", OFFLOAD | {"loss": large_loss}),
]
CASES = [*zip(WHAT, itertools.cycle(sorted(zero.ELEMENTWISE)), HOWS, strict=False)]
CASES += [((stage, make), name, how) for stage in STAGES for make, name, how in SPECIAL]


@pytest.mark.parametrize(("what", "name", "how"), CASES)
@pool.on(3)
def test_models_optimizers_and_options(what, name, how):
    """Every model by every stage, every optimizer by one at least; parameter groups, and what overflows."""
    train(*what, name, **how)


@each_stage
@pool.on(2)
def test_nothing_is_left_behind(stage):
    """By a backward that raises; and by an optimizer that is gone, though the model is not."""
    optimizer, model, *_ = train(stage, plain_model, before=raise_in_backward, **SMALL)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    if stage is not zero.Zero3:
        batch_loss(model, pool.rank(), 0).backward()  # nobody reduces any more
        assert all(p.grad is not None for p in model.parameters())


def body_random(stage, saved, numels, low, micros, **arguments):
    dtype = (
        torch.bfloat16 if low and micros != (2, 0) else torch.float32
    )  # each round's mean is rounded
    make, saved = lambda: Reader(numels).to(dtype), copy.deepcopy(saved)  # which ranks share
    return train(stage, make, loss=Reader.__call__, micros=micros, saved=saved, **arguments)[-1]


@settings(max_examples=8)
@given(
    worlds=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(STAGES)), min_size=2, max_size=2), low=st.booleans(),
    numels=st.lists(st.integers(0, 70), min_size=1, max_size=7), bucket_cap_mb=st.sampled_from([25, 1e-4]),
    name=st.sampled_from(["SGD", "AdamW"]), micros=st.sampled_from([(1, 0), (2, 0), (2, 1), (2, 2)]),
)  # fmt: skip
def test_what_some_ranks_use_and_other_worlds_go_on_with(worlds, **arguments):
    """What one rank uses is averaged with the others' zeros; what none uses is left alone, its state included."""
    saved = None
    for N, stage in worlds:
        saved = pool.run(N, functools.partial(body_random, stage, saved, **arguments))[-1]


@each_stage
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pool.on(2)
def test_gradients_of_a_scaled_loss_and_an_overflow_on_one_rank(stage, dtype):
    plain = make_model("plain")
    model = copy.deepcopy(plain).to(dtype)
    plain.load_state_dict(model.state_dict())  # the same values, in fp32
    optimizer = stage(model, torch.optim.SGD, pool.group(), lr=0.5)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    scaler = amp.GradScaler(pool.device().type, init_scale=1024.0, process_group=pool.group())
    for step in range(3):
        overflow = torch.inf if step == 1 and pool.rank() == 1 else 1.0
        optimizer.zero_grad()
        scaler.scale(batch_loss(model, pool.rank(), step) * overflow).backward()
        scaler.record_found_inf(optimizer, optimizer.unscale_(scaler.get_scale()))
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            one_device_backward(plain, [[step]])
            theirs.step()
        with full(optimizer):
            ours = [p.detach().float().clone() for p in model.parameters()]
        within = {"rtol": 0, "atol": 0 if dtype == torch.float32 else 2e-3}
        torch.testing.assert_close(ours, [p.detach() for p in plain.parameters()], **within)
    assert scaler.get_scale() == 512.0


@each_stage
@pool.on(3)
def test_shards_are_all_of_the_model_and_may_be_written(stage):
    model = make_model("plain", torch.bfloat16)
    optimizer = stage(model, torch.optim.AdamW, pool.group(), bucket_cap_mb=1e-3)
    batch_loss(model, pool.rank(), 0).backward()
    optimizer.step()
    for parameter, start, shard, state in optimizer.shards():
        assert shard.numel() == state["exp_avg"].numel() <= parameter.numel() - start
        numbers = start + torch.arange(shard.numel(), dtype=torch.float32)
        shard.data.copy_(numbers % 128)
    optimizer.sync_parameters()
    with full(optimizer):
        for parameter in model.parameters():
            assert parameter.flatten().tolist() == [n % 128 for n in range(parameter.numel())]


@each_stage
@pool.on(2)
def test_a_loaded_step_count_becomes_what_a_fused_optimizer_wants(stage):
    """As torch.optim's: in fp32 on the parameter's device. Here only the type can differ."""
    model, plain = make_model("plain"), make_model("plain")
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    batch_loss(plain, 0, 0).backward()
    theirs.step()
    saved = theirs.state_dict()
    for entry in saved["state"].values():
        entry["step"] = torch.tensor(7, dtype=torch.int64)
    optimizer = stage(model, torch.optim.AdamW, pool.group(), fused=True)
    optimizer.load_state_dict(saved)
    theirs.load_state_dict(saved)
    bitwise(optimizer.state_dict(), theirs.state_dict())


# ---- Costs


def live_bytes():
    """Bytes of the distinct storages of all tensors made since gc.freeze()."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@each_stage
@pytest.mark.parametrize(("N", "low", "frozen"), [(3, 0, 0), (2, 1, 0), (2, 0, 1), (64, 0, 0)])
def test_bytes_held_and_sent_are_those_of_the_docstring(stage, N, low, frozen, request):
    """In this process, in a world that moves no data."""
    dist.init_process_group("fake", store=FakeStore(), rank=N // 2, world_size=N)
    request.addfinalizer(dist.destroy_process_group)
    gc.freeze()
    request.addfinalizer(gc.unfreeze)
    start, x = live_bytes(), torch.randn(4, 64).to(torch.bfloat16 if low else torch.float32)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(x.dtype)
    for layer in model:
        layer.weight.requires_grad_(not frozen)
    optimizer = stage(model, torch.optim.AdamW, bucket_cap_mb=0.01, lr=1e-3)
    psi = sum(bucket.flat.nbytes for bucket in optimizer._buckets)
    trained = sum(
        bucket.flat.nbytes for bucket in optimizer._buckets if bucket.parameters[0].requires_grad
    )
    assert (
        0 <= psi - sum(p.nbytes for p in model.parameters()) <= 16 * N * len(optimizer._buckets)
    )  # padding
    unpadded = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    params, grads = (
        psi / (N if stage is zero.Zero3 else 1),
        unpadded if stage is zero.Zero1 else trained / N,
    )
    state = (4 * trained + 2 * psi if low else 2 * trained) / N
    passes = {
        zero.Zero1: 2 * trained,
        zero.Zero2: 3 * trained,
        zero.Zero3: 2 * (2 * psi + trained),
    }[stage]
    flags = 2 * (16 + 8 + 16)  # a byte per tensor, the norm, a byte again
    see = lambda: (whole_bytes(optimizer), sum(p.grad is not None for p in model.parameters()))  # noqa: E731
    for step in range(2):
        optimizer.zero_grad()
        with zero.SentBytes() as sent:
            for _ in range(2):
                with Watch(see) as watch:
                    y = model(x)
                    between = whole_bytes(optimizer)
                    y.square().mean().backward()
                    del y
            if step:
                for measured in (live_bytes() - start - x.nbytes, sum(zero.held_by(optimizer))):
                    assert 0 <= measured - params - grads - state <= 300
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        assert sent.total == pytest.approx((passes + flags) * (N - 1) / N)
    assert (
        0 <= live_bytes() - start - x.nbytes - params - trained / N - state <= 300
    )  # step() has moved gradients
    whole, gradients = (
        max(values) for values in zip(*(seen for _, seen in watch.seen), strict=True)
    )
    assert (whole, between) == (
        (psi / 4, 0) if stage is zero.Zero3 else (psi, psi)
    )  # two of eight units, and none
    if (
        stage is zero.Zero2 and not frozen
    ):  # what backward has passed is on its way, and not in .grad
        first = next(number for number, (name, _) in enumerate(watch.seen) if "c10d" in name)
        assert [name for name, _ in watch.seen[:first]].count("aten::mm") <= 4
        assert gradients <= 4
    torch.autograd.grad(model(x.requires_grad_()).sum(), x)  # a backward that reaches no parameter
    assert whole_bytes(optimizer) == between


def test_buckets_are_in_the_order_in_which_backward_fills_them():
    parameters = [nn.Parameter(torch.tensor(float(number))) for number in range(6)]
    kind_of = dict(zip(parameters, "abaccc", strict=True)).get
    buckets = zero.assign_buckets(parameters, kind_of, cap_bytes=12)
    assert [[int(parameter) for parameter in bucket] for bucket in buckets] == [
        [5, 4, 3],
        [2, 0],
        [1],
    ]


# ---- Zero3


@pool.on(3)
def test_whole_parameters_of_zero3():
    """To look at, load, and train on, where one asks for them; else NaN. A copy is not sharded, a part runs alone."""

    def in_vain(step, optimizer, model):  # a forward of which there is no backward
        batch_loss(model, 0, 9)

    optimizer, model, plain, *_ = train(
        zero.Zero3, functools.partial(make_model, "odd"), before=in_vain
    )
    assert all(p.isnan().all() for p in model.parameters())
    assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
    for part in (model, model.first):
        with pytest.raises(RuntimeError, match="module_state_dict"):
            part.state_dict()
    with optimizer.full_parameters():
        average = copy.deepcopy(model)
    bitwise(average.state_dict(), plain.state_dict())
    x = make_batch(0, 0)
    with torch.no_grad():
        ours, expected = (
            [model(x), model.first(x[:, 1:]), average(x)],
            [plain(x), plain.first(x[:, 1:]), plain(x)],
        )
    bitwise(ours, expected)


@pytest.mark.parametrize("how", HOW)
@pool.on(2)
def test_units_of_zero3_and_their_prefetch(how):
    """While a unit computes, that which came next the last time is on its way, and nothing is gathered in vain."""

    def loss_of(model, *number):
        return model(make_batch(*number).requires_grad_(), how=HOW[how]).square().mean()

    optimizer, model, plain, *_ = train(zero.Zero3, functools.partial(Blocks, 7), loss=loss_of)
    buckets, early = optimizer._buckets[::-1], []
    psi_bytes = sum(bucket.flat.nbytes for bucket in buckets)
    ahead = lambda: [number for number, bucket in enumerate(buckets) if bucket.gathering]  # noqa: E731
    optimizer.zero_grad()
    loss = None
    for order in ([[1], [2], [3], [4], [5], [6], [7], []], [[6], [5], [4], [3], [2], [1], [0], []]):
        with zero.SentBytes() as sent, Watch(ahead) as watch:
            loss = loss.backward() if loss else loss_of(model, 0, 0)
        products = [numbers for name, numbers in watch.seen if name in ("aten::addmm", "aten::mm")]
        assert [numbers for numbers, _ in itertools.groupby(products)] == order
        assert sent.total == (psi_bytes / 2 if loss else psi_bytes)

    def look(inner, *_):  # at shards that a step is about to change: none is on its way
        early.extend(
            b
            for b in buckets
            if b.gathering and b.slots[0].segment is inner.param_groups[0]["params"][0]
        )

    optimizer._optimizer.register_step_pre_hook(look)
    with torch.no_grad():
        bitwise(
            model[0].one(make_batch(0, 0)), plain[0].one(make_batch(0, 0))
        )  # alone; the next is gathered
    assert ahead() == [1]
    optimizer.step()
    assert not early


class Positions(nn.Module):
    """Reads the weights of its position embedding, or calls it."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads
        self.tok, self.pos, self.unused = (nn.Embedding(9, 4) for _ in range(3))
        self.head = nn.Linear(4, 9)

    def forward(self, tokens):
        count = tokens.shape[1]
        positions = self.pos.weight[:count] if self.reads else self.pos(torch.arange(count))
        return self.head(self.tok(tokens) + positions)


@pool.on(2)
def test_zero3_says_which_parameter_was_read_without_its_module():
    """Also in the second step, when prefetching may have gathered it; and a module that is not used is no error."""
    model = Positions(reads=False)
    optimizer = zero.Zero3(model, torch.optim.SGD, pool.group(), lr=0.1)
    tokens = torch.arange(6).view(2, 3)
    for model.reads in (False, True, False):
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        says = pytest.raises(RuntimeError, match=r"pos\.weight has a gradient.* call the module")
        with says if model.reads else contextlib.nullcontext():
            loss.backward()
    assert loss.isfinite()


# ---- Wrong use


@each_stage
@pool.on(2)
def test_wrong_use(stage):
    rank, plain, group = pool.rank(), make_model("plain"), pool.group()
    differs = f"the same model; rank {1 - rank}'s differs in .*shape"
    named = [
        type(name, (torch.optim.Optimizer,), {})
        for name in ("LBFGS", "Adafactor", "SparseAdam", "Muon")
    ]
    for words, module, wrong in [
        (differs, nn.Sequential(nn.Linear(2, 2), nn.Linear(6, 4 + rank)), {}),
        (differs, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(4 + rank, affine=False)), {}),
        (differs, make_model("plain", (torch.float32, torch.float64)[rank]), {}),
        (
            "which averages as well",
            nn.parallel.DistributedDataParallel(plain, process_group=group),
            {},
        ),
        ("not among module.parameters", make_model("plain"), {"params": plain.parameters()}),
        *(
            (f"{cls.__name__} may need whole .*AdamW", plain, {"optimizer_class": cls})
            for cls in named
        ),
        *[("not in process_group", plain, {"process_group": dist.GroupMember.NON_GROUP_MEMBER})]
        * rank,
    ]:
        with pytest.raises(ValueError, match=words):
            stage(module, **{"optimizer_class": torch.optim.SGD, "process_group": group} | wrong)
    optimizer = stage(plain, torch.optim.SGD, group)
    with pytest.raises(ValueError, match="to the constructor"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    for move, words in ((torch.nn.Module.float, ""), (torch.nn.Module.double, r"after module\.to")):
        move(plain)
        with pytest.raises(RuntimeError, match=words) if words else contextlib.nullcontext():
            batch_loss(plain, rank, 1).backward()
            optimizer.step()
