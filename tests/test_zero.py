"""zero.py against one device, bit by bit. What is true of any such implementation, claims.py says; here is the rest.

Bodies take the class under test, `stage`, and use what its users see. With SGD the parameters show the gradients.
"""

import contextlib
import copy
import functools
import gc
import weakref

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import MODELS, OPTIMIZERS, assert_equal, make_batch, make_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zero

STAGES = (zero.Zero1, zero.Zero2, zero.Zero3)
each_stage = pytest.mark.parametrize("stage", STAGES)


plain_model = functools.partial(make_model, "plain")


def deep(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(dtype)


def loss_of(model, rank, step, dtype=torch.float32):
    return model(make_batch(rank, step, dtype)).square().mean()


def one_device_backward(model, N, steps, loss=loss_of, by_rank=False):
    """Leave the mean over ranks in .grad. Zero1 (`by_rank`) adds up over a rank's backwards first, Zero2 over ranks."""
    rounds = [[(r, s) for s in steps] for r in range(N)] if by_rank else [[(r, s) for s in steps for r in range(N)]]
    sums = {}
    for batches in rounds:
        for batch in batches:
            loss(model, *batch).backward()
        for p in (p for p in model.parameters() if p.grad is not None):
            sums[p], p.grad = sums.get(p, 0) + p.grad, None
    for p, total in sums.items():
        p.grad = total / N


def full(optimizer):
    return getattr(optimizer, "full_parameters", contextlib.nullcontext)()


def whole(optimizer, model):
    with full(optimizer):
        return [parameter.detach().clone() for parameter in model.parameters()]


def same(ours, theirs):
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), number
        assert_equal(a.detach(), b.detach(), True, number)


def same_state(ours, theirs):
    """Two optimizers' state dicts."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == sorted(theirs["state"])  # in the order of the parameters
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        same(ours["state"][number].values(), [state[name] for name in ours["state"][number]])


def train(
    stage, make, steps, name="sgd", loss=loss_of, *, micro_batches=1, unsynced=0,
    groups=lambda model: model.parameters(), before=lambda step, optimizer, model: None, **arguments,
):  # fmt: skip
    """Train both from rank 0's weights: after each step their parameters are the same, and so is the state. -> all four

    The first `unsynced` micro-batches of a step run in no_sync(). The last step is made twice.
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
    psi_bytes = sum(bucket.flat.nbytes for bucket in optimizer._buckets) if stage is zero.Zero3 else 0
    for step in (*range(steps), None):
        if step is not None:
            before(step, optimizer, model)
            before(step, theirs, plain)
            optimizer.zero_grad()
            theirs.zero_grad()
            batches = range(step * micro_batches, (step + 1) * micro_batches)
            one_device_backward(plain, N, batches, loss, by_rank=unsynced or stage is zero.Zero1)
            with optimizer.no_sync(), optimizer.no_sync(), zero.SentBytes() as sent:
                for batch in batches[:unsynced]:
                    loss(model, rank, batch).backward()
            assert sent.total == 2 * unsynced * psi_bytes * (N - 1) / N  # Zero3's gathers, and no gradients
            for batch in batches[unsynced:]:
                loss(model, rank, batch).backward()
        optimizer.step()
        theirs.step()
        same(whole(optimizer, model), plain.parameters())
    same_state(optimizer.state_dict(), theirs.state_dict())
    return optimizer, model, plain, theirs


# ---- Training equals one device


@pool.on(3)
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


@each_stage
@pytest.mark.parametrize("kind", MODELS)
@pool.on(3)
def test_kinds_of_models(stage, kind):
    """Also where state is kept and updated in another memory."""
    optimizer, *_ = train(stage, functools.partial(make_model, kind), 3, "adamw", bucket_cap_mb=1e-3, offload="cpu")
    views = [view for bucket in optimizer._buckets for view in bucket.whole]
    assert all(view.storage_offset() * view.itemsize % 64 == 0 for view in views)  # as torch aligns what it allocates


@pytest.mark.parametrize("name", sorted(zero.ELEMENTWISE))
@pool.on(2)
def test_elementwise_optimizers(name):
    train(zero.Zero2, plain_model, 3, name)


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
    train(stage, functools.partial(Reader, numels, seed), 3, name, Reader.__call__, **arguments)


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
    vectors = [p for p in model.parameters() if p.dim() == 1]
    rest = {"params": [p for p in model.parameters() if p.dim() > 1]}
    return [rest, {"params": vectors[1:], "weight_decay": 0.1, "lr": 0.05}]


def change_groups(step, optimizer, model):
    optimizer.param_groups[1]["weight_decay"] = 0.3 if step == 3 else 0.0
    model[2].weight.requires_grad_(step != 2)


