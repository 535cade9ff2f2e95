"""amp.py against torch.amp.GradScaler, torch.autocast, training in fp32, and one device."""

import copy
import gc
import io
import pickle
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from shared import OPTIMIZERS, Collectives, assert_equal, make_batch, make_model
from torch.utils._python_dispatch import TorchDispatchMode

import amp

INF, NAN = float("inf"), float("nan")
HALF = [torch.float16, torch.bfloat16]


def small_language_model(seed=0):
    torch.manual_seed(seed)
    model = amp.language_model(C=32, heads=2, layers=1, T=16)
    return model, torch.randint(97, 123, (8, 17), generator=torch.Generator().manual_seed(seed))


def loss_of(model, tokens):
    return amp.language_loss(model(tokens[:, :-1]).float(), tokens[:, 1:])


# ---- why: what 16 bits lose


def test_fp16_gradients_underflow_and_scaling_saves_them():
    """Of the logits' gradient of a mean over a million tokens, fp16 loses 255 of 256; of it scaled, none."""
    model, tokens = small_language_model()
    logits = model(tokens[:, :-1]).detach().requires_grad_()
    amp.language_loss(logits, tokens[:, 1:]).backward()
    gradient = logits.grad * (tokens[:, 1:].numel() / 2**20)
    lost, kept = (gradient.half() == 0).float().mean(), ((gradient * 2.0**16).half() == 0).float().mean()
    assert (gradient != 0).all()
    assert lost.item() == pytest.approx(255 / 256, abs=1e-4)  # all but the target's
    assert kept == 0


def test_an_update_that_16_bits_lose_adds_up_in_the_master():
    for dtype in HALF:
        weight = nn.Parameter(torch.ones(1))
        optimizer = amp.MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1e-4), dtype)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert weight.item() == pytest.approx(0.99, abs=4e-3)  # in 16 bits alone, 1 - 1e-4 is 1


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_are_within_a_few_roundoffs_of_fp32(dtype):
    """Relative error of all gradients together: below 4 unit roundoffs, at a scale without underflow."""
    for seed in range(3):
        model, tokens = small_language_model(seed)
        exact = torch.autograd.grad(loss_of(model, tokens), model.parameters())
        (loss_of(model.to(dtype), tokens) * 2**10).backward()
        error = [g - p.grad.float() / 2**10 for g, p in zip(exact, model.parameters(), strict=True)]
        norm = torch.nn.utils.get_total_norm
        assert 0.05 < norm(error) / norm(exact) / (torch.finfo(dtype).eps / 2) < 4


def trained(seed, wrap, steps=25):
    """-> the loss after 25 steps."""
    model, tokens = small_language_model(seed)
    optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    for _ in range(steps):
        optimizer.zero_grad()
        getattr(optimizer, "scale", lambda loss: loss)(loss_of(model, tokens)).backward()
        optimizer.step()
    return loss_of(model, tokens).item()


WAYS = {
    "bf16": lambda m, o: amp.MixedPrecisionOptimizer(o, torch.bfloat16),
    "fp16": lambda m, o: amp.MixedPrecisionOptimizer(o, torch.float16, amp.GradScaler("cpu")),
    "stochastic": lambda m, o: amp.MixedPrecisionOptimizer(o, torch.bfloat16, stochastic_rounding=True),
}


@pytest.mark.parametrize("seed", range(3))
def test_training_ends_within_two_percent_of_fp32(seed):
    plain = trained(seed, lambda m, o: o)
    for way, wrap in WAYS.items():
        assert trained(seed, wrap) == pytest.approx(plain, rel=0.02), way


# ---- GradScaler against PyTorch's


def two_optimizers():
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((3,), 2.0))]
    return weights, [torch.optim.SGD([weight], lr=0.25) for weight in weights]


CALLS = st.sampled_from(["iteration"] * 6 + ["scale", "unscale", "step", "update", "set", "load", "empty"])


@given(
    st.lists(st.tuples(CALLS, st.integers(0, 1), st.sampled_from([0.5, 3.0, INF, -INF, NAN, 1e38])), max_size=40),
    st.sampled_from([1.0, 2.0**16, 0.1, 3e38]),
    st.sampled_from([2.0, 1.7]),
    st.sampled_from([0.5, 0.3]),
    st.integers(1, 3),
)
def test_any_sequence_of_calls_and_overflows(calls, init_scale, growth, backoff, interval):
    """The same scales, counters, weights and types of errors, bit for bit."""
    scalers = [kind("cpu", init_scale, growth, backoff, interval) for kind in (amp.GradScaler, torch.amp.GradScaler)]
    sides = [(scaler, *two_optimizers()) for scaler in scalers]
    for scaler in scalers:
        scaler.scale(torch.zeros(1))
    for call, which, value in calls:
        results = []
        for scaler, weights, optimizers in sides:
            weight, optimizer = weights[which], optimizers[which]
            actions = {
                "scale": [lambda s=scaler, w=weight, v=value: setattr(w, "grad", s.scale(torch.full_like(w, v)))],
                "unscale": [lambda s=scaler, o=optimizer: s.unscale_(o)],
                "step": [lambda s=scaler, o=optimizer: s.step(o)],
                "update": [scaler.update],
                "set": [lambda s=scaler, v=value: s.update(7.0 if v != v else v)],
                "load": [lambda s=scaler: s.load_state_dict(s.state_dict())],
                "empty": [lambda w=weight: setattr(w, "grad", None)],
            }
            actions["iteration"] = actions["scale"] + actions["step"] + actions["update"]
            raised = None
            for action in actions[call]:
                try:
                    action()
                except (RuntimeError, AssertionError) as error:
                    raised = type(error)
            results.append((raised, scaler.state_dict(), [w.detach().clone() for w in weights]))
        (ours, our_state, our_weights), (theirs, their_state, their_weights) = results
        assert ours == theirs, call
        assert our_state == their_state
        assert all(torch.equal(a, b) for a, b in zip(our_weights, their_weights, strict=True))


