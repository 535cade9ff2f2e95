"""data_parallel.py against one device that works through the same chunks, and against torch.nn.DataParallel."""

import gc
import threading
import weakref
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from shared import MODELS, OPTIMIZERS, assert_equal, assert_same_parameters, make_batch, make_model

import data_parallel as dp

Pair = namedtuple("Pair", "a b")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
implementation = pytest.mark.parametrize("cls", [dp.DataParallel])
n_gpus = torch.cuda.device_count()


@implementation
@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(MODELS),
    st.sampled_from(DTYPES),
    st.sampled_from(sorted(OPTIMIZERS)),
)
def test_training_equals_one_device_chunk_by_chunk(cls, n, rows, kind, dtype, optimizer):
    """Outputs, gradients, parameters and buffers: bitwise, on any number of devices."""
    rows = n * (1 + rows) if kind == "batchnorm" else rows  # a chunk of one row has no variance
    plain, model = make_model(kind, dtype), cls(make_model(kind, dtype), ["cpu"] * n)
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (plain, model)]
    for step in range(4):
        x = make_batch(0, step, torch.float32 if kind == "mixed" else dtype, rows=rows).requires_grad_()
        for o in optimizers:
            o.zero_grad()
        whole = model(x)
        weights = torch.linspace(0.5, 2.0, whole.numel(), dtype=whole.dtype).view_as(whole)
        (whole * weights).sum().backward()
        input_gradient, x.grad, outputs, buffers = x.grad, None, [], None
        for chunk, weight in zip(x.chunk(n), weights.chunk(n), strict=True):
            outputs.append(plain(chunk))
            (outputs[-1] * weight).sum().backward()
            buffers = buffers or [buffer.clone() for buffer in plain.buffers()]  # the first chunk's are what stays
        for buffer, kept in zip(plain.buffers(), buffers, strict=True):
            buffer.copy_(kept)
        assert_equal(whole, torch.cat(outputs), exact=True, what="output")
        assert_equal(input_gradient, x.grad, exact=True, what="gradient of the inputs")
        for o in optimizers:
            o.step()
        assert_same_parameters(model.module, plain, exact=True, what=f"step {step}")
        for a, b in zip(model.buffers(), plain.buffers(), strict=True):
            assert_equal(a, b, exact=True, what="buffer")


@pytest.mark.parametrize("devices", [["cpu"] * 3, ["cuda", "cpu"], ["cuda:0", "cuda:1"]], ids=str)
def test_equals_torchs(devices):
    """torch.nn.DataParallel on as many GPUs as there are, which without one is the module itself."""
    if len({d for d in devices if d != "cpu"}) > n_gpus:
        pytest.skip(f"needs the GPUs of {devices}")
    ours, theirs = dp.DataParallel(make_model("plain").to(devices[0]), devices), nn.DataParallel(make_model("plain"))
    theirs.to(devices[0] if n_gpus else "cpu")
    for model in (ours, theirs):
        model(make_batch(0, 0, rows=7).to(devices[0])).square().mean().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad.to(a.device))
    assert list(ours.state_dict()) == list(theirs.state_dict())


@given(st.integers(1, 5), st.integers(1, 11), st.integers(0, 1))
def test_scatter_cuts_as_chunk_and_gather_puts_together(n, rows, dim):
    x = torch.arange(rows * 12.0).view((rows, 12) if dim == 0 else (12, rows))
    chunks = dp.scatter(x, ["cpu"] * n, dim)
    assert [c.tolist() for c in chunks] == [c.tolist() for c in x.chunk(n, dim)]
    assert torch.equal(dp.gather(chunks, "cpu", dim), x)


