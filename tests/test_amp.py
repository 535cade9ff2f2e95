"""amp.py against torch.amp.GradScaler, torch.autocast, masters kept by hand, and fp32.

What tests/claims/amp.py claims of every GradScaler is not repeated here.
"""

import copy
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F  # noqa: F401 (in ALIKE and UNLIKE)
from hypothesis import example, given
from hypothesis import strategies as st
from shared import OPTIMIZERS, Collectives, batch_loss, loss_of, make_batch, make_model
from torch.optim.lr_scheduler import LambdaLR

import amp
import ddp
import zero

INF = float("inf")
NAN = float("nan")
F32 = torch.float32
F16 = torch.float16
BF16 = torch.bfloat16
bitwise = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_gradients_are_within_roundoffs_of_fp32_and_training_within_two_percent(dtype):
    """The error of all gradients together is below 4 unit roundoffs, if none underflows."""
    tokens = torch.randint(97, 123, (8, 17), generator=torch.Generator().manual_seed(0))
    first_gradients = []
    last_losses = []
    for kind in (F32, dtype):
        torch.manual_seed(0)
        model = amp.language_model(C=32, heads=2, layers=1)
        adamw = OPTIMIZERS["adamw"](model.parameters())
        optimizer = amp.MixedPrecisionOptimizer(adamw, kind, amp.GradScaler("cpu", 2.0**10))
        for step in range(15):
            optimizer.zero_grad()
            loss = amp.language_loss(model(tokens[:, :-1]).float(), tokens[:, 1:])
            optimizer.scale(loss).backward()
            if step == 0:
                gradients = [p.grad.float().flatten() / 2**10 for p in model.parameters()]
                first_gradients.append(torch.cat(gradients))
            optimizer.step()
        last_losses.append(loss.item())
    expected, found = first_gradients
    error = (found - expected).norm() / expected.norm()
    assert 0.05 < error / (torch.finfo(dtype).eps / 2) < 4
    assert last_losses[1] == pytest.approx(last_losses[0], rel=0.02)


# ---- GradScaler


def two_optimizers():
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((3,), 2.0))]
    return weights, [torch.optim.SGD([weight], lr=0.25) for weight in weights]


def call(name, scaler, weight, optimizer, value):
    gradient = torch.full((len(weight),), value)
    if name == "scale":
        [(weight.grad,)] = scaler.scale([(gradient,)])
    elif name == "scale sparse":
        weight.grad = scaler.scale(gradient.to_sparse())
    elif name == "no gradient":
        weight.grad = None
    elif name.startswith("update"):
        scaler.update(*map(float, name.split()[1:]))
    else:
        getattr(scaler, name)(optimizer)


ITERATION = ["scale", "step", "update"]
SPARSE = ["scale sparse", "step", "update"]
WITHOUT = ["no gradient", "step"]
NAMES = [*ITERATION, "no gradient", "unscale_", "update 7"]
CALLS = [ITERATION] * 4 + [SPARSE] * 2 + [[name] for name in NAMES]
VALUES = st.sampled_from([0.5, 3.0, INF, -INF, NAN, 1e38])
# init_scale, growth_factor, backoff_factor, growth_interval, enabled
OPTIONS = [
    (1.0, 2.0, 0.5, 1),
    (2.0**16, 1.7, 0.3, 2),
    (0.1, 2.0, 0.3, 3),
    (3e38, 1.7, 0.5, 1),
    (8.0, 2.0, 0.5, 1, False),
]


def results_of(scaler, calls):
    """After each list of calls: the type of the error, the scaler's state, and the weights."""
    weights, optimizers = two_optimizers()
    for names, i, value in [(["scale"], 0, 0.0), (["scale"], 1, 0.0), *calls]:
        error = None
        try:
            for name in names:
                call(name, scaler, weights[i], optimizers[i], value)
        except (RuntimeError, AssertionError) as raised:
            error = type(raised)
        state = sorted(scaler.state_dict().items())
        yield names, error, scaler.get_scale(), state, *(weight.tolist() for weight in weights)