@pytest.fixture
def default_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_float64")
def test_another_default_dtype():
    for scaler in (amp.GradScaler("cpu"), None):
        weight = nn.Parameter(torch.ones(3))
        optimizer = amp.MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.5), torch.bfloat16, scaler)
        optimizer.scale(weight.sum()).backward()
        optimizer.step()
        assert weight.tolist() == [0.5] * 3
    assert amp.Fp8Linear(nn.Linear(2, 2)).amaxes.dtype == torch.float32


MISUSES = [
    lambda scaler: scaler.load_state_dict({"foo": 1}),
    lambda scaler: scaler.load_state_dict({"scale": 2.0}),
    lambda scaler: scaler.update(4.0),
    lambda scaler: scaler.scale(torch.ones(1)).sum() and scaler.update(torch.ones(2)),
    lambda scaler: scaler.scale(torch.ones(1)).sum() and scaler.update(torch.ones(1, requires_grad=True)),
    lambda scaler: scaler.scale(torch.ones(1)).sum() and scaler.update(INF),
]


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_of_a_scaler(misuse):
    results = []
    for kind in (amp.GradScaler, torch.amp.GradScaler):
        scaler, raised = kind("cpu", 8.0), None
        try:
            misuse(scaler)
        except (KeyError, AssertionError) as error:
            raised = type(error), error.args if isinstance(error, KeyError) else None
        results.append((raised, scaler.get_scale()))
    assert results[0][0] == results[1][0]
    assert results[0][1] == (INF if misuse is MISUSES[-1] else 8.0)


def test_a_scale_that_cannot_grow_stays():
    for kind in (amp.GradScaler, torch.amp.GradScaler):
        scaler, ([weight, _], [optimizer, _]) = kind("cpu", 3e38, growth_interval=1), two_optimizers()
        weight.grad = scaler.scale(torch.full((2,), 0.5))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == torch.tensor(3e38).item()


def test_an_interval_below_the_steps_already_counted():
    """No growth before the next overflow."""
    for kind in (amp.GradScaler, torch.amp.GradScaler):
        scaler, ([weight, _], [optimizer, _]) = kind("cpu", 8.0, growth_interval=10), two_optimizers()
        for step in range(5):
            if step == 3:
                scaler.set_growth_interval(2)
            weight.grad = scaler.scale(torch.ones(2))
            scaler.step(optimizer)
            scaler.update()
        assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (8.0, 5)


def test_scalers_load_each_others_state():
    ours, theirs = amp.GradScaler("cpu", 8.0, 3.0, 0.25, 5), torch.amp.GradScaler("cpu")
    weight, at_first = nn.Parameter(torch.ones(1)), ours.state_dict()
    for _ in range(3):
        ours.scale(weight.sum()).backward()
        ours.step(torch.optim.SGD([weight], lr=0.0))
        ours.update()
    theirs.load_state_dict(ours.state_dict())
    again = amp.GradScaler("cpu")
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == theirs.state_dict() == ours.state_dict()
    assert (at_first["_growth_tracker"], ours.state_dict()["_growth_tracker"]) == (0, 3)
    assert pickle.loads(pickle.dumps(ours)).state_dict() == ours.state_dict()
    ours.unscale_(torch.optim.SGD([weight], lr=0.0))
    with pytest.raises(AssertionError, match="pickled"):
        pickle.dumps(ours)
    with pytest.raises(RuntimeError, match="empty"):
        ours.load_state_dict({})


def test_scaler_defaults_getters_and_setters():
    ours, theirs = amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    assert ours.state_dict() == theirs.state_dict()
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        assert getattr(ours, "get_" + name)() == getattr(theirs, "get_" + name)()
        getattr(ours, "set_" + name)(7)
        assert getattr(ours, "get_" + name)() == 7 == ours.state_dict()[name]
    for bad in ({"growth_factor": 1.0}, {"backoff_factor": 1.0}):
        with pytest.raises(AssertionError, match=r"1\.0"):
            amp.GradScaler("cpu", **bad)


def test_scale_keeps_containers_and_never_overflows_an_fp16_loss():
    scaler, loss = amp.GradScaler("cpu"), torch.tensor(3.0, dtype=torch.float16)
    assert scaler.scale(loss).item() == 3.0 * 2**16
    first, (second, third) = scaler.scale([loss, (loss, loss)])
    assert first == second == third == 3.0 * 2**16
    assert isinstance(scaler.scale((loss,)), tuple)
    assert [x.item() for x in scaler.scale(iter([loss]))] == [3.0 * 2**16]
    with pytest.raises(ValueError, match="int"):
        scaler.scale(3)


@pytest.mark.filterwarnings("error")
def test_a_disabled_scaler_steps_plainly():
    scaler, ([weight, _], [optimizer, _]) = amp.GradScaler("cpu", enabled=False), two_optimizers()
    assert scaler.scale(weight) is weight
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    weight.grad = torch.full_like(weight, INF)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert (weight == -INF).all()
    assert not scaler.is_enabled()
    assert not amp.GradScaler("cuda", enabled=False).is_enabled()
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA is not available"):
            assert not amp.GradScaler().is_enabled()


def test_scaler_refuses_fp16_gradients_closures_and_unscaled_losses():
    scaler, ([weight, _], [optimizer, _]) = amp.GradScaler("cpu"), two_optimizers()
    for method in (scaler.unscale_, scaler.step):
        with pytest.raises(AssertionError, match="scale"):
            method(optimizer)
    scaler.scale(weight)
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(optimizer, closure=lambda: None)
    half = nn.Parameter(weight.detach().half())
    weight.grad, half.grad = torch.ones_like(weight), torch.ones_like(half)
    with pytest.raises(ValueError, match="FP16"):  # also where only one is
        scaler.unscale_(torch.optim.SGD([weight, half]))