@each_stage
@pool.on(3)
def test_groups(stage):
    """With options of their own, changed on the way; parameters frozen and unfrozen; a bias in no group."""
    train(stage, plain_model, 5, bucket_cap_mb=1e-3, groups=two_groups, before=change_groups, micro_batches=2)


# ---- State dicts, and 16 bits


def body_part_of_chain(stage, state, name, first, count, dtype):
    """Load, train, save. Every rank sees the same data, so that the world size changes no sum."""
    model, cls = plain_model(dtype), OPTIMIZERS[name]
    optimizer = stage(model, cls.func, pool.group(), bucket_cap_mb=1e-3, **cls.keywords)
    if state:
        optimizer.load_state_dict(state["optimizer"])
        with full(optimizer):
            model.load_state_dict(state["model"])
    for step in range(first, first + count):
        optimizer.zero_grad()
        loss_of(model, 0, step, dtype).backward()
        optimizer.step()
    held, state = zero.held_by(optimizer), optimizer.state_dict()
    with full(optimizer):
        result = copy.deepcopy({"model": dict(model.state_dict()), "optimizer": state})
    optimizer.step()
    same_state(state, result["optimizer"])  # what was saved is its own
    optimizer.load_state_dict(state)
    assert zero.held_by(optimizer) == held  # a shard, and nothing of the whole
    return result


@pytest.mark.parametrize(("name", "dtype"), [("momentum", torch.float32), ("adamw", torch.bfloat16)])
def test_state_moves_between_world_sizes_and_stages(name, dtype):
    """4 → 1 → 2 → 3 ranks equals no interruption, with masters in 16 bits. (3 does not divide exactly: no steps.)"""
    through, *_ = pool.run(1, body_part_of_chain, zero.Zero1, None, name, 0, 8, dtype)
    chain, state = (
        [(4, zero.Zero2, 2), (1, zero.Zero3, 2), (2, zero.Zero3, 2), (2, zero.Zero1, 2), (3, zero.Zero2, 0)],
        None,
    )
    for number, (N, stage, steps) in enumerate(chain):
        state, *others = pool.run(N, body_part_of_chain, stage, state, name, 2 * number, steps, dtype)
        for other in others if steps else [*others, through]:
            same_state(other["optimizer"], state["optimizer"])
            same(other["model"].values(), state["model"].values())


@each_stage
@pytest.mark.parametrize(("dtype", "offload"), [(torch.bfloat16, None), (torch.float16, "cpu")])
@pool.on(3)
def test_16_bit_parameters_have_fp32_masters(stage, dtype, offload):
    """fp32 masters; gradients added up in fp32, divided after, rounded once. As one device would, bit by bit."""
    ours, plain, N = plain_model(dtype), plain_model(dtype), pool.world_size()
    optimizer = stage(ours, torch.optim.AdamW, pool.group(), lr=1e-2, offload=offload)
    masters = [p.detach().float() for p in plain.parameters()]
    theirs = torch.optim.AdamW(masters, lr=1e-2)
    for step in range(4):
        if step in (0, 3):  # what is written stays, and what is not keeps its fp32 digits
            with full(optimizer):
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


# ---- Costs


def live_bytes():
    """Bytes of the distinct storages of all tensors made since gc.freeze()."""
    dist.barrier(pool.group())  # gloo's thread may hold what it has sent a little longer
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def whole_bytes(optimizer):
    """What has memory now of whole parameters."""
    return sum(bucket.flat.untyped_storage().nbytes() for bucket in optimizer._buckets)


class Watch(TorchDispatchMode):
    """`seen`: what `see` returned before each call of an operator, or of any."""

    def __init__(self, see, name=None):
        super().__init__()
        self.see, self.name, self.seen = see, name, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.name in (None, func._schema.name):
            self.seen.append(self.see())
        return func(*args, **(kwargs or {}))


@each_stage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pool.on(2)
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
        with Watch(lambda: whole_bytes(optimizer)) as peak:
            y = model(x)
            between = whole_bytes(optimizer)
            y.square().mean().backward()
            del y
        if step:
            assert abs(live_bytes() - start - (params + grads + state)) <= slack
            assert abs(sum(zero.held_by(optimizer)) - (params + grads + state)) <= slack
        if stage is zero.Zero3:  # never more than the unit that runs and the next, and none between the passes
            assert size * psi / 8 <= max(peak.seen) <= 2.1 * size * psi / 8
            assert between == whole_bytes(optimizer) == 0
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
@pool.on(3)
def test_bytes_sent_are_those_of_the_docstring(stage):
    for micro_batches in (1, 3):
        check_sent(stage, 3, pool.group(), micro_batches)


