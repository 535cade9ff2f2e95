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
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import (
    HOW,
    MODELS,
    Blocks,
    Outer,
    Reader,
    Watch,
    batch_loss,
    loss_of,
    make_batch,
    make_model,
)

import zero

STAGES = (zero.Zero1, zero.Zero2, zero.Zero3)
each_stage = pytest.mark.parametrize("stage", STAGES)
OPTIONS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
}
PLAIN = functools.partial(make_model, "plain")
bitwise = functools.partial(torch.testing.assert_close, rtol=0, atol=0)  # of whole structures


def full(optimizer):
    """Whole parameters, of Zero3; the others have them anyway."""
    return getattr(optimizer, "full_parameters", contextlib.nullcontext)()


def whole_bytes(optimizer):
    """The memory of whole parameters now."""
    return sum(bucket.flat.untyped_storage().nbytes() for bucket in optimizer._buckets)


def make_sgd(stage, model, **how):
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return stage(model, sgd, pool.group(), **how)


def assert_same_parameters(optimizer, model, plain):
    with full(optimizer):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            bitwise(ours, theirs.to(ours.dtype))


def one_device_backward(plain, rounds, dtype=None, loss=batch_loss, set_to_none=True):
    """Leave the mean over ranks in .grad of `plain`, the masters of a model in `dtype`.

    In each round every rank adds up the gradients of these batches before they are reduced.
    """
    low = copy.deepcopy(plain).to(dtype)
    pairs = list(zip(plain.parameters(), low.parameters(), strict=True))
    plain.zero_grad(set_to_none)
    for numbers in rounds:
        for rank in range(pool.world_size()):
            for number in numbers:
                loss(low, rank, number).backward()
            for p, q in pairs:
                if q.grad is not None:
                    p.grad = q.grad.to(p.dtype) + (0 if p.grad is None else p.grad)
                    q.grad = None
    for p, q in pairs:
        if p.grad is not None:
            p.grad = (p.grad / pool.world_size()).to(q.dtype).to(p.dtype)


def do_nothing(step, optimizer, model):
    pass


def train(
    stage, make, name="AdamW", micros=(1, 0), loss=batch_loss, before=do_nothing, saved=None, **how
):
    """Train ours and one device, from rank 0's weights. They stay equal, and so do their states.

    `micros`: the backwards in a step, and how many of them run in no_sync(), first. `saved` is
    what to go on from, and is returned as well.
    """
    groups = how.pop("groups", nn.Module.parameters)
    set_to_none = how.pop("set_to_none", True)
    options = OPTIONS.get(name, {"lr": 0.01})
    optimizer_class = getattr(torch.optim, name)
    model = make()
    first = next(model.parameters())
    low = first.dtype if first.itemsize < 4 else None
    plain = copy.deepcopy(model).to(low and torch.float32)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.detach().add_(pool.rank())
    ours = stage(model, optimizer_class, pool.group(), params=groups(model), **how, **options)
    theirs = optimizer_class(groups(plain), **options)
    both = ((ours, model), (theirs, plain))
    bitwise(list(model.buffers()), list(plain.buffers()))
    if saved:
        parameters, state = saved
        for optimizer, module in both:
            optimizer.load_state_dict(state)
            with full(optimizer):
                module.load_state_dict(parameters)  # the same values in 16 bits, so masters stay

    for step, inside in enumerate((False, True, False)):
        for optimizer, module in both:
            before(step, optimizer, module)
            with full(optimizer):  # a write is kept, and the rest keeps its fp32 digits
                next(module.parameters()).data.fill_((step + 1) / 8)
        ours.zero_grad(set_to_none)
        batches = range(step * micros[0], (step + 1) * micros[0])
        at_once = micros[1] or stage is zero.Zero1  # a rank adds up its own gradients first
        rounds = [batches] if at_once else [[batch] for batch in batches]
        one_device_backward(plain, rounds, low, loss, set_to_none)
        with full(ours) if inside else contextlib.nullcontext():
            with ours.no_sync():
                for batch in batches[: micros[1]]:
                    loss(model, pool.rank(), batch).backward()
            for batch in batches[micros[1] :]:
                loss(model, pool.rank(), batch).backward()
            ours.step()
        theirs.step()
        assert_same_parameters(ours, model, plain)

    saved = check_states(ours, model, theirs, plain, low)
    return ours, model, plain, saved


