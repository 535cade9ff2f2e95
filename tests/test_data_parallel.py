"""data_parallel.py against one device that takes the chunks in turn."""

import threading

import pytest
import torch
import torch.nn as nn
from shared import assert_equal, assert_same_parameters, make_batch, make_model

import data_parallel as dp

pytestmark = pytest.mark.cpu  # several devices are one CPU here

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
bf16 = torch.bfloat16


def backward_in_chunks(plain, x, count):
    """Return the output of one device. Buffers become those after the first chunk."""
    outputs = []
    buffers = []
    for chunk in x.chunk(count):
        output = plain(chunk)
        output.sin().sum().backward()
        outputs.append(output)
        buffers.append(copies_of(plain.buffers()))
    for buffer, after_first in zip(plain.buffers(), buffers[0], strict=True):
        buffer.copy_(after_first)
    return torch.cat(outputs)


def copies_of(tensors):
    return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize(
    ("kind", "count", "rows", "dtype"),
    [
        ("plain", 4, 5, torch.float32),  # three chunks
        ("frozen", 1, 3, torch.float32),
        ("tied", 4, 8, bf16),  # gradients of replicas add up in order
        ("batchnorm", 2, 5, torch.float32),
        ("odd", 4, 1, torch.float32),  # one chunk
        ("mixed", 3, 7, torch.float32),  # a short last chunk
    ],
    ids=str,
)
def test_training_equals_one_device_chunk_by_chunk(kind, count, rows, dtype):
    plain = make_model(kind, dtype)
    model = dp.DataParallel(make_model(kind, dtype), ["cpu"] * count)
    for step in range(2):
        x = make_batch(0, step, dtype, rows).requires_grad_()
        plain_x = x.detach().requires_grad_()

        output = model(x)
        output.sin().sum().backward()

        expected = backward_in_chunks(plain, plain_x, count)
        assert_equal(output, expected, exact=True)
        assert_equal(x.grad, plain_x.grad, exact=True)
        assert_same_parameters(model.module, plain, exact=True)
        for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs)
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.data.mul_(0.9)
            parameter.grad = None