@pytest.mark.parametrize("kind", [amp.GradScaler, torch.amp.GradScaler], ids=["ours", "theirs"])
def test_the_gradient_of_a_weight_frozen_since_is_unscaled(kind):  # the optimizer would step it
    scaler, ([weight, _], [optimizer, _]) = kind("cpu", 8.0), two_optimizers()
    scaler.scale(weight.sum()).backward()
    weight.requires_grad_(False)
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", [amp.GradScaler, torch.amp.GradScaler], ids=["ours", "theirs"])
def test_nothing_is_unscaled_or_stepped_twice(kind):
    scaler, ([weight, _], [optimizer, _]) = kind("cpu", 4.0), two_optimizers()
    weight.grad = scaler.scale(torch.ones_like(weight))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    for method in (scaler.unscale_, scaler.step):
        with pytest.raises(RuntimeError, match=r"already been called|after step"):
            method(optimizer)
    assert weight.tolist() == [0.75, 0.75]


def test_sparse_and_mixed_gradients():
    """Of several dtypes, one sparse: divided as PyTorch's, and each is looked at."""
    for bad in (None, 0, 1, 2):
        for kind in (amp.GradScaler, torch.amp.GradScaler):
            scaler, table = kind("cpu"), nn.Embedding(5, 2, sparse=True)
            weights = [table.weight, nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(2))]
            scaler.scale(table(torch.tensor([1, 1])).sum() + weights[1].sum() + weights[2].sum()).backward()
            if bad is not None:
                gradient = weights[bad].grad
                (gradient._values() if gradient.is_sparse else gradient)[-1] = NAN
            before = [weight.detach().clone() for weight in weights]
            scaler.step(torch.optim.SGD(weights, lr=1.0))
            expected = [0 if bad is not None else 4, 0 if bad is not None else 2, 0 if bad is not None else 2]
            assert [(b - w).sum().round() for b, w in zip(before, weights, strict=True)] == expected


# ---- GradScaler over a group


def body_overflow(bad_rank):
    scaler = amp.GradScaler("cpu", growth_interval=2, process_group=pool.group())
    theirs = torch.amp.GradScaler("cpu", growth_interval=2)
    (weights, optimizers), (plain, plain_optimizers) = two_optimizers(), two_optimizers()
    theirs.scale(torch.zeros(()))
    for step in range(6):
        overflow = step in (1, 4)
        for i in range(2):
            if pool.rank() == 0 or i == 0:  # the other ranks have no gradient, and no loss, for the second
                weights[i].grad = torch.full_like(weights[i], scaler.get_scale() * (pool.rank() + 1))
                scaler.scale(torch.zeros(()))
            if overflow and pool.rank() == bad_rank and i == 0:
                weights[i].grad[0] = NAN
            plain[i].grad = torch.full_like(
                plain[i], theirs.get_scale() * (INF if overflow and i == 0 else 1 + pool.rank())
            )
        with Collectives() as seen:
            scaler.unscale_(optimizers[0])
            assert scaler.step(optimizers[0]) is None
            scaler.step(optimizers[1])
            scaler.update()
        assert seen.calls == [("allreduce_", 4)] * (2 if pool.world_size() > 1 else 0)
        for optimizer in plain_optimizers:
            theirs.step(optimizer)
        theirs.update()
        assert scaler.state_dict() == theirs.state_dict()
        assert torch.equal(weights[0], plain[0])
        assert torch.equal(weights[1], plain[1] if pool.rank() == 0 else torch.full((3,), 2.0))
    assert scaler.get_scale() != 2.0**16


