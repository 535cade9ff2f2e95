"""amp.py against torch.amp.GradScaler, torch.autocast, masters kept by hand, and fp32.

What tests/claims/amp.py claims of every GradScaler is not repeated here.
"""

import copy
from contextlib import nullcontext
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
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, amp.MixedPrecisionOptimizer(OPTIMIZERS[name](trained), dtype, scaler)


def masters_of(optimizer):
    return optimizer.param_groups[0]["params"]


def flat(tensors):
    flattened = [tensor.detach().flatten() for tensor in tensors]
    return torch.cat(flattened)


def loss_in_fp32(model, number, dtype=BF16):
    output = model(make_batch(0, number, dtype))
    return loss_of(output.float())


def one_step(model, optimizer, number, dtype=BF16):
    optimizer.zero_grad()
    loss = loss_in_fp32(model, number, dtype)
    optimizer.scale(loss).backward()
    optimizer.clip_grad_norm_(0.01)
    optimizer.step()


# ---- GradScaler


@pytest.mark.parametrize("to_layout", [torch.Tensor.to_dense, torch.Tensor.to_sparse])
@pytest.mark.parametrize(
    "options",  # init_scale, growth_factor, backoff_factor, growth_interval, enabled
    [
        (2.0**16, 1.7, 0.3, 2),
        (3e38, 1.7, 0.5, 1),  # the scale would overflow
        (8.0, 2.0, 0.5, 1, False),
    ],
    ids=str,
)
def test_weights_and_scales_are_bitwise_those_of_pytorchs_scaler(options, to_layout):
    histories = []
    for scaler_class in (amp.GradScaler, torch.amp.GradScaler):
        scaler = scaler_class("cpu", *options)
        weight, optimizer = one_weight()
        history = []
        for number in [0.5, 3.0, 0.5, INF, 0.5, 0.5, NAN, 1e38, 3.0, 0.5]:
            gradient = to_layout(torch.full((2,), number))
            [(weight.grad,)] = scaler.scale([(gradient,)])
            scaler.step(optimizer)
            scaler.update()
            history.append((weight.tolist(), scaler.get_scale(), scaler.state_dict()))
        histories.append(str(history))  # as text, because NaN does not equal NaN
    assert histories[0] == histories[1]


def test_update_sets_a_scale_that_the_caller_gives():
    scaler = amp.GradScaler()
    scaler.update(7.0)
    assert scaler.get_scale() == 7.0


def test_a_step_takes_the_closure_none():
    weight, sgd = one_weight()
    weight.grad = torch.ones(2)
    amp.GradScaler().step(sgd, None)
    _, optimizer = start()
    optimizer.step(None)


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


