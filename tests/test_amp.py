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
import torch.nn.functional as F
from shared import OPTIMIZERS, Collectives, batch_loss, loss_of, make_batch, make_model
from torch.utils.checkpoint import checkpoint

import activation_checkpoint
import amp
import ddp
import zero

INF = float("inf")
NAN = float("nan")
F32 = torch.float32
F16 = torch.float16
BF16 = torch.bfloat16
bitwise = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def one_weight(dtype=F32):
    weight = nn.Parameter(torch.ones(2, dtype=dtype))
    return weight, torch.optim.SGD([weight], lr=0.25)


def start(kind="plain", name="sgd", dtype=BF16, scaler=None, seed=1):
    """Return a model and its MixedPrecisionOptimizer."""
    model = make_model(kind, seed=seed)
    inner = OPTIMIZERS[name](model.parameters())
    return model, amp.MixedPrecisionOptimizer(inner, dtype, scaler)


def masters_of(optimizer):
    return optimizer.param_groups[0]["params"]


def flat(tensors):
    return nn.utils.parameters_to_vector(tensors).detach()


def loss_in_fp32(model, number, dtype=BF16):
    """Step 3 overflows."""
    output = model(make_batch(0, number, dtype))
    return loss_of(output.float()) * (INF if number == 3 else 1.0)


def one_step(model, optimizer, number, dtype=BF16):
    optimizer.zero_grad()
    loss = loss_in_fp32(model, number, dtype)
    optimizer.scale(loss).backward()
    optimizer.clip_grad_norm_(0.01)
    optimizer.step(None)  # accelerate gives a closure, which is None
    return loss


# ---- GradScaler

