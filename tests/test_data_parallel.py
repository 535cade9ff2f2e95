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
    """And buffers those of the first chunk: with unequal chunks, or fewer than n."""
    rows = n * (1 + rows) if kind == "batchnorm" else rows  # a chunk of one row has no variance
    plain, model = make_model(kind, dtype), dp.DataParallel(make_model(kind, dtype), ["cpu"] * n)
    for step in range(3):
        x = make_batch(
            0, step, torch.float32 if kind == "mixed" else dtype, rows=rows
        ).requires_grad_()
        chunks, outputs, buffers = x.detach().clone().chunk(n), [], None
        (whole := model(x)).sin().sum().backward()
        for chunk in chunks:
            outputs.append(plain(chunk.requires_grad_()))
            outputs[-1].sin().sum().backward()
            buffers = buffers or [buffer.clone() for buffer in plain.buffers()]
        assert_equal(whole, torch.cat(outputs), exact=True, what="output")
        assert_equal(
            x.grad,
            torch.cat([chunk.grad for chunk in chunks]),
            exact=True,
            what="gradient of the inputs",
        )
        assert_same_parameters(model.module, plain, exact=True, what=f"step {step}")
        if kind != "batchnorm":  # which changes its buffers in each forward
            naive = dp.data_parallel(model.module, x, ["cpu"] * n)
            assert_equal(naive, whole, exact=True, what="output of the naive form")
        for ours, theirs, kept in zip(model.buffers(), plain.buffers(), buffers, strict=True):
            assert_equal(ours, theirs.copy_(kept), exact=True, what="buffer")
        for parameter in (*model.parameters(), *plain.parameters()):  # the next step has others
            parameter.data.mul_(0.9)
            parameter.grad = None


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: without, torch's is the module itself"
)
def test_equals_torchs():
    module, x = make_model("plain").cuda(), make_batch(0, 0, rows=7).cuda()
    models = (
        dp.DataParallel(module, [*range(torch.cuda.device_count())] * 2),
        nn.DataParallel(module),
    )
    torch.testing.assert_close(
        *(torch.autograd.grad(model(x).sin().sum(), [*module.parameters()]) for model in models)
    )


def test_scatter_and_gather_go_into_lists_tuples_and_dicts():
    """Tensors are split as by torch.chunk. Others go to all devices; only None comes back."""
    x = torch.arange(10).view(5, 2)
    marker = object()
    whole, *chunks = (
        [part, {"y": (part[:, 0], None)}, Pair(part, None)] for part in (x, x[:3], x[3:])
    )
    assert str(dp.scatter(whole, ["cpu"] * 2)) == str(chunks)
    assert str(dp.gather(chunks, "cpu")) == str(whole)
    assert [everywhere for _, everywhere in dp.scatter((x, marker), ["cpu"] * 2)] == [marker] * 2
    columns = dp.scatter(x, ["cpu"] * 3, dim=1)
    assert str([columns, dp.gather(columns, "cpu", dim=1)]) == str([[x[:, :1], x[:, 1:]], x])
    with pytest.raises(
        ValueError, match=r"\[\(5, 2\), \(1, 2\)\] give different numbers of chunks for 2 devices"
    ):
        dp.scatter((x, torch.zeros(1, 2)), ["cpu"] * 2)
    for wrong in ([{"a": x}, {"b": x}], [1, 2], [None, x], [x, None]):
        with pytest.raises((ValueError, TypeError)):
            dp.gather(wrong, "cpu")


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_a_replica_has_the_structure_of_the_module_and_lies_on_its_device():
    """Weights in lists, a module used twice, a child that is None, a frozen weight, no bias.

    The first replica shares the module's memory; the others hold one copy of each tensor.
    """
    devices = ["cpu", "cpu", "meta"]
    module = nn.ModuleDict({"lstm": nn.LSTM(6, 4), "norm": nn.BatchNorm1d(6)})
    module["twice"] = module["again"] = nn.Linear(4, 4, bias=False)
    module["list"] = nn.ParameterList(
        [nn.Parameter(torch.ones(4), requires_grad=False), torch.ones(4)]
    )
    module.register_module("none", None)
    states = [*module.parameters(), *module.buffers()]
    replicas = dp.replicate(module, devices)
    for device, replica in zip(devices, replicas, strict=True):
        assert replica["twice"] is replica["again"] is not module["twice"]
        assert replica["twice"].bias is replica.none is None
        assert [weight.requires_grad for weight in replica["list"]] == [False, True]
        attributes = [
            x for part in replica.modules() for x in (vars(part) | part._buffers).values()
        ]
        tensors = list(filter(torch.is_tensor, attributes))
        assert {t.device.type for t in (*tensors, *replica["lstm"]._flat_weights)} == {device}
        shared = {t.data_ptr() for t in tensors} & {state.data_ptr() for state in states}
        assert len(tensors) == len(states)
        assert len(shared) == (len(states) if replica is replicas[0] else 0)
        if device == "cpu":
            sum(t.sum() for t in tensors if t.requires_grad).backward()
    assert all((state.grad == 2).all() for state in states if state.requires_grad)
    outputs = dp.parallel_apply(
        [replica["norm"] for replica in replicas], dp.scatter(torch.randn(6, 6), devices)
    )
    assert [x.device.type for x in (*outputs, dp.gather(outputs, "meta"))] == [*devices, "meta"]


