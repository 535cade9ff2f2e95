"""zero.py against one device, bit by bit. tests/claims has what holds for any such optimizer."""

import contextlib
import copy
import functools
import gc
import itertools
import math
import weakref

import pool
import pytest
import shared
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import HOW, MODELS, Blocks, Outer, Reader, Watch, batch_loss, make_batch, make_model

import zero

STAGES = (zero.Zero1, zero.Zero2, zero.Zero3)
each_stage = pytest.mark.parametrize("stage", STAGES)
OPTIONS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
}
bitwise = functools.partial(torch.testing.assert_close, rtol=0, atol=0)  # of whole structures


def full(optimizer):
    """Whole parameters, of Zero3; the others have them anyway."""
    return getattr(optimizer, "full_parameters", contextlib.nullcontext)()


def whole_bytes(optimizer):
    """The memory of whole parameters now."""
    return sum(bucket.flat.untyped_storage().nbytes() for bucket in optimizer._buckets)


def same_parameters(optimizer, model, plain):
    with full(optimizer):
        ours = list(model.parameters())
        bitwise(ours, [p.to(q.dtype) for p, q in zip(plain.parameters(), ours, strict=True)])


def one_device_backward(plain, rounds, dtype=torch.float32, loss=batch_loss):
    """Leave the mean over ranks in .grad. In 16 bits, `plain` is the masters.

    In each round every rank adds up the gradients of these batches before they are reduced.
    """
    low = copy.deepcopy(plain).to(dtype) if dtype.itemsize < 4 else plain
    pairs = list(zip(plain.parameters(), low.parameters(), strict=True))
    sums = {}
    plain.zero_grad()
    for numbers in rounds:
        for rank in range(pool.world_size()):
            for number in numbers:
                loss(low, rank, number).backward()
            for p, q in pairs:
                if q.grad is not None:
                    sums[p] = sums.get(p, 0) + q.grad.to(p.dtype)
                    q.grad = None
    for p, q in pairs:
        p.grad = (sums[p] / pool.world_size()).to(q.dtype).to(p.dtype) if p in sums else None


def train(
    stage, make, name="AdamW", micros=(1, 0), groups=nn.Module.parameters, loss=batch_loss,
    before=lambda step, optimizer, model: None, saved=None, **arguments,
):  # fmt: skip
    """Train ours and one device from rank 0's weights. They stay equal, and end in the same state.

    `micros`: the backwards in a step, and how many of them run in no_sync(), first. `saved` is
    what to go on from; it is returned, too.
    """
    model = make()
    dtype = next(model.parameters()).dtype
    low = dtype.itemsize < 4
    plain = copy.deepcopy(model).to(torch.float32 if low else None)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(pool.rank())
    options = OPTIONS.get(name, {"lr": 0.01})
    cls = getattr(torch.optim, name)
    optimizer = stage(model, cls, pool.group(), params=groups(model), **arguments, **options)
    theirs = cls(groups(plain), **options)
    both = ((optimizer, model), (theirs, plain))
    for each, module in both if saved else ():
        each.load_state_dict(saved[1])
        with full(each):
            module.load_state_dict(saved[0])  # the same values in 16 bits, so masters stay
    bitwise(list(model.buffers()), list(plain.buffers()))

    for step, inside in enumerate((False, True, False)):
        for each, module in both:
            before(step, each, module)
            with full(each):  # a write is kept, and the rest keeps its fp32 digits
                next(module.parameters()).data.fill_((step + 1) / 8)
        optimizer.zero_grad()
        batches = range(step * micros[0], (step + 1) * micros[0])
        at_once = micros[1] or stage is zero.Zero1  # a rank adds up its own gradients first
        rounds = [batches] if at_once else [[batch] for batch in batches]
        one_device_backward(plain, rounds, dtype, loss)
        with full(optimizer) if inside else contextlib.nullcontext():
            backwards(optimizer, model, loss, batches, micros[1], inside)
            if inside:
                gradients = [p for group in theirs.param_groups for p in group["params"]]
                norm = nn.utils.clip_grad_norm_(gradients, 1e9)
                assert abs(optimizer.clip_grad_norm_(1e9) - norm) <= (1e-2 if low else 1e-6) * norm
            optimizer.step()
        theirs.step()
        same_parameters(optimizer, model, plain)

    # Their states are the same; ours is a copy, and loading it takes no memory.
    held = zero.held_by(optimizer)
    state = optimizer.state_dict()
    expected = theirs.state_dict()
    for number, master in enumerate(plain.parameters()) if low else ():
        expected["state"].setdefault(number, {})["master"] = master
    saved = copy.deepcopy((plain.state_dict(), expected))
    optimizer.step()  # again, with the same gradients
    theirs.step()
    same_parameters(optimizer, model, plain)
    bitwise(state, saved[1])
    for _, _, segment, _ in optimizer.shards() if low else ():
        segment.add_(1)
    optimizer.load_state_dict(state)
    bitwise(optimizer.state_dict(), state, check_dtype=False)  # torch.optim casts NAdam's scalar
    numbers = 8 * len(list(model.parameters()))
    assert all(0 <= a - b <= numbers for a, b in zip(zero.held_by(optimizer), held, strict=True))
    assert stage is not zero.Zero3 or whole_bytes(optimizer) == 0
    for bucket in optimizer._buckets:
        starts = [slot.start * bucket.flat.itemsize for slot in bucket.slots]
        assert not any(start % 64 for start in starts)  # as torch allocates
        assert bucket.shard.nbytes % 16 == 0  # as NCCL wants messages
    return optimizer, model, plain, (saved[0], state)