@pytest.mark.parametrize("stage", [zero.Zero1, zero.Zero2, zero.Zero3])
@pool.on(2)
def test_zero_trains_with_a_scaler_and_an_overflow_on_one_rank_skips_the_step(stage):
    """Zero2 and Zero3 leave nothing in .grad, so the scaler asks them to unscale."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = stage(model, torch.optim.SGD, pool.group(), lr=0.25)
    scaler = amp.GradScaler(pool.device().type, 1024.0, process_group=pool.group())
    for x in (1.0, [1.0, INF][pool.rank()]):
        y = model(torch.full((1, 1), x))
        scaler.scale(y).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    with getattr(optimizer, "full_parameters", nullcontext)():
        assert model.weight.item() == 0.75


# ---- MixedPrecisionOptimizer


def train_language_model(dtype):
    """Return the gradients of the first step, and the loss of the last."""
    torch.manual_seed(0)
    tokens = torch.randint(97, 123, (8, 17))
    model = amp.language_model(C=32, heads=2, layers=1)
    adamw = OPTIMIZERS["adamw"](model.parameters())
    optimizer = amp.MixedPrecisionOptimizer(adamw, dtype, amp.GradScaler("cpu", 2.0**10))
    for step in range(15):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).float()
        loss = amp.language_loss(logits, tokens[:, 1:])
        optimizer.scale(loss).backward()
        if step == 0:
            gradients = flat(p.grad.float() / 2**10 for p in model.parameters())
        optimizer.step()
    return gradients, loss.item()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_gradients_are_within_four_roundoffs_of_fp32_and_losses_within_two_percent(dtype):
    expected, expected_loss = train_language_model(F32)
    gradients, loss = train_language_model(dtype)
    error = (gradients - expected).norm() / expected.norm()
    assert 0.05 < error / (torch.finfo(dtype).eps / 2) < 4
    assert loss == pytest.approx(expected_loss, rel=0.02)


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
    """Clipped, and with momenta from before."""
    model = make_model("tied")
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
    scale = 2.0**20 if scaler else 1.0
    for number in range(14):
        one_step(model, optimizer, number, dtype)
        loss = loss_in_fp32(low, number, dtype)
        scale = amp.mixed_precision_step(loss, scale, low, masters, by_hand)
        bitwise([*model.parameters()], [*low.parameters()])
        bitwise(masters_of(optimizer), masters)
    assert scale == (scaler.get_scale() if scaler else 1.0)


def test_without_a_scaler_an_overflow_skips_the_step():
    model, optimizer = start()
    before = flat(masters_of(optimizer))
    model[0].bias.grad = torch.full((33,), INF, dtype=BF16)
    optimizer.step()
    after = flat(masters_of(optimizer))
    bitwise(after, before)


def test_weights_and_gradients_take_two_bytes_and_masters_four():
    model, optimizer = start("tied", "momentum")
    one_step(model, optimizer, 0)
    masters = masters_of(optimizer)
    psi = sum(master.numel() for master in masters)
    assert amp.held(model.parameters(), optimizer) == (2 * psi, 2 * psi, 4 * psi)
    assert amp.held_bytes(masters) == 4 * psi
    assert all(master.grad is None for master in masters)


def test_sparse_gradients_are_clipped_and_reach_the_masters():
    model = nn.Embedding(5, 3, sparse=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = amp.MixedPrecisionOptimizer(sgd, BF16)
    before = flat(masters_of(optimizer))
    y = model(LABELS)
    y.sum().backward()
    assert optimizer.clip_grad_norm_(100.0).item() == pytest.approx(6**0.5)
    optimizer.step()
    change = before - flat(masters_of(optimizer))
    assert change.tolist() == pytest.approx([0.1] * 6 + [0] * 9)


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


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["model first", "optimizer first"])
def test_training_resumes_bitwise(order):
    scalers = [amp.GradScaler("cpu", scale) for scale in (4.0, 2.0**10)]
    saved, resumed = (start("tied", "adamw", F16, scaler, seed=5) for scaler in scalers)
    one_step(*saved, 0, F16)
    states = copy.deepcopy([each.state_dict() for each in saved])
    for i in order:
        resumed[i].load_state_dict(states[i])
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


def test_masters_of_float64_weights_are_in_float64():
    _, sgd = one_weight(torch.float64)
    [master] = masters_of(amp.MixedPrecisionOptimizer(sgd, BF16))
    assert master.dtype == torch.float64


# ---- misuse

MISUSE = {  # a part of the message: what raises it
    "no rank has a .grad": lambda scaler, sgd, optimizer: scaler.step(sgd),
    "no closure, and only": lambda scaler, sgd, optimizer: scaler.step(sgd, closure=float),
    "takes no closure": lambda scaler, sgd, optimizer: optimizer.step(float),
    "uses its scaler itself": lambda scaler, sgd, optimizer: scaler.step(optimizer),
    "groups to the optimizer before": lambda scaler, sgd, optimizer: optimizer.add_param_group({}),
    "give a dtype instead": lambda scaler, sgd, optimizer: amp.autocast("cpu"),
}


@pytest.mark.parametrize("message", MISUSE)
def test_misuse_is_an_error(message):
    _, sgd = one_weight()
    _, optimizer = start()
    errors = ValueError, TypeError, RuntimeError, AssertionError
    with pytest.raises(errors, match=message):
        MISUSE[message](amp.GradScaler(), sgd, optimizer)


def test_gradients_in_fp16_are_not_unscaled():
    weight, sgd = one_weight(F16)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="FP16"):
        amp.GradScaler().unscale_(sgd)


def test_optimizers_of_zero_are_an_error_because_they_have_masters():
    _, sgd = one_weight()
    sgd.no_sync = None
    with pytest.raises(ValueError, match="SGD has fp32 masters"):
        amp.MixedPrecisionOptimizer(sgd, BF16)


def test_a_backward_after_clipping_is_an_error():
    model, optimizer = start()
    batch_loss(model, 0, 0).backward()
    optimizer.clip_grad_norm_(0.1)
    batch_loss(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match="backward"):
        optimizer.step()


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
        (x @ A, A @ x, x.clone().addmm_(x, x)),
        F.linear(x, weight=A, bias=A[0]),  # keywords
        torch.einsum("ij,jk->ik", x, A),
        (F.gelu(x), x + A, LABELS.sum()),
        (F.cross_entropy(x, LABELS), F.mse_loss(input=x, target=A)),
        x.double() @ A.double(),
        torch.mm(x.float(), A, out=torch.empty(2, 2)),
    ]


def like_pytorch_on_cuda(x):
    """In bf16 PyTorch leaves these as they are on the CPU. Ours are in fp32."""
    return [x.softmax(-1), F.layer_norm(x, (2,)), x.norm(), x.sum(), torch.exp(x), x**2, 2**x]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_operations_return_what_they_return_under_pytorchs_autocast(dtype):
    x = A.to(dtype)
    with amp.autocast(BF16):
        ours = like_pytorch(x)
    with torch.autocast("cpu", BF16):
        bitwise(ours, like_pytorch(x))


def test_sums_norms_and_exponentials_of_bf16_inputs_are_in_fp32():
    with amp.autocast(BF16):
        ours = like_pytorch_on_cuda(A.bfloat16())
    in_fp32 = like_pytorch_on_cuda(A.bfloat16().float())
    bitwise(ours, in_fp32)


def gradient(layer, y):
    return torch.autograd.grad(y.sum(), layer.weight)


def test_the_ideas_linear_layer_is_that_of_pytorchs_autocast():
    layer = nn.Linear(2, 3)
    with torch.autocast("cpu", BF16):
        theirs = layer(A).float()
    amp.autocast_linear(layer, BF16)
    ours = layer(A)
    bitwise(ours, theirs)
    bitwise(gradient(layer, ours), gradient(layer, theirs))


def test_pytorchs_checkpoint_is_an_error_because_its_second_run_has_no_autocast():
    x = A.clone().requires_grad_()
    with amp.autocast(BF16), pytest.raises(RuntimeError, match="activation_checkpoint"):
        checkpoint(nn.Linear(2, 2), x, use_reentrant=False)


def test_our_checkpoint_computes_again_under_autocast():
    layer = nn.Linear(2, 2)
    gradients = []
    for run in (layer, partial(activation_checkpoint.checkpoint, layer)):
        with amp.autocast(BF16):
            y = run(A)
        gradients.append(gradient(layer, y))
    bitwise(*gradients)


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
