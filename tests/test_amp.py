"""amp.py against torch.amp.GradScaler, torch.autocast, masters kept by hand, and training in fp32."""

import copy
import re
from functools import partial

import pool
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: F401 (in ALIKE and UNLIKE)
from hypothesis import given
from hypothesis import strategies as st
from shared import OPTIMIZERS, Collectives, assert_same_parameters, loss_of, make_batch, make_model

import amp

INF, NAN = float("inf"), float("nan")
HALF = [torch.float16, torch.bfloat16]
bitwise = partial(torch.testing.assert_close, rtol=0, atol=0)


def small_language_model():
    torch.manual_seed(0)
    model = amp.language_model(C=32, heads=2, layers=1)
    return model, torch.randint(97, 123, (8, 17), generator=torch.Generator().manual_seed(0))


def language_loss(model, tokens):
    return amp.language_loss(model(tokens[:, :-1]).float(), tokens[:, 1:])


def wrapped(model, dtype, scaler=None, name="adamw"):
    return amp.MixedPrecisionOptimizer(OPTIMIZERS[name](model.parameters()), dtype, scaler)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_are_within_a_few_roundoffs_of_fp32(dtype):
    """Relative error of all gradients together: below 4 unit roundoffs, at a scale without underflow."""
    model, tokens = small_language_model()
    exact = torch.autograd.grad(language_loss(model, tokens), model.parameters())
    (language_loss(model.to(dtype), tokens) * 2**10).backward()
    error = [g - p.grad.float() / 2**10 for g, p in zip(exact, model.parameters(), strict=True)]
    norm = torch.nn.utils.get_total_norm
    assert 0.05 < norm(error) / norm(exact) / (torch.finfo(dtype).eps / 2) < 4


def test_training_ends_within_two_percent_of_fp32():
    losses = []
    for dtype in (torch.float32, *HALF):
        model, tokens = small_language_model()
        optimizer = wrapped(model, dtype, amp.GradScaler("cpu", enabled=dtype == torch.float16))
        for _ in range(25):
            optimizer.zero_grad()
            optimizer.scale(language_loss(model, tokens)).backward()
            optimizer.step()
        losses.append(language_loss(model, tokens).item())
    assert losses[1:] == [pytest.approx(losses[0], rel=0.02)] * 2


def two_optimizers():
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((3,), 2.0))]
    return weights, [torch.optim.SGD([weight], lr=0.25) for weight in weights]


def act(call, scaler, weight, optimizer, value):
    calls = ["scale", "step", "update"] if call == "iteration" else [call]
    for each in calls:
        if each == "scale":
            weight.grad = scaler.scale(torch.full_like(weight, value))
        else:
            {"unscale": scaler.unscale_, "step": scaler.step}.get(each, lambda _: None)(optimizer)
            {"update": scaler.update, "set": lambda: scaler.update(7.0)}.get(each, lambda: None)()


CALLS = st.sampled_from(["iteration"] * 6 + ["scale", "unscale", "step", "update", "set"])


@given(
    st.lists(st.tuples(CALLS, st.integers(0, 1), st.sampled_from([0.5, 3.0, INF, -INF, NAN, 1e38])), max_size=40),
    st.sampled_from([1.0, 2.0**16, 0.1, 3e38]),
    st.sampled_from([2.0, 1.7]),
    st.sampled_from([0.5, 0.3]),
    st.integers(1, 3),
)
def test_any_sequence_of_calls_and_overflows(calls, init_scale, growth, backoff, interval):
    """The same scales, counters, weights and types of errors as PyTorch's, bit for bit."""
    scalers = [kind("cpu", init_scale, growth, backoff, interval) for kind in (amp.GradScaler, torch.amp.GradScaler)]
    sides = [(scaler, *two_optimizers()) for scaler in scalers]
    for scaler, weights, _ in sides:
        for weight in weights:
            weight.grad = scaler.scale(torch.zeros_like(weight))
    for call, which, value in calls:
        results = []
        for scaler, weights, optimizers in sides:
            raised = None
            try:
                act(call, scaler, weights[which], optimizers[which], value)
            except (RuntimeError, AssertionError) as error:
                raised = type(error)
            results.append((raised, sorted(scaler.state_dict().items()), [weight.tolist() for weight in weights]))
        assert str(results[0]) == str(results[1]), call  # as text: NaN is equal to itself