@pytest.mark.parametrize(("N", "bad_rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(N, bad_rank):
    pool.run(N, body_overflow, bad_rank)


def body_scaler_errors():
    scaler, (weights, optimizers) = amp.GradScaler("cpu"), two_optimizers()  # on the default group
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizers[0])
    if pool.rank() == 0:
        weights[1].grad = torch.full_like(weights[1], INF)
    scaler.step(optimizers[1])
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    others = dist.new_group([0, 1])
    if pool.rank() > 1:
        with pytest.raises(ValueError, match="not a member"):
            amp.GradScaler("cpu", process_group=others)
    else:
        gone = weakref.ref(amp.GradScaler("cpu", process_group=others))
        assert gone() is None


def test_scaler_on_the_default_group():
    pool.run(4, body_scaler_errors)


# ---- MixedPrecisionOptimizer


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_masters_by_hand(name, dtype, clip):
    """Bitwise mixed_precision_step: scaled gradients in dtype, cast, unscaled, clipped, fp32 update, rounded copy."""
    model, plain = make_model("plain"), make_model("plain")
    scaler = amp.GradScaler("cpu", 2.0**24)  # overflows in fp16 until it is small enough
    ours = amp.MixedPrecisionOptimizer(OPTIMIZERS[name](model.parameters()), dtype, scaler)
    masters = [parameter.detach().clone().requires_grad_() for parameter in plain.parameters()]
    optimizer, scale, skipped = OPTIMIZERS[name](masters), 2.0**24, 0
    if clip:
        step = optimizer.step
        clip_twice = lambda: [nn.utils.clip_grad_norm_(masters, clip) for _ in range(2)]  # noqa: E731
        optimizer.step = lambda: clip_twice() and step()
    plain.to(dtype)
    for number in range(12):
        x = make_batch(0, number).to(dtype)
        ours.zero_grad()
        ours.scale(model(x).float().square().mean()).backward()
        norms = [ours.clip_grad_norm_(clip) for _ in range(2)] if clip else []
        ours.step()
        before = scale
        scale = amp.mixed_precision_step(plain, masters, optimizer, lambda m, x=x: m(x).float().square().mean(), scale)
        skipped += scale < before
        assert scale == scaler.get_scale()
        if clip and scale == before:
            assert norms[0] > clip
            assert norms[1] == pytest.approx(clip, rel=1e-3)  # unscaled once
        for a, b, master, mine in zip(
            model.parameters(), plain.parameters(), masters, ours.param_groups[0]["params"], strict=True
        ):
            assert a.dtype == a.grad.dtype == dtype
            assert torch.equal(a, b)
            assert torch.equal(master, mine)
            assert mine.grad is None
    assert (skipped > 0) == (dtype == torch.float16)


def test_masters_of_float64_are_float64():
    weight = nn.Parameter(torch.full((3,), 1 / 3, dtype=torch.float64))
    plain = nn.Parameter(weight.detach().clone())
    ours, theirs = (torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in (weight, plain))
    ours = amp.MixedPrecisionOptimizer(ours, torch.float64)
    for _ in range(3):
        for p, optimizer in ((weight, ours), (plain, theirs)):
            optimizer.zero_grad()
            p.square().sum().backward()
            optimizer.step()
    assert torch.equal(weight, plain)


def body_data_parallel(dtype, name, scaled):
    """N ranks that reduce gradients before the step, and one device that accumulates their micro-batches."""
    N, exact = pool.world_size(), pool.world_size() <= 2
    sides = []
    for _ in range(2):
        model = make_model("plain", torch.promote_types(dtype, torch.float32))
        scaler = amp.GradScaler("cpu", 2.0**10, process_group=pool.group()) if scaled else None
        sides.append((model, amp.MixedPrecisionOptimizer(OPTIMIZERS[name](model.parameters()), dtype, scaler)))
    (model, ours), (plain, alone) = sides
    for step in range(4):
        losses = []
        for m, optimizer, ranks in ((model, ours, [pool.rank()]), (plain, alone, range(N))):
            optimizer.zero_grad()
            for rank in ranks:
                bad = INF if step == 2 and rank == N - 1 else 1.0
                losses.append(m(make_batch(rank, step).to(dtype)).double().square().mean() * bad)
                optimizer.scale(losses[-1]).backward()
            for p in m.parameters():
                p.grad /= N
                if m is model:
                    dist.all_reduce(p.grad, group=pool.group())
            optimizer.step()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert step == 2 or a.grad.isfinite().all()
            if step != 2:
                assert_equal(a.grad, b.grad, exact)
            assert_equal(a.detach(), b.detach(), exact)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize(
    ("N", "dtype", "scaled"),
    [(2, torch.bfloat16, False), (2, torch.float16, True), (2, torch.float32, True), (3, torch.float64, True)],
)
def test_data_parallel_equals_one_device(N, dtype, scaled, name):
    pool.run(N, body_data_parallel, dtype, name, scaled)


def train_some(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        x = make_batch(0, step, next(model.parameters()).dtype)
        optimizer.scale(model(x).float().square().mean() * (INF if step == 3 else 1.0)).backward()
        optimizer.step()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("way", ["fp16", "bf16", "stochastic", "model last", "masters alone", "theirs"])
def test_resuming_is_exact(way, name):
    def make(seed):
        model = make_model("plain", seed=seed)
        optimizer = OPTIMIZERS[name](model.parameters())
        if way == "theirs":  # PyTorch's scaler works as well as ours
            return model, amp.MixedPrecisionOptimizer(optimizer, torch.float16, torch.amp.GradScaler("cpu"))
        return model, WAYS[way if way in WAYS else "bf16"](model, optimizer)

    model, optimizer = make(0)
    train_some(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    model_state, state = torch.load(file)
    again, other = make(1)
    if way not in ("model last", "masters alone"):
        again.load_state_dict(model_state)
    other.load_state_dict(state)
    if way == "model last":
        again.load_state_dict(model_state)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    for m, o in ((model, optimizer), (again, other)):
        train_some(m, o, range(5, 9))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert str(optimizer.state_dict()) == str(other.state_dict())
    if way == "fp16":
        assert optimizer.state_dict()["scaler"]["scale"] == 2.0**15


def test_loading_refuses_another_model():
    one, other = (
        amp.MixedPrecisionOptimizer(OPTIMIZERS["sgd"]([nn.Parameter(torch.ones(n))]), torch.bfloat16) for n in (2, 3)
    )
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        one.load_state_dict(other.state_dict())


def test_bytes_that_stay_allocated():
    """16 = 2 + 2 + 4 + 4 + 4 per parameter, and 12 without masters; tied weights once."""
    for arguments, expected in (({}, [2, 2, 4, 4, 4]), ({"stochastic_rounding": True}, [2, 2, 0, 4, 4])):
        model = make_model("tied")
        inner = torch.optim.AdamW(model.parameters())
        optimizer = amp.MixedPrecisionOptimizer(inner, torch.bfloat16, **arguments)
        psi = sum(p.numel() for p in model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            model(make_batch(0, step, torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            masters = inner.param_groups[0]["params"]
            state = [[s[key] for s in inner.state.values()] for key in ("exp_avg", "exp_avg_sq")]
            kinds = [list(model.parameters()), [p.grad for p in model.parameters()], masters, *state]
            assert [amp.held_bytes(kind) / psi for kind in kinds] == expected
            assert all(master.grad is None for master in masters)


def test_groups_schedulers_and_state_go_on():
    model, plain = make_model("frozen"), make_model("frozen")
    optimizers = []
    for m in (model, plain):
        optimizer = torch.optim.AdamW(list(m[0].parameters()) + list(m[2].parameters()), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
        m(make_batch(0, 0)).square().mean().backward()
        optimizer.step()
        before = m[0].weight.grad.clone()
        if m is model:
            optimizer = amp.MixedPrecisionOptimizer(optimizer, torch.float32)
            assert torch.equal(m[0].weight.grad, before)
        optimizer.add_param_group({"params": m[4].parameters(), "lr": 0.01})
        schedulers.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step))
        optimizers.append((m, optimizer, schedulers))
    for step in range(1, 4):
        for m, optimizer, schedulers in optimizers:
            optimizer.zero_grad()
            m(make_batch(0, step)).square().mean().backward()
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    ours = optimizers[0][1]
    for bad in ([model[4].weight], [nn.Parameter(torch.ones(1, dtype=torch.complex64))]):
        with pytest.raises(ValueError, match=r"more than one|complex64"):
            ours.add_param_group({"params": bad})


def test_state_and_gradients_in_16_bits_are_cast_up():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    inner = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    weight.grad = torch.ones_like(weight)
    inner.step()
    optimizer = amp.MixedPrecisionOptimizer(inner, torch.float16)
    (master,) = optimizer.param_groups[0]["params"]
    assert master.dtype == optimizer.state[master]["momentum_buffer"].dtype == torch.float32
    assert weight.dtype == torch.float16
    assert weight not in optimizer.state


def test_what_is_written_into_the_model_counts():
    weight = nn.Parameter(torch.tensor([1.0 + 2**-12, 3.0]))
    optimizer = amp.MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1.0), torch.bfloat16)
    with torch.no_grad():
        weight[1] = 5.0
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.tolist() == [1.0, 5.0]
    assert optimizer.param_groups[0]["params"][0].tolist() == [1.0 + 2**-12, 5.0]  # the other keeps its bits
    weight.data = torch.tensor([1.0, 7.0]).bfloat16()
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].tolist() == [1.0 + 2**-12, 7.0]


def test_zero_grad_and_unused_parameters():
    model = make_model("plain")
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    optimizer = amp.MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), torch.bfloat16)

    def backward():
        optimizer.zero_grad(set_to_none=False)
        loss = model(make_batch(0, 0, torch.bfloat16)).float().square().mean()
        loss.backward()
        return loss

    first = backward()
    optimizer.step()
    assert backward() < first
    assert model.unused.grad is None
    optimizer.zero_grad(set_to_none=False)
    assert (model[0].weight.grad == 0).all()
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    optimizer.step()  # nothing to do
    assert model.unused.tolist() == [1, 1]
    backward()
    first = optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()  # and no step
    backward()
    model[0].weight.grad *= 1000
    assert optimizer.clip_grad_norm_(1.0) > 10 * first
    gone = weakref.ref(optimizer)
    optimizer = backward = None
    assert gone() is None