OPTIONS = {  # init_scale, growth_factor, backoff_factor, growth_interval, enabled
    "grows and falls": (2.0**16, 1.7, 0.3, 2),
    "would overflow": (3e38, 1.7, 0.5, 1),
    "disabled": (8.0, 2.0, 0.5, 1, False),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_weights_and_scales_are_bitwise_those_of_pytorchs_scaler(options):
    """Of dense and of sparse gradients, and after a scale that the caller sets."""
    histories = []
    for scaler_class in (amp.GradScaler, torch.amp.GradScaler):
        scaler = scaler_class("cpu", *OPTIONS[options])
        weight, optimizer = one_weight()
        history = []
        for number in [0.5, 3.0, 0.5, INF, 0.5, 0.5, NAN, 1e38, 3.0, 0.5]:
            gradient = torch.full((2,), number)
            if number == 3.0:
                gradient = gradient.to_sparse()
            [(weight.grad,)] = scaler.scale([(gradient,)])
            scaler.step(optimizer, None)
            scaler.update(7.0 if number == 1e38 else None)
            history.append((weight.tolist(), scaler.get_scale(), scaler.state_dict()))
        histories.append(str(history))  # as text, because NaN does not equal NaN
    assert histories[0] == histories[1]


@pool.on(2)
def test_an_overflow_of_one_optimizer_on_one_rank_skips_its_step_on_all():
    """The other optimizer steps, also on the rank without a gradient. Each sends four bytes."""
    scaler = amp.GradScaler(pool.device().type, 4.0, process_group=pool.group())
    overflowing, first = one_weight()
    other, second = one_weight()
    overflowing.grad = torch.full((2,), [NAN, 4.0][pool.rank()])
    other.grad = [torch.full((2,), 4.0), None][pool.rank()]
    with Collectives() as seen:
        scaler.unscale_(first)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert seen.calls == [("allreduce_", 4)] * 2
    assert scaler.get_scale() == 2.0
    assert overflowing[1] == 1.0
    assert other[1] == [0.75, 1.0][pool.rank()]


@pool.on(2)
def test_zero_trains_with_a_scaler_and_an_overflow_on_one_rank_skips_the_step():
    """Zero3 leaves nothing in .grad, so the scaler asks it to unscale."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = zero.Zero3(model, torch.optim.SGD, pool.group(), lr=0.25)
    scaler = amp.GradScaler(pool.device().type, 1024.0, process_group=pool.group())
    for x in (1.0, [1.0, INF][pool.rank()]):
        y = model(torch.full((1, 1), x))
        scaler.scale(y).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    with optimizer.full_parameters():
        assert model.weight.item() == 0.75


# ---- MixedPrecisionOptimizer


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_gradients_are_within_four_roundoffs_of_fp32_and_losses_within_two_percent(dtype):
    gradients = []
    losses = []
    for each in (F32, dtype):
        model, optimizer = start(dtype=each)
        for number in range(15):
            loss = one_step(model, optimizer, number % 3, each)
            gradients.append(flat(p.grad.float() for p in model.parameters()))
        losses.append(loss.item())
    error = (gradients[15] - gradients[0]).norm() / gradients[0].norm()
    assert 0.05 < error / (torch.finfo(dtype).eps / 2) < 4
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize(
    ("name", "dtype", "scaler"),
    [
        ("adamw", F16, amp.GradScaler("cpu", 2.0**20)),  # too large at first
        ("adamw", F16, torch.amp.GradScaler("cpu", 2.0**20)),
        ("momentum", BF16, None),
    ],
    ids=["fp16", "fp16, PyTorch's scaler", "bf16"],
)
def test_training_is_bitwise_that_of_masters_by_hand(name, dtype, scaler):
    """Clipped, with momenta from before, and with steps that are skipped."""
    model = make_model("tied", F32 if scaler else torch.float64)
    plain = copy.deepcopy(model)  # its parameters are the masters by hand
    masters = list(plain.parameters())
    inner = OPTIMIZERS[name](model.parameters())
    by_hand = OPTIMIZERS[name](masters)
    for each, stepped in ((model, inner), (plain, by_hand)):
        batch_loss(each, 0, 0).backward()
        stepped.step()

    def clip(*_):
        nn.utils.clip_grad_norm_(masters, 0.01)

    by_hand.register_step_pre_hook(clip)
    low = copy.deepcopy(plain).to(dtype)
    optimizer = amp.MixedPrecisionOptimizer(inner, dtype, scaler)
    scale = 2.0**20
    for number in range(14):
        one_step(model, optimizer, number, dtype)
        loss = loss_in_fp32(low, number, dtype)
        scale = amp.mixed_precision_step(loss, scale, low, masters, by_hand)
        bitwise([*model.parameters()], [*low.parameters()])
        bitwise(masters_of(optimizer), masters)
    assert scaler is None or scale == scaler.get_scale()


def test_weights_and_gradients_take_two_bytes_and_masters_four():
    model, optimizer = start("tied", "momentum")
    one_step(model, optimizer, 0)
    masters = masters_of(optimizer)
    psi = sum(master.numel() for master in masters)
    assert amp.held(model.parameters(), optimizer) == (2 * psi, 2 * psi, 4 * psi)
    assert amp.held_bytes(masters) == 4 * psi
    assert all(master.grad is None for master in masters)


def test_gradients_stay_until_zero_grad():
    model, optimizer = start()
    bias = masters_of(optimizer)[1]
    before = bias.clone()
    model[0].bias.grad = torch.ones(33, dtype=BF16)
    optimizer.step()
    optimizer.step()
    optimizer.unscale_()
    optimizer.zero_grad()
    optimizer.step()
    bitwise(bias, before - 0.1 - 0.1)


def test_training_resumes_bitwise():
    scalers = [amp.GradScaler("cpu", scale) for scale in (4.0, 2.0**10)]
    saved, resumed = (start("tied", "adamw", F16, scaler, seed=5) for scaler in scalers)
    one_step(*saved, 0, F16)
    states = copy.deepcopy([each.state_dict() for each in saved])
    for each, state in zip(resumed, states, strict=True):
        each.load_state_dict(state)
    for each in (saved, resumed):
        one_step(*each, 1, F16)
    bitwise(resumed[1].state_dict(), saved[1].state_dict())


def test_weights_that_the_caller_writes_reach_the_masters_and_others_keep_their_bits():
    model, optimizer = start()
    one_step(model, optimizer, 0)
    before = flat(masters_of(optimizer))
    model[0].weight.detach()[0] = 5.0  # six weights
    after = flat(optimizer.state_dict()["master_weights"])
    assert after[:6].tolist() == [5.0] * 6
    bitwise(after[6:], before[6:])


@pytest.mark.parametrize("wrapper", [ddp.DDP, nn.parallel.DistributedDataParallel])
@pool.on(2)
def test_replicas_agree_if_ddp_broadcasts_after_the_masters_were_made(wrapper):
    """Rank 0 drops the bits of its masters that the broadcast in bf16 does not carry."""
    model, optimizer = start(seed=pool.rank())
    replica = wrapper(model, process_group=pool.group())
    for step in range(2):
        optimizer.zero_grad()
        loss = batch_loss(replica, pool.rank(), step)
        loss.backward()
        optimizer.step()
    masters = flat(masters_of(optimizer))
    of_rank_0 = masters.clone()
    dist.broadcast(of_rank_0, group=pool.group(), group_src=0)
    bitwise(masters, of_rank_0)


# ---- misuse that would train wrongly


def unscale_fp16(model, optimizer):
    weight, sgd = one_weight(F16)
    weight.grad = torch.ones_like(weight)
    amp.GradScaler().unscale_(sgd)


def step_without_a_gradient(model, optimizer):
    _, sgd = one_weight()
    amp.GradScaler().step(sgd)


def clip_before_a_backward(model, optimizer):
    batch_loss(model, 0, 0).backward()
    optimizer.clip_grad_norm_(0.1)
    batch_loss(model, 0, 0).backward()
    optimizer.step()


def checkpoint_with_pytorchs(model, optimizer):
    x = A.clone().requires_grad_()
    with amp.autocast(BF16):
        checkpoint(nn.Linear(2, 2), x, use_reentrant=False)


MISUSE = {
    unscale_fp16: "FP16",
    step_without_a_gradient: "no rank has a .grad",
    clip_before_a_backward: "backward ran",
    checkpoint_with_pytorchs: "activation_checkpoint",
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_is_an_error(misuse):
    with pytest.raises((ValueError, RuntimeError, AssertionError), match=MISUSE[misuse]):
        misuse(*start())


def test_a_write_to_data_is_an_error_until_it_is_reloaded():
    model, optimizer = start()
    model[0].weight.data.fill_(3.0)
    with pytest.raises(RuntimeError, match="reload_model_params"):
        optimizer.step()
    optimizer.reload_model_params()
    optimizer.step()
    assert (masters_of(optimizer)[0] == 3.0).all()


# ---- autocast

A = torch.tensor([[1.001, 0.3], [0.7, 1.9]])
LABELS = torch.tensor([0, 1])


def like_pytorch(x):
    """Operations on A, in fp32 or in bf16, whose dtypes and values are those of PyTorch."""
    return [
        x @ A,
        A @ x,
        x.clone().addmm_(x, x),
        F.linear(x, weight=A, bias=A[0]),
        torch.einsum("ij,jk->ik", x, A),
        F.gelu(x),
        x + A,
        F.cross_entropy(x, LABELS),
        F.mse_loss(input=x, target=A),
        x.double() @ A.double(),
        torch.mm(x.float(), A, out=torch.empty(2, 2)),
    ]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_operations_return_what_they_return_under_pytorchs_autocast(dtype):
    x = A.to(dtype)
    with amp.autocast(BF16):
        ours = like_pytorch(x)
    with torch.autocast("cpu", BF16):
        bitwise(ours, like_pytorch(x))


def like_pytorch_on_cuda(x):
    """In bf16 PyTorch leaves these as they are on the CPU. Ours are in fp32."""
    return [x.softmax(-1), F.layer_norm(x, (2,)), x.norm(), x.sum(), torch.exp(x), x**2, 2**x]


def test_sums_norms_and_exponentials_of_bf16_inputs_are_in_fp32():
    x = A.bfloat16()
    with amp.autocast(BF16):
        ours = like_pytorch_on_cuda(x)
    bitwise(ours, like_pytorch_on_cuda(x.float()))


def gradient(layer, y):
    return torch.autograd.grad(y.sum(), layer.weight, retain_graph=True)


def test_the_ideas_linear_layer_and_our_checkpoint_compute_as_pytorchs_autocast():
    layer = nn.Linear(2, 3)
    with torch.autocast("cpu", BF16):
        theirs = layer(A).float()
    with amp.autocast(BF16):
        again = activation_checkpoint.checkpoint(layer, A).float()
    amp.autocast_linear(layer, BF16)
    for ours in (layer(A), again):
        bitwise(ours, theirs)
        bitwise(gradient(layer, ours), gradient(layer, theirs))


def test_the_innermost_region_decides_also_if_it_is_not_enabled():
    def product():
        return (A @ A).dtype

    inner = amp.autocast(BF16)
    with amp.autocast(F16):
        with inner, amp.autocast(F16, enabled=False):
            assert product() == F32
            assert A.half().sum().dtype == F16
        assert inner(product)() == BF16  # as a decorator
        assert product() == F16
    assert product() == F32