def backwards(optimizer, model, loss, batches, unsynced, inside):
    """Run them, and check that no_sync() sends no gradients, and that others leave no .grad."""
    N = pool.world_size()
    sharded = isinstance(optimizer, zero.Zero3)
    psi_bytes = sum(bucket.flat.nbytes for bucket in optimizer._buckets) if sharded else 0
    with optimizer.no_sync(), optimizer.no_sync(), zero.SentBytes() as sent:
        for batch in batches[:unsynced]:
            loss(model, pool.rank(), batch).backward()
    assert inside or sent.total == 2 * unsynced * psi_bytes * (N - 1) / N  # Zero3 gathers
    for batch in batches[unsynced:]:
        loss(model, pool.rank(), batch).backward()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        assert type(optimizer) is zero.Zero1 or all(p.grad is None for p in parameters)


@pool.on(3)
def test_the_naive_form():
    ours = make_model("plain")
    plain = copy.deepcopy(ours)
    shard = zero.flatten(ours.parameters(), 3).chunk(3)[pool.rank()].clone()
    optimizer = torch.optim.AdamW([shard])
    theirs = torch.optim.AdamW(plain.parameters())
    for step in range(3):
        ours.zero_grad()
        batch_loss(ours, pool.rank(), step).backward()
        zero.sharded_step(ours.parameters(), shard, optimizer, pool.group())
        one_device_backward(plain, [[step]])
        theirs.step()
        bitwise(list(ours.parameters()), list(plain.parameters()))


def two_groups(model):
    """One with options of its own; one bias is in none."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
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
    """The sum of three ranks' fp16 gradients is beyond 65504, and their mean is not."""
    return 16000 * model(make_batch(rank, step, torch.float16)).square().sum()


SMALL = {"bucket_cap_mb": 1e-3}
OFFLOAD = {"offload": "cpu"}
PLAIN = functools.partial(make_model, "plain")
WHAT = itertools.product(STAGES, [Outer, *(functools.partial(make_model, kind) for kind in MODELS)])
HOWS = itertools.cycle([SMALL, SMALL | OFFLOAD, OFFLOAD, {}])
SPECIAL = [
    (PLAIN, "SGD", SMALL | {"groups": two_groups, "before": change_groups, "micros": (2, 0)}),
    (functools.partial(PLAIN, torch.float16), "Adam", OFFLOAD | {"loss": large_loss}),
]
CASES = [*zip(WHAT, itertools.cycle(sorted(zero.ELEMENTWISE)), HOWS, strict=False)]
CASES += [((stage, make), name, how) for stage in STAGES for make, name, how in SPECIAL]


@pytest.mark.parametrize(("what", "name", "how"), CASES)
@pool.on(3)
def test_models_optimizers_and_options(what, name, how):
    """Every model by every stage, and every optimizer; parameter groups; what would overflow."""
    train(*what, name, **how)


@each_stage
@pool.on(2)
def test_nothing_is_left_behind(stage):
    """By a backward that raises; by an optimizer that is gone while the model is not."""
    optimizer, model, *_ = train(stage, PLAIN, before=raise_in_backward, **SMALL)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    if stage is not zero.Zero3:
        batch_loss(model, pool.rank(), 0).backward()  # reduces nothing any more
        assert all(p.grad is not None for p in model.parameters())


def body_random(stage, saved, numels, low, micros, **arguments):
    dtype = torch.bfloat16 if low and micros != (2, 0) else torch.float32  # a mean is rounded
    make = lambda: Reader(numels).to(dtype)  # noqa: E731
    saved = copy.deepcopy(saved)  # which ranks share
    return train(stage, make, loss=Reader.__call__, micros=micros, saved=saved, **arguments)[-1]


