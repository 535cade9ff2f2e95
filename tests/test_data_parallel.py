"""data_parallel.py against one device that works through the same chunks, and against torch.nn.DataParallel."""

import threading
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from shared import MODELS, OPTIMIZERS, assert_equal, assert_same_parameters, make_batch, make_model

import data_parallel as dp

Pair = namedtuple("Pair", "a b")
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
implementation = pytest.mark.parametrize("cls", [dp.DataParallel])


@implementation
@given(st.integers(1, 4), st.integers(1, 9), st.sampled_from(MODELS), DTYPES, st.sampled_from(sorted(OPTIMIZERS)))
def test_training_is_bitwise_that_of_one_device_chunk_by_chunk(cls, n, rows, kind, dtype, optimizer):
    """Outputs, all gradients, parameters, buffers (the first chunk's stay): with unequal chunks, or fewer than n."""
    rows = n * (1 + rows) if kind == "batchnorm" else rows  # a chunk of one row has no variance
    plain, model = make_model(kind, dtype), cls(make_model(kind, dtype), ["cpu"] * n)
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (plain, model)]
    for step in range(4):
        x = make_batch(0, step, torch.float32 if kind == "mixed" else dtype, rows=rows).requires_grad_()
        chunks, outputs, buffers = x.detach().clone().chunk(n), [], None
        for o in optimizers:
            o.zero_grad()
        whole = model(x)
        weights = torch.linspace(0.5, 2.0, whole.numel(), dtype=whole.dtype).view_as(whole)
        (whole * weights).sum().backward()
        for chunk, weight in zip(chunks, weights.chunk(n), strict=True):
            outputs.append(plain(chunk.requires_grad_()))
            (outputs[-1] * weight).sum().backward()
            buffers = buffers or [buffer.clone() for buffer in plain.buffers()]
        for o in optimizers:
            o.step()
        assert_equal(whole, torch.cat(outputs), exact=True, what="output")
        assert_equal(x.grad, torch.cat([chunk.grad for chunk in chunks]), exact=True, what="gradient of the inputs")
        assert_same_parameters(model.module, plain, exact=True, what=f"step {step}")
        for ours, theirs, kept in zip(model.buffers(), plain.buffers(), buffers, strict=True):
            assert_equal(ours, theirs.copy_(kept), exact=True, what="buffer")


@implementation
@pytest.mark.parametrize("devices", [["cpu"] * 3, ["cuda"] * 2, ["cuda:0", "cuda:1"]], ids=str)
def test_equals_torchs(cls, devices):
    """torch.nn.DataParallel on the GPUs there are; without any, it is the module itself."""
    if len(set(devices) - {"cpu"}) > torch.cuda.device_count():
        pytest.skip(f"needs the GPUs of {devices}")
    ours, theirs = cls(make_model("plain").to(devices[0]), devices), nn.DataParallel(make_model("plain").to(devices[0]))
    for model in (ours, theirs):
        model(make_batch(0, 0, rows=7).to(devices[0])).square().mean().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_scatter_and_gather_go_into_lists_tuples_and_dicts():
    """They cut as torch.chunk does, and join; what is not a tensor goes to all, and but for None does not come back."""
    x, y, marker = torch.arange(5), torch.arange(10).view(5, 2), object()
    inputs = ((x, {"y": [y, None]}, Pair(x, "text"), OrderedDict(z=y)), {"marker": marker})
    first, ((a, more, pair, ordered), kwargs) = dp.scatter(inputs, ["cpu"] * 2)
    assert a.tolist() == pair.a.tolist() == [3, 4]
    assert more["y"][0].tolist() == ordered["z"].tolist() == [[6, 7], [8, 9]]
    assert (more["y"][1], pair.b, type(ordered)) == (None, "text", OrderedDict)
    assert kwargs["marker"] is marker is first[1]["marker"]
    with pytest.raises(ValueError, match=r"\[\(5,\), \(1, 2\)\] give different numbers of chunks for 2 devices"):
        dp.scatter((x, torch.zeros(1, 2)), ["cpu"] * 2)
    columns = dp.scatter(y, ["cpu"] * 3, dim=1)
    assert [column.shape for column in columns] == [(5, 1)] * 2
    assert torch.equal(dp.gather(columns, "cpu", dim=1), y)
    together = dp.gather([Pair({"a": x}, [y, None]), Pair({"a": x[:1]}, [y[:2], None])], "cpu")
    assert together.a["a"].tolist() == [0, 1, 2, 3, 4, 0]
    assert torch.equal(together.b[0], torch.cat([y, y[:2]]))
    assert together.b[1] is None
    for wrong in ([{"a": x}, {"b": x}], [1, 2], [None, x], [x, None]):
        with pytest.raises((ValueError, TypeError)):
            dp.gather(wrong, "cpu")


