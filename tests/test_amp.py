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


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


# ---- GradScaler


def one_weight(value=1.0, size=2):
    weight = nn.Parameter(torch.full((size,), value))
    return weight, torch.optim.SGD([weight], lr=0.25)


# init_scale, growth_factor, backoff_factor, growth_interval, enabled
OPTIONS = [
    (2.0**16, 1.7, 0.3, 2),
    (0.1, 2.0, 0.3, 1),
    (3e38, 1.7, 0.5, 1),  # the scale would overflow
    (8.0, 2.0, 0.5, 1, False),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weights_and_scales_are_bitwise_those_of_pytorchs_scaler(options):
    histories = []
    for scaler_class in (amp.GradScaler, torch.amp.GradScaler):
        scaler = scaler_class("cpu", *options)
        weight, optimizer = one_weight()
        history = []
        for gradient in [0.5, 3.0, 0.5, INF, 0.5, 0.5, NAN, 1e38, 3.0, 0.5]:
            gradients = torch.full((2,), gradient)
            [(weight.grad,)] = scaler.scale([(gradients,)])
            scaler.step(optimizer)
            scaler.update()
            history.append((weight.tolist(), scaler.get_scale(), scaler.state_dict()))
        histories.append(str(history))  # as text, because NaN does not equal NaN
    assert histories[0] == histories[1]


def test_sparse_gradients_are_unscaled():
    weight, optimizer = one_weight()
    scaler = amp.GradScaler("cpu", 8.0)
    gradient = torch.ones(2).to_sparse()
    weight.grad = scaler.scale(gradient)
    scaler.unscale_(optimizer)
    assert weight.grad.to_dense().tolist() == [1.0, 1.0]


def test_a_step_without_any_gradient_is_an_error():
    _, optimizer = one_weight()
    with pytest.raises(AssertionError, match="no rank"):
        amp.GradScaler().step(optimizer)


def test_update_sets_a_scale_that_the_caller_gives():
    scaler = amp.GradScaler()
    scaler.update(7.0)
    assert scaler.get_scale() == 7.0


def test_gradients_in_fp16_are_not_unscaled():
    weight = nn.Parameter(torch.ones(2, dtype=F16))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="FP16"):
        amp.GradScaler().unscale_(torch.optim.SGD([weight]))


def test_the_scaler_takes_no_closure_but_none():
    weight, optimizer = one_weight()
    scaler = amp.GradScaler()
    weight.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, float)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, closure=float)
    scaler.step(optimizer, None)


@pool.on(2)
def test_an_overflow_of_one_optimizer_on_one_rank_skips_its_step_on_all():
    """The other optimizer steps, also on the rank without a gradient. Each sends four bytes."""
    scaler = amp.GradScaler(pool.device().type, 4.0, process_group=pool.group())
    overflowing, first = one_weight(1.0)
    other, second = one_weight(2.0)
    overflowing.grad = scaler.scale(torch.ones(2))
    if pool.rank() == 0:
        overflowing.grad[0] = NAN
        other.grad = scaler.scale(torch.ones(2))
    with Collectives() as seen:
        scaler.unscale_(first)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert seen.calls == [("allreduce_", 4)] * 2
    assert scaler.get_scale() == 2.0
    assert overflowing.tolist() == [1.0, 1.0]
    expected = 2.0 if pool.rank() == 1 else 1.75
    assert other.tolist() == [expected, expected]