@pytest.mark.parametrize("kind", [amp.GradScaler, torch.amp.GradScaler], ids=["ours", "theirs"])
def test_a_step_given_up_after_clipping(kind):
    weight, scaler = nn.Parameter(torch.ones(2)), kind("cpu", 4.0)
    optimizer = amp.MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1.0), torch.float16, scaler)
    for factor in (1.0, INF, 3.0):
        optimizer.zero_grad()
        optimizer.scale(weight.sum() * factor).backward()
        assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(factor * 2**0.5, rel=1e-3)
    assert scaler.get_scale() == 2.0
    assert weight.tolist() == [1, 1]


@pytest.mark.parametrize("kind", [amp.GradScaler, torch.amp.GradScaler], ids=["ours", "theirs"])
@pytest.mark.parametrize("method", ["step", "clip_grad_norm_", "an optimizer's"])
def test_after_a_refused_step(method, kind):
    weight, scaler = nn.Parameter(torch.ones(2)), kind("cpu", 4.0)
    inner = torch.optim.SGD([weight], lr=0.5)
    optimizer = amp.MixedPrecisionOptimizer(inner, torch.float16, scaler)
    with pytest.raises(AssertionError, match="scale"):
        optimizer.step()
    optimizer.scale(weight.sum())  # and no backward
    if method == "clip_grad_norm_":
        optimizer.clip_grad_norm_(1.0)
    elif method == "step":
        with pytest.raises(AssertionError, match="No inf checks"):
            optimizer.step()
    else:
        weight.grad, inner.step = torch.ones_like(weight), lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        del inner.step
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.scale(weight.sum()).backward()
        optimizer.step()
    assert weight.tolist() == [0, 0]
    assert scaler.get_scale() == 4.0


def test_wrong_dtypes():
    for dtype, arguments in ((torch.int8, {}), (torch.float16, {"stochastic_rounding": True})):
        with pytest.raises(ValueError, match=str(dtype)):
            amp.MixedPrecisionOptimizer(OPTIMIZERS["sgd"]([nn.Parameter(torch.ones(2))]), dtype, **arguments)


def test_what_is_not_there_is_an_attribute_error():
    """Also in a copy, which has no optimizer: without end it would look for one in itself."""
    optimizer = amp.MixedPrecisionOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters()), torch.bfloat16)
    for holder in (optimizer, copy.deepcopy(optimizer)):
        assert not hasattr(holder, "nothing")


# ---- stochastic rounding


def every_rounding(value, monkeypatch):
    """What each of the 65536 random numbers makes of `value`."""
    monkeypatch.setattr(torch, "randint", lambda high, *args, **kwargs: torch.arange(high, dtype=torch.int32))
    return amp.stochastic_round(torch.full((2**16,), value)).double()


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-40, 0.3, 65504.5, -1e-38])
def test_stochastic_rounding_is_exact_in_expectation(value, monkeypatch):
    value = torch.tensor(value)
    results = every_rounding(value.item(), monkeypatch)
    assert results.mean() == value.double()
    assert len(results.unique()) == 2