def check_states(ours, model, theirs, plain, low):
    """They are the same. Ours is a copy. Loading it takes no memory. Return plain's and ours."""
    held = zero.held_by(ours)
    state = ours.state_dict()
    expected = theirs.state_dict()
    for number, master in enumerate(plain.parameters() if low else ()):
        expected["state"].setdefault(number, {})["master"] = master
    parameters, expected = copy.deepcopy((plain.state_dict(), expected))
    ours.step()  # again, with the same gradients
    theirs.step()
    assert_same_parameters(ours, model, plain)
    bitwise(state, expected)
    for _, _, segment, _ in ours.shards() if low else ():
        segment.add_(1)
    ours.load_state_dict(state)
    bitwise(ours.state_dict(), state, check_dtype=False)  # torch.optim casts NAdam's scalar
    numbers = 8 * len(list(model.parameters()))
    assert all(0 <= b - a <= numbers for a, b in zip(held, zero.held_by(ours), strict=True))
    assert not isinstance(ours, zero.Zero3) or whole_bytes(ours) == 0
    if low:
        ours.sync_parameters()  # from the loaded masters
        plain.load_state_dict(parameters)
        assert_same_parameters(ours, model, plain)
    return parameters, state


@pool.on(3)
def test_the_naive_form():
    ours = PLAIN()
    plain = PLAIN()
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


def large_loss(model, rank, step):
    """The sum of three ranks' fp16 gradients is beyond 65504, and their mean is not."""
    return 16000 * model(make_batch(rank, step, torch.float16)).square().sum()


class Words(nn.Module):
    """Calls its embedding, and reads the embedding's weight: at once, and after other units."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x, tied=True):
        hidden = self.embed(x.argmax(1))
        if tied:
            hidden = F.linear(torch.tanh(hidden), self.embed.weight)
        hidden = self.blocks(hidden)
        return F.linear(hidden, self.embed.weight) if tied else hidden


def sparse_loss(model, rank, step):
    return model(make_batch(rank, step), tied=False).square().mean()


def make_sparse(step, optimizer, model):
    model.embed.sparse = isinstance(optimizer, zero.Zero1)  # ours, and not one device's


def compile_model(step, optimizer, model):
    if step == 0 and isinstance(optimizer, zero.Zero1):
        model.compile(backend="eager")


def loss_by_one_block(model, rank, step):
    return loss_of(model(make_batch(rank, step), which=[step % 2]))


SMALL = {"bucket_cap_mb": 1e-3}
OFFLOAD = {"offload": "cpu"}
GROUPS = SMALL | {"groups": two_groups, "before": change_groups, "micros": (2, 0)}
HOWS = itertools.cycle([SMALL, SMALL | OFFLOAD, OFFLOAD, {}])
MAKES = [Outer, Words, *(functools.partial(make_model, kind) for kind in MODELS)]
NAMES = itertools.cycle(sorted(zero.ELEMENTWISE))
CASES = [(stage, make, next(NAMES), next(HOWS)) for stage in STAGES for make in MAKES]
for each in STAGES:
    CASES.append((each, PLAIN, "SGD", GROUPS))
    CASES.append((each, Words, "SGD", {"before": make_sparse, "loss": sparse_loss}))
    half = functools.partial(PLAIN, torch.float16)
    CASES.append((each, half, "Adam", OFFLOAD | {"loss": large_loss}))
    blocks = functools.partial(Blocks, 2)
    CASES.append((each, blocks, "SGD", {"before": compile_model}))
    CASES.append((each, blocks, "AdamW", {"set_to_none": False, "loss": loss_by_one_block}))


@pytest.mark.parametrize(("stage", "make", "name", "how"), CASES)
@pool.on(3)
def test_models_optimizers_and_options(stage, make, name, how):
    """Every model by every stage, and every optimizer; groups; sparse gradients; large ones."""
    train(stage, make, name, **how)


def raise_in_backward(step, optimizer, model):
    hidden = model[:2](make_batch(0, 0))
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model[2:](hidden).sum().backward()


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
    arguments |= {"micros": micros, "saved": copy.deepcopy(saved)}  # which ranks share
    return train(stage, lambda: Reader(numels).to(dtype), loss=Reader.__call__, **arguments)[-1]


@settings(max_examples=8)
@given(
    worlds=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(STAGES)), min_size=2, max_size=2),
    low=st.booleans(),
    numels=st.lists(st.integers(0, 70), min_size=1, max_size=7),
    bucket_cap_mb=st.sampled_from([25, 1e-4]),
    name=st.sampled_from(["SGD", "AdamW"]),
    micros=st.sampled_from([(1, 0), (2, 0), (2, 1), (2, 2)]),
)
def test_what_some_ranks_use_and_other_worlds_go_on_with(worlds, **arguments):
    """What one rank uses is averaged with the others' zeros. What no rank uses stays as it is."""
    saved = None
    for N, stage in worlds:
        saved = pool.run(N, functools.partial(body_random, stage, saved, **arguments))[-1]


