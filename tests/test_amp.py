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
from hypothesis import example, given
from hypothesis import strategies as st
from shared import OPTIMIZERS, Collectives, batch_loss, loss_of, make_batch, make_model
from torch.optim.lr_scheduler import LambdaLR
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


def test_gradients_in_fp16_are_not_unscaled():
    weight = nn.Parameter(torch.ones(2, dtype=F16))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="FP16"):
        amp.GradScaler().unscale_(torch.optim.SGD([weight]))


def test_the_scaler_takes_no_closure_but_none():
    (weight, _), (optimizer, _) = two_optimizers()
    scaler = amp.GradScaler(init_scale=1.0)
    weight.grad = torch.ones(2)
    for wrong in ([float], {}), ([], {"closure": float}):
        with pytest.raises(RuntimeError, match="no closure"):
            scaler.step(optimizer, *wrong[0], **wrong[1])
    scaler.step(optimizer, None)
    assert weight.tolist() == [0.75, 0.75]


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


class Trainings:
    """The same training twice: by MixedPrecisionOptimizer, and by section 1 with masters by hand.

    The optimizer is wrapped after a step, and has a parameter that no loss uses.
    """

    def __init__(self, name, dtype, scaler_class):
        plain = make_model("tied")  # its parameters are the masters by hand
        self.model = copy.deepcopy(plain)
        self.unused = nn.Parameter(torch.ones(3))
        self.masters = list(plain.parameters())
        inner = OPTIMIZERS[name]([*self.model.parameters(), self.unused])
        self.reference = OPTIMIZERS[name](self.masters)
        for model, optimizer in ((self.model, inner), (plain, self.reference)):
            batch_loss(model, 0, 0).backward()
            optimizer.step()
        self.low = copy.deepcopy(plain).to(dtype)
        self.scale = 2.0**20 if scaler_class else 1.0  # too large at first
        self.grows = not scaler_class
        scaler = scaler_class and scaler_class("cpu", self.scale)
        self.optimizer = amp.MixedPrecisionOptimizer(inner, dtype, scaler)
        self.norms = []  # of the gradients by hand, before they were clipped
        self.reference.register_step_pre_hook(self.clip)

    def clip(self, *_):
        self.norms.append(nn.utils.clip_grad_norm_(self.masters, 0.01))

    def step(self, x):
        """Return the norm."""
        self.optimizer.zero_grad()
        self.optimizer.scale(square_loss(x, self.model)).backward()
        norm = self.optimizer.clip_grad_norm_(0.01)
        self.optimizer.step()
        loss = square_loss(x, self.low)
        scale = amp.mixed_precision_step(loss, self.scale, self.low, self.masters, self.reference)
        self.scale = 1.0 if self.grows else scale
        return norm


TRAININGS = [
    ("adamw", F16, amp.GradScaler),
    ("adamw", F16, torch.amp.GradScaler),
    ("momentum", BF16, None),
    ("adamw", F32, amp.GradScaler),
]


@pytest.mark.parametrize(("name", "dtype", "scaler_class"), TRAININGS)
def test_training_is_bitwise_that_of_masters_by_hand(name, dtype, scaler_class):
    both = Trainings(name, dtype, scaler_class)
    scheduler = LambdaLR(both.optimizer, lambda step: 0.9**step)
    for number in range(1, 15):
        factor = INF if number == 14 else 1.0  # the last step overflows
        steps = len(both.norms)
        norm = both.step(make_batch(0, number).to(dtype) * factor)
        bitwise([norm] * (len(both.norms) - steps), both.norms[steps:])
        assert both.optimizer.scaler.get_scale() == both.scale
        bitwise(list(both.model.parameters()), list(both.low.parameters()))
        bitwise(masters_of(both.optimizer), [*both.masters, both.unused.float()])
        scheduler.step()
        both.reference.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
    assert 0 < len(both.norms) < 14  # some steps, not all, were skipped


@pytest.mark.parametrize(("name", "adam"), [("adamw", 8), ("momentum", 4)])
def test_weights_and_gradients_take_two_bytes_and_masters_four(name, adam):
    both = Trainings(name, BF16, None)
    both.step(make_batch(0, 1, BF16))
    psi = sum(master.numel() for master in both.masters)
    weights, gradients, state = amp.held(both.model.parameters(), both.optimizer)
    assert (weights, gradients) == (2 * psi, 2 * psi)
    assert state // psi == adam  # and the counts of AdamW's steps
    masters = masters_of(both.optimizer)
    assert amp.held_bytes(masters) == 4 * (psi + both.unused.numel())
    assert all(master.grad is None for master in masters)


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


def make_optimizer(model, dtype=BF16, scaler=None):
    return amp.MixedPrecisionOptimizer(OPTIMIZERS["sgd"](model.parameters()), dtype, scaler)


def test_the_scaler_refuses_an_optimizer_that_uses_it():
    optimizer = make_optimizer(make_model("plain"), scaler=amp.GradScaler())
    with pytest.raises(ValueError, match="uses its scaler itself"):
        optimizer.scaler.step(optimizer)


def test_groups_are_added_before():
    with pytest.raises(ValueError, match="before"):
        make_optimizer(make_model("plain")).add_param_group({"params": []})


def test_optimizers_of_zero_are_refused_because_they_have_masters():
    sgd = OPTIMIZERS["sgd"](make_model("plain").parameters())
    sgd.no_sync = None
    with pytest.raises(ValueError, match="SGD has fp32 masters"):
        amp.MixedPrecisionOptimizer(sgd, BF16)