@given(
    st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 1), VALUES), max_size=40),
    st.sampled_from(OPTIONS),
)
@example([(["scale", "step", "step"], 0, 0.5)], OPTIONS[0])
@example([(ITERATION, 0, value) for value in (0.5, INF, 0.5, 0.5, 0.5)], OPTIONS[2])
@example([(ITERATION, 0, 0.5)] * 2, OPTIONS[3])
@example([(SPARSE, 1, value) for value in (0.5, NAN, 3.0)], OPTIONS[1])
@example([(WITHOUT, 0, 0.5), (["update"], 0, 0.5)], OPTIONS[0])
@example([(WITHOUT, 0, 0.5), (ITERATION, 1, 0.5)], OPTIONS[0])
def test_any_sequence_of_calls_does_what_pytorchs_scaler_does(calls, options):
    """The scales, counters and weights are bitwise PyTorch's. Errors have the same types."""
    ours, theirs = (
        list(results_of(scaler_class("cpu", *options), calls))
        for scaler_class in (amp.GradScaler, torch.amp.GradScaler)
    )
    assert str(ours) == str(theirs)  # as text, because NaN does not equal NaN


def test_wrong_calls_of_the_scaler_and_of_autocast():
    scaler = amp.GradScaler()
    low = nn.Parameter(torch.ones(2, dtype=F16))
    low.grad = torch.ones_like(low)
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(torch.optim.SGD([low]))
    with pytest.raises(RuntimeError, match="no closure"):
        scaler.step(torch.optim.SGD([low]), closure=float)
    with pytest.raises(TypeError, match="give a dtype"):
        amp.autocast("cpu")


@pool.on(2)
def test_an_overflow_of_one_optimizer_on_one_rank_skips_its_step_on_all():
    """The other optimizer steps, also on the rank without a gradient. Each sends four bytes."""
    scaler = amp.GradScaler(pool.device().type, 4.0, process_group=pool.group())
    weights, optimizers = two_optimizers()
    weights[0].grad = scaler.scale(torch.ones(2))
    if pool.rank() == 0:
        weights[0].grad[0] = NAN
        weights[1].grad = scaler.scale(torch.ones(3))
    with Collectives() as seen:
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert seen.calls == [("allreduce_", 4)] * 2
    assert scaler.get_scale() == 2.0
    assert weights[0].tolist() == [1.0, 1.0]
    assert weights[1].tolist() == ([2.0] * 3 if pool.rank() else [1.75] * 3)


@pytest.mark.parametrize("stage", [zero.Zero1, zero.Zero2, zero.Zero3])
@pool.on(2)
def test_over_zero_a_scale_changes_nothing_and_an_overflow_on_one_rank_skips_the_step(stage):
    """Bitwise. Zero2 and Zero3 leave nothing in .grad, so the scaler asks them to unscale."""
    models = [make_model("plain"), make_model("plain")]
    optimizers = [stage(model, torch.optim.SGD, pool.group(), lr=0.1) for model in models]
    scaler = amp.GradScaler(pool.device().type, 1024.0, process_group=pool.group())
    for step in range(4):
        overflows = step == 2
        factor = INF if overflows and pool.rank() == 1 else 1.0
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(batch_loss(models[0], pool.rank(), step) * factor).backward()
        scaler.step(optimizers[0])
        scaler.update()
        if not overflows:
            batch_loss(models[1], pool.rank(), step).backward()
            optimizers[1].step()
    assert scaler.get_scale() == 512.0
    shards = [[shard for _, _, shard, _ in optimizer.shards()] for optimizer in optimizers]
    bitwise(*shards)


