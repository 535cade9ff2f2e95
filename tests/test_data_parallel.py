"""data_parallel.py against one device that takes the chunks in turn, and torch.nn.DataParallel."""

import threading
from collections import namedtuple

import pytest
import torch
import torch.nn as nn
from shared import MODELS, assert_equal, assert_same_parameters, make_batch, make_model

import data_parallel as dp

pytestmark = pytest.mark.cpu  # several devices are one CPU here

Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(("n", "rows"), [(1, 3), (2, 5), (3, 7), (4, 5), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients_are_bitwise_those_of_one_device_chunk_by_chunk(n, rows, kind, dtype):
    """With unequal chunks, or fewer than n. Buffers are those of the first chunk."""
    if kind == "batchnorm":
        rows = n * (1 + rows)  # a chunk of one row has no variance
    plain = make_model(kind, dtype)
    model = dp.DataParallel(make_model(kind, dtype), ["cpu"] * n)
    for step in range(3):
        x = make_batch(0, step, torch.float32 if kind == "mixed" else dtype, rows)
        chunks = [chunk.requires_grad_() for chunk in x.clone().chunk(n)]
        x.requires_grad_()

        output = model(x)
        output.sin().sum().backward()

        outputs = []
        buffers = []
        for chunk in chunks:
            outputs.append(plain(chunk))
            outputs[-1].sin().sum().backward()
            buffers.append([buffer.clone() for buffer in plain.buffers()])
        for buffer, after_the_first in zip(plain.buffers(), buffers[0], strict=True):
            buffer.copy_(after_the_first)
        assert_equal(output, torch.cat(outputs), True, "output")
        assert_equal(x.grad, torch.cat([chunk.grad for chunk in chunks]), True, "input's gradient")
        assert_same_parameters(model.module, plain, True, f"step {step}")
        for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            assert_equal(ours, theirs, True, "buffer")
        if kind != "batchnorm":  # which changes its buffers in each forward
            naive = dp.data_parallel(model.module, x, ["cpu"] * n)
            assert_equal(naive, output, True, "output of the naive form")
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.data.mul_(0.9)  # the next step has others
            parameter.grad = None


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: without, torch's is the module itself"
)
def test_equals_torchs():
    module = make_model("plain").cuda()
    x = make_batch(0, 0, rows=7).cuda()
    ours = dp.DataParallel(module, [*range(torch.cuda.device_count())] * 2)
    results = []
    for model in (ours, nn.DataParallel(module)):
        results.append(torch.autograd.grad(model(x).sin().sum(), [*module.parameters()]))
    torch.testing.assert_close(*results)


def test_scatter_and_gather_go_into_lists_tuples_and_dicts():
    """Tensors are split as by torch.chunk. Others go to all devices; only None comes back."""
    x = torch.arange(10).view(5, 2)
    devices = ["cpu"] * 2

    def nested(part):
        return [part, {"y": (part[:, 0], None)}, Pair(part, None)]

    chunks = dp.scatter(nested(x), devices)
    assert str(chunks) == str([nested(x[:3]), nested(x[3:])])
    assert str(dp.gather(chunks, "cpu")) == str(nested(x))
    marker = object()
    assert [last for _, last in dp.scatter((x, marker), devices)] == [marker] * 2
    columns = dp.scatter(x, ["cpu"] * 3, dim=1)
    assert str(columns) == str([x[:, :1], x[:, 1:]])
    assert torch.equal(dp.gather(columns, "cpu", dim=1), x)


def test_what_cannot_be_split_or_joined_is_an_error():
    x = torch.ones(5, 2)
    with pytest.raises(ValueError, match=r"2 devices: .* \{2: \(5, 2\), 1: \(1, 2\)\}"):
        dp.scatter((x, x[:1]), ["cpu"] * 2)
    with pytest.raises(ValueError, match="set sparse=False"):
        dp.replicate(nn.Sequential(nn.Embedding(5, 2, sparse=True)), ["cpu"] * 2)
    for wrong in ([{"a": x}, {"b": x}], [1, 2], [None, x], [x, None]):
        with pytest.raises((ValueError, TypeError)):
            dp.gather(wrong, "cpu")
    with pytest.raises(ValueError, match="needs `devices`"):
        dp.parallel_apply([nn.Identity()], [None])


def tensors_in(replica):
    """What stands for the parameters and buffers of a module."""
    for part in replica.modules():
        for value in (vars(part) | part._buffers).values():
            if torch.is_tensor(value):
                yield value


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_a_replica_has_the_structure_of_the_module_and_lies_on_its_device():
    """Weights in lists, a module used twice, a child that is None, a frozen weight, no bias.

    The first replica shares the module's memory; the others hold one copy of each tensor.
    """
    devices = ["cpu", "cpu", "meta"]
    frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    module = nn.ModuleDict({"lstm": nn.LSTM(6, 4), "norm": nn.BatchNorm1d(6)})
    module["embedding"] = nn.Embedding(3, 4)
    module["twice"] = module["again"] = nn.Linear(4, 4, bias=False)
    module["list"] = nn.ParameterList([frozen, torch.ones(4)])
    module.register_module("none", None)
    states = [*module.parameters(), *module.buffers()]
    own_memory = {state.data_ptr() for state in states}

    replicas = dp.replicate(module, devices)

    for number, (device, replica) in enumerate(zip(devices, replicas, strict=True)):
        tensors = list(tensors_in(replica))
        assert replica["twice"] is replica["again"] is not module["twice"]
        assert replica["twice"].bias is replica.none is None
        assert [weight.requires_grad for weight in replica["list"]] == [False, True]
        assert {t.device.type for t in (*tensors, *replica["lstm"]._flat_weights)} == {device}
        assert len(tensors) == len(states)
        shared = {t.data_ptr() for t in tensors} & own_memory
        assert len(shared) == (len(states) if number == 0 else 0)
        if device == "cpu":
            sum(t.sum() for t in tensors if t.requires_grad).backward()
    assert all((state.grad == 2).all() for state in states if state.requires_grad)
    norms = [replica["norm"] for replica in replicas]
    outputs = dp.parallel_apply(norms, dp.scatter(torch.randn(6, 6), devices))
    assert [x.device.type for x in outputs] == devices
    assert dp.gather(outputs, "meta").device.type == "meta"


class Sees(nn.Linear):
    """Notes (rows, scale, grad mode, training) of each call in a list that all replicas share."""

    def __init__(self):
        super().__init__(6, 2)
        self.seen = []

    def forward(self, *inputs, scale=1, loss=False):
        x = inputs[0] if inputs else self.weight[:0]
        self.scale = scale
        self.seen.append((len(x), scale, torch.is_grad_enabled(), self.training))
        if (x < 0).any():
            raise KeyError(x[0, 0].item())
        y = x @ self.weight.T * scale
        return y.square().mean() if loss else y


def test_replicas_have_their_rows_and_this_threads_modes():
    """Fewer rows have fewer replicas, and an input without a tensor has all."""
    module = Sees()
    model = dp.DataParallel(module, ["cpu"] * 3)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.eval()(torch.ones(7, 6), scale=2).dtype == torch.bfloat16
    assert sorted(module.seen) == [(1, 2, False, False)] + [(3, 2, False, False)] * 2
    module.seen.clear()
    output = model.train()(torch.ones(2, 6))
    output.sum().backward()
    assert output.dtype == torch.float32
    assert module.bias.grad is None  # forward does not use it
    assert model().shape == model(scale=4).shape == (0, 2)
    expected = [(1, 1, True, True)] * 2 + [(0, 1, True, True)] + [(0, 4, True, True)] * 3
    assert module.seen == expected
    assert not hasattr(module, "scale")  # what a replica sets is lost
    assert list(model.state_dict()) == list(nn.DataParallel(module).state_dict())


def test_the_first_exception_is_raised_when_all_threads_have_ended():
    model = dp.DataParallel(Sees(), ["cpu"] * 3)
    threads = threading.active_count()
    with pytest.raises(KeyError, match=r"KeyError in replica 1 on device cpu: -1\.0"):
        model(-torch.arange(3.0).view(3, 1).expand(3, 6))  # the third raises as well
    assert threading.active_count() == threads


def test_the_replicas_run_at_the_same_time():
    barrier = threading.Barrier(3, timeout=30)

    class Meets(nn.Module):
        def forward(self, x):
            barrier.wait()
            return x

    x = torch.ones(3, 2)
    assert torch.equal(dp.DataParallel(Meets(), ["cpu"] * 3)(x), x)


def test_scalars_are_gathered_as_a_vector_with_a_warning():
    module = Sees()
    x = torch.rand(5, 6)
    with pytest.warns(UserWarning, match="scalars"):
        losses = dp.DataParallel(module, ["cpu"] * 3)(x, loss=True)
    alone = dp.DataParallel(module, ["cpu"])(x, loss=True)  # one device has nothing to gather
    assert not torch.allclose(losses.mean(), alone)
    torch.testing.assert_close((2 * losses[0] + 2 * losses[1] + losses[2]) / 5, alone)