def test_scatter_and_gather_go_into_lists_tuples_and_dicts():
    """What is not a tensor goes to all as it is; it does not come back, but for None."""
    x, y, marker = torch.arange(5), torch.arange(10).view(5, 2), object()
    inputs = ((x, {"y": [y, None]}, Pair(x, "text"), OrderedDict(z=y)), {"marker": marker})
    first, ((a, more, pair, ordered), kwargs) = dp.scatter(inputs, ["cpu"] * 2)
    assert a.tolist() == pair.a.tolist() == [3, 4]
    assert more["y"][0].tolist() == ordered["z"].tolist() == [[6, 7], [8, 9]]
    assert (more["y"][1], pair.b, type(ordered)) == (None, "text", OrderedDict)
    assert kwargs["marker"] is marker is first[1]["marker"]
    with pytest.raises(ValueError, match=r"\[\(5,\), \(1, 2\)\] give different numbers of chunks for 2 devices"):
        dp.scatter((x, torch.zeros(1, 2)), ["cpu"] * 2)
    outputs = [Pair({"a": torch.full((2,), i), "b": [torch.full((1, 2), i)]}, None) for i in range(2)]
    together = dp.gather(outputs, "cpu")
    assert type(together) is Pair
    assert together.a["a"].tolist() == [0, 0, 1, 1]
    assert together.a["b"][0].tolist() == [[0, 0], [1, 1]]
    assert together.b is None
    for wrong, error in (
        ([{"a": x}, {"b": x}], ValueError),
        ([1, 2], TypeError),
        ([None, x], TypeError),
        ([x, None], TypeError),
    ):
        with pytest.raises(error):
            dp.gather(wrong, "cpu")


def test_each_device_gets_its_own_of_everything():
    """Nothing of device 1 lies on device 0, and the other way; the meta device stands for the second."""
    module, devices = nn.BatchNorm1d(6), ["cpu", "meta"]
    chunks, replicas = dp.scatter(torch.randn(4, 6), devices), dp.replicate(module, devices)
    for device, chunk, replica in zip(devices, chunks, replicas, strict=True):
        assert {chunk.device.type, replica.weight.device.type, replica.running_mean.device.type} == {device}
    assert replicas[0].weight.data_ptr() == module.weight.data_ptr()
    assert [output.device.type for output in dp.parallel_apply(replicas, chunks, None, devices)] == devices
    assert dp.gather([torch.ones(2), torch.ones(2, device="meta")], "meta").device.type == "meta"