def test_a_scaler_refuses_closures_and_fp16_gradients():
    scaler, ([weight, _], [optimizer, _]) = amp.GradScaler("cpu", 4.0), two_optimizers()
    weight.grad, half = scaler.scale(torch.ones_like(weight)), nn.Parameter(weight.detach().half())
    with pytest.raises(RuntimeError, match=r"(?i)closure"):
        scaler.step(optimizer, closure=lambda: None)
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match="FP16"):  # also where only one is
        scaler.unscale_(torch.optim.SGD([weight, half]))


def test_a_disabled_scaler_steps_plainly():
    scaler, ([weight, _], [optimizer, _]) = amp.GradScaler("cpu", enabled=False), two_optimizers()
    assert scaler.scale(weight) is weight
    for call in ("scale", "unscale", "step", "update"):
        act(call, scaler, weight, optimizer, INF)
    scaler.load_state_dict({})
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (1.0, {}, False)
    assert weight.tolist() == [-INF, -INF]


def test_any_nesting_of_losses_is_scaled():
    """In fp32, where it does not overflow; also where there is no CUDA."""
    one, (other,) = amp.GradScaler(init_scale=8.0).scale([torch.ones(()), (torch.tensor(3e4, dtype=torch.float16),)])
    assert (one.item(), other.item()) == (8, 8 * 3e4)
    assert amp.GradScaler().state_dict() == torch.amp.GradScaler("cpu").state_dict()  # the defaults
    amp.GradScaler().unscale_(two_optimizers()[1][0])  # which has no gradients


def body_overflow():
    scaler, (weights, optimizers) = amp.GradScaler("cpu", 4.0, process_group=pool.group()), two_optimizers()
    for i in range(2 - pool.rank()):  # rank 0 alone has gradients for the second
        weights[i].grad = scaler.scale(torch.ones_like(weights[i]))
    if pool.rank() == 0:
        weights[0].grad[0] = NAN
    with Collectives() as seen:
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert seen.calls == [("allreduce_", 4)] * 2
    assert (scaler.get_scale(), weights[0].tolist()) == (2.0, [1.0, 1.0])
    assert weights[1].tolist() == ([2.0] * 3 if pool.rank() else [1.75] * 3)


def test_an_overflow_of_one_optimizer_on_one_rank():
    """All ranks skip its step, not the other's; four bytes for each optimizer are reduced, also without gradients."""
    pool.run(2, body_overflow)


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize(
    ("name", "dtype"), [("adamw", torch.float16), ("momentum", torch.bfloat16), ("sgd", torch.float32)]
)
def test_masters_by_hand(name, dtype, clip):
    """Bitwise mixed_precision_step: scaled gradients in dtype, cast, unscaled, clipped, fp32 update, rounded copy."""

    def loss(model):
        return model(x).float().square().mean()

    model, plain, scale, skipped = make_model("plain"), make_model("plain"), 2.0**24, 0
    scaler = amp.GradScaler("cpu", scale)  # overflows in fp16 until it is small enough
    ours = wrapped(model, dtype, scaler, name)
    masters = [parameter.detach().clone().requires_grad_() for parameter in plain.parameters()]
    optimizer = OPTIMIZERS[name](masters)
    optimizer.register_step_pre_hook(lambda *_: clip and nn.utils.clip_grad_norm_(masters, clip) and None)
    plain.to(dtype)
    for number in range(12):
        x, before = make_batch(0, number).to(dtype), scale
        ours.zero_grad()
        ours.scale(loss(model)).backward()
        left = [parameter.grad.clone() for parameter in model.parameters()]
        if clip:
            ours.clip_grad_norm_(clip)
        ours.step()
        bitwise([parameter.grad for parameter in model.parameters()], left, equal_nan=True)  # as backward left them
        scale = amp.mixed_precision_step(plain, masters, optimizer, loss, scale)
        assert scale == scaler.get_scale()
        skipped += scale < before
        bitwise(list(model.parameters()), list(plain.parameters()))  # dtypes, too
        bitwise(ours.param_groups[0]["params"], masters)
    assert (skipped > 0) == (dtype == torch.float16)


