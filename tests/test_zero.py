"""zero.py against one device, bit by bit. What is true of any such implementation, claims.py says; here is the rest.

Bodies take the class under test, `stage`, and use what its users see. With SGD the parameters show the gradients.
"""

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
from shared import OPTIMIZERS, assert_equal, make_batch, make_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zero

STAGES = (zero.Zero1, zero.Zero2, zero.Zero3)
each_stage = pytest.mark.parametrize("stage", STAGES)


def on(N):
    """A test that runs on N ranks."""

    def decorate(body):
        @functools.wraps(body)  # and so has its arguments
        def test(**arguments):
            pool.run(N, call, body.__name__, arguments)

        return test

    return decorate


def call(name, arguments):
    return globals()[name].__wrapped__(**arguments)


class Odd(nn.Module):
    """Tied, frozen, unused, empty, scalar, strided and integer parameters, in nested modules, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inputs, self.tied, self.unused = nn.Linear(6, 33), nn.Linear(33, 33, bias=False), nn.Linear(3, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(2))
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.tied.weight = self.blocks[0][0].weight
        self.convolution = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(0.1 * torch.randn(7, 33).t())
        self.empty, self.scale = nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(1.5))
        self.integers = nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False)
        self.register_buffer("offset", torch.ones(33))

    def forward(self, x):
        x = self.scale * self.inputs(x) + self.offset + self.empty.sum() + self.integers[1]
        for block in self.blocks:
            x = x + block(x)
        x = self.tied(self.frozen(x)) @ self.transposed
        return self.convolution(x[:, :6].reshape(-1, 6, 1, 1).expand(-1, 6, 2, 2)[:, :3])


plain_model = functools.partial(make_model, "plain")


def deep(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(dtype)


def loss_of(model, rank, step, dtype=torch.float32):
    return model(make_batch(rank, step, dtype)).square().mean()


# Where sums are added up in another order than on one device.
IN_64 = {"make": functools.partial(plain_model, torch.float64), "exact": False}
IN_64["loss"] = functools.partial(loss_of, dtype=torch.float64)


def one_device_backward(model, N, steps, loss=loss_of, by_rank=False):
    """Leave in .grad those of all ranks' batches of `steps`, added in rank order, then divided.

    Zero2 and Zero3 add up over the ranks in every backward, Zero1 (`by_rank`) over a rank's backwards first.
    """
    orders = [[(r, s) for s in steps] for r in range(N)] if by_rank else [[(r, s) for s in steps for r in range(N)]]
    sums = {}
    for order in orders:
        for rank, step in order:
            loss(model, rank, step).backward()
        for p in (p for p in model.parameters() if p.grad is not None):
            sums[p] = sums[p] + p.grad if p in sums else p.grad
            p.grad = None
    for p, total in sums.items():
        p.grad = total / N


def whole(optimizer, model):
    """Copies of the whole parameters."""
    with getattr(optimizer, "full_parameters", contextlib.nullcontext)():
        return [parameter.detach().clone() for parameter in model.parameters()]


def same(ours, theirs, exact=True):
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), number
        assert_equal(a.detach(), b.detach(), exact, number)


def same_state(ours, theirs):
    """Two optimizers' state dicts."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == sorted(theirs["state"])  # in the order of the parameters
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        same(ours["state"][number].values(), [state[name] for name in ours["state"][number]])


