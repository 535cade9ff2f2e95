"""amp.py against torch.amp.GradScaler, torch.autocast, masters kept by hand, and fp32."""

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
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

import amp
import ddp
import zero

INF, NAN = float("inf"), float("nan")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
bitwise = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_gradients_are_within_roundoffs_of_fp32_and_training_within_two_percent(dtype):
    """The error of all gradients together is below 4 unit roundoffs, if none underflows."""
    tokens = torch.randint(97, 123, (8, 17), generator=torch.Generator().manual_seed(0))
    first_gradients, last_losses = [], []
    for kind in (F32, dtype):
        torch.manual_seed(0)
        model = amp.language_model(C=32, heads=2, layers=1)
        scaler = amp.GradScaler("cpu", 2.0**10)
        adamw = OPTIMIZERS["adamw"](model.parameters())
        optimizer = amp.MixedPrecisionOptimizer(adamw, kind, scaler)
        for step in range(25):
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


def two_optimizers():
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((3,), 2.0))]
    return weights, [torch.optim.SGD([weight], lr=0.25) for weight in weights]


SCALE = "[(weight.grad,)] = scaler.scale([(torch.full_like(weight, value),)])"
STEP = "scaler.step(optimizer)"
UPDATE = "scaler.update()"
NO_GRADIENT = "weight.grad = None"
SINGLE_CALLS = [
    SCALE,
    STEP,
    UPDATE,
    NO_GRADIENT,
    "scaler.unscale_(optimizer)",
    "scaler.step(optimizer, closure=float)",
    "scaler.update(7.0)",
]
CALLS = [[SCALE, STEP, UPDATE]] * 6 + [[call] for call in SINGLE_CALLS]
VALUES = st.sampled_from([0.5, 3.0, INF, -INF, NAN, 1e38])
# init_scale, growth_factor, backoff_factor, growth_interval, enabled
HOW = [
    (1.0, 2.0, 0.5, 1),
    (2.0**16, 1.7, 0.3, 2),
    (0.1, 2.0, 0.3, 3),
    (3e38, 1.7, 0.5, 1),
    (8.0, 2.0, 0.5, 1, False),
]


@given(
    st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 1), VALUES), max_size=40),
    st.sampled_from(HOW),
)
@example([([SCALE, STEP, STEP], 0, 0.5)], HOW[0])
@example([([SCALE, STEP, UPDATE], 0, value) for value in (0.5, INF, 0.5, 0.5, 0.5)], HOW[2])
@example([([NO_GRADIENT, STEP], 0, 0.5), ([UPDATE], 0, 0.5)], HOW[0])
@example([([NO_GRADIENT, STEP], 0, 0.5), ([SCALE, STEP, UPDATE], 1, 0.5)], HOW[0])
def test_any_sequence_of_calls_and_overflows(calls, options):
    """The same scales, counters, weights and types of errors as PyTorch's, bit for bit."""
    sides = [
        (scaler("cpu", *options), *two_optimizers())
        for scaler in (amp.GradScaler, torch.amp.GradScaler)
    ]
    for each, which, value in [([SCALE], 0, 0.0), ([SCALE], 1, 0.0), *calls]:
        results = []
        for scaler, weights, optimizers in sides:
            raised, own = (
                None,
                {"scaler": scaler, "weight": weights[which], "optimizer": optimizers[which]},
            )
            try:
                for call in each:
                    exec(call, globals() | own | {"value": value})
            except (RuntimeError, AssertionError) as error:
                raised = type(error)
            state = sorted(scaler.state_dict().items()), scaler.get_scale(), scaler.is_enabled()
            results.append((raised, state, [weight.tolist() for weight in weights]))
        assert str(results[0]) == str(results[1]), each  # as text: NaN is equal to itself