@pytest.mark.parametrize(
    ("backends", "reduced_on"),
    [("meta:nccl", "meta"), ("cpu:gloo,meta:nccl", "cpu"), ("meta:gloo,cpu:gloo", "cpu")],
)
@pool.on(1)
def test_an_overflow_is_reduced_on_a_device_of_the_groups_backend(backends, reduced_on):
    """NCCL reduces nothing on the CPU. Here the meta device stands for CUDA."""
    weights, optimizers = two_optimizers()
    weights[0].grad = torch.ones(2)

    def all_reduce(tensor, **_):
        raise RuntimeError(f"on {tensor.device.type}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group=None: backends)
        patch.setattr(dist, "all_reduce", all_reduce)
        with pytest.raises(RuntimeError, match=f"on {reduced_on}"):
            amp.GradScaler(process_group=pool.group()).unscale_(optimizers[0])


# ---- MixedPrecisionOptimizer


def square_loss(x, model):
    return model(x).float().square().mean()


def masters_of(optimizer):
    return optimizer.param_groups[0]["params"]


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.mark.parametrize(
    ("name", "dtype", "scaler_class"),
    [
        ("adamw", F16, amp.GradScaler),
        ("adamw", F16, torch.amp.GradScaler),
        ("momentum", BF16, None),
        ("adamw", F32, amp.GradScaler),
    ],
)
def test_training_is_bitwise_that_of_masters_by_hand(name, dtype, scaler_class):
    """The optimizer is wrapped after a step. Gradients are clipped, and the last one overflows."""
    plain = make_model("tied")  # its parameters are the masters by hand
    model = copy.deepcopy(plain)
    unused = nn.Parameter(torch.ones(3))
    masters = list(plain.parameters())
    inner = OPTIMIZERS[name]([*model.parameters(), unused])
    reference = OPTIMIZERS[name](masters)
    for each, optimizer in ((model, inner), (plain, reference)):
        batch_loss(each, 0, 0).backward()
        optimizer.step()
    low = copy.deepcopy(plain).to(dtype)
    scale = 2.0**20 if scaler_class else 1.0  # too large at first
    scaler = scaler_class and scaler_class("cpu", scale)
    optimizer = amp.MixedPrecisionOptimizer(inner, dtype, scaler)
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    norms = []
    clip = partial(nn.utils.clip_grad_norm_, masters, 0.01)
    reference.register_step_pre_hook(lambda *_: norms.append(clip()))

    for number in range(1, 15):
        factor = INF if number == 14 else 1.0
        loss = partial(square_loss, make_batch(0, number).to(dtype) * factor)
        optimizer.zero_grad()
        optimizer.scale(loss(model)).backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        norm = optimizer.clip_grad_norm_(0.01)
        optimizer.step()
        next_scale = amp.mixed_precision_step(low, masters, reference, loss, scale)
        if next_scale == scale:
            bitwise(norm, norms[-1])
        scale = next_scale if scaler_class else 1.0
        assert optimizer.scaler.get_scale() == scale
        bitwise([parameter.grad for parameter in model.parameters()], gradients)
        bitwise(list(model.parameters()), list(low.parameters()))
        bitwise(masters_of(optimizer), [*masters, unused.float()])
        assert all(master.grad is None for master in masters_of(optimizer))
        scheduler.step()
        reference.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
    assert 0 < len(norms) < 14  # some steps, not all, were skipped

    psi = sum(master.numel() for master in masters)
    adam = 8 * psi + 4 * len(masters) if name == "adamw" else 4 * psi  # AdamW counts its steps
    held = amp.held(model.parameters(), optimizer)
    assert held == (dtype.itemsize * psi, dtype.itemsize * psi, adam)
    assert amp.held_bytes(masters_of(optimizer)) == 4 * psi + 4 * unused.numel()


def test_sparse_gradients_train_bitwise_as_dense_ones():
    weights = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(5, 3, sparse=sparse)
        adamw = OPTIMIZERS["adamw"](model.parameters())
        optimizer = amp.MixedPrecisionOptimizer(adamw, BF16, amp.GradScaler("cpu", 8.0))
        for step in range(3):
            optimizer.zero_grad()
            optimizer.scale(loss_of(model(torch.tensor([step, 4])))).backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
        weights.append(model.weight)
    bitwise(*weights)


def test_gradients_stay_until_zero_grad_as_in_pytorch():
    model = make_model("plain")
    plain = copy.deepcopy(model)
    sgd = OPTIMIZERS["sgd"](plain.parameters())
    optimizer = amp.MixedPrecisionOptimizer(OPTIMIZERS["sgd"](model.parameters()), F32)
    batch_loss(model, 0, 0).backward()
    optimizer.unscale_()
    optimizer.zero_grad()
    optimizer.step()  # without a gradient
    for each, stepped in ((model, optimizer), (plain, sgd)):
        batch_loss(each, 0, 1).backward()
        stepped.step()
        stepped.step()
    bitwise(list(model.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [1]])
@pytest.mark.parametrize("scaler_class", [amp.GradScaler, torch.amp.GradScaler, None])
def test_training_resumes_bitwise_in_either_order_of_loading(scaler_class, order):
    """If the caller has written to weights, their masters take the values that were written."""

    def start(seed):
        model = make_model("tied", seed=seed)
        scaler = scaler_class and scaler_class("cpu", 2.0**10)
        adamw = OPTIMIZERS["adamw"](model.parameters())
        return model, amp.MixedPrecisionOptimizer(adamw, F16, scaler)

    def train(model, optimizer, numbers):
        for number in numbers:
            optimizer.zero_grad()
            loss = square_loss(make_batch(0, number, F16), model)
            optimizer.scale(loss).backward()
            optimizer.step()

    model, optimizer = start(seed=1)
    train(model, optimizer, [0, 1, 2])
    before = flat(masters_of(optimizer))
    next(model.parameters()).detach()[0] = 5.0  # six weights
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])

    resumed = start(seed=7)
    for i in order:
        resumed[i].load_state_dict(states[i])
    after = flat(masters_of(resumed[1]))
    assert resumed[1].scaler.state_dict() == optimizer.scaler.state_dict()
    assert after[:6].tolist() == [5.0] * 6
    bitwise(after[6:], before[6:])
    for each in ((model, optimizer), resumed):
        train(*each, [3, 4])
    bitwise(masters_of(resumed[1]), masters_of(optimizer))