@pytest.mark.parametrize("stage", [zero.Zero1, zero.Zero2, zero.Zero3])
@pool.on(2)
def test_over_zero_a_scale_changes_no_bit_and_an_overflow_on_one_rank_skips_the_step(stage):
    """Zero2 and Zero3 leave nothing in .grad, so the scaler asks them to unscale."""
    group = pool.group()
    model = make_model("plain")
    plain = make_model("plain")
    optimizer, unscaled = (stage(each, torch.optim.SGD, group) for each in (model, plain))
    scaler = amp.GradScaler(pool.device().type, 1024.0, process_group=group)
    for factor in (1.0, INF if pool.rank() == 1 else 1.0):
        optimizer.zero_grad()
        loss = factor * batch_loss(model, pool.rank(), 0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    batch_loss(plain, pool.rank(), 0).backward()
    unscaled.step()
    assert scaler.get_scale() == 512.0
    for ours, theirs in zip(optimizer.shards(), unscaled.shards(), strict=True):
        bitwise(ours[2], theirs[2])


@pool.on(1)
def test_an_overflow_of_offloaded_gradients_is_reduced_where_the_backend_can():
    """NCCL reduces nothing on the CPU. Here the meta device stands for CUDA."""
    weight, optimizer = one_weight()
    weight.grad = torch.ones(2)

    def all_reduce(tensor, **_):
        raise RuntimeError(f"on {tensor.device.type}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group=None: "meta:nccl")
        patch.setattr(dist, "all_reduce", all_reduce)
        with pytest.raises(RuntimeError, match="on meta"):
            amp.GradScaler(process_group=pool.group()).unscale_(optimizer)


# ---- MixedPrecisionOptimizer


def make_optimizer(model, name="sgd", dtype=BF16, scaler=None):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return amp.MixedPrecisionOptimizer(OPTIMIZERS[name](parameters), dtype, scaler)


def masters_of(optimizer):
    return optimizer.param_groups[0]["params"]


def square_loss(model, number, dtype):
    x = make_batch(0, number, dtype)
    return loss_of(model(x).float())


def one_step(model, optimizer, number, dtype=BF16):
    optimizer.zero_grad()
    loss = square_loss(model, number, dtype)
    optimizer.scale(loss).backward()
    norm = optimizer.clip_grad_norm_(0.01)
    optimizer.step()
    return norm


TRAININGS = {
    "fp16": ("adamw", F16, amp.GradScaler("cpu", 2.0**20)),  # too large at first
    "fp16, PyTorch's scaler": ("adamw", F16, torch.amp.GradScaler("cpu", 2.0**20)),
    "bf16": ("momentum", BF16, None),
}


@pytest.mark.parametrize("case", TRAININGS)
def test_training_is_bitwise_that_of_masters_by_hand(case):
    """Clipped, with a learning rate that changes, and momenta from before."""
    name, dtype, scaler = TRAININGS[case]
    model = make_model("tied")
    plain = copy.deepcopy(model)  # its parameters are the masters by hand
    masters = list(plain.parameters())
    inner = OPTIMIZERS[name](model.parameters())
    by_hand = OPTIMIZERS[name](masters)
    for each, stepped in ((model, inner), (plain, by_hand)):
        batch_loss(each, 0, 0).backward()
        stepped.step()
    by_hand.register_step_pre_hook(lambda *_: norms.append(clip(masters, 0.01)))
    clip = nn.utils.clip_grad_norm_
    low = copy.deepcopy(plain).to(dtype)
    optimizer = amp.MixedPrecisionOptimizer(inner, dtype, copy.deepcopy(scaler))
    scale = 2.0**20 if scaler else 1.0
    norms = []
    for number in range(14):
        for each in (inner, by_hand):
            each.param_groups[0]["lr"] = 0.01 * 0.9**number
        count = len(norms)
        norm = one_step(model, optimizer, number, dtype)
        loss = square_loss(low, number, dtype)
        scale = amp.mixed_precision_step(loss, scale, low, masters, by_hand)
        bitwise([norm] * (len(norms) - count), norms[count:])
        bitwise(list(model.parameters()), list(low.parameters()))
        bitwise(masters_of(optimizer), masters)
    assert optimizer.scaler.get_scale() == scale
    assert len(norms) == (14 if scaler is None else 12)  # the others were skipped


def test_without_a_scaler_an_overflow_skips_the_step():
    model = make_model("plain")
    optimizer = make_optimizer(model)
    before = flat(masters_of(optimizer))
    loss = INF * batch_loss(model, 0, 0)
    loss.backward()
    optimizer.step()
    bitwise(flat(masters_of(optimizer)), before)


@pytest.mark.parametrize(
    ("name", "adam"),
    [("adamw", 8), ("momentum", 4)],
)
def test_weights_and_gradients_take_two_bytes_and_masters_four(name, adam):
    model = make_model("tied")
    optimizer = make_optimizer(model, name)
    one_step(model, optimizer, 1)
    masters = masters_of(optimizer)
    psi = sum(master.numel() for master in masters)
    weights, gradients, state = amp.held(model.parameters(), optimizer)
    assert (weights, gradients) == (2 * psi, 2 * psi)
    assert state // psi == adam  # and the counts of AdamW's steps
    assert amp.held_bytes(masters) == 4 * psi
    assert all(master.grad is None for master in masters)


def test_sparse_gradients_reach_the_masters():
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = make_optimizer(model)
    before = masters_of(optimizer)[0].clone()
    model(LABELS).sum().backward()
    optimizer.clip_grad_norm_(100.0)
    optimizer.step()
    change = before - masters_of(optimizer)[0]
    assert change.sum(1).tolist() == pytest.approx([0.3, 0.3, 0, 0, 0])


def test_gradients_stay_until_zero_grad():
    model = make_model("plain")
    optimizer = make_optimizer(model)
    masters = masters_of(optimizer)
    for _ in range(2):
        batch_loss(model, 0, 0).backward()
        optimizer.unscale_()
        optimizer.zero_grad()
    before = flat(masters)
    optimizer.step()
    bitwise(flat(masters), before)
    model[0].bias.grad = torch.ones(33, dtype=BF16)
    before = masters[1].clone()
    optimizer.step()
    optimizer.step()
    bitwise(masters[1], before - 0.1 - 0.1)


@pytest.mark.parametrize("loaded_first", ["model", "optimizer"])
@pytest.mark.parametrize("scaler_class", [amp.GradScaler, None])
def test_training_resumes_bitwise(scaler_class, loaded_first):
    def start(seed):
        model = make_model("tied", seed=seed)
        scaler = scaler_class and scaler_class("cpu", 2.0**10)
        return model, make_optimizer(model, "adamw", F16, scaler)

    saved = start(seed=1)
    resumed = start(seed=7)
    one_step(*saved, 0, F16)
    states = copy.deepcopy([each.state_dict() for each in saved])
    order = [0, 1] if loaded_first == "model" else [1, 0]
    for i in order:
        resumed[i].load_state_dict(states[i])
    for each in (saved, resumed):
        one_step(*each, 1, F16)
    bitwise(masters_of(resumed[1]), masters_of(saved[1]))
    scalers = [optimizer.scaler for _, optimizer in (saved, resumed)]
    assert scalers[0].get_scale() == scalers[1].get_scale()


def test_weights_that_the_caller_writes_reach_the_masters_and_others_keep_their_bits():
    model = make_model("plain")
    optimizer = make_optimizer(model)
    one_step(model, optimizer, 0)
    before = flat(masters_of(optimizer))
    model[0].weight.detach()[0] = 5.0  # six weights
    state = optimizer.state_dict()
    after = flat(state["master_weights"])
    assert after[:6].tolist() == [5.0] * 6
    bitwise(after[6:], before[6:])


@pytest.mark.parametrize("wrapper", [ddp.DDP, nn.parallel.DistributedDataParallel])
@pool.on(2)
def test_replicas_agree_if_ddp_broadcasts_after_the_masters_were_made(wrapper):
    """Rank 0 drops the bits of its masters that the broadcast in bf16 does not carry."""
    model = make_model("plain", seed=pool.rank())
    optimizer = make_optimizer(model, "adamw")
    replica = wrapper(model, process_group=pool.group())
    for step in range(4):
        optimizer.zero_grad()
        batch_loss(replica, pool.rank(), step).backward()
        optimizer.step()
    masters = flat(masters_of(optimizer))
    of_rank_0 = masters.clone()
    dist.broadcast(of_rank_0, group=pool.group(), group_src=0)
    bitwise(masters, of_rank_0)
    before = make_model("plain")
    assert not torch.equal(masters[:6], before[0].weight[0])


@pytest.fixture
def default_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(F32)


@pytest.mark.usefixtures("default_float64")
def test_masters_of_float64_weights_are_in_float64_with_a_scale_in_fp32():
    weight = nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight], lr=2.0**-40)
    optimizer = amp.MixedPrecisionOptimizer(sgd, BF16, amp.GradScaler(init_scale=2.0))
    weight.grad = torch.full((2,), 6.0, dtype=BF16)
    optimizer.step()
    [master] = masters_of(optimizer)
    assert master.tolist() == [1 - 3 * 2.0**-40] * 2