@each_stage
@pool.on(3)
def test_norms_clipping_and_the_scale_of_a_loss(stage):
    """The group of all ranks stands for one of model parallelism. test_amp has a GradScaler."""
    model = PLAIN()
    optimizer = make_sgd(stage, model)
    norm_of = functools.partial(optimizer.clip_grad_norm_, math.inf)
    for scale in (1024.0, 1.0):
        optimizer.zero_grad()
        batch_loss(model, pool.rank(), 0).backward()
        norm = norm_of()
        assert optimizer.unscale_(scale) == 0
        assert norm_of() == norm / scale
    matrices, vectors = (norm_of(counted=lambda p, dim=dim: p.dim() == dim) for dim in (2, 1))
    assert 0 < vectors < norm
    torch.testing.assert_close(matrices.square() + vectors.square(), norm.square())
    thrice = norm_of(process_groups=[pool.group()])
    torch.testing.assert_close(thrice.square(), 3 * norm.square())
    optimizer.clip_grad_norm_(norm.item() / 2)
    torch.testing.assert_close(norm_of(), norm / 2 * norm / (norm + 1e-6))
    model[4].bias.register_hook(lambda gradient: gradient * math.inf)
    batch_loss(model, pool.rank(), 1).backward()
    assert optimizer.unscale_(1.0) == 1
    assert norm_of().isinf()  # not NaN


@each_stage
@pool.on(2)
def test_experts_keep_their_values_beside_what_is_trained(stage):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].differ_between_ranks = True  # as expert_parallel.py marks what it splits
    expert = model[1].weight
    before = expert.detach().add_(pool.rank()).clone()
    optimizer = make_sgd(stage, model, params=model[0].parameters())
    batch_loss(model, pool.rank(), 0).backward()
    optimizer.step()
    bitwise(expert.detach(), before)
    assert expert.grad is not None


@each_stage
@pool.on(2)
def test_complex_gradients_are_clipped(stage):
    def square_loss(model, rank, step):
        return model(make_batch(rank, step, torch.complex128)).abs().square().sum()

    model = nn.Linear(6, 5, dtype=torch.complex128)
    plain = copy.deepcopy(model)
    optimizer = make_sgd(stage, model)
    square_loss(model, pool.rank(), 0).backward()
    norm = optimizer.clip_grad_norm_(1.0)
    one_device_backward(plain, [[0]], loss=square_loss)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    torch.testing.assert_close(optimizer.clip_grad_norm_(1.0).item(), 1.0)