@settings(max_examples=8)
@given(
    worlds=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(STAGES)), min_size=2, max_size=2),
    low=st.booleans(), numels=st.lists(st.integers(0, 70), min_size=1, max_size=7),
    bucket_cap_mb=st.sampled_from([25, 1e-4]), name=st.sampled_from(["SGD", "AdamW"]),
    micros=st.sampled_from([(1, 0), (2, 0), (2, 1), (2, 2)]),
)  # fmt: skip
def test_what_some_ranks_use_and_other_worlds_go_on_with(worlds, **arguments):
    """What one rank uses is averaged with the others' zeros. What no rank uses stays as it is."""
    saved = None
    for N, stage in worlds:
        saved = pool.run(N, functools.partial(body_random, stage, saved, **arguments))[-1]


@each_stage
@pool.on(2)
def test_the_scale_of_a_loss_divides_gradients_and_their_norm(stage):
    """Until zero_grad(). An overflow on one rank is found on all. (amp.GradScaler: test_amp.)"""
    model = PLAIN(torch.float16)
    plain = copy.deepcopy(model).float()
    optimizer = stage(model, torch.optim.SGD, pool.group(), lr=0.5)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    norms = []
    for scale in (1.0, 1024.0):
        optimizer.zero_grad()
        (batch_loss(model, pool.rank(), 0) * scale).backward()
        norms.append(optimizer.clip_grad_norm_(math.inf))
    assert optimizer.unscale_(1024.0) == 0
    torch.testing.assert_close(norms[1] / 1024, norms[0], rtol=2e-3, atol=0)
    assert optimizer.clip_grad_norm_(math.inf) == norms[1] / 1024
    optimizer.step()
    one_device_backward(plain, [[0]])
    theirs.step()
    with full(optimizer):
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all((p - q).abs().max() < 2e-3 for p, q in pairs)
    optimizer.zero_grad()
    overflow = math.inf if pool.rank() == 1 else 1.0
    batch_loss(model, pool.rank(), 0).backward()
    assert optimizer.clip_grad_norm_(math.inf) > 100 * norms[0] / 1024  # not divided
    (batch_loss(model, pool.rank(), 0) * overflow).backward()
    assert not optimizer.clip_grad_norm_(math.inf).isfinite()
    assert optimizer.unscale_(1024.0) == 1


@each_stage
@pool.on(3)
def test_a_norm_over_several_groups_counts_what_it_is_told(stage):
    """The group of all ranks stands for one of model parallelism: it adds up three equal norms."""
    model = PLAIN()
    optimizer = stage(model, torch.optim.SGD, pool.group())
    batch_loss(model, pool.rank(), 0).backward()
    whole = optimizer.clip_grad_norm_(math.inf)
    matrices = optimizer.clip_grad_norm_(math.inf, counted=lambda p: p.dim() == 2)
    vectors = optimizer.clip_grad_norm_(math.inf, counted=lambda p: p.dim() == 1)
    torch.testing.assert_close(matrices.square() + vectors.square(), whole.square())
    assert 0 < vectors < whole
    thrice = optimizer.clip_grad_norm_(math.inf, process_groups=[pool.group()])
    torch.testing.assert_close(thrice.square(), 3 * whole.square())


@each_stage
@pool.on(3)
def test_shards_are_all_of_the_model_and_may_be_written(stage):
    model = PLAIN(torch.bfloat16)
    optimizer = stage(model, torch.optim.AdamW, pool.group(), **SMALL)
    batch_loss(model, pool.rank(), 0).backward()
    optimizer.step()
    for parameter, first, segment, state in optimizer.shards():
        assert segment.numel() == state["exp_avg"].numel() <= parameter.numel() - first
        numbers = first + torch.arange(segment.numel(), dtype=torch.float32)
        segment.copy_(numbers % 128)
    optimizer.sync_parameters()
    with full(optimizer):
        for parameter in model.parameters():
            assert parameter.flatten().tolist() == [n % 128 for n in range(parameter.numel())]