@each_stage
@pytest.mark.parametrize("N", [8, 1024])
def test_bytes_sent_at_1024_ranks(stage, N, request, monkeypatch):
    """In this process, by the collectives that NCCL has; no data moves."""
    dist.init_process_group("fake", store=FakeStore(), rank=N // 2, world_size=N)
    request.addfinalizer(dist.destroy_process_group)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    check_sent(stage, N, None, 2)


def test_buckets_are_in_the_order_in_which_backward_fills_them():
    parameters = [nn.Parameter(torch.tensor(float(number))) for number in range(6)]
    buckets = zero.assign_buckets(dict(zip(parameters, "abaccc", strict=True)), cap_bytes=12)
    assert [[int(parameter) for parameter in bucket] for bucket in buckets] == [[5, 4, 3], [1], [2, 0]]


@pool.on(2)
def test_gradients_leave_during_backward():
    """Zero2 sends a bucket while backward goes on below it, and frees its gradients; a group of biases stops none."""
    model, events = deep(), []
    biases, matrices = ([p for p in model.parameters() if p.dim() == dim] for dim in (1, 2))
    groups = [{"params": biases}, {"params": matrices}]
    optimizer = zero.Zero2(model, torch.optim.SGD, pool.group(), bucket_cap_mb=0.01, params=groups, lr=0.1)
    for number, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, number=number: events.append(number))

    def see():
        events.append("sent")
        assert sum(p.grad is not None for p in matrices) <= 2

    with Watch(see, "c10d::send"):
        model(torch.randn(2, 64, requires_grad=True)).sum().backward()
    assert events.count("sent") == 9 == len(optimizer._buckets)
    assert all(p.grad is None for p in model.parameters())
    assert events.index("sent") < events.index(5) < events.index(0)


# ---- Zero3


@pool.on(3)
def test_whole_parameters_of_zero3():
    optimizer, model, plain, theirs = train(zero.Zero3, functools.partial(make_model, "odd"), 1)
    assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
    assert all(p.isnan().all() for p in model.parameters())
    for part in (model, model.first):
        with pytest.raises(RuntimeError, match="module_state_dict"):
            part.state_dict()
    same(optimizer.module_state_dict().values(), plain.state_dict().values())
    with optimizer.full_parameters():
        average = copy.deepcopy(model)  # is not sharded
    x = make_batch(0, 0)
    with torch.no_grad():
        same(
            [model(x), model.first(x[:, 1:]), average(x)], [plain(x), plain.first(x[:, 1:]), plain(x)]
        )  # a part, alone
    same(average.state_dict().values(), plain.state_dict().values())
    torch.manual_seed(9)
    plain.first.reset_parameters()
    for step in range(2):
        optimizer.zero_grad()
        theirs.zero_grad()
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
    assert whole_bytes(optimizer) == 0


class Part(nn.Module):
    """Hands an input through; one output is unused."""

    def __init__(self, width):
        super().__init__()
        self.layer, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(()))

    def forward(self, x, residual):
        return torch.tanh(self.layer(x)), residual, self.scale * x


class Blocks(nn.Module):
    """Parts, called plainly or in checkpoints; `reentrant` ones are a backward within backward."""

    def __init__(self, how="plain", width=64):
        super().__init__()
        torch.manual_seed(1)
        self.parts, self.how = nn.ModuleList(Part(width) for _ in range(8)), how

    def forward(self, x):
        residual = x = self.parts[0](x, x)[0]
        run = functools.partial(checkpoint, use_reentrant=self.how == "reentrant")
        for part in self.parts[1:-1]:
            x, residual, _ = part(x, residual) if self.how == "plain" else run(part, x, residual)
        return self.parts[-1].layer(x + residual)  # not the unit itself


@pytest.mark.parametrize("how", ["plain", "reentrant"])
@pool.on(2)
def test_modules_that_run_in_unusual_ways(how):
    optimizer, *_ = train(zero.Zero3, functools.partial(Blocks, how, 6), 3, "momentum")
    assert whole_bytes(optimizer) == 0