@each_stage
@pool.on(2)
def test_a_loaded_step_count_becomes_what_a_fused_optimizer_wants(stage):
    """As torch.optim's: in fp32, on the parameter's device. Here only the type can differ."""
    plain = PLAIN()
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    ours = stage(PLAIN(), torch.optim.AdamW, pool.group(), fused=True)
    saved = theirs.state_dict()
    for number, p in enumerate(plain.state_dict().values()):
        entry = {"step": torch.tensor(7), "exp_avg": p.clone(), "exp_avg_sq": p.square()}
        saved["state"][number] = entry
    for optimizer in (ours, theirs):
        optimizer.load_state_dict(saved)
    bitwise(ours.state_dict(), theirs.state_dict())


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
    grads = trained / N
    if stage is zero.Zero1:
        grads = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    params = psi / N if stage is zero.Zero3 else psi
    state = (4 * trained + 2 * psi if low else 2 * trained) / N
    passes = {zero.Zero1: 2 * trained, zero.Zero2: 3 * trained, zero.Zero3: 4 * psi + 2 * trained}
    flags = 2 * (16 + 8 + 16)  # a byte per tensor, the norm, a byte again

    def see():
        return whole_bytes(optimizer), sum(p.grad is not None for p in model.parameters())

    def backward():
        y = model(x)
        assert whole_bytes(optimizer) == between
        y.square().mean().backward()

    between = 0 if stage is zero.Zero3 else psi
    for step in range(2):
        optimizer.zero_grad()
        with zero.SentBytes() as sent:
            for _ in range(2):
                with Watch(see) as watch:
                    backward()
            if step:
                for measured in (live_bytes() - start - x.nbytes, sum(zero.held_by(optimizer))):
                    assert 0 <= measured - params - grads - state <= 300
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        assert sent.total == pytest.approx((passes[stage] + flags) * (N - 1) / N)
    # step() has moved gradients
    assert 0 <= live_bytes() - start - x.nbytes - params - trained / N - state <= 300
    whole = max(whole for _, (whole, _) in watch.seen)
    assert whole == (psi / 4 if stage is zero.Zero3 else psi)  # two units of eight
    if stage is zero.Zero2 and not frozen:  # backward sends what it has passed, and frees .grad
        first = next(number for number, (name, _) in enumerate(watch.seen) if "c10d" in name)
        assert [name for name, _ in watch.seen[:first]].count("aten::mm") <= 4
        assert max(gradients for _, (_, gradients) in watch.seen) <= 4
    torch.autograd.grad(model(x.requires_grad_()).sum(), x)  # a backward that reaches no parameter
    assert whole_bytes(optimizer) == between
    with optimizer.no_sync(), zero.SentBytes() as sent:
        with optimizer.no_sync():
            pass
        backward()
    assert sent.total == pytest.approx(2 * (psi - between) * (N - 1) / N)  # Zero3 gathers