def test_step_takes_no_closure_but_none():
    model = make_model("plain")
    optimizer = make_optimizer(model, F32)
    before = model[0].weight.detach().clone()
    batch_loss(model, 0, 0).backward()
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(float)
    bitwise(model[0].weight.detach(), before)
    optimizer.step(None)
    assert not torch.equal(model[0].weight, before)


def trained_by(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_frozen_parameters_in_another_dtype_are_named_in_the_first_forward():
    model = make_model("frozen")
    optimizer = amp.MixedPrecisionOptimizer(OPTIMIZERS["sgd"](trained_by(model)), BF16)
    other = make_model("frozen")
    batch_loss(other, 0, 0)  # of another model, which has fp32 weights
    with pytest.raises(ValueError, match=r"0\.bias, 2\.weight; call model\.to\(torch\.bfloat16\)"):
        batch_loss(model, 0, 0)
    assert optimizer.dtype == BF16


def test_frozen_parameters_that_were_cast_first_train():
    model = make_model("frozen", BF16)
    optimizer = amp.MixedPrecisionOptimizer(OPTIMIZERS["sgd"](trained_by(model)), BF16)
    batch_loss(model, 0, 0).backward()
    optimizer.step()
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
    with pytest.raises(RuntimeError, match="every backward first"):
        getattr(optimizer, call)(*[0.1] * (call != "step"))


# ---- autocast

A = torch.tensor([[1.001, 0.3], [0.7, 1.9]])
LABELS = torch.tensor([0, 1])
# x is A, in fp32 or in 16 bits. Dtypes and values are torch.autocast("cpu")'s:
ALIKE = {
    "matmul": lambda x: (x @ A, A @ x),
    "keywords": lambda x: (torch.mm(input=x, mat2=A), F.linear(x, weight=A, bias=A[0])),
    "batches": lambda x: torch.baddbmm(A[None], x[None], A[None]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, A),
    "conv2d": lambda x: F.conv2d(x[None, None], A[:1, :1, None, None]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], A[None]),
    "elementwise": lambda x: (F.gelu(x), x + A, x.max(), torch.cat([x, A]), torch.prod(x)),
    "in place": lambda x: x.clone().addmm_(x, x),
    "losses": lambda x: (F.cross_entropy(x, LABELS), F.mse_loss(input=x, target=A)),
    "indices": lambda x: (F.embedding(LABELS, x), LABELS.sum()),
    "float64": lambda x: x.double() @ A.double(),
    "out": lambda x: torch.mm(x.float(), A, out=torch.empty(2, 2)),
}
# In 16 bits PyTorch leaves these as they are on the CPU. Ours are in fp32, as PyTorch's on CUDA.
UNLIKE = {
    "softmax": lambda x: (x.softmax(-1), F.log_softmax(x, -1), x.logsumexp(0)),
    "norms": lambda x: (F.layer_norm(x, (2,)), F.group_norm(x[None], 1), x.norm()),
    "sums": lambda x: (x.sum(), x.mean(), x.var(), x.cumsum(0)),
    "powers": lambda x: (torch.exp(x), x.log(), x**2, 2**x, torch.rsqrt(x)),
}


@pytest.mark.parametrize("low", [False, True], ids=["fp32 input", "16-bit input"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", [*ALIKE, *UNLIKE])
def test_operations_return_what_they_return_under_pytorchs_autocast(name, dtype, low):
    unlike = low and name in UNLIKE
    operation = (ALIKE | UNLIKE)[name]
    x = A.to(dtype) if low else A
    with amp.autocast(dtype):
        ours = operation(x)
    with torch.autocast("cpu", dtype, enabled=not unlike):
        expected = operation(x.float() if unlike else x)
    bitwise(ours, expected)


@pytest.mark.parametrize("bias", [False, True])
def test_the_ideas_linear_layer_is_that_of_pytorchs_autocast(bias):
    layers = [nn.Linear(2, 3, bias)]
    layers.append(copy.deepcopy(layers[0]))
    amp.autocast_linear(layers[0], BF16)
    ours = layers[0](A)
    with torch.autocast("cpu", BF16):
        theirs = layers[1](A)
    assert ours.dtype == F32
    bitwise(ours, theirs.float())
    for layer, output in zip(layers, (ours, theirs), strict=True):
        output.sum().backward()
        assert layer.weight.grad.dtype == F32
    bitwise(layers[0].weight.grad, layers[1].weight.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_pytorchs_checkpoint_is_an_error_because_its_second_run_has_no_autocast(reentrant):
    x = A.clone().requires_grad_()
    layer = nn.Linear(2, 2)
    with amp.autocast(BF16), pytest.raises(RuntimeError, match="activation_checkpoint"):
        checkpoint(layer, x, use_reentrant=reentrant)


@pytest.mark.parametrize("way", ["ours", "autocast inside", "autocast inside, reentrant"])
def test_these_checkpoints_change_no_bit(way):
    x = A.clone().requires_grad_()
    model = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 2))
    inside = amp.autocast(BF16)(model.forward)
    inside(x).square().sum().backward()
    expected = [x.grad.clone(), *(parameter.grad.clone() for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    if way == "ours":
        with amp.autocast(BF16):
            y = activation_checkpoint.checkpoint(model, x)
    else:
        y = checkpoint(inside, x, use_reentrant="reentrant" in way)
    y.square().sum().backward()
    bitwise([x.grad, *(parameter.grad for parameter in model.parameters())], expected)


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