def test_stochastic_rounding_is_unbiased_with_its_own_random_numbers():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    draws = torch.stack([amp.stochastic_round(values, torch.Generator().manual_seed(i)).double() for i in range(400)])
    down = (values.view(torch.int32) & -(2**16)).view(torch.float32)
    step = ((values.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32) - down
    up = ((values - down) / step).double()
    error = (draws.mean(0) - values) / (step * (up * (1 - up) / 400).sqrt())  # in standard errors
    assert error[(up > 0.05) & (up < 0.95)].abs().max() < 5
    assert abs(error[up > 0].mean()) < 5 / 1000**0.5


def test_stochastic_rounding_changes_nothing_that_bf16_holds(monkeypatch):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    rounded = amp.stochastic_round(every.float())
    assert torch.equal(rounded.nan_to_num(7.0, 8.0, 9.0), every.nan_to_num(7.0, 8.0, 9.0))
    assert torch.equal(rounded.isnan(), every.isnan())
    largest = torch.finfo(torch.float32).max
    assert (every_rounding(largest, monkeypatch) == torch.finfo(torch.bfloat16).max).all()
    assert (every_rounding(-largest, monkeypatch) == torch.finfo(torch.bfloat16).min).all()


def body_stochastic():
    torch.manual_seed(pool.rank())  # of no influence
    weight = nn.Parameter(torch.linspace(1, 2, 200))
    optimizer = amp.MixedPrecisionOptimizer(
        torch.optim.SGD([weight], lr=1e-4), torch.bfloat16, stochastic_rounding=True
    )
    for _ in range(60):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    everyone = [torch.empty_like(weight) for _ in range(pool.world_size())]
    dist.all_gather(everyone, weight.detach(), group=pool.group())
    assert torch.equal(*everyone)
    assert (weight.float().mean() - (1.5 - 60e-4)).abs() < 2e-3  # each update alone would be lost
    assert len((weight.float() - torch.linspace(1, 2, 200)).unique()) > 3


def test_ranks_round_alike():
    pool.run(2, body_stochastic)


def test_every_weight_and_step_draws_its_own():
    weights = [nn.Parameter(torch.ones(200)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=2**-9)  # half of a unit in the last place below 1
    optimizer = amp.MixedPrecisionOptimizer(optimizer, torch.bfloat16, stochastic_rounding=True)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert not torch.equal(*weights)
    for weight in weights:
        assert weight.unique().tolist() == [1 - 2**-7, 1 - 2**-8, 1]


def test_stochastic_rounding_takes_more_weights():
    weights = [nn.Parameter(torch.full((4,), value)) for value in (1.0, 2.0)]
    inner = torch.optim.SGD(weights[:1], lr=0.5)
    optimizer = amp.MixedPrecisionOptimizer(inner, torch.bfloat16, stochastic_rounding=True)
    optimizer.add_param_group({"params": weights[1:]})
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert [weight.tolist() for weight in weights] == [[0.5] * 4, [1.5] * 4]
    assert amp.held_bytes(master for group in inner.param_groups for master in group["params"]) == 0


# ---- autocast

A, B, V = torch.ones(2, 2), torch.full((2, 2), 0.5), torch.full((2,), 0.5)
KERNEL, LABELS = torch.ones(1, 1, 1, 1), torch.tensor([0, 1])
# x is A, in fp32 or in 16 bits. Results as torch.autocast("cpu") has them, in dtype and value:
ALIKE = """
    x @ A; A @ x; torch.mm(x, A); torch.bmm(x[None], A[None]); torch.baddbmm(A[None], x[None], A[None]); F.gelu(x)
    torch.addmm(A, x, A); F.linear(x, A, V); torch.einsum("ij,jk->ik", x, A); F.gelu(x)
    F.conv2d(x[None, None], KERNEL); F.conv_transpose2d(x[None, None], KERNEL)
    F.scaled_dot_product_attention(x[None], x[None], A[None]); x + A; x.max(); torch.cat([x, A])
    torch.addcmul(x, A, B); torch.addcmul(x, x, x)
    F.nll_loss(x, LABELS); F.cross_entropy(x, LABELS); F.mse_loss(x, A); F.l1_loss(x, B)
    F.binary_cross_entropy(x * 0.5, A); F.embedding(LABELS, x); x.double() @ A.double(); LABELS.sum()
    x.clone().addmm_(x, x); torch.prod(x); torch.linalg.matrix_power(x, 3)"""
# Not so: in 16 bits torch leaves these as they are on the CPU (on CUDA only the last four), ours are in fp32.
UNLIKE = """x.softmax(-1); F.log_softmax(x, -1); F.layer_norm(x, (2,)); F.group_norm(x[None], 1); x.sum(); torch.exp(x)
    x.log(); x**2; 2**x; torch.rsqrt(x); x.norm(); torch.linalg.vector_norm(x); x.logsumexp(0); F.normalize(x)
    torch.special.expm1(x); x.cumsum(0); x.mean(); x.var(); torch.exp2(x); x.nansum()"""


@pytest.mark.parametrize("given", [torch.float32, "low"], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_dtypes_of_results(dtype, given):
    x = A.to(dtype if given == "low" else given)
    for operation in re.split(r";|\n", (ALIKE + ";" + UNLIKE).strip()):
        results = []
        for region in (amp.autocast(dtype), torch.autocast("cpu", dtype)):
            with region:
                results.append(eval(operation.strip(), globals(), {"x": x}))
        ours, theirs = results
        if operation not in ALIKE:
            assert ours.dtype == torch.float32, operation
        if operation in ALIKE or given != "low":
            assert ours.dtype == theirs.dtype, operation
            assert torch.equal(ours, theirs), operation
        else:
            assert theirs.dtype == x.dtype, f"{operation} differs no more"


@pytest.mark.parametrize("region", [amp.autocast(torch.bfloat16), torch.autocast("cpu", torch.bfloat16)])
def test_keyword_arguments_are_cast(region):
    x = A.bfloat16()
    with region:
        assert torch.mm(input=A, mat2=A).dtype == F.linear(x, weight=A, bias=V).dtype == torch.bfloat16
        assert torch.addcmul(x, tensor1=A, tensor2=x).dtype == F.mse_loss(input=x, target=A).dtype == torch.float32


# Not in torch's lists for CUDA: other names of what is, compositions of what is, and what is in fp32 only here.
MORE = """__matmul__ __rmatmul__ __pow__ __rpow__ multi_head_attention_forward lstm gru rnn_tanh rnn_relu vecdot
    multi_dot matrix_power inner softmin gumbel_softmax normalize norm pairwise_distance cross_entropy interpolate
    upsample binary_cross_entropy exp2 mean nanmean nansum var std var_mean std_mean"""


def test_the_lists_are_those_that_torch_has_for_cuda():
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    if not header.exists():
        pytest.skip(f"this torch has no {header}")
    text = header.read_text().replace("\\\n", "")
    macros = {"LOWER_PRECISION_FP": "low", "FP32": "fp32", "FP32_SET_OPT_DTYPE": "fp32", "PROMOTE": "common"}
    theirs = {}
    for macro, kind in macros.items():
        (body,) = re.findall(rf"#define AT_FORALL_{macro}\(_\)(.*)", text)
        names = {re.sub("^linalg_|(?<=grid_sample)r$", "", name) for name in re.findall(r"_\((\w+)", body)}
        # Python calls lstm_cell, scaled_dot_product_attention, interpolate, and what ends in _loss
        theirs |= {n: kind for n in names if not re.search("_thnn_fused|flash|upsample|_loss|nll_loss2d", n)}
    assert {name: kind for name, kind in amp.KIND.items() if name in theirs} == theirs
    assert set(amp.KIND) - set(theirs) <= set(MORE.split())


def test_regions_nest_and_end():
    half, inner = amp.autocast(torch.float16), amp.autocast(torch.bfloat16)
    assert (A @ A).dtype == torch.float32
    with half:
        assert (A @ A).dtype == torch.float16
        with inner:
            assert (A @ A).dtype == torch.bfloat16
            with amp.autocast(torch.bfloat16, enabled=False), half:
                assert (A @ A).dtype == torch.float16
            with amp.autocast(torch.bfloat16, enabled=False):
                assert (A @ A).dtype == torch.float32
                assert A.half().sum().dtype == torch.float16
            with inner:
                assert (A @ A).dtype == torch.bfloat16
            assert (A @ A).dtype == torch.bfloat16
        assert (A @ A).dtype == torch.float16
        assert torch.inner(A.half(), A).dtype == torch.float32  # a tensordot, which torch refuses on the CPU
        found = []
        thread = threading.Thread(target=lambda: found.extend([(A @ A).dtype, inner(torch.mm)(A, A).dtype]))
        thread.start()
        thread.join()
        assert found == [torch.float32, torch.bfloat16]
        both, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=inner(lambda: (both.set(), done.wait(10), found.append((A @ A).dtype))))
        thread.start()
        both.wait(10)
        assert (A @ A).dtype == torch.float16  # while the other thread is in its region
        done.set()
        thread.join()
        assert found[2:] == [torch.bfloat16]
        with pytest.raises(ZeroDivisionError), inner:
            raise ZeroDivisionError
        assert torch.mm(A, A, out=torch.empty(2, 2)).dtype == torch.float32
    assert (A @ A).dtype == torch.float32
    assert inner(torch.mm)(A, A).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="float64"):
        amp.autocast(torch.float64)


class Casts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_a_weight_is_cast_once_per_outermost_region():
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4, dtype=torch.bfloat16)
    for cache, expected in ((True, 1), (False, 6)):
        with amp.autocast(torch.bfloat16, cache_enabled=cache), Casts() as casts:
            for _ in range(3):
                layer(x)
                with amp.autocast(torch.bfloat16, cache_enabled=cache):
                    layer(x)
        assert casts.count == expected
        assert amp.autocast.regions.casts == {}
    with amp.autocast(torch.bfloat16):
        layer(layer(x.float()).float())
        assert [key[0] is layer.weight for key in amp.autocast.regions.casts] == [True]  # no input, no activation
    gone = weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert gone() is None


