"""data_parallel.py against one device that takes the chunks in turn."""

import copy
import threading

import pytest
import torch
import torch.nn as nn
from shared import assert_equal, assert_same_parameters, make_batch, make_model

import data_parallel as dp

pytestmark = [
    pytest.mark.cpu,  # several devices are one CPU here
    pytest.mark.filterwarnings("error"),
]

TWO = ["cpu"] * 2
bf16 = torch.bfloat16


def backward(output):
    loss = output.sin().sum()
    loss.backward()


@pytest.mark.parametrize(
    ("kind", "devices", "rows"),
    [
        ("plain", 4, 5),  # three chunks
        ("frozen", 1, 3),
        ("tied", 4, 8),  # gradients of replicas add up in order
        ("batchnorm", 2, 5),
        ("odd", 4, 1),  # one chunk
        ("mixed", 3, 7),  # a short last chunk
    ],
)
def test_outputs_and_gradients_are_bitwise_those_of_one_device_chunk_by_chunk(kind, devices, rows):
    plain = make_model(kind, bf16)
    model = dp.DataParallel(copy.deepcopy(plain), ["cpu"] * devices)
    x = make_batch(0, 0, bf16, rows).requires_grad_()
    plain_x = x.detach().requires_grad_()

    output = model(x)
    backward(output)

    expected = [plain(chunk) for chunk in plain_x.chunk(devices)]
    for each in expected:
        backward(each)
    assert_equal(output, torch.cat(expected), exact=True)
    assert_equal(x.grad, plain_x.grad, exact=True)
    assert_same_parameters(model.module, plain, exact=True)


def test_buffers_are_those_after_the_first_chunk():
    norm = nn.BatchNorm1d(6)
    x = make_batch(0, 0)
    dp.DataParallel(norm, TWO)(x)
    assert torch.equal(norm.running_mean, 0.1 * x[:3].mean(0))


def test_the_idea_has_the_output_of_the_class():
    module = make_model("plain")
    x = make_batch(0, 0)
    devices = ["cpu"] * 4  # three chunks
    model = dp.DataParallel(module, devices)
    assert torch.equal(dp.data_parallel(module, x, devices), model(x))


# ---- scatter and gather


def nested(x):
    row = x[:1]
    return [x, {"y": (row, None)}]  # what is no tensor goes to all devices


def test_containers_are_scattered_and_gathered_along_dim():
    x = torch.arange(10).view(2, 5)
    chunks = dp.scatter(nested(x), TWO, dim=1)
    joined = dp.gather(chunks, "cpu", dim=1)
    left = nested(x[:, :3])
    right = nested(x[:, 3:])
    assert str(chunks) == str([left, right])
    assert str(joined) == str(nested(x))


def test_tensors_of_different_numbers_of_chunks_are_an_error():
    x = torch.ones(5, 2)
    with pytest.raises(ValueError, match=r"2: \(5, 2\), 1: \(1, 2\)"):
        dp.scatter((x, x[:1]), TWO)


def test_what_is_no_tensor_goes_to_as_many_devices_as_there_are_chunks():
    x = torch.ones(1, 2)
    assert str(dp.scatter((x, "name"), TWO)) == str([(x, "name")])


def test_scalars_become_a_vector_with_a_warning():
    with pytest.warns(UserWarning, match="scalars"):
        joined = dp.gather([torch.tensor(1), torch.tensor(2)], "cpu")
    assert joined.tolist() == [1, 2]


# ---- replicas


@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_the_first_replica_shares_memory_and_the_second_is_a_copy(name):
    module = nn.BatchNorm1d(3)
    first, second = dp.replicate(module, TWO)
    address = getattr(module, name).data_ptr()
    assert getattr(first, name).data_ptr() == address
    assert getattr(second, name).data_ptr() != address


def test_a_replica_keeps_the_structure_of_the_module():
    module = nn.ModuleDict()
    module["twice"] = module["again"] = nn.Linear(4, 4, bias=False)
    replica = dp.replicate(module, TWO)[1]
    assert replica["twice"] is replica["again"] is not module["twice"]
    assert replica["twice"].bias is None


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_an_lstm_uses_the_weights_of_its_replica():
    replica = dp.replicate(nn.LSTM(6, 4), ["cpu", "meta"])[1]
    assert {weight.device.type for weight in replica._flat_weights} == {"meta"}


def test_sparse_embeddings_are_an_error():
    module = nn.Embedding(5, 2, sparse=True)
    with pytest.raises(ValueError, match="sparse=False"):
        dp.replicate(module, TWO)


# ---- calls


class Sees(nn.Module):
    """Notes (rows, scale, modes) of each call in a list that replicas share."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x=(), scale=1):
        modes = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), self.training]
        self.seen.append((len(x), scale, modes))
        return torch.ones(1)


def test_replicas_run_in_the_modes_of_the_calling_thread():
    model = dp.DataParallel(Sees(), TWO)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", bf16):
        model(torch.ones(5, 6), scale=2)
    modes = [False, True, False]
    assert sorted(model.module.seen) == [(2, 2, modes), (3, 2, modes)]


def test_a_module_runs_once_without_inputs_and_on_all_devices_without_tensors():
    model = dp.DataParallel(Sees(), ["cpu"] * 3)
    model()
    model(scale=4)
    assert [scale for _, scale, _ in model.module.seen] == [1, 4, 4, 4]


def test_replicas_run_at_the_same_time():
    barrier = threading.Barrier(3, timeout=30)
    inputs = [torch.ones(1)] * 3
    outputs = dp.parallel_apply([lambda _: barrier.wait()] * 3, inputs)
    assert sorted(outputs) == [0, 1, 2]


def fail(x):
    return 1 / x


def test_the_first_exception_is_raised_when_all_threads_have_ended():
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="replica 1 on device meta"):
        dp.parallel_apply(
            [fail] * 3,
            [1, 0, 0],
            devices=["cpu", "meta", "cpu"],
        )
    assert threading.active_count() == threads


class Calls(nn.Module):
    """Forward calls one of its methods."""

    def __init__(self, method):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.method = method

    def forward(self, x):
        method = getattr(self.layer, self.method)
        return x * len(list(method()))


@pytest.mark.parametrize("method", ["parameters", "named_parameters", "state_dict"])
def test_parameters_of_a_replica_are_an_error_because_there_are_none(method):
    x = torch.ones(2, 2)
    on_one_device = dp.DataParallel(Calls(method), ["cpu"])
    assert on_one_device(x).sum() == 8
    model = dp.DataParallel(Calls(method), TWO)
    with pytest.raises(RuntimeError, match=r"replica 0 .* no parameters\(\)"):
        model(x)