@each_stage
@pool.on(2)
def test_a_loaded_step_count_becomes_what_a_fused_optimizer_wants(stage):
    """As torch.optim's: in fp32, on the parameter's device. Here only the type can differ."""
    plain = PLAIN()
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    batch_loss(plain, 0, 0).backward()
    theirs.step()
    saved = theirs.state_dict()
    for state in saved["state"].values():
        state["step"] = torch.tensor(7, dtype=torch.int64)
    optimizer = stage(PLAIN(), torch.optim.AdamW, pool.group(), fused=True)
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
    gc.freeze()
    request.addfinalizer(gc.unfreeze)
    with shared.fake_world(N, rank=N // 2):
        check_costs(stage, N, low, frozen)


def check_costs(stage, N, low, frozen):
    start = live_bytes()
    x = torch.randn(4, 64).to(torch.bfloat16 if low else torch.float32)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(x.dtype)
    for layer in model:
        layer.weight.requires_grad_(not frozen)
    optimizer = stage(model, torch.optim.AdamW, bucket_cap_mb=0.01, lr=1e-3)
    buckets = optimizer._buckets
    psi = sum(bucket.flat.nbytes for bucket in buckets)
    trained = sum(b.flat.nbytes for b in buckets if b.parameters[0].requires_grad)
    padding = psi - sum(p.nbytes for p in model.parameters())
    assert 0 <= padding <= 16 * N * len(buckets)
    unpadded = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    params = psi / N if stage is zero.Zero3 else psi
    grads = unpadded if stage is zero.Zero1 else trained / N
    state = (4 * trained + 2 * psi if low else 2 * trained) / N
    passes = {zero.Zero1: 2 * trained, zero.Zero2: 3 * trained, zero.Zero3: 4 * psi + 2 * trained}
    flags = 2 * (16 + 8 + 16)  # a byte per tensor, the norm, a byte again

    def see():
        return whole_bytes(optimizer), sum(p.grad is not None for p in model.parameters())

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
        assert sent.total == pytest.approx((passes[stage] + flags) * (N - 1) / N)
    # step() has moved gradients
    assert 0 <= live_bytes() - start - x.nbytes - params - trained / N - state <= 300
    whole = max(whole for _, (whole, _) in watch.seen)
    gradients = max(gradients for _, (_, gradients) in watch.seen)
    if stage is zero.Zero3:
        assert (whole, between) == (psi / 4, 0)  # two units of eight, and none
    else:
        assert (whole, between) == (psi, psi)
    if stage is zero.Zero2 and not frozen:  # backward sends what it has passed, and frees .grad
        first = next(number for number, (name, _) in enumerate(watch.seen) if "c10d" in name)
        assert [name for name, _ in watch.seen[:first]].count("aten::mm") <= 4
        assert gradients <= 4
    torch.autograd.grad(model(x.requires_grad_()).sum(), x)  # a backward that reaches no parameter
    assert whole_bytes(optimizer) == between


def test_buckets_are_in_the_order_of_backward():
    parameters = [nn.Parameter(torch.tensor(float(number))) for number in range(6)]
    kind_of = dict(zip(parameters, "abaccc", strict=True)).get
    buckets = zero.assign_buckets(parameters, kind_of, cap_bytes=12)
    numbers = [[int(parameter) for parameter in bucket] for bucket in buckets]
    assert numbers == [[5, 4, 3], [2, 0], [1]]


# ---- Zero3


@pool.on(3)
def test_whole_parameters_of_zero3():
    """To look at, load and train on; else they are NaN. A copy is whole, a part runs alone."""

    def in_vain(step, optimizer, model):  # a forward without a backward
        batch_loss(model, 0, 9)

    make = functools.partial(make_model, "odd")
    optimizer, model, plain, *_ = train(zero.Zero3, make, before=in_vain)
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
        bitwise([model(x), average(x)], [plain(x), plain(x)])
        bitwise(model.first(x[:, 1:]), plain.first(x[:, 1:]))


@pytest.mark.parametrize("how", HOW)
@pool.on(2)
def test_units_of_zero3_and_their_prefetch(how):
    """While a unit computes, the one that came next last time is on its way, and no other."""

    def loss_of(model, *number):
        return model(make_batch(*number).requires_grad_(), how=HOW[how]).square().mean()

    def ahead():
        return [number for number, bucket in enumerate(buckets) if bucket.gathering]

    optimizer, model, plain, *_ = train(zero.Zero3, functools.partial(Blocks, 7), loss=loss_of)
    buckets = optimizer._buckets[::-1]
    psi_bytes = sum(bucket.flat.nbytes for bucket in buckets)
    optimizer.zero_grad()
    loss = None
    for order in ([[1], [2], [3], [4], [5], [6], [7], []], [[6], [5], [4], [3], [2], [1], [0], []]):
        with zero.SentBytes() as sent, Watch(ahead) as watch:
            loss = loss.backward() if loss else loss_of(model, 0, 0)
        products = [numbers for name, numbers in watch.seen if name in ("aten::addmm", "aten::mm")]
        assert [numbers for numbers, _ in itertools.groupby(products)] == order
        assert sent.total == (psi_bytes / 2 if loss else psi_bytes)

    early = []

    def look(inner, *_):  # at the shard that a step is about to change
        segment = inner.param_groups[0]["params"][0]
        early.extend(b for b in buckets if b.gathering and b.slots[0].segment is segment)

    optimizer._optimizer.register_step_pre_hook(look)
    x = make_batch(0, 0)
    with torch.no_grad():
        bitwise(model[0].one(x), plain[0].one(x))  # alone; the next unit is gathered
    assert ahead() == [1]
    optimizer.step()
    assert not early


class PassesOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x), x