@pytest.mark.parametrize("how", ["plain", "checkpointed"])
@pool.on(2)
def test_prefetch(how):
    """While a unit computes, that which came next the last time is on its way, and nothing is gathered in vain."""
    model = Blocks(how)
    optimizer = zero.Zero3(model, torch.optim.SGD, pool.group(), lr=0.1)
    buckets = list(reversed(optimizer._buckets))
    psi_bytes = sum(bucket.flat.nbytes for bucket in buckets)
    ahead = lambda: [number for number, bucket in enumerate(buckets) if bucket.works]  # noqa: E731
    for step in range(3):
        with zero.SentBytes() as sent, Watch(ahead, "aten::addmm") as watch:  # a layer
            loss = model(torch.randn(2, 64)).sum()
        assert sent.total == psi_bytes / 2
        assert watch.seen == ([[1], [2], [3], [4], [5], [6], [7], []] if step else [[]] * 8)
        with zero.SentBytes() as sent, Watch(ahead, "aten::addmm") as watch:
            loss.backward()
        assert sent.total == 2 * psi_bytes / 2
        if step and how == "checkpointed":  # computed again
            assert watch.seen == [[5], [4], [3], [2], [1], [0]]


@pool.on(2)
def test_a_step_waits_for_the_gather_that_a_unit_called_alone_has_begun():
    """It sends the shard that the step is about to change."""
    model, x, early = Blocks(), torch.randn(2, 64), []
    optimizer = zero.Zero3(model, torch.optim.SGD, pool.group(), lr=0.1)
    on_their_way = lambda: [bucket.segments for bucket in optimizer._buckets if bucket.works]  # noqa: E731
    look = lambda inner, *_: early.append(any(inner.param_groups[0]["params"] is s for s in on_their_way()))  # noqa: E731
    optimizer._optimizer.register_step_pre_hook(look)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
    with torch.no_grad():
        model.parts[0](x, x)
    assert on_their_way()
    optimizer.step()
    assert len(early) == 8
    assert not any(early)


@pool.on(2)
def test_frozen_parameters_are_freed():
    """Frozen parameters are freed after backward as well, and neither they nor gradients of theirs are sent."""
    model = deep()
    for layer in model:
        layer.weight.requires_grad_(False)
    optimizer = zero.Zero3(model, torch.optim.AdamW, pool.group(), lr=0.1)
    frozen, trained = (sum(b.flat.nbytes for b in optimizer._buckets if len(b.whole[0].shape) == dim) for dim in (2, 1))
    for _ in range(2):
        with Watch(lambda: whole_bytes(optimizer)) as peak, zero.SentBytes() as sent:
            model(torch.randn(3, 64)).square().mean().backward()
        assert max(peak.seen) == 2 * (frozen + trained) / 8
    assert sent.total == (2 * frozen + 3 * trained) / 2
    x = torch.randn(3, 64, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)  # a backward that reaches no parameter
    assert whole_bytes(optimizer) == 0


# ---- Wrong use, and ends


@each_stage
@pool.on(2)
def test_wrong_use(stage):
    rank, group, SGD = pool.rank(), pool.group(), torch.optim.SGD
    for unlike in (
        nn.Linear(6, 4 + rank),
        nn.BatchNorm1d(4 + rank, affine=False),
        plain_model().to((torch.float32, torch.float64)[rank]),
    ):
        with pytest.raises(ValueError, match=f"the same model; rank {1 - rank}'s differs in .*shape"):
            stage(nn.Sequential(nn.Linear(2, 2), unlike), SGD, group)
    with pytest.raises(ValueError, match="DistributedDataParallel, which averages as well"):
        stage(nn.parallel.DistributedDataParallel(plain_model(), process_group=group), SGD, group)
    with pytest.raises(ValueError, match=r"not among module.parameters"):
        stage(plain_model(), SGD, group, params=plain_model().parameters())
    for name in ("LBFGS", "Adafactor", "SparseAdam", "Muon"):
        optimizer_class = getattr(torch.optim, name, type(name, (torch.optim.Optimizer,), {}))  # Muon is of torch 2.9
        with pytest.raises(ValueError, match=f"{name} may need whole parameters.*AdamW"):
            stage(plain_model(), optimizer_class, group)
    if rank:
        with pytest.raises(ValueError, match="rank 1 is not in process_group"):
            stage(plain_model(), SGD, dist.GroupMember.NON_GROUP_MEMBER)
    ours = plain_model()
    optimizer = stage(ours, SGD, group)
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    ours.to(torch.float32)  # no change
    loss_of(ours, rank, 1).backward()
    optimizer.step()
    ours.double()
    with pytest.raises(RuntimeError, match=r"after module\.to"):  # noqa: PT012
        loss_of(ours, rank, 1, torch.float64).backward()
        optimizer.step()


@each_stage
@pool.on(2)
def test_nothing_is_left_behind(stage):
    """By a backward that raises; and by an optimizer that is gone, though the model is not."""
    ours, plain = plain_model(), plain_model()
    optimizer = stage(ours, torch.optim.SGD, pool.group(), bucket_cap_mb=1e-4, lr=0.1)
    hidden = ours[:2](make_batch(0, 0))
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
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