def train(
    stage, make, steps, name="sgd", loss=loss_of, exact=True, *, micro_batches=1, unsynced=0,
    groups=lambda model: model.parameters(), before=lambda step, optimizer, model: None, forget=True, **arguments,
):  # fmt: skip
    """Train both from rank 0's weights, and compare them after each step. -> optimizer, model, plain model, theirs

    Not to `forget` gradients is to add to those of the step before, and to step twice.
    """
    N, rank = pool.world_size(), pool.rank()
    optimizer_class = OPTIMIZERS.get(name) or functools.partial(getattr(torch.optim, name), lr=0.01)
    cls, options = optimizer_class.func, optimizer_class.keywords
    model, plain = make(), make()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(rank)
    optimizer = stage(model, cls, pool.group(), params=groups(model), **arguments, **options)
    theirs = cls(groups(plain), **options)
    same(model.buffers(), plain.buffers())
    for step in range(steps):
        before(step, optimizer, model)
        before(step, theirs, plain)
        batches = range(step * micro_batches, (step + 1) * micro_batches)
        if forget:
            optimizer.zero_grad()
        for p in plain.parameters():
            p.grad = None if forget or p.grad is None else p.grad * N
        one_device_backward(plain, N, batches, loss, by_rank=unsynced or stage is zero.Zero1)
        with optimizer.no_sync(), optimizer.no_sync(), zero.SentBytes() as sent:
            for batch in batches[:unsynced]:
                loss(model, rank, batch).backward()
        psi_bytes = sum(bucket.flat.nbytes for bucket in optimizer._buckets) if stage is zero.Zero3 else 0
        assert sent.total == 2 * unsynced * psi_bytes * (N - 1) / N  # Zero3's gathers, and no gradients
        for batch in batches[unsynced:]:
            loss(model, rank, batch).backward()
        for _ in range(1 if forget else 2):
            optimizer.step()
            theirs.step()
            same(whole(optimizer, model), plain.parameters(), exact)
    return optimizer, model, plain, theirs


# ---------------------------------------------------------------------------------------------------------------------
# Training equals one device


@on(3)
def test_the_naive_form():
    ours, plain = plain_model(), plain_model()
    shard = zero.flatten(ours.parameters(), 3).chunk(3)[pool.rank()].clone()
    optimizer, theirs = OPTIMIZERS["adamw"]([shard]), OPTIMIZERS["adamw"](plain.parameters())
    for step in range(3):
        ours.zero_grad()
        plain.zero_grad()
        loss_of(ours, pool.rank(), step).backward()
        one_device_backward(plain, pool.world_size(), [step])
        zero.sharded_step(ours.parameters(), shard, optimizer, pool.group())
        theirs.step()
        same(ours.parameters(), plain.parameters())


def check_state_too(stage, make, name, **arguments):
    optimizer, _, _, theirs = train(stage, make, 3, name, **arguments)
    same_state(optimizer.state_dict(), theirs.state_dict())
    for bucket in optimizer._buckets:  # as torch aligns what it allocates
        assert all(view.storage_offset() * view.itemsize % 64 == 0 for view in bucket.whole)


@each_stage
@on(3)
def test_odd_models(stage):
    """Parameters after each step, and the state dict, also where it is kept and updated in another memory."""
    check_state_too(stage, Odd, "adamw", bucket_cap_mb=1e-3, offload="cpu")


@pytest.mark.parametrize("name", sorted(zero.ELEMENTWISE))
@on(2)
def test_elementwise_optimizers(name):
    check_state_too(zero.Zero2, plain_model, name)