def test_a_cached_cast_is_neither_without_gradient_nor_stale():
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    with amp.autocast(torch.bfloat16):
        with torch.no_grad():
            before = layer(x)
        after = layer(x)
        after.sum().backward()
        assert layer.weight.grad.dtype == torch.float32
        assert torch.equal(before, after)
        with amp.autocast(torch.float16):
            assert layer(x).dtype == torch.float16
        with torch.no_grad():
            layer.weight.zero_()
        assert (layer(x) == 0).all()
        with torch.inference_mode():
            assert (layer(x) == 0).all()
            assert nn.Linear(4, 1)(x).dtype == torch.bfloat16
        layer(x).sum().backward()


def test_loss_and_gradients_are_those_of_torch_autocast():
    """Bitwise, for a model of operations that torch treats alike on the CPU; several batches in a region."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5))
    results = []
    for region in (amp.autocast(torch.bfloat16), torch.autocast("cpu", torch.bfloat16)):
        model.zero_grad()
        torch.manual_seed(0)
        with region:
            for _ in range(3):
                loss = F.cross_entropy(model(torch.randn(6, 1, 4, 4)), torch.randint(5, (6,)))
                loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["encoder", "lstm", "gru", "attention"])
def test_whole_layers(kind):
    """Gradients as of fp32, within bf16's roundoff; fp32 gradients; in eval, without grad, the same output."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    layer = {
        "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        "lstm": lambda: nn.LSTM(8, 8, batch_first=True),
        "gru": lambda: nn.GRU(8, 8, batch_first=True),
        "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    }[kind]()
    run = (lambda: layer(x, x, x)) if kind == "attention" else (lambda: layer(x))
    first = (lambda y: y) if kind == "encoder" else (lambda y: y[0])
    exact = torch.autograd.grad(first(run()).square().sum(), list(layer.parameters()))
    with amp.autocast(torch.bfloat16):
        y = first(run())
        loss = y.square().sum()
    assert y.dtype == (torch.float32 if kind == "encoder" else torch.bfloat16)  # its last operation is a norm
    loss.backward()
    for a, p in zip(exact, layer.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert (a - p.grad).norm() <= 0.05 * a.norm() + 1e-2
    layer.eval()
    with torch.no_grad(), amp.autocast(torch.bfloat16):
        assert torch.equal(first(run()), y)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_take_what_a_layer_before_makes(kind):
    torch.manual_seed(0)
    model, x, results = nn.Sequential(nn.Linear(4, 4), kind(4, 4)), torch.randn(3, 4), []
    for region in (amp.autocast(torch.bfloat16), torch.autocast("cpu", torch.bfloat16)):
        with region:
            y = model(x)[0]
        results.append([y, *torch.autograd.grad(y.float().sum(), list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with amp.autocast(torch.bfloat16):
        with amp.autocast(torch.bfloat16, enabled=False), pytest.raises(ValueError, match="dtype"):
            model[1](x.bfloat16())
        model[1](x.bfloat16())
    with pytest.raises(ValueError, match="dtype"):
        model[1](x.bfloat16())


# ---- fp8


def test_fp8_rounding():
    x = torch.randn(1000) * 1e-3
    for dtype, roundoff, largest in ((torch.float8_e4m3fn, 2**-4, 448.0), (torch.float8_e5m2, 2**-3, 57344.0)):
        amax = x.abs().max()
        rounded, scale = amp.round_to_fp8(x, dtype, amax), 2.0 ** torch.log2(largest / amax).floor()
        assert torch.equal(rounded, (x * scale).to(dtype).float() / scale)
        kept = x.abs() > amax * 2**-5
        assert 0 < ((rounded - x).abs() / x.abs())[kept].max() <= roundoff
        assert torch.equal(amp.round_to_fp8(1e6 * x, dtype, amax).abs().max(), largest / scale)  # saturates
        assert torch.equal(amp.round_to_fp8(x, dtype, torch.tensor(0.0)), x.to(dtype).float())
        assert amp.round_to_fp8(torch.tensor([INF, NAN, 0.0]), dtype, amax).nan_to_num(7.0, 8.0).tolist() == [
            8.0,
            7.0,
            0.0,
        ]
        assert amp.round_to_fp8(torch.tensor([0.0, 1e-44]), dtype, torch.tensor(1e-44)).isfinite().all()


def test_fp8_scales_come_from_the_steps_before():
    layer, x = amp.Fp8Linear(nn.Linear(2, 2, bias=False), history=2), torch.tensor([[3.0, -5.0]])
    for factor, expected in ((1, [5, 0]), (100, [500, 5]), (10, [50, 500]), (INF, [0, 50])):
        layer(factor * x).sum().backward()
        assert layer.amaxes[0].tolist() == expected
    layer.eval()(x)
    assert layer.amaxes[0].tolist() == [0, 50]
    assert (layer.amaxes[1] == layer.weight.abs().max()).all()
    assert layer.amaxes[2].tolist() == [1, 1]
    w8 = amp.round_to_fp8(layer.weight, torch.float8_e4m3fn, layer.amaxes[1].max())
    for factor in (1, 1000):  # which saturates
        x8 = amp.round_to_fp8(factor * x, torch.float8_e4m3fn, torch.tensor(50.0))
        assert torch.equal(layer(factor * x), x8 @ w8.T)


def test_fp8_linear_multiplies_rounded_factors():
    torch.manual_seed(0)
    linear = nn.Linear(6, 4)
    layer, x = amp.Fp8Linear(linear), torch.randn(5, 6, requires_grad=True)
    assert layer.weight is linear.weight
    dy = torch.randn(5, 4)
    layer(x).backward(dy)
    linear.zero_grad()
    x.grad = None
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    pairs = zip((x.detach(), layer.weight.detach(), dy), (e4m3, e4m3, e5m2), layer.amaxes, strict=True)
    x8, w8, dy8 = (amp.round_to_fp8(value, dtype, amaxes.max()) for value, dtype, amaxes in pairs)
    y = layer(x)
    y.backward(dy)
    assert torch.equal(y, F.linear(x8, w8) + layer.bias)
    assert torch.equal(x.grad, dy8 @ w8)
    assert torch.equal(layer.weight.grad, dy8.T @ x8)
    assert torch.equal(layer.bias.grad, dy.sum(0))
    other = amp.Fp8Linear(nn.Linear(6, 4))
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():  # nothing wants a hook
        y = other.eval()(x)
    assert torch.equal(y, layer.eval()(x))


def test_fp8_training_follows_fp32():
    def wrap(model, optimizer):
        for block in model[1:-2]:
            block.linear1, block.linear2 = amp.Fp8Linear(block.linear1), amp.Fp8Linear(block.linear2)
        return amp.MixedPrecisionOptimizer(optimizer, torch.bfloat16)

    assert trained(0, wrap) == pytest.approx(trained(0, lambda m, o: o), rel=0.04)


# ---- cost, and the demo

FAKE = """
import sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import amp

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(sys.argv[1]))
N, model = dist.get_world_size(), amp.language_model(C=64, heads=2, layers=1)
optimizer = torch.optim.AdamW(model.parameters())
optimizer = amp.MixedPrecisionOptimizer(optimizer, torch.bfloat16, amp.GradScaler("cpu"))
tokens = torch.randint(256, (1, 65))
with amp.SentBytes() as sent:
    optimizer.scale(amp.language_loss(model(tokens[:, :-1]).float(), tokens[:, 1:])).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
psi = 2 * sum(p.numel() for p in model.parameters())
assert abs(sent.total - 2 * (psi + 4) * (N - 1) / N) < 1e-3, (sent.total, psi)
print("ok")
"""


@pytest.mark.parametrize("N", [8, 64, 1024])
def test_the_same_bytes_at_scale(N):
    here = Path(__file__).parent
    environment = {"PYTHONPATH": str(here.parent), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FAKE, str(N)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "ok\n", done.stderr