@pytest.mark.parametrize("order", ["model first", "model last", "optimizer alone"])
@pytest.mark.parametrize("scaler_class", [None, amp.GradScaler, torch.amp.GradScaler])
def test_resuming_is_exact(scaler_class, order):
    """Bitwise, whichever is loaded first: the model or the optimizer, whose masters have more bits."""
    dtype, sides = torch.float16 if scaler_class else torch.bfloat16, []
    for seed in (0, 1):
        model = make_model("plain", seed=seed)
        sides.append((model, wrapped(model, dtype, scaler_class and scaler_class("cpu", 4.0))))
    (model, optimizer), (again, other) = sides

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            optimizer.scale(model(make_batch(0, step, dtype)).sum().float() * (INF if step == 3 else 1.0)).backward()
            optimizer.step()

    train(model, optimizer, range(5))
    model_state, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if order == "model first":
        again.load_state_dict(model_state)
    other.load_state_dict(state)
    if order == "model last":
        again.load_state_dict(model_state)
    for side in sides:
        train(*side, range(5, 9))
    assert_same_parameters(model, again, exact=True)
    assert str(optimizer.state_dict()) == str(other.state_dict())
    assert optimizer.state_dict()["scaler"].get("scale", 2.0) == 2.0


def test_a_checkpoint_loaded_into_the_model_counts():
    """Old masters do not overwrite it; where weight and master agree, the master keeps its bits."""
    model = nn.Linear(2, 1, bias=False)
    model.load_state_dict({"weight": torch.tensor([[1.0 + 2**-12, 3.0]])})
    optimizer = amp.MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), torch.bfloat16)
    for new in (5.0, 6.0):
        model.load_state_dict({"weight": torch.tensor([[1.0, new]])})
        if new == 6.0:
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
        assert optimizer.state_dict()["master_weights"][0].tolist() == [[1.0 + 2**-12, new]]
        assert model.weight.tolist() == [[1.0, new]]


