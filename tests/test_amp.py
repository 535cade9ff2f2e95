"""amp.py against torch.amp.GradScaler, torch.autocast, masters kept by hand, and fp32.

What tests/claims/amp.py claims of every GradScaler is not repeated here.
"""

import copy
import pickle
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from shared import OPTIMIZERS, Collectives, batch_loss, loss_of, make_batch, make_model
from torch.utils._python_dispatch import TorchDispatchMode
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


class Operators(TorchDispatchMode):
    """The names of the operators that run in this context."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


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


@pytest.mark.parametrize(
    "wrong",
    [{"growth_factor": 1.0}, {"backoff_factor": 1.0}],
    ids=str,
)
@pytest.mark.parametrize("scaler_class", [amp.GradScaler, torch.amp.GradScaler])
def test_factors_that_would_not_adapt_the_scale_are_an_error(scaler_class, wrong):
    with pytest.raises(AssertionError, match="factor"):
        scaler_class("cpu", **wrong)


def test_an_initial_scale_of_nan_is_an_error():
    with pytest.raises(AssertionError, match="init_scale=nan"):
        amp.GradScaler(init_scale=NAN)


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor", "growth_interval"])
def test_settings_are_read_and_changed_as_pytorchs(name):
    scales = []
    for scaler_class in (amp.GradScaler, torch.amp.GradScaler):
        scaler = scaler_class("cpu", 1024.0)
        weight, optimizer = one_weight()
        set_value = getattr(scaler, f"set_{name}")
        get_value = getattr(scaler, f"get_{name}")
        scales.append([get_value()])
        set_value(3 if name == "growth_interval" else 0.75)
        scales[-1].append(get_value())
        for number in (1.0, 1.0, INF, 1.0, 1.0, 1.0):
            weight.grad = scaler.scale(torch.full((2,), number))
            scaler.step(optimizer)
            scaler.update()
            scales[-1].append(scaler.get_scale())
    assert scales[0] == scales[1]


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


@pytest.mark.parametrize("scaler", [None, amp.GradScaler("cpu", 1024.0)], ids=["bf16", "scaled"])
def test_complex_parameters_train_beside_16_bits_as_without(scaler):
    weights = [nn.Parameter(torch.tensor([1 + 2j, 3 - 1j])) for _ in range(2)]
    real, _ = one_weight()
    inner = torch.optim.Adam([weights[0], real], lr=0.1)
    optimizer = amp.MixedPrecisionOptimizer(inner, BF16, scaler)
    plain = torch.optim.Adam([weights[1]], lr=0.1)
    for number in (1.0, INF, 2.0, 3.0):
        loss = (weights[0] * (number + 1j)).abs().sum() + (real**2).sum()
        optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number < INF:
            (weights[1] * (number + 1j)).abs().sum().backward()
            plain.step()
            plain.zero_grad()
    bitwise(weights[0], weights[1])
    assert real.dtype == BF16


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_a_fused_optimizer_steps_without_a_wait_of_the_host_and_few_kernels(name):
    """It trains as one that is not fused. A step with an inf changes nothing."""
    results = []
    for fused in (True, False):
        model = make_model("plain", seed=1)
        inner = getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=fused, foreach=False)
        optimizer = amp.MixedPrecisionOptimizer(inner, BF16)
        for number in range(6):
            optimizer.zero_grad()
            loss_in_fp32(model, number).backward()
            with Operators() as seen:
                optimizer.step()
        assert ("_local_scalar_dense" in seen.names) is not fused
        assert seen.names.count("_foreach_copy_") == 2
        assert seen.names.count("_to_copy") + seen.names.count("copy_") <= 1  # found_inf's
        results.append([*masters_of(optimizer), inner.state_dict()["state"]])
    torch.testing.assert_close(*results)


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
    optimizer.zero_grad(set_to_none=False)
    assert model[0].bias.grad.tolist() == [0.0] * 33
    optimizer.zero_grad()
    assert model[0].bias.grad is None
    optimizer.step()
    bitwise(bias, before - 0.1 - 0.1)


def test_the_technique_alone_trains_bitwise_as_its_subclass():
    model, optimizer = start(scaler=amp.GradScaler(init_scale=8.0))
    alone = make_model("plain")
    inner = OPTIMIZERS["sgd"](alone.parameters())
    masters = amp.MasterWeights(inner, BF16, amp.LossScaler(init_scale=8.0))
    for number in range(3):
        for each, stepper in [(model, optimizer), (alone, masters)]:
            batch = make_batch(0, number, BF16)
            output = each(batch)
            loss = loss_of(output.float())
            stepper.scale(loss).backward()
            stepper.clip_grad_norm_(0.1)
            stepper.step()
            each.zero_grad()
        bitwise(flat(alone.parameters()), flat(model.parameters()))


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


# ---- gradients between clip_grad_norm_() and step()


def backward_anew(model):
    model.zero_grad()
    batch_loss(model, 0, 1).backward()


def replace_one(model):
    model[0].bias.grad = torch.ones_like(model[0].bias)


def drop_one(model):
    model[0].bias.grad = None


def give_the_first_one(model):
    frozen_until_now = model[0].weight
    frozen_until_now.grad = torch.ones_like(frozen_until_now)


SCALERS = {
    "no scaler": lambda: None,
    "our scaler": partial(amp.GradScaler, "cpu", 4.0),
    "PyTorch's": partial(torch.amp.GradScaler, "cpu", 4.0),
}


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("change", [backward_anew, replace_one, drop_one, give_the_first_one])
def test_a_gradient_replaced_after_clipping_is_an_error(change, scaler):
    """The new tensor has been written as often as the old one, so versions do not tell."""
    model, optimizer = start(scaler=SCALERS[scaler]())
    loss = batch_loss(model, 0, 0)
    optimizer.scale(loss).backward()
    model[0].weight.grad = None
    optimizer.clip_grad_norm_(0.1)
    change(model)
    with pytest.raises(RuntimeError, match="replaced, after clip_grad_norm_"):
        optimizer.step()


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("wrapper", [ddp.DDP, nn.parallel.DistributedDataParallel])
@pool.on(2)
def test_under_ddp_a_backward_anew_after_clipping_is_an_error(wrapper, as_view):
    model, optimizer = start()
    replica = wrapper(model, process_group=pool.group(), gradient_as_bucket_view=as_view)
    batch_loss(replica, pool.rank(), 0).backward()
    optimizer.clip_grad_norm_(0.1)
    replica.zero_grad()
    batch_loss(replica, pool.rank(), 1).backward()
    with pytest.raises(RuntimeError, match="replaced, after clip_grad_norm_"):
        optimizer.step()


@pytest.mark.parametrize("scaler", SCALERS)
def test_gradients_dropped_after_clipping_leave_no_trace(scaler):
    results = []
    for drops in (True, False):
        model, optimizer = start(name="adamw", scaler=SCALERS[scaler]())
        if drops:
            loss = batch_loss(model, 0, 1)
            optimizer.scale(loss).backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.zero_grad()
            if optimizer.scaler.is_enabled():
                optimizer.scaler.update()
        one_step(model, optimizer, 0)
        results.append([*masters_of(optimizer)])
    bitwise(*results)


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_state_loaded_between_clipping_and_step_keeps_the_clipped_gradients(scaler):
    """As in PyTorch. The state has another scale, which these gradients do not have."""
    model, optimizer = start(scaler=SCALERS[scaler]())
    state = copy.deepcopy(optimizer.state_dict())
    state["scaler"] |= {"scale": 1024.0} if state["scaler"] else {}
    model[0].bias.grad = optimizer.scale(torch.ones(33)).to(BF16)
    optimizer.clip_grad_norm_(1e9)
    optimizer.load_state_dict(state)
    before = masters_of(optimizer)[1].clone()
    optimizer.step()
    bitwise(masters_of(optimizer)[1], before - 0.1)


# ---- numbers at the ends of the range


@pytest.mark.parametrize("fused", [False, True])
def test_finite_gradients_are_used_even_if_their_norm_overflows(fused):
    """A parameter without elements has no largest one."""
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))]
    inner = torch.optim.SGD(weights, lr=2.0**-66, fused=fused)
    optimizer = amp.MixedPrecisionOptimizer(inner, BF16)
    for number in (2.0**65, INF, NAN):
        for weight in weights:
            weight.grad = torch.full_like(weight, 1.0)
        weights[0].grad[1] = number
        optimizer.step()
        optimizer.zero_grad()
        assert weights[0].tolist() == [1.0, 0.5, 1.0]


def test_a_scale_that_nears_zero_is_an_error_that_says_where_to_look():
    """PyTorch skips every further step in silence."""
    scaler = amp.GradScaler("cpu", 2.0**-127, backoff_factor=0.5)
    weight, optimizer = one_weight()
    weight.grad = scaler.scale(torch.ones(2))
    scaler.step(optimizer)
    assert weight.tolist() == [0.75, 0.75]
    scaler.update(2.0**-128)
    with pytest.raises(RuntimeError, match="scale has fallen to 3e-39"):
        scaler.step(optimizer)


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


def copy_it(model, optimizer):
    copy.deepcopy((model, optimizer))


def pickle_it(model, optimizer):
    pickle.dumps(optimizer)


def load_the_state_of_a_disabled_scaler(model, optimizer):
    amp.GradScaler().load_state_dict(amp.GradScaler(enabled=False).state_dict())


def load_a_part_of_a_state(model, optimizer):
    amp.GradScaler().load_state_dict({"scale": 2.0})


def lose_from_probabilities(model, optimizer):
    with amp.autocast(BF16):
        nn.BCELoss()(A.sigmoid(), A.sigmoid())


MISUSE = {
    copy_it: "state_dict",
    pickle_it: "state_dict",
    load_the_state_of_a_disabled_scaler: "empty",
    load_a_part_of_a_state: "growth_factor",
    lose_from_probabilities: "BCEWithLogitsLoss",
    unscale_fp16: "FP16",
    step_without_a_gradient: "no rank has a .grad",
    clip_before_a_backward: "backward ran",
    checkpoint_with_pytorchs: "activation_checkpoint",
}


ERRORS = (ValueError, RuntimeError, AssertionError, TypeError, KeyError)


@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_is_an_error(misuse):
    with pytest.raises(ERRORS, match=MISUSE[misuse]):
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


def pytorchs_cases():
    """Return {list: cases} of PyTorch's own tests. A case has a name, arguments and options."""
    pytest.MonkeyPatch().setitem(  # it imports a package that is not a dependency of PyTorch
        sys.modules,
        "torch.testing._internal.common_utils",
        SimpleNamespace(TEST_WITH_ROCM=False, TestCase=object),
    )
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    return vars(AutocastTestLists("cpu"))


