"""data_parallel.py against one device that works through the same chunks."""

import copy
import dataclasses
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


def cpus(n):
    return ["cpu"] * n


@given(
    n=st.integers(1, 4),
    rows=st.integers(1, 9),
    kind=st.sampled_from(MODELS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_training_equals_one_device_chunk_by_chunk(n, rows, kind, dtype, optimizer):
    if kind == "batchnorm":
        rows = n * (1 + rows)  # a chunk of one row has no variance
    plain, model = make_model(kind, dtype), dp.DataParallel(make_model(kind, dtype), cpus(n))
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (plain, model)]
    for step in range(4):
        batch = make_batch(0, step, torch.float32 if kind == "mixed" else dtype, rows=rows)
        for o in optimizers:
            o.zero_grad()
        whole = model(batch)
        weights = torch.linspace(0.5, 2.0, whole.numel(), dtype=whole.dtype).view_as(whole)
        (whole * weights).sum().backward()
        outputs, buffers = [], None
        for chunk, weight in zip(batch.chunk(n), weights.chunk(n), strict=True):
            outputs.append(plain(chunk))
            (outputs[-1] * weight).sum().backward()
            if buffers is None:  # the first chunk's statistics are the ones that stay
                buffers = [buffer.clone() for buffer in plain.buffers()]
        for buffer, kept in zip(plain.buffers(), buffers, strict=True):
            buffer.copy_(kept)
        assert_equal(whole, torch.cat(outputs), exact=True, what="output")
        for o in optimizers:
            o.step()
        assert_same_parameters(model.module, plain, exact=True, what=f"step {step}")
        for a, b in zip(model.buffers(), plain.buffers(), strict=True):
            assert_equal(a, b, exact=True, what="buffer")


def test_on_a_machine_without_gpus_torchs_is_the_module_itself():
    if torch.cuda.is_available():
        pytest.skip("torch.nn.DataParallel uses the GPUs here; the next test compares with them")
    ours, theirs = dp.DataParallel(make_model("plain"), cpus(3)), nn.DataParallel(make_model("plain"))
    for model in (ours, theirs):
        model(make_batch(0, 0, rows=7)).square().mean().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_equals_torchs_on_gpus():
    results = []
    for make in (dp.DataParallel, nn.DataParallel):
        model = make(make_model("batchnorm").cuda())
        for step in range(3):
            model.zero_grad()
            model(make_batch(0, step, rows=8).cuda()).square().mean().backward()
        results.append(model.module)
    for a, b in zip(results[0].parameters(), results[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for a, b in zip(results[0].buffers(), results[1].buffers(), strict=True):
        torch.testing.assert_close(a, b)


# ---- scatter and gather


@dataclasses.dataclass
class Output:
    a: torch.Tensor
    b: list


@given(st.integers(1, 5), st.integers(1, 11), st.integers(0, 1))
def test_scatter_cuts_as_chunk_and_gather_puts_together(n, rows, dim):
    x = torch.arange(rows * 12.0).view((rows, 12) if dim == 0 else (12, rows))
    chunks = dp.scatter(x, cpus(n), dim)
    assert [c.tolist() for c in chunks] == [c.tolist() for c in x.chunk(n, dim)]
    assert torch.equal(dp.gather(chunks, "cpu", dim), x)


def test_scatter_of_nested_inputs():
    x, y, marker = torch.arange(5), torch.arange(10).view(5, 2), object()
    inputs = ((x, {"y": [y, None]}, Pair(x, "text"), OrderedDict(z=y)), {"marker": marker})
    first, second = dp.scatter(inputs, cpus(2))
    (a, more, pair, ordered), kwargs = second
    assert a.tolist() == [3, 4]
    assert more["y"][0].tolist() == [[6, 7], [8, 9]]
    assert more["y"][1] is None
    assert isinstance(pair, Pair)
    assert pair.b == "text"
    assert isinstance(ordered, OrderedDict)
    assert kwargs["marker"] is marker is first[1]["marker"]
    with pytest.raises(ValueError, match=r"\(5,\), \(1, 2\) do not make one number of chunks for 2 devices"):
        dp.scatter((x, torch.zeros(1, 2)), cpus(2))


def test_gather_of_nested_outputs():
    def output(i):
        return {"x": torch.full((2,), i), "more": (torch.full((1, 2), i), None), "d": Output(torch.full((1,), i), [])}

    together = dp.gather([output(0), output(1)], "cpu")
    assert together["x"].tolist() == [0, 0, 1, 1]
    assert together["more"][0].tolist() == [[0, 0], [1, 1]]
    assert together["more"][1] is None
    assert together["d"].a.tolist() == [0, 1]
    assert dp.gather([Pair(torch.zeros(1), torch.ones(1))] * 2, "cpu").b.tolist() == [1, 1]
    with pytest.warns(UserWarning, match="scalars"):
        assert dp.gather([torch.tensor(1), torch.tensor(2)], "cpu").tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"different keys: \[\['a'\], \['b'\]\]"):
        dp.gather([{"a": None}, {"b": None}], "cpu")
    with pytest.raises(TypeError, match="can't return int"):
        dp.gather([1, 2], "cpu")


def test_mean_of_losses_of_uneven_chunks_is_not_the_loss():
    model = dp.DataParallel(dp.LossInside(nn.Linear(3, 5)), cpus(2))
    inputs, targets = torch.randn(3, 1, 3), torch.randint(5, (3, 1))
    losses = model(inputs, targets)
    loss = dp.language_loss(model.module.model(inputs), targets)
    assert losses.shape == (2,)
    assert not torch.allclose(losses.mean(), loss)
    torch.testing.assert_close((2 * losses[0] + losses[1]) / 3, loss)


# ---- replicas


class Sees(nn.Module):
    """Records what reaches each replica."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.unused = nn.Linear(2, 2)
        self.seen = []  # shared by the replicas: the list is copied by reference

    def forward(self, x, scale=1, **kwargs):
        self.seen.append((threading.current_thread().name, x.shape[0], scale, torch.is_grad_enabled(), self.training))
        return self.linear(x) * scale


def test_each_replica_in_its_thread_with_its_rows():
    model = dp.DataParallel(Sees(), cpus(3))
    with torch.no_grad():
        model.eval()
        model(torch.ones(7, 6), scale=2)
    seen = sorted(model.module.seen, key=lambda s: s[1])
    assert [s[1:] for s in seen] == [(1, 2, False, False), (3, 2, False, False), (3, 2, False, False)]
    assert len({s[0] for s in seen}) == 3
    model.module.seen.clear()
    model(torch.ones(2, 6)).sum().backward()  # fewer rows than devices
    assert [s[1] for s in model.module.seen] == [1, 1]
    assert model.module.unused.weight.grad is None
    model.module.seen.clear()
    model(torch.ones(1, 6))
    assert model.module.seen[0][0] == "MainThread"


def test_gradients_reach_inputs_and_frozen_parameters_get_none():
    module = make_model("frozen")
    model, x, plain_x = dp.DataParallel(module, cpus(2)), make_batch(0, 0), make_batch(0, 0)
    plain = copy.deepcopy(module)
    x.requires_grad_()
    plain_x.requires_grad_()
    model(x).square().sum().backward()
    sum(plain(chunk).square().sum() for chunk in plain_x.chunk(2)).backward()
    assert torch.equal(x.grad, plain_x.grad)
    assert module[0].bias.grad is None
    assert module[2].weight.grad is None
    torch.testing.assert_close(module[0].weight.grad, plain[0].weight.grad)


def test_the_module_keeps_its_parameters_and_replicas_do_not_stay():
    replicas = []

    class Keeps(nn.Linear):
        def forward(self, x):
            replicas.append(weakref.ref(self))
            assert not any(isinstance(p, nn.Parameter) for p in (self.weight, self.bias))
            return super().forward(x)

    model = dp.DataParallel(Keeps(6, 2), cpus(2))
    model(make_batch(0, 0)).sum().backward()
    gc.collect()
    assert len(replicas) == 2
    assert all(replica() is None for replica in replicas)
    assert [name for name, _ in model.named_parameters()] == ["module.weight", "module.bias"]
    assert model.module.weight.grad.shape == (2, 6)


def test_buffers_of_device_0_stay_and_those_of_the_others_do_not():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 1)
            self.register_buffer("rows", torch.zeros(()))

        def forward(self, x):
            self.rows += x.shape[0]
            return self.linear(x)

    model = dp.DataParallel(Counts(), cpus(2))
    model(torch.ones(5, 6))
    assert model.module.rows.item() == 3
    model(torch.ones(5, 6))
    assert model.module.rows.item() == 6


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_modules_that_hold_their_weights_in_lists():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(6, 4, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.list = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
            self.shared = nn.ModuleList([nn.Linear(4, 4)])
            self.again = self.shared[0]

        def forward(self, x):
            x, _ = self.lstm(x)
            x, _ = self.attention(x, x, x, need_weights=False)
            return self.again(self.shared[0](x * self.list[0] + self.list[1]))

    torch.manual_seed(0)
    plain = Model()
    model = dp.DataParallel(copy.deepcopy(plain), cpus(2))
    x = torch.randn(4, 3, 6)
    model(x).square().sum().backward()
    for chunk in x.chunk(2):
        plain(chunk).square().sum().backward()
    for (name, a), (_, b) in zip(model.module.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda m, name=name: f"{name}: {m}")


def test_an_exception_in_a_replica_is_raised_again_with_its_device():
    class Breaks(nn.Linear):
        def forward(self, x):
            if x[0, 0] > 0:
                raise KeyError(x[0, 0].item())
            return super().forward(x)

    model = dp.DataParallel(Breaks(6, 2), cpus(3))
    before = threading.active_count()
    with pytest.raises(KeyError, match=r"Caught KeyError in replica 1 on device cpu: 1\.0"):
        model(torch.arange(3.0).view(3, 1).expand(3, 6))
    assert threading.active_count() == before
    model(torch.zeros(3, 6)).sum().backward()


def test_the_functions_take_what_torchs_take():
    modules = dp.replicate(nn.Linear(6, 2), cpus(2))
    x = torch.ones(4, 6)
    for inputs in (dp.scatter(x, cpus(2)), dp.scatter((x,), cpus(2))):
        outputs = dp.parallel_apply(modules, inputs)
        assert torch.equal(dp.gather(outputs, "cpu"), torch.cat([modules[0](chunk) for chunk in x.chunk(2)]))
    seen = dp.replicate(Sees(), cpus(2))
    dp.parallel_apply(seen, dp.scatter((x,), cpus(2)), [{"scale": 2}, {"scale": 3}], cpus(2))
    assert sorted(s[2] for s in seen[0].seen) == [2, 3]


def test_without_a_batch_to_cut():
    class Repeats(nn.Module):
        def __init__(self):
            super().__init__()
            self.row = nn.Parameter(torch.ones(1, 2))

        def forward(self, times=1):
            return self.row.expand(times, 2)

    model = dp.DataParallel(Repeats(), cpus(3))
    assert model().shape == (1, 2)  # nothing to share out: once
    assert model(2).shape == (6, 2)  # what is not a tensor goes to all, as in torch's


def test_replicas_have_the_structure_of_the_module():
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), None])
    module.again = module[0]
    module[1].weight.requires_grad_(False)
    for replica in dp.replicate(module, cpus(2)):
        assert replica.again is replica[0]
        assert replica[2] is None
        assert [replica[0].weight.requires_grad, replica[1].weight.requires_grad] == [True, False]
        assert not isinstance(replica[0].weight, nn.Parameter)


def test_autocast_reaches_the_threads():
    model = dp.DataParallel(nn.Linear(6, 2), cpus(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.ones(4, 6)).dtype == torch.bfloat16
    assert model(torch.ones(4, 6)).dtype == torch.float32


def test_wrong_devices():
    with pytest.raises(ValueError, match="devices is empty"):
        dp.DataParallel(nn.Linear(2, 2), [])
    model = dp.DataParallel(nn.Linear(2, 2), ["meta", "meta"])
    with pytest.raises(RuntimeError, match="'weight' is on cpu; the module must be on meta"):
        model(torch.ones(2, 2))


def test_what_travels_is_the_cost_in_the_docstring():
    for n in (2, 3):
        model = dp.DataParallel(dp.language_model(C=24, heads=2, layers=1, T=8), cpus(n))
        psi = sum(p.nbytes for p in model.parameters())
        tokens = torch.randint(256, (n, 9))
        assert dp.moved_bytes(model, tokens[:, :-1], tokens[:, 1:]) == 2 * psi * (n - 1)
        replicas = dp.replicate(model.module, [torch.device("cpu")] * n)
        assert all(
            a.data_ptr() == b.data_ptr() for a, b in zip(tensors_of(replicas[0]), model.parameters(), strict=True)
        )


def tensors_of(replica):
    return [t for module in replica.modules() for t in vars(module).values() if isinstance(t, torch.Tensor)]