def test_bytes_that_stay_allocated():
    """16 = 2 + 2 + 4 + 4 + 4 per parameter; tied weights once; the gradients in fp32 are gone after the step."""
    model = make_model("tied")
    inner = torch.optim.AdamW(model.parameters())
    optimizer = amp.MixedPrecisionOptimizer(inner, torch.bfloat16)
    model(make_batch(0, 0, torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    masters, parameters = inner.param_groups[0]["params"], list(model.parameters())
    state = [[s[key] for s in inner.state.values()] for key in ("exp_avg", "exp_avg_sq")]
    kinds = [parameters, [p.grad for p in parameters], masters, *state]
    assert [amp.held_bytes(kind) / sum(p.numel() for p in parameters) for kind in kinds] == [2, 2, 4, 4, 4]
    assert all(master.grad is None for master in masters)


def test_schedulers_and_state_go_on():
    """Bitwise the plain optimizer, in fp64: wrapped after a step, schedulers made before and after, a part frozen."""
    models = [make_model("frozen", torch.float64) for _ in range(2)]
    for wrap, model in enumerate(models):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        steps = [optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
        for number in range(4):
            model.zero_grad()
            loss_of(model(make_batch(0, number, torch.float64))).backward()
            for step in steps:
                step.step()
            if number == 0:
                steps[0] = optimizer = amp.MixedPrecisionOptimizer(optimizer, torch.float64) if wrap else optimizer
                steps.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step))
    assert_same_parameters(*models, exact=True)


@pytest.mark.parametrize("scaler", [None, amp.GradScaler("cpu", 4.0)])
def test_a_step_given_up_after_clipping(scaler):
    """zero_grad() instead of step(): the next gradients are looked at anew; a scaler wants its update() first."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = amp.MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1.0), torch.float16, scaler)
    for factor in (1.0, INF, 3.0):
        optimizer.scale(weight.sum() * factor).backward()
        assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(factor * 2**0.5, rel=1e-3)
        optimizer.zero_grad(set_to_none=factor == INF)
        assert weight.grad is None if factor == INF else weight.grad.tolist() == [0, 0]
        if scaler:
            with pytest.raises(RuntimeError, match=r"since the last update"):
                optimizer.unscale_()
            optimizer.zero_grad()
            scaler.update()
    assert weight.tolist() == [1, 1]


def test_what_cannot_be_wrapped():
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    inner.no_sync = None  # as zero.py's have
    with pytest.raises(ValueError, match="SGD has fp32 masters"):
        amp.MixedPrecisionOptimizer(inner, torch.bfloat16)


A, V, LABELS = torch.tensor([[1.001, 0.3], [0.7, 1.9]]), torch.tensor([0.501, 0.3]), torch.tensor([0, 1])
# x is A, in fp32 or in 16 bits; dtypes and values of results as torch.autocast("cpu") has them:
ALIKE = """x @ A; A @ x; torch.mm(x, A); torch.mm(input=x, mat2=A); torch.bmm(x[None], A[None]); torch.addmm(A, x, A)
    torch.baddbmm(A[None], x[None], A[None]); F.linear(x, A, V); F.linear(x, weight=A, bias=V)
    torch.einsum("ij,jk->ik", x, A); F.conv2d(x[None, None], A[:1, :1, None, None])
    F.scaled_dot_product_attention(x[None], x[None], A[None]); F.gelu(x); x + A; x.max(); torch.cat([x, A])
    F.nll_loss(x, LABELS); F.cross_entropy(x, LABELS); F.mse_loss(x, A); F.mse_loss(input=x, target=A)
    F.embedding(LABELS, x); x.double() @ A.double(); LABELS.sum(); x.clone().addmm_(x, x); torch.prod(x)"""
# In 16 bits torch leaves these as they are on the CPU; ours are in fp32, as its own on CUDA.
UNLIKE = """x.softmax(-1); F.log_softmax(x, -1); F.layer_norm(x, (2,)); F.group_norm(x[None], 1); x.sum(); torch.exp(x)
    x.log(); x**2; 2**x; torch.rsqrt(x); x.norm(); torch.linalg.vector_norm(x); x.logsumexp(0); F.normalize(x)
    x.cumsum(0); x.mean(); x.var()"""


@pytest.mark.parametrize("given", [torch.float32, "low"], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_results_of_operations(dtype, given):
    x = A.to(dtype if given == "low" else given)
    for operation in re.split(r";|\n", (ALIKE + ";" + UNLIKE).strip()):
        evaluate = partial(eval, operation.strip(), globals(), {"x": x})
        results = []
        for region in (amp.autocast(dtype), torch.autocast("cpu", dtype)):
            with region:
                results.append(evaluate())
        ours, theirs = results
        if operation in ALIKE or given != "low":
            assert ours.dtype == theirs.dtype, operation
            assert torch.equal(ours, theirs), operation
        else:
            assert ours.dtype == torch.float32, operation
            assert torch.equal(ours, eval(operation.strip(), globals(), {"x": x.float()})), operation
            assert theirs.dtype == x.dtype, f"{operation} differs no more"


def test_regions_nest_and_end():
    """The innermost decides, also one that is not enabled; a region also decorates."""
    inner, product = amp.autocast(torch.bfloat16), lambda: (A @ A).dtype
    with amp.autocast(torch.float16):
        with inner, amp.autocast(torch.float16, enabled=False):
            assert (product(), A.half().sum().dtype) == (torch.float32, torch.float16)
        with inner:
            assert product() == torch.bfloat16
        assert (product(), inner(product)()) == (torch.float16, torch.bfloat16)
        assert torch.mm(A, A, out=torch.empty(2, 2)).dtype == torch.float32
    assert product() == torch.float32


def test_a_weight_is_cast_once_in_a_region():
    """Anew when it has changed, or for a gradient; activations are not kept, and after the region nothing is."""
    layer, x, region = nn.Linear(4, 4, bias=False), torch.ones(2, 4, dtype=torch.bfloat16), amp.autocast(torch.bfloat16)
    with region:
        with torch.no_grad():
            layer(x)
        sum(layer(x) for _ in range(3)).sum().backward()
        assert len(region._casts) == 2  # one with, and one without a gradient
        assert torch.equal(layer.weight.grad, torch.full((4, 4), 6.0))
        with torch.no_grad():
            layer.weight.zero_()
        assert (layer(x) == 0).all()
        layer(x.float())
        assert len(region._casts) == 3
    assert not region._casts