class Reader(nn.Module):
    """Uses some of its parameters."""

    def __init__(self, numels, seed):
        super().__init__()
        torch.manual_seed(seed)
        shapes = [(n,) if n % 2 else (n // 2, 2) for n in numels]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, rank, step):
        generator = torch.Generator().manual_seed(rank + 7 * step)
        total = self.weights[0].sum() * 0
        for number, weight in enumerate(self.weights):
            if hash((len(self.weights), step, rank, number)) % 3 == 0:
                total = total + (weight * torch.randn(weight.shape, generator=generator)).sin().sum()
        return total


def body_random(stage, numels, seed, name, **arguments):
    check_state_too(stage, functools.partial(Reader, numels, seed), name, loss=Reader.__call__, **arguments)


@settings(max_examples=12)
@given(
    N=st.integers(1, 4), stage=st.sampled_from(STAGES), name=st.sampled_from(["momentum", "adamw"]),
    numels=st.lists(st.integers(0, 70), min_size=1, max_size=7), seed=st.integers(0, 2**20),
    bucket_cap_mb=st.sampled_from([25, 1e-4]), micros=st.sampled_from([(1, 0), (2, 0), (2, 1), (2, 2)]),
)  # fmt: skip
def test_random_shapes_used_by_random_ranks(N, micros, **arguments):
    """What one rank uses is averaged with the others' zeros; what none uses is left alone, its state included."""
    how = dict(zip(("micro_batches", "unsynced"), micros, strict=True))  # the first so many within no_sync
    pool.run(N, functools.partial(body_random, **how, **arguments))


def two_groups(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices}, {"params": vectors[1:], "weight_decay": 0.1, "lr": 0.05}]


def change_groups(step, optimizer, model):
    optimizer.param_groups[1]["weight_decay"] = 0.3 if step == 3 else 0.0
    model[2].weight.requires_grad_(step != 2)


@each_stage
@on(3)
def test_groups(stage):
    """With options of their own, changed on the way; parameters frozen and unfrozen; a bias in no group."""
    how = {"groups": two_groups, "before": change_groups}
    optimizer, model, _, theirs = train(stage, plain_model, 5, bucket_cap_mb=1e-3, **how)
    same_state(optimizer.state_dict(), theirs.state_dict())
    with pytest.raises(ValueError, match="sharded at construction"):
        optimizer.add_param_group({"params": [model[0].bias]})
    with pytest.raises(ValueError, match=r"not among module.parameters"):
        stage(plain_model(), torch.optim.SGD, pool.group(), params=plain_model().parameters(), lr=0.1)


@each_stage
@on(3)
def test_gradients_stay_until_zero_grad(stage):
    """For a second step and for a backward to add to, within no_sync, which is silent, or without."""
    how = {"forget": False, "micro_batches": 2, "unsynced": 1, "bucket_cap_mb": 1e-4}
    optimizer, model, *_ = train(stage, steps=2, name="momentum", **how, **IN_64)
    optimizer.zero_grad()
    before = whole(optimizer, model)
    optimizer.step()  # nothing has a gradient, momentum rests
    same(whole(optimizer, model), before)


# ---------------------------------------------------------------------------------------------------------------------
# State dicts, and 16 bits


def body_part_of_chain(stage, state, name, first, count, dtype):
    """Load, train, save. Every rank sees the same data, so that the world size changes no sum."""
    model, cls = plain_model(dtype), OPTIMIZERS[name]
    if state and first % 4:
        model.load_state_dict(state["model"])
    optimizer = stage(model, cls.func, pool.group(), bucket_cap_mb=1e-3, **cls.keywords)
    if state:
        optimizer.load_state_dict(state["optimizer"])
        with getattr(optimizer, "full_parameters", contextlib.nullcontext)():  # after the optimizer, too
            model.load_state_dict(state["model"])
    for step in range(first, first + count):
        optimizer.zero_grad()
        loss_of(model, 0, step, dtype).backward()
        optimizer.step()
    before = optimizer.state_dict()
    model_state = optimizer.module_state_dict() if stage is zero.Zero3 else model.state_dict()
    state = copy.deepcopy({"model": model_state, "optimizer": before})
    optimizer.step()
    same_state(before, state["optimizer"])  # what was saved is its own
    held = zero.held_by(optimizer)
    optimizer.load_state_dict(before)
    assert zero.held_by(optimizer) == held  # a shard, and nothing of the whole
    return state


@pytest.mark.parametrize(("name", "dtype"), [("momentum", torch.float32), ("adamw", torch.bfloat16)])
def test_state_moves_between_world_sizes_and_stages(name, dtype):
    """4 → 1 → 2 ranks equals no interruption, with masters in 16 bits. (3 does not divide exactly.)"""
    chain, state = [(4, zero.Zero2), (1, zero.Zero3), (2, zero.Zero3), (2, zero.Zero1)], None
    for number, (N, stage) in enumerate(chain):
        results = pool.run(N, body_part_of_chain, stage, state, name, 2 * number, 2, dtype)
        for other in results[1:]:
            same_state(other["optimizer"], results[0]["optimizer"])
        state = results[0]
    through = pool.run(1, body_part_of_chain, zero.Zero1, None, name, 0, 8, dtype)[0]
    same_state(state["optimizer"], through["optimizer"])
    same(state["model"].values(), through["model"].values())
    at_3 = pool.run(3, body_part_of_chain, zero.Zero2, state, name, 8, 0, dtype)[2]
    same_state(at_3["optimizer"], state["optimizer"])


@each_stage
@pytest.mark.parametrize(("dtype", "offload"), [(torch.bfloat16, None), (torch.float16, "cpu")])
@on(3)
def test_16_bit_parameters_have_fp32_masters(stage, dtype, offload):
    """fp32 masters; gradients added up in fp32, divided after, rounded once. As one device would, bit by bit."""
    ours, plain, N = plain_model(dtype), plain_model(dtype), pool.world_size()
    optimizer = stage(ours, torch.optim.AdamW, pool.group(), lr=1e-2, offload=offload)
    masters = [p.detach().float() for p in plain.parameters()]
    theirs = torch.optim.AdamW(masters, lr=1e-2)
    for step in range(4):
        if step == 3:  # what is written stays, and what is not keeps its fp32 digits
            with getattr(optimizer, "full_parameters", contextlib.nullcontext)():
                ours[0].weight.data[:2] = 0.5
            plain[0].weight.data[:2] = masters[0][:2] = 0.5
        optimizer.zero_grad()
        loss_of(ours, pool.rank(), step, dtype).backward()
        gradients = []
        for rank in range(N):
            loss_of(plain, rank, step, dtype).backward()
            gradients.append([p.grad.float() for p in plain.parameters()])
            plain.zero_grad()
        for master, of_ranks in zip(masters, zip(*gradients, strict=True), strict=True):
            master.grad = (sum(of_ranks) / N).to(dtype).float()
        optimizer.step()
        theirs.step()
        torch._foreach_copy_([p.data for p in plain.parameters()], masters)
        same(whole(optimizer, ours), plain.parameters())
    state = optimizer.state_dict()["state"]
    same([state[number]["master"] for number in sorted(state)], masters)
    # A sum beyond fp16 has a mean within.
    model = nn.Linear(1, 1, dtype=torch.float16)
    optimizer = stage(model, torch.optim.SGD, pool.group(), lr=0.1)
    (model(torch.zeros(1, dtype=torch.float16)) * 40000).backward()
    assert optimizer.clip_grad_norm_(1e9) == optimizer.clip_grad_norm_(1e9) == 40000  # is not made larger


# ---------------------------------------------------------------------------------------------------------------------
# Costs


def live_bytes():
    """Bytes of the distinct storages of all tensors made since gc.freeze()."""
    dist.barrier(pool.group())  # gloo's thread may hold what it has sent a little longer
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


class Peak(TorchDispatchMode):
    """The most bytes of whole parameters at any operator."""

    def __init__(self, optimizer):
        super().__init__()
        self.buckets, self.most = optimizer._buckets, 0

    def now(self):
        return sum(bucket.flat.untyped_storage().nbytes() for bucket in self.buckets)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.most = max(self.most, self.now())
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Calls `see` before each call of an operator."""

    def __init__(self, name, see):
        super().__init__()
        self.name, self.see = name, see

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == self.name:
            self.see()
        return func(*args, **(kwargs or {}))


@each_stage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on(2)
def test_memory_is_that_of_the_docstring(stage, dtype):
    gc.collect()
    gc.freeze()
    start = live_bytes()
    model = deep(dtype)
    N, psi, size = pool.world_size(), sum(p.numel() for p in model.parameters()), dtype.itemsize
    optimizer = stage(model, torch.optim.AdamW, pool.group(), bucket_cap_mb=0.01, lr=1e-3)
    x = torch.randn(4, 64).to(dtype)
    params, grads = (size * psi / (N if sharded else 1) for sharded in (stage is zero.Zero3, stage is not zero.Zero1))
    state = (12 if size == 2 else 8) * psi / N
    slack = 4 * (10 * 32 + 20 * 32) + x.nbytes  # padding, step counts, placeholders, the input
    for step in range(3):
        optimizer.zero_grad()
        with Peak(optimizer) as peak:
            y = model(x)
            between = peak.now()
            y.square().mean().backward()
            del y
        if step:
            measured = live_bytes() - start - (params + grads + state)
            assert abs(measured) <= slack, (measured, slack)
            assert abs(sum(zero.held_by(optimizer)) - (params + grads + state)) <= slack
        if stage is zero.Zero3:  # never more than the unit that runs and the next, and none between the passes
            assert size * psi / 8 <= peak.most <= 2.1 * size * psi / 8
            assert between == peak.now() == 0
        optimizer.step()
    grads = grads / N if stage is zero.Zero1 else grads  # step() has moved them
    assert abs(live_bytes() - start - (params + grads + state)) <= slack
    gc.unfreeze()


def check_sent(stage, N, group, micro_batches):
    model = deep()
    optimizer = stage(model, torch.optim.SGD, group, lr=0.1, bucket_cap_mb=0.01)
    with zero.SentBytes() as sent:
        for _ in range(micro_batches):
            model(torch.randn(2, 64)).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    passes = {zero.Zero1: 2, zero.Zero2: micro_batches + 1, zero.Zero3: 3 * micro_batches}[stage]
    formula = passes * sum(p.nbytes for p in model.parameters()) * (N - 1) / N
    flags = 2 * (16 + 8 + 16) * (N - 1) / N  # twice a byte per parameter tensor, and the norm
    assert 0 <= sent.total - flags - formula <= 3 * micro_batches * 8 * 4 * N  # padding


@each_stage
@pytest.mark.parametrize("micro_batches", [1, 3])
@on(3)
def test_bytes_sent_are_those_of_the_docstring(stage, micro_batches):
    check_sent(stage, 3, pool.group(), micro_batches)


@each_stage
@pytest.mark.parametrize("N", [8, 1024])
def test_bytes_sent_at_1024_ranks(stage, N, request, monkeypatch):
    """In this process, by the collectives that NCCL has; no data moves."""
    dist.init_process_group("fake", store=FakeStore(), rank=N // 2, world_size=N)
    request.addfinalizer(dist.destroy_process_group)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    check_sent(stage, N, None, 2)


@on(2)
def test_gradients_leave_during_backward():
    """Zero2 sends a bucket while backward goes on below it, and frees its gradients at once."""
    model = deep()
    optimizer = zero.Zero2(model, torch.optim.SGD, pool.group(), bucket_cap_mb=0.01, lr=0.1)
    events = []
    for number, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, number=number: events.append(number))

    def see():
        events.append("sent")
        assert sum(p.grad is not None for p in model.parameters()) <= 4

    with Watch("c10d::send", see):
        model(torch.randn(2, 64, requires_grad=True)).sum().backward()
    assert events.count("sent") == 8 == len(optimizer._buckets)
    assert all(p.grad is None for p in model.parameters())
    assert events.index("sent") < events.index(5) < events.index(0)


# ---------------------------------------------------------------------------------------------------------------------
# Zero3


@on(3)
def test_whole_parameters_of_zero3():
    optimizer, model, plain, theirs = train(zero.Zero3, Odd, 1)
    assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
    assert all(p.isnan().all() for p in model.parameters() if p.is_floating_point())
    for part in (model, model.inputs):
        with pytest.raises(RuntimeError, match="module_state_dict"):
            part.state_dict()
    state = optimizer.module_state_dict()
    assert list(state) == list(plain.state_dict())
    same(state.values(), plain.state_dict().values())
    with optimizer.full_parameters():
        average = copy.deepcopy(model)  # is not sharded
    x = make_batch(0, 0)
    with torch.no_grad():
        same([model(x), model.inputs(x), average(x)], [plain(x), plain.inputs(x), plain(x)])  # a part, alone
    assert list(average.state_dict()) == list(state)
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 7))
    torch.manual_seed(9)
    plain.inputs.reset_parameters()
    for step in range(2):
        for o in (optimizer, theirs):
            o.zero_grad()
        with contextlib.nullcontext() if step else optimizer.full_parameters():  # load, and train inside
            if step == 0:
                model.load_state_dict(plain.state_dict())
            loss = loss_of(model, pool.rank(), step)
            loss_of(model, 0, 0)  # of which there is no backward
            loss.backward()
            optimizer.step()
        one_device_backward(plain, pool.world_size(), [step])
        theirs.step()
        same(optimizer.module_state_dict().values(), plain.state_dict().values())
    assert Peak(optimizer).now() == 0


class Strange(nn.Module):
    """Runs the parts of a module but not the module; a part hands its input through; outputs in a dict, one unused."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x, *, residual):
            return {"x": (self.first(x), self.second(x)), "residual": residual}

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.never_called = nn.Linear(6, 6), Strange.Part()
        self.parts = nn.ModuleList(Strange.Part() for _ in range(3))

    def forward(self, x):
        residual = x = self.never_called.second(self.never_called.first(self.embed(x)))
        for part in self.parts:
            y = part(torch.tanh(x), residual=residual)
            x, residual = y["x"][0] + y["residual"], y["residual"]
        return x


class Blocks(nn.Module):
    """Layers, called plainly or in checkpoints; `reentrant` ones are a backward within backward."""

    def __init__(self, how="plain", width=64):
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.how = nn.ModuleList(nn.Linear(width, width) for _ in range(8)), how

    def forward(self, x):
        x = x.requires_grad_(self.how == "reentrant")
        for layer in self.layers:
            block = lambda x, layer=layer: torch.tanh(layer(x))  # noqa: E731
            x = block(x) if self.how == "plain" else checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x


@pytest.mark.parametrize("make", [Strange, functools.partial(Blocks, "reentrant", 6)])
@on(2)
def test_modules_that_run_in_unusual_ways(make):
    how = IN_64 | {"make": lambda: make().double(), "exact": True}
    optimizer, *_ = train(zero.Zero3, steps=3, name="momentum", **how)
    assert Peak(optimizer).now() == 0


@pytest.mark.parametrize("how", ["plain", "checkpointed"])
@on(2)
def test_prefetch(how):
    """While a unit computes, that which came next the last time is on its way, and nothing is gathered in vain."""
    model = Blocks(how)
    optimizer = zero.Zero3(model, torch.optim.SGD, pool.group(), lr=0.1)
    buckets, ahead = list(reversed(optimizer._buckets)), []
    psi_bytes = sum(4 * bucket.flat.numel() for bucket in buckets)
    see = Watch("aten::addmm", lambda: ahead.append([n for n, bucket in enumerate(buckets) if bucket.works]))  # a layer
    for step in range(3):
        ahead.clear()
        with zero.SentBytes() as sent, see:
            loss = model(torch.randn(2, 64)).sum()
        assert sent.total == psi_bytes / 2
        assert ahead == ([[1], [2], [3], [4], [5], [6], [7], []] if step else [[]] * 8)
        ahead.clear()
        with zero.SentBytes() as sent, see:
            loss.backward()
        assert sent.total == 2 * psi_bytes / 2
        if step and how == "checkpointed":  # computed again
            assert ahead == [[6], [5], [4], [3], [2], [1], [0], []], ahead
    with torch.no_grad(), zero.SentBytes() as sent:
        model(model(torch.randn(2, 64)))
    assert sent.total == 2 * psi_bytes / 2


class Adapted(nn.Module):
    """A frozen layer with a trained addition, as LoRA: backward needs the frozen weight after the trained one."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x):
        return x + self.frozen(torch.tanh(x)) + self.up(self.down(x))


@on(2)
def test_frozen_parameters_are_freed():
    """Frozen parameters are freed after backward as well, and neither they nor gradients of theirs are sent."""
    torch.manual_seed(1)
    model = nn.Sequential(*(Adapted() for _ in range(6)))
    optimizer = zero.Zero3(model, torch.optim.AdamW, pool.group(), lr=0.1)
    for _ in range(2):
        with Peak(optimizer) as peak, zero.SentBytes() as sent:
            model(torch.randn(3, 64)).square().mean().backward()
        assert peak.most < 2.1 * 4 * sum(p.numel() for p in model[0].parameters())
    trained = [bucket.parameters[0].requires_grad for bucket in optimizer._buckets]
    sizes = [4 * bucket.flat.numel() for bucket in optimizer._buckets]
    assert sent.total == (2 * sum(sizes) + sum(itertools.compress(sizes, trained))) / 2
    x = torch.randn(3, 64, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)  # a backward that reaches no parameter
    assert peak.now() == 0


# ---------------------------------------------------------------------------------------------------------------------
# Wrong use, and ends


@each_stage
@on(2)
def test_wrong_use(stage):
    rank, group, SGD = pool.rank(), pool.group(), torch.optim.SGD
    with pytest.raises(
        ValueError, match=rf"on rank {1 - rank} are .*weight': shape \({4 + rank}, 6\).*shape \({5 - rank}, 6\)"
    ):
        stage(nn.Sequential(nn.Linear(6, 4 + rank)), SGD, group)
    model = plain_model()
    model.register_buffer("buffer", torch.ones(3 + rank))
    for unlike in (model, plain_model(torch.float64 if rank else torch.float32)):
        with pytest.raises(ValueError, match="ranks must hold the same model"):
            stage(unlike, SGD, group)
    with pytest.raises(ValueError, match="DistributedDataParallel, which averages as well"):
        stage(nn.parallel.DistributedDataParallel(plain_model(), process_group=group), SGD, group)
    for name in ("LBFGS", "Adafactor", "SparseAdam", "Muon"):
        optimizer_class = getattr(torch.optim, name, type(name, (torch.optim.Optimizer,), {}))  # Muon is of torch 2.9
        with pytest.raises(ValueError, match=f"{name} may need whole parameters.*AdamW"):
            stage(plain_model(), optimizer_class, group)
    if rank:
        with pytest.raises(ValueError, match="rank 1 is not in process_group"):
            stage(plain_model(), SGD, dist.GroupMember.NON_GROUP_MEMBER)
    ours = plain_model()
    optimizer = stage(ours, SGD, group)
    ours.to(torch.float32)  # no change
    loss_of(ours, rank, 1).backward()
    optimizer.step()
    ours.double()
    with pytest.raises(RuntimeError, match=r"after module\.to"):  # noqa: PT012
        loss_of(ours, rank, 1, torch.float64).backward()
        optimizer.step()


@each_stage
@on(2)
def test_nothing_is_left_behind(stage):
    """By a backward that raises; and by an optimizer that is gone, though the model is not."""

    def fail(_):
        raise ArithmeticError

    ours, plain = plain_model(), plain_model()
    optimizer = stage(ours, torch.optim.SGD, pool.group(), bucket_cap_mb=1e-4, lr=0.1)
    hidden = ours[:2](make_batch(0, 0))
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError):
        ours[2:](hidden).sum().backward()
    optimizer.zero_grad()
    loss_of(ours, pool.rank(), 1).backward()
    assert stage is zero.Zero1 or all(p.grad is None for p in ours.parameters())  # reduced at once, as ever
    one_device_backward(plain, pool.world_size(), [1])
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    same(whole(optimizer, ours), plain.parameters())
    optimizer, hidden, gone = None, None, weakref.ref(optimizer)  # a graph keeps Zero3, for its backward
    gc.collect()
    assert gone() is None
    if stage is not zero.Zero3:
        loss_of(ours, pool.rank(), 0).backward()  # nobody reduces any more
        assert all(p.grad is not None for p in ours.parameters())