def test_each_device_gets_its_own_of_everything():
    """The meta device stands for the second. Replica 0 shares the module's memory; each computes where its input is."""
    module, devices = nn.BatchNorm1d(6), ["cpu", "meta"]
    chunks, replicas = dp.scatter(torch.randn(4, 6), devices), dp.replicate(module, devices)
    for device, chunk, replica in zip(devices, chunks, replicas, strict=True):
        assert {chunk.device.type, replica.weight.device.type, replica.running_mean.device.type} == {device}
    assert replicas[0].weight.data_ptr() == module.weight.data_ptr()
    assert [output.device.type for output in dp.parallel_apply(replicas, chunks)] == devices
    assert dp.gather([torch.ones(2), torch.ones(2, device="meta")], "meta").device.type == "meta"


class Sees(nn.Module):
    """Records what reaches each replica, in a list that all of them have."""

    def __init__(self):
        super().__init__()
        self.linear, self.unused, self.seen = nn.Linear(6, 2), nn.Linear(2, 2), []

    def forward(self, x, scale=1):
        self.scale = scale
        self.seen.append((len(x), scale, torch.is_grad_enabled(), self.training, threading.current_thread().name))
        if x[0, 0] < 0:
            raise KeyError(x[0, 0].item())
        return self.linear(x) * scale


@implementation
def test_each_replica_in_a_thread_with_its_rows_and_this_threads_modes(cls):
    """Fewer rows have fewer replicas; what one raises is raised again, with its number, when all threads have ended."""
    model = cls(Sees(), ["cpu"] * 3)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.eval()(torch.ones(7, 6), scale=2).dtype == torch.bfloat16
    seen, model.module.seen = sorted(model.module.seen), []
    assert [s[:4] for s in seen] == [(1, 2, False, False), (3, 2, False, False), (3, 2, False, False)]
    assert len({s[4] for s in seen}) == 3
    output = model.train()(torch.ones(2, 6), scale=1)
    output.sum().backward()
    assert [s[:4] for s in model.module.seen] == [(1, 1, True, True)] * 2
    assert output.dtype == torch.float32
    assert model.module.unused.weight.grad is None
    assert not hasattr(model.module, "scale")  # what a replica sets is lost
    with pytest.raises(KeyError, match=r"KeyError in replica 1 on device cpu: -1\.0"):
        model(-torch.arange(3.0).view(3, 1).expand(3, 6))  # the third raises as well
    assert not [thread for thread in threading.enumerate() if thread.name in {s[4] for s in model.module.seen}]


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_a_replica_has_the_structure_of_the_module():
    """Weights in lists, a module used twice, a child that is None, a frozen weight, no bias; no Parameters."""
    module = nn.ModuleDict({"lstm": nn.LSTM(6, 4), "twice": nn.Linear(4, 4, bias=False)})
    module["again"], module["list"] = module["twice"], nn.ParameterList([torch.ones(4), torch.ones(4)])
    module.register_module("none", None)
    module["list"][0].requires_grad_(False)
    replicas = dp.replicate(module, ["cpu"] * 2)
    for replica in replicas:
        assert replica["twice"] is replica["again"] is not module["twice"]
        assert replica["twice"].bias is replica.none is None
        assert [weight.requires_grad for weight in replica["list"]] == [False, True]
        assert not isinstance(replica["twice"].weight, nn.Parameter)
    own, first, second = ({w.data_ptr() for w in m["lstm"]._flat_weights} for m in (module, *replicas))
    assert first == own
    assert not second & own


@implementation
def test_what_has_no_batch_and_what_returns_a_loss(cls):
    """No input: once. No tensor: on all devices. A scalar: a vector, with a warning, whose mean is not the loss."""

    class Loss(nn.Linear):
        def forward(self, x=2, times=1):
            return super().forward(x).square().mean() if torch.is_tensor(x) else self.bias.expand(x * times, 2)

    module, x = Loss(6, 2), make_batch(0, 0, rows=3)
    model = cls(module, ["cpu"] * 2)
    assert [model().shape[0], model(3).shape[0], model(times=4).shape[0]] == [2, 6, 16]
    with pytest.warns(UserWarning, match="scalars"):
        losses = model(x)
    assert not torch.allclose(losses.mean(), module(x))
    torch.testing.assert_close((2 * losses[0] + losses[1]) / 3, module(x))
    assert cls(module, ["cpu"])(x).shape == ()  # one device has nothing to gather


@pytest.mark.parametrize("n", [2, 3, 8])
def test_what_travels_is_the_cost_in_the_docstring(n):
    """2Ψ(N-1) bytes: a copy of each parameter for each other device, and a gradient of each copy."""
    model, moved = dp.language_model(C=24, heads=2, layers=1), []
    replicas, own = dp.replicate(model, ["cpu"] * n), {p.data_ptr() for p in model.parameters()}
    for tensor in {t for m in nn.ModuleList(replicas).modules() for t in vars(m).values() if torch.is_tensor(t)}:
        if tensor.data_ptr() not in own:
            moved.append(tensor.nbytes)
            tensor.register_hook(lambda gradient: moved.append(gradient.nbytes))
    sum(replica(torch.zeros(1, 8, dtype=torch.long)).sum() for replica in replicas).backward()
    assert sum(moved) == 2 * sum(p.nbytes for p in model.parameters()) * (n - 1)