class Sees(nn.Linear):
    """Records what reaches each replica, in a list that all share. Does not use its bias."""

    def forward(self, *inputs, scale=1, loss=False):
        x = inputs[0] if inputs else self.weight[:0]
        self.scale = scale
        thread = threading.current_thread().name
        self.seen.append((len(x), scale, torch.is_grad_enabled(), self.training, thread))
        if (x < 0).any():
            raise KeyError(x[0, 0].item())
        y = x @ self.weight.T * scale
        return y.square().mean() if loss else y


def test_each_replica_in_a_thread_with_its_rows_and_this_threads_modes():
    """Fewer rows have fewer replicas, no input has one, and an input without a tensor has all.

    An exception is raised again, with the replica's number, when all threads have ended.
    """
    model = dp.DataParallel(Sees(6, 2), ["cpu"] * 3)
    seen = []
    model.module.seen = seen
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.eval()(torch.ones(7, 6), scale=2).dtype == torch.bfloat16
    output = model.train()(torch.ones(2, 6))
    output.sum().backward()
    assert (output.dtype, model.module.bias.grad) == (torch.float32, None)
    assert (len(model()), len(model(scale=4))) == (0, 0)
    assert not hasattr(model.module, "scale")  # what a replica sets is lost
    calls = [call[:4] for call in seen]  # (rows, scale, grad mode, training)
    assert sorted(calls[:3]) == [(1, 2, False, False), (3, 2, False, False), (3, 2, False, False)]
    assert calls[3:6] == [(1, 1, True, True)] * 2 + [(0, 1, True, True)]
    assert calls[6:] == [(0, 4, True, True)] * 3
    assert len({s[4] for s in seen}) == 3 + 2 + 1 + 3
    with pytest.raises(KeyError, match=r"KeyError in replica 1 on device cpu: -1\.0"):
        model(-torch.arange(3.0).view(3, 1).expand(3, 6))  # the third raises as well
    assert not {s[4] for s in seen} & {thread.name for thread in threading.enumerate()}
    x = torch.rand(5, 6)
    with pytest.warns(UserWarning, match="scalars"):
        losses = model(x, loss=True)
    alone = dp.DataParallel(model.module, ["cpu"])(x, loss=True)  # one device has nothing to gather
    assert not torch.allclose(losses.mean(), alone)
    torch.testing.assert_close((2 * losses[0] + 2 * losses[1] + losses[2]) / 5, alone)
    assert list(model.state_dict()) == list(nn.DataParallel(model.module).state_dict())