def test_buckets_are_in_the_order_of_backward():
    parameters = [nn.Parameter(torch.tensor(float(number))) for number in range(6)]
    kind_of = dict(zip(parameters, "abaccc", strict=True)).get
    buckets = zero.assign_buckets(parameters, kind_of, cap_bytes=8)
    numbers = [[int(parameter) for parameter in bucket] for bucket in buckets]
    assert numbers == [[5, 4], [2, 0], [3], [1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_and_shards_are_aligned(dtype):
    """Parameters to 64 bytes, as torch allocates them; shards to 16 bytes, as NCCL wants them."""
    with shared.fake_world(3, rank=1):
        bucket = zero.Bucket(list(PLAIN(dtype).parameters()), None, None)
    assert all(slot.start * dtype.itemsize % 64 == 0 for slot in bucket.slots)
    assert bucket.shard.nbytes % 16 == 0


# ---- Zero3


def forward_alone(step, optimizer, model):
    batch_loss(model, 0, 9)


@pool.on(3)
def test_whole_and_freed_parameters_of_zero3():
    """Freed, they have a shape and no values. A copy of the whole ones is an ordinary module."""
    optimizer, model, plain, _ = train(zero.Zero3, PLAIN, before=forward_alone)
    for parameter, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.isnan().all()
        assert parameter.shape == theirs.shape
    with optimizer.full_parameters():
        average = copy.deepcopy(model)
        nn.init.zeros_(model[0].bias)
    bitwise(average.state_dict(), plain.state_dict())
    bitwise([average(make_batch(0, 0))], [plain(make_batch(0, 0))])
    for part in (model, model[0]):
        with pytest.raises(RuntimeError, match="module_state_dict"):
            part.state_dict()
        with pytest.raises(RuntimeError, match="full_parameters"):
            part.load_state_dict({})
    model[0].bias.data.zero_()  # is lost, and does not reach other parameters
    model(make_batch(0, 0))
    assert all(parameter.isnan().all() for parameter in model.parameters())
    nn.init.zeros_(model[0].bias)
    with pytest.raises(RuntimeError, match=r"shape \(33,\) was written .*full_parameters"):
        model(make_batch(0, 0))


@pytest.mark.parametrize("how", HOW)
@pool.on(2)
def test_units_of_zero3_and_their_prefetch(how):
    """While a unit computes, the one that came next last time is on its way, and no other."""

    def loss_of(model, *number):
        return model(make_batch(*number).requires_grad_(), how=HOW[how]).square().mean()

    def ahead():
        return [number for number, bucket in enumerate(buckets) if bucket.gathering]

    optimizer, model, plain, _ = train(zero.Zero3, functools.partial(Blocks, 7), loss=loss_of)
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


class Scales(nn.Linear):
    """Changes its output in place, by a parameter that backward needs first. Passes its input on.

    The input's gradient is that of the unit before, which may not be freed for it.
    """

    def __init__(self):
        super().__init__(6, 6)
        self.scale = nn.Parameter(torch.full((6,), 3.0))

    def forward(self, x):
        return super().forward(x[0]).mul_(self.scale), x[0]


@pool.on(2)
def test_units_that_return_their_input_and_change_their_output_in_place():
    def loss_of(model, *number):
        y, x = model([make_batch(*number)])
        return y.sum() + x.sum()

    optimizer, model, *_ = train(
        zero.Zero3, lambda: nn.Sequential(Scales(), Scales(), Scales()), loss=loss_of
    )
    psi_bytes = sum(bucket.flat.nbytes for bucket in optimizer._buckets)
    loss = loss_of(model, 0, 0)
    with zero.SentBytes() as sent:
        loss.backward()
    assert sent.total == psi_bytes / 2 + psi_bytes / 2  # parameters, gradients


class Positions(nn.ModuleList):
    """Reads the weights of its position embedding, or calls it. Never uses the third."""

    def __init__(self):
        super().__init__(nn.Embedding(9, 4) for _ in range(3))

    def forward(self, tokens, reads):
        positions = self[1].weight[:3] if reads else self[1](torch.arange(3))
        return self[0](tokens) + positions


@pool.on(2)
def test_zero3_says_which_parameter_was_read_without_its_module():
    """In the second step, too, when the unit may be prefetched."""
    model = Positions()
    optimizer = make_sgd(zero.Zero3, model)
    tokens = torch.arange(6).view(2, 3)
    says = r"1\.weight has a gradient.* call the module"
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
def test_wrong_models_and_arguments(stage):
    rank = pool.rank()
    plain = PLAIN()
    expert = nn.Linear(6, 6)
    expert.differ_between_ranks = True
    transposed = nn.Conv2d(2, 2, 3)
    if rank:
        transposed.to(memory_format=torch.channels_last)
    expanded = PLAIN()
    expanded.register_buffer("mask", torch.ones(1).expand(4))
    shuffled = nn.Module()
    for name in ("ab", "ba")[rank]:
        shuffled.register_parameter(name, nn.Parameter(torch.ones(2)))
    in_ddp = nn.parallel.DistributedDataParallel(plain, process_group=pool.group())
    differs = f"the same model; rank {1 - rank}'s differs in .*shape"
    cases = [
        (differs, nn.Linear(6, 4 + rank), {}),
        (differs, nn.BatchNorm1d(4 + rank), {}),
        (differs, PLAIN((torch.float32, torch.float64)[rank]), {}),
        (f"rank {1 - rank}'s differs in the order", shuffled, {}),
        ("averages as well", in_ddp, {}),
        ("not among module.parameters", PLAIN(), {"params": plain.parameters()}),
        (differs + ".*strides", transposed, {}),
        ("different experts", expert, {}),
        ("mask is expanded: clone", expanded, {}),
        ("LBFGS may need whole .*AdamW", plain, {"optimizer_class": torch.optim.LBFGS}),
    ]
    if rank:
        outside = {"process_group": dist.GroupMember.NON_GROUP_MEMBER}
        cases.append(("not in process_group", plain, outside))
    for words, module, wrong in cases:
        arguments = {"optimizer_class": torch.optim.SGD, "process_group": pool.group()} | wrong
        with pytest.raises(ValueError, match=words):
            stage(module, **arguments)


@each_stage
@pool.on(2)
def test_wrong_calls(stage):
    model = PLAIN()
    optimizer = make_sgd(stage, model)

    def train_step():
        batch_loss(model, pool.rank(), 0).backward()
        optimizer.step()

    optimizer.step()  # does nothing, because there are no gradients
    train_step()
    transposed = make_sgd(stage, nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last))
    with pytest.raises(ValueError, match=r"\(2, 2, 3, 3\) is not contiguous"):
        list(transposed.shards())
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"the optimizer's zero_grad"):
        train_step()
    heads = Blocks(2)
    by_heads = make_sgd(stage, heads, bucket_cap_mb=1e-4)
    for head in (0, 1):  # buckets of the second have no gradients in the first step
        loss_of(heads[head](make_batch(0, 0))).backward()
        with pytest.raises(RuntimeError, match="zero_grad") if head else contextlib.nullcontext():
            by_heads.step()
        heads.zero_grad()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="to the constructor"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    model.float()  # moves nothing
    train_step()
    model.double()
    with pytest.raises(RuntimeError, match=r"after module\.to"):
        train_step()