@pytest.mark.parametrize("wrapper", [ddp.DDP, nn.parallel.DistributedDataParallel])
@pool.on(2)
def test_replicas_agree_if_ddp_broadcasts_after_the_masters_were_made(wrapper):
    """Rank 0 drops the bits of its masters that the broadcast in bf16 does not carry."""
    model = make_model("plain", seed=pool.rank())
    optimizer = amp.MixedPrecisionOptimizer(OPTIMIZERS["adamw"](model.parameters()), BF16)
    replica = wrapper(model, process_group=pool.group())
    for step in range(4):
        optimizer.zero_grad()
        batch_loss(replica, pool.rank(), step).backward()
        optimizer.step()
    masters = flat(masters_of(optimizer))
    of_rank_0 = masters.clone()
    dist.broadcast(of_rank_0, group=pool.group(), group_src=0)
    bitwise(masters, of_rank_0)
    assert not torch.equal(masters[:6], make_model("plain")[0].weight[0])


def test_under_another_default_dtype_and_with_masters_in_it(request):
    request.addfinalizer(lambda: torch.set_default_dtype(F32))
    torch.set_default_dtype(torch.float64)
    weight = nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight], lr=2.0**-40)
    optimizer = amp.MixedPrecisionOptimizer(sgd, BF16, amp.GradScaler(init_scale=2.0))
    weight.grad = torch.full((2,), 6.0, dtype=BF16)
    optimizer.step()
    assert masters_of(optimizer)[0].tolist() == [1 - 3 * 2.0**-40] * 2