def test_what_is_16_bits_is_scaled_in_32_or_refused():
    """Also where there is no CUDA."""
    assert amp.GradScaler().state_dict() == torch.amp.GradScaler("cpu").state_dict()
    assert amp.GradScaler(init_scale=8.0).scale(torch.tensor(3e4, dtype=F16)).item() == 8 * 3e4
    weights = [*two_optimizers()[0], nn.Parameter(torch.ones(2, dtype=F16))]
    weights[0].grad, weights[2].grad = torch.ones(2), torch.ones(2, dtype=F16)
    with pytest.raises(ValueError, match="FP16"):  # also where only one is
        amp.GradScaler().unscale_(torch.optim.SGD(weights))
    amp.GradScaler().unscale_(torch.optim.SGD(weights[1:2]))  # which has no gradient
    (inner := torch.optim.SGD(weights[:2])).no_sync = None  # as zero.py's have
    with pytest.raises(ValueError, match="SGD has fp32 masters"):
        amp.MixedPrecisionOptimizer(inner, BF16)


@pool.on(2)
def test_an_overflow_of_one_optimizer_on_one_rank():
    """All ranks skip its step, not the other's. Each optimizer costs four bytes."""
    scaler = amp.GradScaler(pool.device().type, 4.0, process_group=pool.group())
    weights, optimizers = two_optimizers()
    for i in range(2 - pool.rank()):  # rank 0 alone has gradients for the second
        weights[i].grad = scaler.scale(torch.ones_like(weights[i]))
    weights[0].grad[0] = NAN if pool.rank() == 0 else 1.0
    with Collectives() as seen:
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert seen.calls == [("allreduce_", 4)] * 2
    assert (scaler.get_scale(), weights[0].tolist()) == (2.0, [1.0, 1.0])
    assert weights[1].tolist() == ([2.0] * 3 if pool.rank() else [1.75] * 3)


@pool.on(2)
def test_no_gradient_on_any_rank_is_an_error_on_all():
    """After the all-reduce, so that a rank that alone has none takes part (above)."""
    scaler = amp.GradScaler(pool.device().type, 8.0, process_group=pool.group())
    with pytest.raises(AssertionError, match=r"No inf checks were recorded.* If SGD keeps grad"):
        scaler.step(two_optimizers()[1][0])


@pytest.mark.parametrize("stage", [zero.Zero1, zero.Zero2, zero.Zero3])
@pool.on(2)
def test_over_zero_a_scale_changes_nothing_and_an_overflow_on_one_rank_skips_the_step(stage):
    """Bitwise. Zero2 and Zero3 leave nothing in .grad: they unscale themselves."""
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


def test_a_caller_that_unscales_records_what_it_found():
    (weights, optimizers), scaler = two_optimizers(), amp.GradScaler("cpu", 8.0)
    for weight, optimizer, found_inf in zip(
        weights, optimizers, (True, torch.zeros(1)), strict=True
    ):
        weight.grad = torch.ones_like(weight)
        scaler.record_found_inf(optimizer, found_inf)
        scaler.step(optimizer)
    scaler.update()
    assert (weights[0].tolist(), weights[1].tolist()) == ([1.0] * 2, [1.75] * 3)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.parametrize("backends", ["meta:nccl", "cpu:gloo,meta:nccl"])
@pool.on(1)
def test_an_overflow_is_reduced_on_a_device_of_the_groups_backend(backends, has_gradient):
    """NCCL reduces nothing on the CPU. Here the meta device stands for CUDA."""
    reduced, (weights, optimizers) = [], two_optimizers()
    weights[0].grad = torch.ones(2) if has_gradient else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group=None: backends)
        patch.setattr(dist, "all_reduce", lambda tensor, **_: reduced.append(tensor.device.type))
        amp.GradScaler(process_group=pool.group()).unscale_(optimizers[0])
    assert reduced == [backends.partition(":")[0]]


WRAPPERS = {"ours": ddp.DDP, "torch": nn.parallel.DistributedDataParallel}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pool.on(2)
def test_replicas_agree_if_ddp_broadcasts_after_the_masters_were_made(wrapper, dtype):
    """Rank 0 drops the bits of its masters that no broadcast in bf16 carries."""
    model = make_model("plain", dtype, seed=pool.rank())
    optimizer = amp.MixedPrecisionOptimizer(OPTIMIZERS["adamw"](model.parameters()), BF16)
    replica = WRAPPERS[wrapper](model, process_group=pool.group())
    start = next(model.parameters()).detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        loss_of(replica(make_batch(pool.rank(), step, BF16))).backward()
        optimizer.step()
    masters = torch.cat([master.flatten() for master in optimizer.param_groups[0]["params"]])
    of_rank_0 = masters.clone()
    dist.broadcast(of_rank_0, group=pool.group(), group_src=0)
    bitwise(masters, of_rank_0)
    assert not torch.equal(start, next(model.parameters()))