@implementation
def test_the_mean_of_replicas_losses_is_not_the_loss(cls):
    """Scalars come back as a vector, with a warning; that of 2 rows and that of 1 do not count alike."""

    class WithLoss(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    x = make_batch(0, 0, rows=3)
    inside = WithLoss(6, 2)
    with pytest.warns(UserWarning, match="scalars"):
        losses = cls(inside, ["cpu"] * 2)(x)
    assert losses.shape == (2,)
    torch.testing.assert_close((2 * losses[0] + losses[1]) / 3, inside(x))
    assert not torch.allclose(losses.mean(), inside(x))


class Sees(nn.Module):
    """Records what reaches each replica, in a list that all of them have."""

    def __init__(self):
        super().__init__()
        self.linear, self.unused, self.seen = nn.Linear(6, 2), nn.Linear(2, 2), []

    def forward(self, x, scale=1):
        self.scale = scale
        self.seen.append((x.shape[0], scale, torch.is_grad_enabled(), self.training, threading.current_thread().name))
        return self.linear(x) * scale


@implementation
def test_each_replica_in_a_thread_with_its_rows_and_this_threads_modes(cls):
    model = cls(Sees(), ["cpu"] * 3)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.eval()(torch.ones(7, 6), scale=2).dtype == torch.bfloat16
    seen, model.module.seen = sorted(model.module.seen), []
    assert [s[:4] for s in seen] == [(1, 2, False, False), (3, 2, False, False), (3, 2, False, False)]
    assert len({s[4] for s in seen}) == 3
    output = model.train()(torch.ones(2, 6))  # fewer rows than devices
    output.sum().backward()
    assert [s[:4] for s in model.module.seen] == [(1, 1, True, True)] * 2
    assert output.dtype == torch.float32
    assert model.module.unused.weight.grad is None
    assert not hasattr(model.module, "scale")  # what a replica sets is lost


@implementation
def test_the_module_keeps_its_parameters_and_replicas_do_not_stay(cls):
    replicas = []

    class Keeps(nn.Linear):
        def forward(self, x):
            replicas.append(weakref.ref(self))
            assert not any(isinstance(p, nn.Parameter) for p in (self.weight, self.bias))
            return super().forward(x)

    model = cls(Keeps(6, 2), ["cpu"] * 2)
    model(make_batch(0, 0)).sum().backward()
    gc.collect()
    assert [replica() for replica in replicas] == [None, None]
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["module.weight", "module.bias"]


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_a_replica_has_the_structure_of_the_module():
    """Weights in lists, a module used twice, a child that is None, a frozen weight, no bias."""
    module = nn.ModuleDict({"lstm": nn.LSTM(6, 4), "twice": nn.Linear(4, 4, bias=False), "again": None})
    module.list, module["again"] = nn.ParameterList([torch.ones(4), torch.ones(4)]), module["twice"]
    module.register_module("none", None)
    module.list[0].requires_grad_(False)
    a, b = dp.replicate(module, ["cpu"] * 2)
    for replica in (a, b):
        assert replica["twice"] is replica["again"]
        assert replica["twice"].bias is replica.none is None
        assert [weight.requires_grad for weight in replica.list] == [False, True]
        (replica["lstm"](torch.ones(1, 3, 6))[0] * replica.list[0] * replica.list[1]).sum().backward()
    assert all(p.grad is not None for p in [*module["lstm"].parameters(), module.list[1]])
    pointers = [{w.data_ptr() for w in m["lstm"]._flat_weights} for m in (module, a, b)]
    assert pointers[0] == pointers[1]
    assert not pointers[0] & pointers[2]


@implementation
def test_an_exception_in_a_replica_is_raised_again_with_its_number(cls):
    class Breaks(nn.Linear):
        def forward(self, x):
            if x[0, 0] > 0:
                raise KeyError(x[0, 0].item())
            return super().forward(x)

    model, before = cls(Breaks(6, 2), ["cpu"] * 3), threading.active_count()
    with pytest.raises(KeyError, match=r"KeyError in replica 1 on device cpu: 1\.0"):
        model(torch.arange(3.0).view(3, 1).expand(3, 6))
    assert threading.active_count() == before
    model(torch.zeros(3, 6)).sum().backward()


def test_the_functions_take_what_torchs_take():
    modules, x = dp.replicate(Sees(), ["cpu"] * 2), torch.ones(4, 6)
    expected = modules[0](x)
    for inputs in (dp.scatter(x, ["cpu"] * 2), dp.scatter((x,), ["cpu"] * 2)):
        assert torch.equal(dp.gather(dp.parallel_apply(modules, inputs), "cpu"), expected)
    outputs = dp.parallel_apply(modules, inputs, [{"scale": 2}, {"scale": 3}], ["cpu"] * 2)
    assert torch.equal(dp.gather(outputs, "cpu"), torch.cat([expected[:2] * 2, expected[2:] * 3]))


@implementation
def test_without_a_batch_to_cut(cls):
    """Nothing to share out is done once; what is not a tensor goes to all devices, as in torch's."""

    class Repeats(nn.Embedding):
        def forward(self, times=1):
            return self.weight.expand(times, 2)

    model = cls(Repeats(1, 2), ["cpu"] * 3)
    assert model().shape == (1, 2)
    assert model(2).shape == model(times=2).shape == (6, 2)


@implementation
@pytest.mark.parametrize("n", [2, 3])
def test_what_travels_is_the_cost_in_the_docstring(cls, n):
    """2Ψ(N-1) bytes: a copy of each parameter for each other device, and a gradient of each copy."""
    model, moved = dp.language_model(C=24, heads=2, layers=1), []
    replicas = dp.replicate(model, ["cpu"] * n)
    tensors = [t for m in nn.ModuleList(replicas).modules() for t in vars(m).values() if torch.is_tensor(t)]
    own = {p.data_ptr() for p in model.parameters()}
    for tensor in tensors:
        if tensor.data_ptr() not in own:
            moved.append(tensor.nbytes)
            tensor.register_hook(lambda gradient: moved.append(gradient.nbytes))
    sum(replica(torch.zeros(1, 8, dtype=torch.long)).sum() for replica in replicas).backward()
    assert sum(moved) == 2 * sum(p.nbytes for p in model.parameters()) * (n - 1)