@pool.on(2)
def test_a_unit_that_returns_its_input_is_gathered_once_in_backward():
    """Its input's gradient is that of the unit before, which may not be freed for it."""
    model = nn.Sequential(nn.Linear(6, 6), PassesOn())
    optimizer = zero.Zero3(model, torch.optim.SGD, pool.group())
    psi_bytes = sum(bucket.flat.nbytes for bucket in optimizer._buckets)
    for step in range(2):  # the second prefetches
        y, x = model(make_batch(pool.rank(), step))
        with zero.SentBytes() as sent:
            (y.sum() + x.sum()).backward()
        assert sent.total == psi_bytes / 2 + psi_bytes / 2  # parameters, gradients


class Positions(nn.Module):
    """Reads the weights of its position embedding, or calls it."""

    def __init__(self):
        super().__init__()
        self.tok, self.pos, self.unused = (nn.Embedding(9, 4) for _ in range(3))
        self.head = nn.Linear(4, 9)

    def forward(self, tokens, reads):
        count = tokens.shape[1]
        positions = self.pos.weight[:count] if reads else self.pos(torch.arange(count))
        return self.head(self.tok(tokens) + positions)


@pool.on(2)
def test_zero3_says_which_parameter_was_read_without_its_module():
    """In the second step, too, when the unit may be prefetched. A module may be left unused."""
    model = Positions()
    optimizer = zero.Zero3(model, torch.optim.SGD, pool.group(), lr=0.1)
    tokens = torch.arange(6).view(2, 3)
    says = r"pos\.weight has a gradient.* call the module"
    for reads in (True, False, True, False):
        optimizer.zero_grad()
        loss = model(tokens, reads).square().mean()
        with pytest.raises(RuntimeError, match=says) if reads else contextlib.nullcontext():
            loss.backward()
    assert loss.isfinite()
    with optimizer.full_parameters():  # in which it may be read
        model(tokens, True).sum().backward()


# ---- Wrong use


@each_stage
@pool.on(2)
def test_wrong_use(stage):
    rank = pool.rank()
    plain = PLAIN()
    group = pool.group()
    first = nn.Linear(2, 2)
    in_ddp = nn.parallel.DistributedDataParallel(plain, process_group=group)
    shuffled = nn.ParameterDict()
    for name in ("ab", "ba")[rank]:
        shuffled.register_parameter(name, nn.Parameter(torch.ones(2)))
    differs = f"the same model; rank {1 - rank}'s differs in .*shape"
    cases = [
        (differs, nn.Sequential(first, nn.Linear(6, 4 + rank)), {}),
        (differs, nn.Sequential(first, nn.BatchNorm1d(4 + rank, affine=False)), {}),
        (differs, PLAIN((torch.float32, torch.float64)[rank]), {}),
        (f"rank {1 - rank}'s differs in the order", shuffled, {}),
        ("which averages as well", in_ddp, {}),
        ("not among module.parameters", PLAIN(), {"params": plain.parameters()}),
    ]
    for name in ("LBFGS", "Adafactor", "SparseAdam", "Muon"):
        cls = type(name, (torch.optim.Optimizer,), {})
        cases.append((f"{name} may need whole .*AdamW", plain, {"optimizer_class": cls}))
    if rank:
        outside = {"process_group": dist.GroupMember.NON_GROUP_MEMBER}
        cases.append(("not in process_group", plain, outside))
    for words, module, wrong in cases:
        with pytest.raises(ValueError, match=words):
            stage(module, **{"optimizer_class": torch.optim.SGD, "process_group": group} | wrong)

    optimizer = stage(plain, torch.optim.SGD, group)
    with pytest.raises(ValueError, match="to the constructor"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    plain.float()  # moves nothing
    batch_loss(plain, rank, 1).backward()
    optimizer.step()
    plain.double()
    with pytest.raises(RuntimeError, match=r"after module\.to"):
        (batch_loss(plain, rank, 1).backward(), optimizer.step())