def test_weights_written_through_data_before_the_first_step_are_an_error():
    model = make_model("plain")
    optimizer = amp.MixedPrecisionOptimizer(OPTIMIZERS["sgd"](model.parameters()), BF16)
    model[0].weight.data.fill_(3.0)
    loss_of(model(make_batch(0, 0, BF16))).backward()
    with pytest.raises(RuntimeError, match=r"reload_model_params\(\) on all ranks"):
        optimizer.step()
    optimizer.reload_model_params()
    assert (optimizer.param_groups[0]["params"][0] == 3.0).all()
    optimizer.step()


def square_loss(x, model):
    return model(x).float().square().mean()


def masters_of(optimizer):
    return optimizer.param_groups[0]["params"]


@pytest.mark.parametrize(
    ("name", "dtype", "scaler_class", "clip"),
    [
        ("adamw", F16, amp.GradScaler, 0.01),
        ("adamw", F16, torch.amp.GradScaler, None),
        ("momentum", BF16, None, 0.01),
        ("momentum", BF16, None, None),
        ("adamw", F32, amp.GradScaler, 0.01),
    ],
)
def test_training_is_bitwise_that_of_masters_by_hand(name, dtype, scaler_class, clip):
    """Wrapped after a step; with schedulers, overflows, and a parameter that is not used."""
    plain = make_model("tied")  # its parameters are the masters by hand
    model = copy.deepcopy(plain)
    unused = nn.Parameter(torch.ones(3))
    inner = OPTIMIZERS[name]([*model.parameters(), unused])
    reference = OPTIMIZERS[name](plain.parameters())
    schedulers = [ExponentialLR(inner, 0.9), ExponentialLR(reference, 0.9)]
    for each, optimizer in ((model, inner), (plain, reference)):
        batch_loss(each, 0, 0).backward()
        optimizer.step()
    low = copy.deepcopy(plain).to(dtype)
    masters = list(plain.parameters())
    scale = 2.0**20 if scaler_class else 1.0  # too large at first
    scaler = scaler_class("cpu", scale) if scaler_class else None
    optimizer = amp.MixedPrecisionOptimizer(inner, dtype, scaler)
    schedulers += [LambdaLR(each, lambda step: 0.9**step) for each in (optimizer, reference)]
    norms = []
    if clip:
        reference.register_step_pre_hook(
            lambda *_: norms.append(nn.utils.clip_grad_norm_(masters, clip))
        )

    for number in range(1, 15):
        factor = INF if number == 14 else 1.0
        loss = partial(square_loss, make_batch(0, number).to(dtype) * factor)
        optimizer.zero_grad()
        optimizer.scale(loss(model)).backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        norm = optimizer.clip_grad_norm_(clip) if clip else None
        optimizer.step()
        next_scale = amp.mixed_precision_step(low, masters, reference, loss, scale)
        is_skipped = next_scale < scale
        scale = next_scale if scaler else 1.0
        bitwise([parameter.grad for parameter in model.parameters()], gradients)
        bitwise(list(model.parameters()), list(low.parameters()))
        bitwise(masters_of(optimizer), [*masters, unused.float()])
        assert scale == (scaler.get_scale() if scaler else 1.0)
        if clip and not is_skipped:
            bitwise(norm, norms[-1])
        for scheduler in schedulers:
            scheduler.step()

    psi = sum(master.numel() for master in masters)
    adam = 8 * psi + 4 * len(masters) if name == "adamw" else 4 * psi  # AdamW counts its steps
    held = amp.held(model.parameters(), optimizer)
    assert held == (dtype.itemsize * psi, dtype.itemsize * psi, adam)
    assert amp.held_bytes(masters_of(optimizer)) == 4 * psi + 4 * unused.numel()