def test_the_idea_has_the_output_of_the_class():
    module = make_model("plain")
    x = make_batch(0, 0, rows=5)
    output = dp.data_parallel(module, x, ["cpu"] * 4)
    assert torch.equal(output, dp.DataParallel(module, ["cpu"] * 4)(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's is the module without a GPU")
def test_gradients_are_those_of_torchs_class():
    module = make_model("plain").cuda()
    x = make_batch(0, 0, rows=7).cuda()
    parameters = list(module.parameters())
    gradients = []
    for model in (dp.DataParallel(module), nn.DataParallel(module)):
        loss = model(x).sin().sum()
        gradients.append(torch.autograd.grad(loss, parameters))
    torch.testing.assert_close(*gradients)


# ---- scatter and gather


def nested(x):
    first = x[:, 0]
    return [x, {"y": (first, None)}]


def test_containers_are_scattered_and_gathered():
    x = torch.arange(10).view(5, 2)
    chunks = dp.scatter(nested(x), TWO)
    joined = dp.gather(chunks, "cpu")
    assert str(chunks) == str([nested(x[:3]), nested(x[3:])])
    assert str(joined) == str(nested(x))


def test_objects_that_are_no_tensors_go_to_all_devices():
    chunks = dp.scatter(["text", torch.ones(2)], TWO)
    assert [text for text, _ in chunks] == ["text", "text"]


def test_tensors_are_split_and_joined_along_dim():
    x = torch.arange(10).view(5, 2)
    columns = dp.scatter(x, THREE, dim=1)
    joined = dp.gather(columns, "cpu", dim=1)
    assert str(columns) == str([x[:, :1], x[:, 1:]])
    assert torch.equal(joined, x)


def test_tensors_of_different_numbers_of_chunks_are_an_error():
    x = torch.ones(5, 2)
    with pytest.raises(ValueError, match=r"2: \(5, 2\), 1: \(1, 2\)"):
        dp.scatter((x, x[:1]), TWO)


@pytest.mark.parametrize("first", [None, 1, {}], ids=str)
def test_outputs_that_cannot_be_joined_are_an_error(first):
    with pytest.raises((ValueError, TypeError)):
        dp.gather([first, torch.ones(2)], "cpu")


def test_scalars_become_a_vector_with_a_warning():
    with pytest.warns(UserWarning, match="scalars"):
        joined = dp.gather([torch.tensor(1), torch.tensor(2)], "cpu")
    assert joined.tolist() == [1, 2]


# ---- replicas


def memory_of(module):
    states = [*module.parameters(), *module.buffers()]
    return {state.data_ptr() for state in states}


def memory_of_replica(replica):
    values = []
    for part in replica.modules():
        values += vars(part).values()
        values += part._buffers.values()
    return {value.data_ptr() for value in values if torch.is_tensor(value)}


def test_the_first_replica_shares_memory_and_the_second_is_a_copy():
    module = make_model("batchnorm")
    first, second = map(memory_of_replica, dp.replicate(module, TWO))
    assert first == memory_of(module)
    assert len(second) == len(first)
    assert first.isdisjoint(second)


def test_a_replica_keeps_the_structure_of_the_module():
    module = nn.ModuleDict()
    module["twice"] = module["again"] = nn.Linear(4, 4, bias=False)
    module["list"] = nn.ParameterList([torch.ones(4)])
    module["list"][0].requires_grad_(False)
    module.register_module("none", None)

    replica = dp.replicate(module, TWO)[1]

    assert replica["twice"] is replica["again"] is not module["twice"]
    assert replica["twice"].bias is replica.none is None
    assert not replica["list"][0].requires_grad


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_an_lstm_uses_the_weights_of_its_replica():
    replica = dp.replicate(nn.LSTM(6, 4), ["cpu", "meta"])[1]
    assert {weight.device.type for weight in replica._flat_weights} == {"meta"}


def test_sparse_embeddings_are_an_error():
    module = nn.Embedding(5, 2, sparse=True)
    with pytest.raises(ValueError, match="sparse=False"):
        dp.replicate(module, TWO)


# ---- calls


class Sees(nn.Linear):
    """Notes (rows, scale, grad mode, training) of each call in a list that replicas share."""

    def __init__(self):
        super().__init__(6, 2)
        self.seen = []

    def forward(self, *inputs, scale=1):
        x = inputs[0] if inputs else self.weight[:0]
        self.seen.append((len(x), scale, torch.is_grad_enabled(), self.training))
        return x @ self.weight.T * scale


def test_replicas_run_in_the_modes_of_the_calling_thread():
    module = Sees().eval()
    model = dp.DataParallel(module, THREE)
    with torch.no_grad(), torch.autocast("cpu", bf16):
        output = model(torch.ones(5, 6), scale=2)
    assert output.dtype == bf16
    assert sorted(module.seen) == [(1, 2, False, False), (2, 2, False, False), (2, 2, False, False)]


def test_a_module_runs_once_without_inputs_and_on_all_devices_without_tensors():
    module = Sees()
    model = dp.DataParallel(module, THREE)
    assert model().shape == model(scale=4).shape == (0, 2)
    assert module.seen == [(0, 1, True, True)] + [(0, 4, True, True)] * 3


def test_replicas_run_at_the_same_time():
    barrier = threading.Barrier(3, timeout=30)

    def meet(x):
        barrier.wait()
        return x

    assert dp.parallel_apply([meet] * 3, [torch.ones(1)] * 3) == [1, 1, 1]


def test_the_first_exception_is_raised_when_all_threads_have_ended():
    def fail(x):
        return 1 / x

    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="replica 1 on device meta"):
        dp.parallel_apply([fail] * 3, [1, 0, 0], devices=["cpu", "meta", "cpu"])
    assert threading.active_count() == threads


def test_devices_are_those_of_the_inputs_unless_given():
    norms = dp.replicate(nn.BatchNorm1d(6), ["cpu", "meta"])
    inputs = dp.scatter(torch.randn(4, 6), ["cpu", "meta"])
    outputs = dp.parallel_apply(norms, inputs)
    assert [output.device.type for output in outputs] == ["cpu", "meta"]
    with pytest.raises(ValueError, match="devices"):
        dp.parallel_apply([nn.Identity()], [None])