def test_wrong_calls_of_the_mixed_precision_optimizer():
    model = make_model("plain")
    sgd = OPTIMIZERS["sgd"](model.parameters())
    optimizer = amp.MixedPrecisionOptimizer(sgd, BF16, amp.GradScaler())
    with pytest.raises(ValueError, match="uses its scaler itself"):
        optimizer.scaler.step(optimizer)
    with pytest.raises(ValueError, match="before MixedPrecisionOptimizer is made"):
        optimizer.add_param_group({"params": []})
    sgd.no_sync = None  # as the optimizers of zero.py have
    with pytest.raises(ValueError, match="SGD has fp32 masters"):
        amp.MixedPrecisionOptimizer(sgd, BF16)

    model[0].weight.data.fill_(3.0)
    optimizer.scale(batch_loss(model, 0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"reload_model_params\(\) on all ranks"):
        optimizer.step()
    optimizer.reload_model_params()
    assert (masters_of(optimizer)[0] == 3.0).all()
    optimizer.clip_grad_norm_(0.1)
    optimizer.scale(batch_loss(model, 0, 0)).backward()
    for lost in (optimizer.step, lambda: optimizer.clip_grad_norm_(0.1)):
        with pytest.raises(RuntimeError, match="call every backward first"):
            lost()


# ---- autocast

A = torch.tensor([[1.001, 0.3], [0.7, 1.9]])
V = torch.tensor([0.501, 0.3])
LABELS = torch.tensor([0, 1])
# x is A, in fp32 or in 16 bits. Dtypes and values are torch.autocast("cpu")'s:
ALIKE = """x @ A; A @ x; torch.mm(x, A); torch.mm(input=x, mat2=A); torch.bmm(x[None], A[None])
    torch.addmm(A, x, A); torch.baddbmm(A[None], x[None], A[None])
    F.linear(x, A, V); F.linear(x, weight=A, bias=V); torch.einsum("ij,jk->ik", x, A)
    F.conv2d(x[None, None], A[:1, :1, None, None])
    F.scaled_dot_product_attention(x[None], x[None], A[None])
    F.gelu(x); x + A; x.max(); torch.cat([x, A]); torch.prod(x); x.clone().addmm_(x, x)
    F.nll_loss(x, LABELS); F.cross_entropy(x, LABELS); F.mse_loss(x, A)
    F.mse_loss(input=x, target=A); F.embedding(LABELS, x); x.double() @ A.double(); LABELS.sum()
    torch.mm(x.float(), A, out=torch.empty(2, 2))"""
# In 16 bits PyTorch leaves these as they are on the CPU. Ours are in fp32, as PyTorch's on CUDA.
UNLIKE = """x.softmax(-1); F.log_softmax(x, -1); F.layer_norm(x, (2,)); F.group_norm(x[None], 1)
    x.sum(); x.mean(); x.var(); x.cumsum(0); x.norm(); torch.linalg.vector_norm(x); F.normalize(x)
    torch.exp(x); x.log(); x**2; 2**x; torch.rsqrt(x); x.logsumexp(0)"""


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_results_of_operations(dtype, low):
    x = A.to(dtype) if low else A
    for operation in f"{ALIKE};{UNLIKE}".replace("\n", ";").split(";"):
        unlike = low and operation in UNLIKE
        with amp.autocast(dtype):
            ours = eval(operation.strip(), globals(), {"x": x})
        with torch.autocast("cpu", dtype, enabled=not unlike):
            expected = eval(operation.strip(), globals(), {"x": x.float() if unlike else x})
        bitwise(ours, expected, msg=operation)


def test_the_innermost_region_decides_also_if_it_is_not_enabled():
    def product():
        return (A @ A).dtype

    inner = amp.autocast(BF16)
    with amp.autocast(F16):
        with inner, amp.autocast(F16, enabled=False):
            assert product() == F32
            assert A.half().sum().dtype == F16
        with inner:
            assert product() == BF16
        assert inner(product)() == BF16  # as a decorator
        assert product() == F16
    assert product() == F32