def in_training(name, dtype, scaler_class, seed=1):
    model = make_model("tied", seed=seed)
    scaler = scaler_class("cpu", 2.0**10) if scaler_class else None
    inner = OPTIMIZERS[name](model.parameters())
    return model, amp.MixedPrecisionOptimizer(inner, dtype, scaler)


def backward(model, optimizer, number):
    optimizer.zero_grad()
    x = make_batch(0, number).to(optimizer.dtype)
    optimizer.scale(square_loss(x, model)).backward()


@pytest.mark.parametrize("order", [["model", "optimizer"], ["optimizer", "model"], ["optimizer"]])
@pytest.mark.parametrize("scaler_class", [amp.GradScaler, torch.amp.GradScaler, None])
def test_a_resumed_training_goes_on_bitwise(scaler_class, order):
    """In either order of loading. A weight that the caller has written counts as it is."""
    model, optimizer = in_training("adamw", F16, scaler_class)
    for number in range(3):
        backward(model, optimizer, number)
        optimizer.step()
    before = torch.cat([master.flatten() for master in masters_of(optimizer)])
    next(model.parameters()).detach()[0] = 5.0  # six weights; the others keep the masters' bits
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    states = copy.deepcopy(states)
    second_model, second = in_training("adamw", F16, scaler_class, seed=7)
    for what in order:
        {"model": second_model, "optimizer": second}[what].load_state_dict(states[what])

    after = torch.cat([master.flatten() for master in masters_of(second)])
    assert (after != before).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]
    bitwise(after[:6], torch.full((6,), 5.0))
    for number in (3, 4):
        for each in ((model, optimizer), (second_model, second)):
            backward(*each, number)
            each[1].step()
    bitwise(list(second_model.parameters()), list(model.parameters()))
    bitwise(masters_of(second), masters_of(optimizer))


@pytest.mark.parametrize("scaler_class", [amp.GradScaler, torch.amp.GradScaler, None])
def test_a_step_may_be_given_up_after_unscale(scaler_class):
    """zero_grad() drops the unscaled gradients as well; a scaler wants its update() first."""
    model, optimizer = in_training("adamw", F16, scaler_class)
    same_model, same = in_training("adamw", F16, scaler_class)
    backward(model, optimizer, 0)
    optimizer.unscale_()
    optimizer.zero_grad(set_to_none=False)
    assert not any(parameter.grad.any() for parameter in model.parameters())
    if scaler_class:
        with pytest.raises(RuntimeError, match="since the last update"):
            optimizer.unscale_()
        optimizer.scaler.update()
    for each in ((model, optimizer), (same_model, same)):
        backward(*each, 1)
        each[1].step()
    bitwise(masters_of(optimizer), masters_of(same))


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
    F.mse_loss(input=x, target=A); F.embedding(LABELS, x); x.double() @ A.double(); LABELS.sum()"""
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


def test_regions_nest_and_end_and_cast_a_weight_once():
    """The innermost decides, also if it is not enabled. A weight is cast anew if it has changed, or
    for a gradient. No activation is kept, and nothing after the region."""
    inner = amp.autocast(BF16)

    def product():
        return (A @ A).dtype

    with amp.autocast(F16):
        with inner, amp.autocast(F16, enabled=False):
            assert (product(), A.half().sum().dtype) == (F32, F16)
        with inner:
            assert product() == BF16
        assert (product(), inner(product)()) == (F16, BF16)
        assert torch.mm(A, A, out=torch.empty(2, 2)).dtype == F32
    assert product() == F32
    layer = nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4, dtype=BF16)
    region = amp.autocast(BF16)
    with region:
        with torch.no_grad():
            layer(x)
        sum(layer(x) for _ in range(3)).sum().backward()
        assert len(region._casts) == 2  # one with, and one without a gradient
        bitwise(layer.weight.grad, torch.full((4, 4), 6.0))
        with torch.no_grad():
            layer.weight.zero_()
        assert not layer(x).any()
        layer(x.float())
        assert len(region._casts) == 3
    assert not region._casts