def test_the_scaler_refuses_an_optimizer_that_uses_it():
    optimizer = make_optimizer(make_model("plain"), scaler=amp.GradScaler())
    with pytest.raises(ValueError, match="itself"):
        optimizer.scaler.step(optimizer)


def test_groups_are_added_before():
    optimizer = make_optimizer(make_model("plain"))
    with pytest.raises(ValueError, match="before"):
        optimizer.add_param_group({"params": []})


def test_optimizers_of_zero_are_refused_because_they_have_masters():
    _, sgd = one_weight()
    sgd.no_sync = None
    with pytest.raises(ValueError, match="SGD has fp32 masters"):
        amp.MixedPrecisionOptimizer(sgd, BF16)


def test_step_takes_no_closure_but_none():
    optimizer = make_optimizer(make_model("plain"))
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(float)
    optimizer.step(None)


def test_frozen_parameters_in_another_dtype_are_named_in_the_first_forward():
    model = make_model("frozen")
    optimizer = make_optimizer(model)
    other = make_model("frozen")
    batch_loss(other, 0, 0)  # another model may have fp32 weights
    with pytest.raises(ValueError, match=r"0\.bias, 2\.weight"):
        batch_loss(model, 0, 0)
    assert optimizer.dtype == BF16
    assert nn.modules.module._global_forward_pre_hooks == {}