def run_case(name, args, *options):
    if name == "einsum":  # its arguments do not fit its equation
        return torch.einsum("ij,jk", *options[0])
    for module in (torch, torch._C._nn, torch.Tensor):
        function = getattr(module, name, None)
        if function:
            break
    keywords = {}
    for option in options:
        if isinstance(option, dict):
            keywords = option
    output = function(*args, **keywords)
    return output[0] if isinstance(output, tuple) else output


LISTS = {
    "torch_fp16": F16,
    "nn_fp16": F16,
    "methods_fp16": F16,
    "torch_fp32": F32,
    "nn_fp32": F32,
    "methods_fp32": F32,
    "torch_need_autocast_promote": F32,
}


@pytest.mark.filterwarnings("ignore:.*chain_matmul:UserWarning", "ignore:Using torch.cross")
@pytest.mark.parametrize("name", LISTS)
def test_pytorchs_own_cases_return_the_dtype_of_its_list(name):
    cases = [case for case in pytorchs_cases()[name] if not case[0].startswith("cudnn")]
    assert cases
    with amp.autocast(F16):
        wrong = {case[0] for case in cases if run_case(*case).dtype != LISTS[name]}
    assert not wrong


def test_all_operations_of_pytorchs_lists_are_in_ours():
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    if not header.exists():
        pytest.skip("torch has no headers")
    lists = dict(re.findall(r"#define AT_FORALL_(\w+)\(_\)([^#]*)", header.read_text()))
    theirs = {name: set(re.findall(r"_\((\w+)[,)]", text)) for name, text in lists.items()}
    low = theirs["LOWER_PRECISION_FP"] - amp.LOW_PRECISION
    assert {name for name in low if not re.match("_thnn|_scaled", name)} == set()
    fp32 = theirs["FP32"] | theirs["FP32_SET_OPT_DTYPE"]
    assert {name for name in fp32 - amp.FP32 if not name.endswith("_loss")} == set()
    assert theirs["PROMOTE"] <= amp.PROMOTE


def test_functions_of_mixed_dtypes_compute_in_the_widest():
    image = torch.randn(1, 1, 4, 4)
    grid = torch.rand(1, 2, 2, 2)
    layer = nn.Bilinear(2, 2, 3)
    with amp.autocast(BF16):
        outputs = [
            F.grid_sample(image.bfloat16(), grid, align_corners=False),
            layer(A.bfloat16(), A),
            torch.tensordot(A.bfloat16(), A, 1),
        ]
        assert torch.dot(A[0].bfloat16(), A[1].bfloat16()).dtype == BF16
    expected = [
        F.grid_sample(image.bfloat16().float(), grid, align_corners=False),
        layer(A.bfloat16().float(), A),
        A.bfloat16().float() @ A,
    ]
    bitwise(outputs, expected)


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