def test_a_write_to_data_is_an_error_until_it_is_reloaded():
    model = make_model("plain")
    optimizer = make_optimizer(model)
    model[0].weight.data.fill_(3.0)
    batch_loss(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match="reload_model_params"):
        optimizer.step()
    optimizer.reload_model_params()
    assert (masters_of(optimizer)[0] == 3.0).all()
    optimizer.step()


@pytest.mark.parametrize("call", ["step", "clip_grad_norm_"])
def test_a_backward_after_clipping_is_an_error(call):
    model = make_model("plain")
    optimizer = make_optimizer(model)
    batch_loss(model, 0, 0).backward()
    optimizer.clip_grad_norm_(0.1)
    batch_loss(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match="backward"):
        optimizer.step() if call == "step" else optimizer.clip_grad_norm_(0.1)


# ---- autocast

A = torch.tensor([[1.001, 0.3], [0.7, 1.9]])
LABELS = torch.tensor([0, 1])
# x is A, in fp32 or in bf16. The dtypes and values are those of torch.autocast("cpu").
ALIKE = {
    "products": lambda x: (x @ A, A @ x),
    "keywords": lambda x: F.linear(x, weight=A, bias=A[0]),
    "lists of inputs": lambda x: torch.einsum("ij,jk->ik", x, A),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], A[None]),
    "elementwise": lambda x: (F.gelu(x), x + A),
    "in place": lambda x: x.clone().addmm_(x, x),
    "losses": lambda x: (F.cross_entropy(x, LABELS), F.mse_loss(input=x, target=A)),
    "integers": lambda x: (x[LABELS], LABELS.sum()),
    "float64": lambda x: x.double() @ A.double(),
    "out": lambda x: torch.mm(x.float(), A, out=torch.empty(2, 2)),
}
# In bf16 PyTorch leaves these as they are on the CPU. Ours are in fp32, as PyTorch's on CUDA.
UNLIKE = {
    "softmax": lambda x: x.softmax(-1),
    "norms": lambda x: (F.layer_norm(x, (2,)), x.norm()),
    "sums": lambda x: (x.sum(), x.mean()),
    "powers": lambda x: (torch.exp(x), x**2, 2**x),
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ALIKE)
def test_operations_return_what_they_return_under_pytorchs_autocast(name, dtype):
    x = A.to(dtype)
    with amp.autocast(BF16):
        ours = ALIKE[name](x)
    with torch.autocast("cpu", BF16):
        bitwise(ours, ALIKE[name](x))


@pytest.mark.parametrize("name", UNLIKE)
def test_sums_norms_and_exponentials_of_bf16_inputs_are_in_fp32(name):
    x = A.bfloat16()
    with amp.autocast(BF16):
        ours = UNLIKE[name](x)
    bitwise(ours, UNLIKE[name](x.float()))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_the_ideas_linear_layer_is_that_of_pytorchs_autocast(bias):
    layer = nn.Linear(2, 3, bias)
    plain = copy.deepcopy(layer)
    amp.autocast_linear(layer, BF16)
    ours = layer(A)
    with torch.autocast("cpu", BF16):
        theirs = plain(A)
    ours.sum().backward()
    theirs.sum().backward()
    bitwise(ours, theirs.float())
    bitwise(layer.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_pytorchs_checkpoint_is_an_error_because_its_second_run_has_no_autocast(reentrant):
    x = A.clone().requires_grad_()
    layer = nn.Linear(2, 2)
    with amp.autocast(BF16), pytest.raises(RuntimeError, match="activation_checkpoint"):
        checkpoint(layer, x, use_reentrant=reentrant)


@pytest.mark.parametrize("way", ["ours", "autocast inside", "autocast inside, reentrant"])
def test_these_checkpoints_change_no_bit(way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 2))
    inside = amp.autocast(BF16)(model.forward)
    parameters = list(model.parameters())
    x = A.clone().requires_grad_()
    expected = torch.autograd.grad(loss_of(inside(x)), parameters)
    if way == "ours":
        with amp.autocast(BF16):
            y = activation_checkpoint.checkpoint(model, x)
    else:
        y = checkpoint(inside, x, use_reentrant="reentrant" in way)
    loss_of(y).backward()
    bitwise([each.grad for each in parameters], list(expected))


def test_a_device_type_instead_of_a_dtype_is_an_error():
    with pytest.raises(TypeError, match="give a dtype"):
        amp.autocast("cpu")


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
