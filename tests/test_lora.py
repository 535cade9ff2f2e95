"""lora.py against dense weights W + (α/r) B A, peft and bitsandbytes."""

import copy
import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pool
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from shared import OPTIMIZERS, Collectives, assert_equal, assert_same_parameters, loss_of, make_batch

import ddp
import fsdp
import lora


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def fill(model, seed=5):
    """Give every adapter values, as if trained."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


class Net(nn.Module):
    """One layer of each kind; (B, T) integers to (B, 3, …)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.mlp = nn.ModuleDict({"up": nn.Linear(6, 10), "down": nn.Linear(10, 6, bias=False)})
        self.conv = nn.Conv2d(1, 3, (3, 2), stride=2, padding=1, dilation=(1, 2), padding_mode="circular")

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.mlp["down"](torch.tanh(self.mlp["up"](x)))
        return self.conv(x[:, None])


ALL = ["embed", "up", "down", "conv"]
TOKENS = torch.randint(1, 11, (4, 7), generator=torch.Generator().manual_seed(0))


def make_net(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return Net().to(dtype)


def train_step(model, *inputs):
    model.zero_grad()
    output = model(*inputs)
    loss_of(output).backward()
    return output


# ---- one layer


SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12))
BATCHES = st.sampled_from([(), (1,), (5,), (2, 3), (0, 4)])
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


@given(SIZES, st.sampled_from([0.5, 1, 16, 32]), st.booleans(), st.booleans(), BATCHES, DTYPES)
def test_forward_and_gradients_are_those_of_the_dense_weight(sizes, alpha, rslora, bias, batch, dtype):
    k, d, r = sizes
    base = nn.Linear(k, d, bias=bias).to(dtype)
    W, b = base.weight.detach().double(), base.bias.detach().double() if bias else None
    layer = lora.LoRALinear(base, r=r, lora_alpha=alpha, use_rslora=rslora)
    x = torch.randn(*batch, k, dtype=dtype, requires_grad=True)
    assert torch.equal(layer(x), F.linear(x, base.weight, base.bias))  # B = 0: bitwise
    fill(layer)
    A, B = (p["default"].detach().double().requires_grad_() for p in (layer.lora_A, layer.lora_B))
    x64 = x.detach().double().requires_grad_()
    scaling = alpha / r**0.5 if rslora else alpha / r
    y, expected = layer(x), F.linear(x64, W + scaling * B @ A, b)
    assert y.dtype == dtype
    assert y.shape == expected.shape
    naive = lora.naive_lora(x64, W, A, B, scaling) + (0 if b is None else b)
    assert torch.allclose(naive, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (y.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    unit = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]  # float64: 1e-12 in all
    pairs = [(y, expected), (x.grad, x64.grad), (layer.lora_A["default"].grad, A.grad)]
    for ours, theirs in [*pairs, (layer.lora_B["default"].grad, B.grad)]:
        bound = (
            10
            * unit
            * max([1.0, *theirs.detach().abs().flatten().tolist()])
            * max(1, scaling * (dtype != torch.float64))
        )
        assert torch.allclose(ours.double(), theirs, rtol=0, atol=bound)
    assert base.weight.grad is None
    assert layer.lora_A["default"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_at_the_start_the_output_is_bitwise_that_of_the_model(dtype, dora):
    plain = make_net(dtype)
    model = lora.inject_lora(copy.deepcopy(plain), target_modules=ALL, use_dora=dora)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    model = lora.inject_lora(copy.deepcopy(plain), target_modules=ALL, init_lora_weights="gaussian")
    assert torch.equal(model(TOKENS), plain(TOKENS))


LAYERS = [nn.Conv1d(4, 6, 3, stride=2, padding=1), nn.Conv2d(4, 6, (3, 2), padding="same", dilation=2, bias=False)]
LAYERS += [nn.Conv2d(4, 6, 1), nn.Conv3d(4, 6, 2, padding=1, padding_mode="reflect"), nn.Embedding(9, 4, padding_idx=2)]


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
@pytest.mark.parametrize("dora", [False, True])
def test_every_kind_equals_the_layer_with_its_dense_weight(layer, dora):
    layer = copy.deepcopy(layer).double()
    adapted = fill(lora.kind_of(layer)(layer, r=3, use_dora=dora))
    dense = copy.deepcopy(layer)
    dense.weight = nn.Parameter(adapted.weight.detach())
    sizes = [(2, 4, 7, 6, 5)[: layer.weight.dim()], (4, 7, 6, 5)[: layer.weight.dim() - 1]]  # without a batch as well
    inputs = [torch.randn(size).double() for size in sizes]
    if isinstance(layer, nn.Embedding):
        inputs = [torch.randint(3, 9, (3, 5))]
        assert torch.autograd.grad(adapted(torch.tensor([2])).sum(), adapted.lora_B["default"])[0].abs().max() == 0
    for x in inputs:
        assert_equal(adapted(x).detach(), dense(x).detach(), exact=False)
    # gradients of the factors, through the dense weight
    weights = torch.randn_like(adapted(inputs[0]))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    ours = torch.autograd.grad((adapted(inputs[0]) * weights).sum(), trained)
    through = torch.func.functional_call(dense, {"weight": adapted.weight}, inputs[0])
    theirs = torch.autograd.grad((through * weights).sum(), trained)
    for a, b in zip(ours, theirs, strict=True):
        assert_equal(a, b, exact=False)


def test_initial_factors():
    for init, std in ((True, (1 / 3 / 400) ** 0.5), ("gaussian", 1 / 50)):  # U(-1/√k, 1/√k); N(0, 1/r²)
        A = lora.LoRALinear(nn.Linear(400, 2), r=50, init_lora_weights=init).lora_A["default"]
        assert abs(A.std() / std - 1) < 0.03
        assert (A.abs().max() < 1 / 20) == (init is True)
    A = lora.LoRAEmbedding(nn.Embedding(3, 400), r=50).lora_A["default"]  # N(0, 1), as peft's
    assert abs(A.std() - 1) < 0.03


def test_dora_is_its_formula():
    base = nn.Linear(5, 4)
    base.weight.data[1] = 0  # a norm of zero
    assert torch.equal(lora.LoRALinear(base, use_dora=True)(torch.ones(5)), base(torch.ones(5)))
    layer = fill(lora.LoRALinear(nn.Linear(5, 4).double(), r=2, lora_alpha=6, use_dora=True))
    A, B, m = layer.lora_A["default"], layer.lora_B["default"], layer.lora_magnitude["default"]
    V = layer.base_layer.weight + 3 * B @ A
    expected = m[:, None] * V / V.detach().norm(dim=1, keepdim=True)  # the norm is a constant in backward
    x = torch.randn(3, 5).double()
    for ours, theirs in [(layer.weight, expected), (layer(x), F.linear(x, expected, layer.bias))]:
        assert_equal(ours.detach(), theirs.detach(), exact=False)
        grads = (torch.autograd.grad(y.square().sum(), (A, B, m), retain_graph=True) for y in (ours, theirs))
        for a, b in zip(*grads, strict=True):
            assert_equal(a, b, exact=False)


def test_dropout_is_before_A_only_and_off_in_eval():
    layer = fill(lora.LoRALinear(nn.Linear(50, 4).double(), lora_dropout=0.5))
    x = torch.randn(3, 50).double()
    torch.manual_seed(1)
    ours = layer(x)
    torch.manual_seed(1)
    A, B = layer.lora_A["default"], layer.lora_B["default"]
    assert_equal(ours, layer.base_layer(x) + 2 * F.dropout(x, 0.5) @ A.t() @ B.t(), exact=False)
    assert not torch.equal(layer(x), ours)
    assert torch.equal(layer.eval()(x), layer(x))
    assert_equal(layer(x), F.linear(x, layer.weight, layer.bias), exact=False)
    embedding = fill(lora.LoRAEmbedding(nn.Embedding(11, 4), lora_dropout=0.5))
    assert torch.equal(embedding(TOKENS), embedding(TOKENS))  # tokens are not dropped


def test_dora_rescales_what_dropout_leaves_of_W_x():
    layer = fill(lora.LoRALinear(nn.Linear(50, 4).double(), lora_dropout=0.5, use_dora=True))
    x, g = torch.randn(3, 50).double(), lora.dora_gain(layer)
    A, B, W = layer.lora_A["default"], layer.lora_B["default"], layer.base_layer.weight
    torch.manual_seed(1)
    ours = layer(x)
    torch.manual_seed(1)
    dropped = F.dropout(x, 0.5)
    assert_equal(
        ours, layer.base_layer(x) + (g - 1) * (dropped @ W.t()) + g * 2 * (dropped @ A.t() @ B.t()), exact=False
    )
    with torch.no_grad():
        B.zero_()
        layer.lora_magnitude["default"].copy_(lora.channel_norm(layer))
    assert torch.equal(layer(x), layer.base_layer(x))  # at the start


class ReluLinear(nn.Linear):
    def forward(self, x):
        return F.relu(super().forward(x))  # which keeps its output for backward


@pytest.mark.parametrize("kind", [nn.Linear, ReluLinear])
def test_the_output_of_the_base_layer_is_its_own(kind):
    layer, held = fill(lora.LoRALinear(kind(4, 3).double(), r=2)), []
    layer.base_layer.register_forward_hook(lambda module, inputs, output: held.append(output))
    other = lora.LoRALinear(kind(4, 3))
    other.base_layer.register_full_backward_hook(lambda *gradients: None)
    other(torch.ones(1, 4, requires_grad=True)).sum().backward()
    x = torch.randn(2, 5, 4).double().requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert torch.equal(held[0], layer.base_layer(x.flatten(0, 1)))
    assert_equal(y, layer.base_layer(x) + 8 * x @ layer.lora_A["default"].t() @ layer.lora_B["default"].t(), False)


def test_embeddings_scale_gradients_by_frequency():
    layer = fill(lora.LoRAEmbedding(nn.Embedding(9, 4, scale_grad_by_freq=True).double(), r=2))
    layer(torch.tensor([1, 1, 1, 2])).sum().backward()
    gradient = layer.lora_B["default"].grad
    assert_equal(gradient[1], gradient[2], exact=False)


def test_a_frozen_layers_input_is_not_kept_and_no_tensor_of_the_outputs_size_is():
    layer = lora.LoRALinear(nn.Linear(40, 4000), r=2)
    saved = []
    x = torch.randn(300, 40, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        layer(x)
    assert max(saved) == layer.base_layer.weight.numel()  # 300 · 4000 would be the output


def test_autocast_and_strided_inputs():
    layer, x = nn.Linear(6, 5), torch.randn(6, 2, 3).permute(1, 2, 0)
    adapted = lora.LoRALinear(copy.deepcopy(layer), r=2)
    assert torch.equal(adapted(x), layer(x))
    strided = fill(copy.deepcopy(adapted).double())
    for other in (x.double(), torch.randn(4, 12).double()[:, ::2], torch.randn(12).double()[::2]):
        assert_equal(strided(other), F.linear(other, strided.weight, strided.bias), exact=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(adapted(x), layer(x))
        fill(adapted)(x).sum().backward()
        assert lora.LoRALinear(layer, use_dora=True)(x).dtype == torch.bfloat16
    assert adapted.lora_A["default"].grad.dtype == torch.float32


UNUSABLE = [{"r": 0}, {"r": 2.5}, {"r": True}, {"lora_dropout": 1.0}, {"lora_dropout": -0.1}, {"quantize": "int8"}]
UNUSABLE += [{"quantize": "nf4"}, *({"adapter_name": name} for name in ("a.b", "values", "training", "", None))]
UNUSABLE += [{"target_modules": wanted} for wanted in ("(", None, [1])]


@pytest.mark.parametrize("arguments", UNUSABLE, ids=str)
def test_unusable_arguments_leave_the_model_alone(arguments):
    model = make_net()
    if "quantize" in arguments:  # found in the second of two
        model.mlp["down"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=next(iter(arguments))):
        lora.inject_lora(model, **arguments)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(isinstance(layer, lora.LoRALayer) for layer in model.modules())
    with pytest.raises(ValueError, match="init_lora_weights"):
        lora.inject_lora(model, init_lora_weights="pissa")


def test_factors_are_where_the_weight_is():  # on the CPU only meta shows it
    for arguments in ({"use_dora": True}, {"quantize": "nf4", "double_quant": True}):
        model = make_net().to("meta" if "use_dora" in arguments else "cpu")
        lora.inject_lora(model, target_modules=ALL, **arguments).to("meta")
        assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


# ---- injection


def trained_names(model):
    return {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}


TARGETS = [
    ("all-linear", {"0.linear1", "0.linear2", "1.head.linear1"}),
    (["linear1"], {"0.linear1", "1.head.linear1"}),
    (("head.linear1",), {"1.head.linear1"}),
    ({"0.linear2"}, {"0.linear2"}),
    (["ear1", "0.linear2"], {"0.linear2"}),
    (r"\d\.linear\d", {"0.linear1", "0.linear2"}),
    (r"0\.linear|1\.head\.linear1", {"1.head.linear1"}),
    (["out_proj"], {"0.self_attn.out_proj"}),
]


@pytest.mark.parametrize(("target_modules", "expected"), TARGETS)
def test_target_modules(target_modules, expected):
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    head = nn.ModuleDict({"head": nn.ModuleDict({"linear1": nn.Linear(8, 8)})})
    model = nn.ModuleList([block, head])
    assert lora.inject_lora(model, target_modules=target_modules) is model
    assert trained_names(model) == expected


def test_names_are_whole_and_adapted_layers_are_not_looked_into():
    model = nn.ModuleDict({"a_b": nn.Linear(2, 2), "a": nn.ModuleDict({"b": nn.Linear(2, 2), "bc": nn.Linear(2, 2)})})
    assert trained_names(lora.inject_lora(model, target_modules=["a.b"])) == {"a.b"}
    lora.inject_lora(model, adapter_name="second")
    assert trained_names(model) == {"a_b", "a.b", "a.bc"}
    assert type(model["a"]["b"].base_layer) is nn.Linear


REFUSED = [
    (["q_proj"], {}, r"\['q_proj'\] finds no layer; there are embed, mlp.up, mlp.down, conv"),
    (".*_proj", {}, "finds no layer"),
    (["mlp"], {}, "mlp is a ModuleDict, not one of Linear, Embedding, Conv1d"),
    (["out_proj"], {"lora_dropout": 0.1}, r"only reads attention\.out_proj\.weight"),
    (["out_proj"], {"quantize": "nf4"}, r"only reads attention\.out_proj\.weight"),
    (["grouped"], {}, "grouped has 2 groups"),
]


@pytest.mark.parametrize(("target_modules", "arguments", "message"), REFUSED)
def test_what_cannot_be_adapted_is_named(target_modules, arguments, message):
    model = make_net()
    if "finds" not in message:
        model.attention, model.grouped = nn.MultiheadAttention(8, 2), nn.Conv1d(4, 4, 1, groups=2)
    with pytest.raises(ValueError, match=message):
        lora.inject_lora(model, target_modules=target_modules, **arguments)
    assert all(p.requires_grad for p in model.parameters())


def test_one_layer_in_two_places_stays_one_and_tied_weights_stay_tied():
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.Sequential(shared), nn.Embedding(6, 6), nn.Linear(6, 6))
    model[2].weight = model[3].weight
    lora.inject_lora(model, target_modules=["0", "2"])
    assert isinstance(model[0], lora.LoRALinear)
    assert model[0] is model[1][0]
    before = model[3].weight.detach().clone()
    fill(model)
    lora.merge(model)
    assert torch.equal(model[3].weight, before)  # the adapter of the embedding is not one of the head
    assert not torch.equal(model[2].base_layer.weight, before)
    lora.unmerge(model)
    assert model[2].base_layer.weight is model[3].weight
    assert len([p for p in model.parameters() if p.requires_grad]) == 4


@pytest.mark.parametrize("target", ["linear1", "linear2", "out_proj"])
@pytest.mark.parametrize("grad", [False, True])
def test_modules_that_read_weights_without_calling_see_the_adapter(target, grad):
    """nn.TransformerEncoderLayer takes a fast path in eval without gradients; nn.MultiheadAttention always reads."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).double()
    model = fill(lora.inject_lora(copy.deepcopy(block), r=2, target_modules=[target]))
    plain, path = copy.deepcopy(block), "self_attn.out_proj" if target == "out_proj" else target
    plain.get_submodule(path).weight = nn.Parameter(model.get_submodule(path).weight.detach())
    x = torch.randn(2, 5, 8).double()
    for training in (True, False):
        with torch.set_grad_enabled(grad):
            ours, theirs = model.train(training)(x), plain.train(training)(x)
        assert_equal(ours.detach(), theirs.detach(), exact=False)
        lora.set_adapter(model, None)
        with torch.set_grad_enabled(grad):
            assert_equal(model(x).detach(), block.train(training)(x).detach(), exact=False)
        lora.set_adapter(model, "default")
        assert not torch.allclose(ours, block(x))
        if grad:
            ours.square().sum().backward()
            assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("r", [1, 4, 8])
def test_gpt3_parameters(r):
    assert lora.gpt3_parameters(r) == {1: 4_718_592, 4: 18_874_368, 8: 37_748_736}[r]


# ---- training


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_equals_training_the_factors_of_dense_weights(optimizer):
    """Three kinds of layers in one model; the plain one computes with W + (α/r) B A by torch.func.functional_call."""
    plain, model = make_net(), lora.inject_lora(make_net(), r=3, lora_alpha=2, target_modules=ALL)
    layers = lora.lora_layers(model)
    ours = [p["default"] for layer in layers.values() for p in (layer.lora_A, layer.lora_B)]
    flat = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = [OPTIMIZERS[optimizer](parameters) for parameters in (ours, flat)]
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    for step in range(5):
        weights = {}
        for path, A, B in zip(layers, flat[::2], flat[1::2], strict=True):
            W = plain.get_parameter(f"{path}.weight").detach()
            weights[f"{path}.weight"] = W + 2 / 3 * (B.flatten(1) @ A.flatten(1)).view(W.shape)
        optimizers[1].zero_grad()
        loss_of(torch.func.functional_call(plain, weights, TOKENS.roll(step))).backward()
        train_step(model, TOKENS.roll(step))
        for a, b in zip(ours, flat, strict=True):
            assert_equal(a.grad, b.grad, exact=False)
        for o in optimizers:
            o.step()
        for a, b in zip(ours, flat, strict=True):
            assert_equal(a.detach(), b.detach(), exact=False)
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name in frozen)
        assert name not in frozen or torch.equal(p, frozen[name])


# ---- merging, several adapters


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_merge_and_unmerge(dora, quantize, dtype):
    model = fill(lora.inject_lora(make_net(dtype), target_modules=ALL, use_dora=dora, quantize=quantize)).eval()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        output = model(TOKENS)
        lora.merge(model)
        merged = model(TOKENS)
        assert torch.equal(model.train()(TOKENS), merged)
    assert torch.equal(model.eval()(TOKENS), merged)  # a gradient may be wanted of the input
    for layer in lora.lora_layers(model).values():
        assert layer.base_layer.weight.dtype == dtype  # dense, also where W was quantised
        assert not layer.base_layer.weight.requires_grad
        assert not torch.equal(layer.base_layer.weight, layer.unmerged[0]) if quantize is None else True
    scale = output.double().abs().max()
    assert (merged - output).abs().max() <= (1e-12 if dtype == torch.float64 else 2**-5) * scale
    with pytest.raises(ValueError, match=r"merged already: embed, mlp.up, .*unmerge\(model\) first"):
        lora.merge(model)
    model.train()
    with pytest.raises(ValueError, match="'default' is merged"):
        model(TOKENS)
    with pytest.raises(ValueError, match="merged already"):
        lora.set_adapter(model, None)
    with pytest.raises(ValueError, match="embed is merged"):
        lora.inject_lora(model, target_modules=ALL, adapter_name="second")
    lora.unmerge(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    with torch.no_grad():
        assert torch.equal(model.eval()(TOKENS), output)
    with pytest.raises(ValueError, match="not merged"):
        lora.unmerge(model)
    with pytest.raises(ValueError, match="no adapters"):
        lora.merge(make_net())


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_what_is_unmerged_is_where_the_model_is_and_in_its_dtype(quantize):
    tied = nn.Linear(64, 64)
    for move in ({"dtype": torch.float16}, {"device": "meta"}):
        model = nn.Sequential(copy.deepcopy(tied), nn.Linear(64, 64))
        model[1].weight = model[0].weight
        model = lora.inject_lora(model, target_modules=["0"], quantize=quantize)
        lora.merge(model)
        lora.unmerge(model.to(**move))
        weight, bias = model[0].base_layer.weight, model[0].base_layer.bias
        assert (weight.dtype, weight.device, model[0].weight.dtype) == (bias.dtype, bias.device, bias.dtype)
        assert (weight is model[1].weight) == (quantize is None and "dtype" in move)
        assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())


def test_several_adapters_switched_by_name():
    plain = make_net()
    model = fill(lora.inject_lora(copy.deepcopy(plain), target_modules=["up"]))
    first = model(TOKENS)
    lora.inject_lora(model, r=2, target_modules=["up", "conv"], adapter_name="second", use_dora=True)
    assert torch.equal(model(TOKENS), plain(TOKENS))  # a new one starts from the model without any
    assert trained_names(model) == {"mlp.up", "conv"}
    second = fill(model)(TOKENS)
    train_step(model, TOKENS)
    assert model.mlp["up"].lora_A["default"].grad is None
    lora.set_adapter(model, "default")
    assert trained_names(model) == {"mlp.up"}
    fill(model, seed=0)
    third = model(TOKENS)
    lora.set_adapter(model, None)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    assert trained_names(model) == set()
    lora.set_adapter(model, "default")
    assert torch.equal(model(TOKENS), third)
    assert not torch.equal(third, first)
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match="no adapter 'third'; there are default, second"):
        lora.set_adapter(model, "third")
    lora.inject_lora(model, target_modules=["down"], adapter_name="fourth")  # elsewhere: switches all others off
    assert torch.equal(model(TOKENS), plain(TOKENS))
    assert trained_names(model) == {"mlp.down"}
    with pytest.raises(ValueError, match=r"mlp\.up has an adapter 'default' already"):
        lora.inject_lora(model, target_modules=["up"])
    with pytest.raises(ValueError, match=r"mlp\.up has an adapter 'default' of another configuration, .*r=8.*r=4"):
        lora.inject_lora(model, r=4, target_modules=["embed"])
    lora.set_adapter(model, "default")
    lora.merge(model)
    with pytest.raises(ValueError, match=r"mlp\.up is merged; unmerge\(model\) first"):
        lora.inject_lora(model, target_modules=["embed"], adapter_name="fifth")
    assert type(model.embed) is nn.Embedding


# ---- files


def test_keys_and_fields_are_peft_s(tmp_path):
    model = fill(lora.inject_lora(make_net(), r=2, target_modules=ALL, use_dora=True))
    saved = lora.adapter_state_dict(model)
    expected = {"embed.lora_embedding_A": (2, 11), "embed.lora_embedding_B": (6, 2), "conv.lora_A.weight": (2, 1, 3, 2)}
    expected |= {"mlp.up.lora_A.weight": (2, 6), "mlp.up.lora_B.weight": (10, 2), "mlp.up.lora_magnitude_vector": (10,)}
    expected |= {"mlp.down.lora_A.weight": (2, 10), "mlp.down.lora_B.weight": (6, 2)}
    expected |= {"mlp.down.lora_magnitude_vector": (6,), "conv.lora_magnitude_vector": (1, 3, 1, 1)}
    expected |= {"embed.lora_magnitude_vector": (6,), "conv.lora_B.weight": (3, 2, 1, 1)}
    assert {key: tuple(t.shape) for key, t in saved.items()} == {
        f"base_model.model.{k}": s for k, s in expected.items()
    }
    lora.save_adapter(model, tmp_path / "new" / "folder")
    fields = json.loads((tmp_path / "new" / "folder" / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "r": 2, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": ALL}
    expected |= {"use_rslora": False, "use_dora": True, "bias": "none", "init_lora_weights": True, "task_type": None}
    assert expected.items() <= fields.items()
    assert not {"quantize", "double_quant", "adapter_name"} & fields.keys()


@pytest.mark.parametrize("target_modules", ["all-linear", "embed|conv", ("up", "conv"), {"up"}])
@pytest.mark.parametrize("injected", [False, True])
def test_an_adapter_is_loaded_as_it_was_saved(tmp_path, target_modules, injected):
    arguments = {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": target_modules}
    model = fill(lora.inject_lora(make_net(), **arguments, adapter_name="ours")).eval()
    lora.save_adapter(model, tmp_path)
    (tmp_path / "adapter_model.old").write_text("")
    lora.save_adapter(model, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # nothing stale
    if target_modules == "all-linear":  # a word that peft knows for some models only
        assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == r"mlp\.up|mlp\.down"
    other = make_net()
    if injected:
        lora.inject_lora(other, **{**arguments, "lora_alpha": 1}, adapter_name="mine")
    assert lora.load_adapter(other, tmp_path, adapter_name="mine") is other
    assert torch.equal(other.eval()(TOKENS), model(TOKENS))  # with the file's α
    assert trained_names(other) == trained_names(model)
    lora.load_adapter(fill(other), tmp_path, adapter_name="beside")
    assert torch.equal(other(TOKENS), model(TOKENS))
    assert {name.rpartition(".")[2] for name, p in other.named_parameters() if p.requires_grad} == {"beside"}
    lora.merge(other)
    with pytest.raises(ValueError, match="merged already"):
        lora.load_adapter(other, tmp_path, adapter_name="mine")


def test_an_adapter_injected_in_two_parts_is_saved_as_one(tmp_path):
    model = lora.inject_lora(make_net(), r=2, target_modules=["up"])
    lora.save_adapter(fill(lora.inject_lora(model, r=2, target_modules=["conv"])), tmp_path)
    assert torch.equal(lora.load_adapter(make_net(), tmp_path)(TOKENS), model(TOKENS))


UP, BASE = "base_model.model.mlp.up.lora_A.weight", "base_model.model.embed.base_layer.weight"


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('ran')",)


SPOILT = [
    (lambda f, t: t.pop(UP), r"mlp\.up\.lora_A\.weight is missing in the file, \(2, 6\) in the model"),
    (
        lambda f, t: t.update({"base_model.model.x": torch.ones(1)}),
        r"base_model\.model\.x is \(1,\) in the file, missing in the model",
    ),
    (
        lambda f, t: t.update({BASE: torch.ones(11, 6)}),
        r"embed\.base_layer\.weight is \(11, 6\) in the file, missing in the model",
    ),
    (lambda f, t: f.update(r=4), r"up\.lora_A\.weight is \(2, 6\) in the file, \(4, 6\) in the model; .*lora_B"),
    (lambda f, t: f.update(alpha_pattern={"up": 3}), r"not supported: alpha_pattern \{'up': 3\}"),
    (lambda f, t: f.update(peft_type="IA3"), "peft_type 'IA3'"),
    (lambda f, t: f.update(bias="all"), "bias 'all'"),
    (lambda f, t: f.update(init_lora_weights="pissa"), "not supported: init_lora_weights 'pissa'"),
    (lambda f, t: f.update(target_modules=["q_proj"]), "q_proj"),
    (lambda f, t: t.update(evil=Evil()), "(?i)weights.only"),
    *((lambda f, t, n=name: f.update({n: True}), f"not supported: {name} True") for name in lora.UNSUPPORTED),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT)
def test_a_file_that_does_not_fit_is_refused(tmp_path, spoil, message, monkeypatch):
    monkeypatch.setattr(lora, "safetensors", None)
    lora.save_adapter(fill(lora.inject_lora(make_net(), r=2, target_modules=["embed", "up"])), tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    tensors = torch.load(tmp_path / "adapter_model.bin")
    spoil(fields, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    torch.save(tensors, tmp_path / "adapter_model.bin")
    model, plain = make_net(), make_net()
    with pytest.raises((ValueError, pickle.UnpicklingError), match=message):
        lora.load_adapter(model, tmp_path)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(p.requires_grad for p in model.parameters())
    adapted = fill(lora.inject_lora(plain, target_modules=["up"], adapter_name="first"))
    before, names = adapted(TOKENS), [*adapted.state_dict()]
    with pytest.raises((ValueError, pickle.UnpicklingError), match=message):
        lora.load_adapter(adapted, tmp_path)
    assert torch.equal(adapted(TOKENS), before)
    assert [*adapted.state_dict()] == names
    assert trained_names(adapted) == {"mlp.up"}


def test_a_base_model_of_other_shapes_and_a_missing_package(tmp_path, monkeypatch):
    monkeypatch.setattr(lora, "safetensors", None)
    lora.save_adapter(lora.inject_lora(nn.Sequential(nn.Linear(6, 5)), r=2), tmp_path)
    with pytest.raises(ValueError, match=r"0\.lora_A\.weight is \(2, 6\) in the file, \(2, 7\) in the model"):
        lora.load_adapter(nn.Sequential(nn.Linear(7, 5)), tmp_path)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    key = "base_model.model.0.base_layer.weight"
    torch.save(torch.load(tmp_path / "adapter_model.bin") | {key: model[0].weight}, tmp_path / "adapter_model.bin")
    fields = json.loads((tmp_path / "adapter_config.json").read_text()) | {"target_modules": ["0"]}
    fields |= {"alpha_pattern": {}, "fan_in_fan_out": False, "layer_replication": None}  # as peft writes what is unused
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    lora.load_adapter(model, tmp_path)  # a weight of the base model, as peft saves for embeddings, but the same
    with pytest.raises(ValueError, match="no adapter 'x'"):
        lora.save_adapter(model, tmp_path, "x")
    (tmp_path / "adapter_model.bin").rename(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ImportError, match="pip install safetensors"):
        lora.load_adapter(model, tmp_path)


@needs("peft")
@pytest.mark.filterwarnings("ignore:.*eva")
@pytest.mark.parametrize("init", [False, "orthogonal", "eva"])
def test_how_peft_has_initialised_an_adapter_is_of_no_account(tmp_path, init):
    import peft

    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=init)
    theirs = fill(peft.get_peft_model(make_net(), config))
    theirs.save_pretrained(tmp_path)
    assert_equal(lora.load_adapter(make_net(), tmp_path)(TOKENS), theirs(TOKENS), exact=False)


@needs("peft")
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_loads_ours_and_we_load_peft_s(tmp_path, dora, rslora, monkeypatch):
    import peft

    targets = ["embed", "up", "down", "conv"]
    plain = make_net()
    plain.conv = nn.Conv2d(1, 3, 3, stride=2, padding=1).double()  # peft's convolutions do not dilate
    arguments = {"r": 2, "lora_alpha": 6, "use_dora": dora, "use_rslora": rslora, "target_modules": targets}
    ours = fill(lora.inject_lora(copy.deepcopy(plain), **arguments)).eval()
    with monkeypatch.context() as without:
        without.setattr(lora, "safetensors", None if rslora else lora.safetensors)  # peft reads .bin as well
        lora.save_adapter(ours, tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "ours").eval()
    assert_equal(ours(TOKENS).detach(), theirs(TOKENS).detach(), exact=False)
    assert not torch.allclose(plain(TOKENS), ours(TOKENS), atol=1e-2)
    theirs = fill(peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(**arguments))).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = lora.load_adapter(copy.deepcopy(plain), tmp_path / "theirs").eval()
    assert_equal(ours(TOKENS).detach(), theirs(TOKENS).detach(), exact=False)
    assert sorted(peft.get_peft_model_state_dict(theirs)) == sorted(lora.adapter_state_dict(ours))
    for model in (ours, theirs):  # and the gradients
        train_step(model.train(), TOKENS)
    grads = lora.adapter_state_dict(ours, state_dict={name: p.grad for name, p in ours.named_parameters()})
    gradients = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    for name, gradient in grads.items():
        assert_equal(gradient, gradients.pop(name if name in gradients else f"{name}.weight"), False, name)
    assert not gradients


# ---- NF4


@given(st.integers(1, 700), st.sampled_from([32, 64, 256]), st.booleans(), st.integers(0, 10**6))
def test_nf4_rounds_to_the_nearest_value_of_each_block(n, block_size, double_quant, seed):
    weight = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 5 - 2)
    quantized = lora.quantize_nf4(weight, block_size, double_quant)
    values, rounded = torch.tensor(lora.NF4_VALUES), lora.dequantize_nf4(quantized)
    assert rounded.shape == weight.shape
    assert quantized.packed.numel() == (n + 1) // 2
    for i in range(0, n, block_size):
        block, got = weight[i : i + block_size], rounded[i : i + block_size]
        absmax = block.abs().max()
        if double_quant:  # the scale itself is rounded: the codes are those of the exact one
            plain = lora.quantize_nf4(weight, block_size)
            assert torch.equal(plain.packed, quantized.packed)
            continue
        nearest = (block[:, None] / absmax - values).abs().min(1).values
        assert torch.allclose((block - got).abs() / absmax, nearest, atol=1e-6)
        assert (block - got).abs().max() <= 0.5 * values.diff().max() * absmax * 1.000001
        order = block.argsort()
        assert (got[order].diff() >= 0).all()  # monotone


def test_nf4_values_survive_and_the_first_is_in_the_high_half():
    weight = torch.tensor(lora.NF4_VALUES) * 3
    quantized = lora.quantize_nf4(torch.cat([weight, weight.flip(0), weight, weight]))
    assert torch.equal(lora.dequantize_nf4(quantized)[:16], weight)
    assert quantized.packed[:8].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    values = torch.tensor(lora.NF4_VALUES)
    ties = torch.cat([(values[:-1] + values[1:]) / 2, torch.ones(1)])
    assert lora.quantize_nf4(ties).packed.tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]  # to the lower
    assert set(lora.quantize_nf4(torch.zeros(65)).packed.tolist()) == {0x77}
    odd = lora.quantize_nf4(torch.ones(3, 3))
    assert odd.packed.tolist() == [0xFF] * 4 + [0xF7]  # the missing one is a zero


@pytest.mark.parametrize("n", [2**21 + 64 * 5 + 7, 2**19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("double_quant", [False, True])
def test_dequantised_values_are_code_times_scale_rounded_once(n, dtype, double_quant):
    """Across chunks and tails, against the definition one nibble at a time."""
    q = lora.quantize_nf4(torch.randn(n).to(dtype), double_quant=double_quant)
    nibbles = torch.stack([q.packed >> 4, q.packed & 15], 1).flatten()[:n]
    absmax = q.absmax
    if double_quant:
        blocks = torch.arange(len(absmax)) // 256
        absmax = lora.dynamic_map(q.device)[absmax.long()] * q.scales[blocks] + q.mean
    expected = torch.tensor(lora.NF4_VALUES)[nibbles.long()] * absmax.repeat_interleave(64)[:n]
    assert torch.equal(lora.dequantize_nf4(q), expected.to(dtype))
    assert lora.dequantize_nf4(q, torch.float16).dtype == torch.float16


def test_nf4_takes_4_127_bits_a_parameter():
    weight = torch.randn(1024, 4096)
    for double_quant, bits in ((False, 4.5), (True, 4 + 8 / 64 + 32 / (64 * 256))):
        quantized = lora.quantize_nf4(weight, double_quant=double_quant)
        held = sum(tensor.untyped_storage().nbytes() for tensor in quantized.buffers())
        assert abs(8 * held / weight.numel() - bits) < 1e-5
    assert round(bits, 3) == 4.127
    exact = lora.quantize_nf4(weight).absmax
    scales = quantized.scales.repeat_interleave(256)
    rounded = lora.dynamic_map(quantized.device)[quantized.absmax.long()] * scales + quantized.mean
    assert ((rounded - exact).abs() <= 0.0704 / 2 * scales * 1.001).all()  # half the widest gap of the 8-bit values


@pytest.mark.parametrize("block_size", [32, 64, 128, 256, 512, 1024, 2048, 4096])
def test_any_dtype_is_quantised_in_fp32_and_no_padding_is_held(block_size):
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        weight = torch.randn(5001, generator=torch.Generator().manual_seed(0)).to(dtype)
        for double_quant in (False, True):
            ours, exact = (lora.quantize_nf4(w, block_size, double_quant) for w in (weight, weight.float()))
            for name, buffer in exact.named_buffers():
                assert buffer.untyped_storage().nbytes() == buffer.nbytes
                assert getattr(ours, name).dtype == buffer.dtype
                assert torch.equal(getattr(ours, name), buffer)


def test_nf4_rounds_as_bitsandbytes_does():
    weight = torch.randn(64 * 3000, generator=torch.Generator().manual_seed(0))
    plain, double = (lora.quantize_nf4(weight, double_quant=d) for d in (False, True))
    assert torch.equal(double.mean, plain.absmax.mean(0, keepdim=True))
    values = torch.tensor(lora.NF4_VALUES)
    middle = (values[:-1] + values[1:]) / 2
    for absmax in torch.tensor(
        [3.0, 7.0, 11.0, 0.3, 0.7]
    ):  # edges by the product with the reciprocal, not the quotient
        for x in middle * absmax:
            code = lora.quantize_nf4(torch.stack([absmax, x])).packed[0].item() & 15
            assert code == torch.bucketize(x * (1 / absmax), middle)
    values = lora.dynamic_map(torch.device("cpu"))  # its create_dynamic_map()
    assert len(values) == 256
    assert values[:1].tolist() == pytest.approx([-0.99296875])
    assert values[127:130].tolist() == pytest.approx([0.0, 5.5e-7, 3.25e-6])
    assert values[253:].tolist() == pytest.approx([0.97890625, 0.99296875, 1.0])


def test_tables_are_float32():
    torch.set_default_dtype(torch.float64)
    try:
        for table in (lora.nf4_quads, lora.dynamic_map):  # without their caches
            assert torch.equal(table.__wrapped__(torch.device("cpu")), table(torch.device("cpu")))
        assert lora.quantize_nf4(torch.ones(64)).absmax.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_cannot_be_quantised():
    for weight in (torch.ones(0), torch.arange(9), torch.tensor([1.0, float("nan")])):
        with pytest.raises(ValueError, match="a weight of"):
            lora.quantize_nf4(weight)
    with pytest.raises(ValueError, match="block_size is 48"):
        lora.quantize_nf4(torch.ones(8), 48)


@needs("bitsandbytes")
def test_nf4_is_byte_for_byte_bitsandbytes():
    import bitsandbytes.functional as bnb

    for n in (64, 4096, 64 * 256 * 3, 100_002, 12_345):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            weight = (0.05 * torch.randn(n)).to(dtype)
            packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
            ours = lora.quantize_nf4(weight)
            assert torch.equal(packed.flatten(), ours.packed)
            assert torch.equal(state.absmax, ours.absmax)
            assert torch.equal(bnb.dequantize_4bit(packed, state).flatten(), lora.dequantize_nf4(ours))
            packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
            ours = lora.quantize_nf4(weight, double_quant=True)
            assert torch.equal(state.state2.code, lora.dynamic_map(weight.device))
            assert torch.equal(state.state2.absmax, ours.scales)
            # its CPU kernel finds the 8-bit code through a table of 2^16: it may take one nearly as near
            theirs, codes = (state.state2.code[absmax.int()] for absmax in (state.absmax, ours.absmax))
            close = (state.absmax.int() - ours.absmax.int()).abs() <= 1
            assert (close | ((theirs - codes).abs() <= 2**-15)).all() or n == 64


# ---- QLoRA


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_quantised_layer_is_the_layer_with_the_rounded_weight(bias, dtype):
    base = nn.Linear(37, 23, bias=bias).to(dtype)
    rounded = lora.dequantize_nf4(lora.quantize_nf4(base.weight))
    plain = copy.deepcopy(base)
    plain.weight = nn.Parameter(rounded)
    quantised, adapted = (fill(lora.LoRALinear(b, r=2, quantize=q)) for b, q in ((base, "nf4"), (plain, None)))
    for layer in (adapted, quantised):
        layer.lora_A["default"].data.copy_(adapted.lora_A["default"])
    x = torch.randn(2, 5, 37, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [train_step(layer, i) for layer, i in zip((quantised, adapted), inputs, strict=True)]
    assert torch.equal(*outputs)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for factor in ("lora_A", "lora_B"):
        assert torch.equal(getattr(quantised, factor)["default"].grad, getattr(adapted, factor)["default"].grad)
    names = {name for name, _ in quantised.named_parameters()} - {"base_layer.bias"}
    assert names == {"lora_A.default", "lora_B.default"}


def test_a_cast_quantised_layer_is_of_that_dtype():
    block = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True)
    model, x = lora.inject_lora(block, quantize="nf4").bfloat16().eval(), torch.randn(2, 5, 64).bfloat16()
    assert model.linear1.weight.dtype == model.linear1.base_layer.weight.dtype == torch.bfloat16
    for step in (lambda model: None, lora.merge):
        step(model)
        for grad in (True, False):  # without: the path that reads .weight
            with torch.set_grad_enabled(grad):
                assert model(x).dtype == torch.bfloat16
    assert model.linear1.base_layer.weight.dtype == torch.bfloat16


def test_a_quantised_layer_takes_an_input_of_another_dtype():
    layer, x = lora.LoRALinear(nn.Linear(64, 48, bias=False), quantize="nf4"), torch.randn(3, 64).bfloat16()
    layer(x.requires_grad_()).sum().backward()
    weight = lora.dequantize_nf4(layer.base_layer.weight, torch.bfloat16)
    assert torch.equal(x.grad, torch.ones(3, 48).bfloat16() @ weight)


def test_no_dequantised_weight_is_kept_and_bytes_survive_casts_and_state_dicts():
    model = fill(lora.inject_lora(nn.Sequential(nn.Linear(64, 640)), r=2, quantize="nf4", double_quant=True))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = model(torch.randn(3, 64, requires_grad=True))
    assert max(tensor.numel() for tensor in saved) < 64 * 640 // 2
    function = output.grad_fn
    while function.name() != "NF4ProductBackward":
        function = function.next_functions[0][0]
    assert not [value for value in vars(function).values() if isinstance(value, torch.Tensor)]
    weight = model[0].base_layer.weight
    bytes_before = {name: buffer.clone() for name, buffer in weight.named_buffers()}
    assert bytes_before.keys() == {"packed", "absmax", "scales", "mean"}  # double_quant
    other = lora.inject_lora(nn.Sequential(nn.Linear(64, 640)), r=2, quantize="nf4", double_quant=True)
    other.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model).to(torch.bfloat16)
    for same in (other, copied):
        for name, buffer in same[0].base_layer.weight.named_buffers():
            assert buffer.dtype == bytes_before[name].dtype
            assert torch.equal(buffer, bytes_before[name])
    assert copied(torch.randn(3, 64).bfloat16()).dtype == torch.bfloat16
    assert lora.inject_lora(model, r=1, quantize="nf4", adapter_name="b")[0].base_layer.weight is weight


# ---- data parallelism


def make_model(dtype=torch.float64, seed=1, quantize=None):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3)).to(dtype)
    return fill(lora.inject_lora(model, r=2, target_modules=["0", "2"], quantize=quantize))


PHI = 2 * (6 + 33) + 2 * (33 + 17)  # Σ r(d + k)


def one_device_step(model, ranks, step, dtype):
    """Mean of the ranks' gradients, added in rank order."""
    model.zero_grad()
    for rank in range(ranks):
        loss_of(model(make_batch(rank, step, dtype))).backward()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad /= ranks


def body_data_parallel(how, optimizer, quantize, dtype):
    ranks, rank, exact = pool.world_size(), pool.rank(), pool.world_size() <= 2
    plain, model = make_model(dtype, quantize=quantize), make_model(dtype, quantize=quantize)
    if how == "average":
        trained = model
    elif how == "ddp":
        trained = ddp.DDP(model, pool.group())
    else:
        for unit in (model[0], model[2]):
            fsdp.fully_shard(unit, process_group=pool.group())
        trained = fsdp.fully_shard(model, process_group=pool.group())
    optimizers = [OPTIMIZERS[optimizer]([p for p in m.parameters() if p.requires_grad]) for m in (trained, plain)]
    for step in range(3):
        optimizers[0].zero_grad()
        with Collectives() as seen:
            loss_of(trained(make_batch(rank, step, dtype))).backward()
            if how == "average":
                lora.average_adapters(model, pool.group())
        if how != "fsdp":
            size = torch.finfo(dtype).bits // 8
            assert seen.bytes_of("allreduce_") == PHI * size
            assert how == "ddp" or [name for name, _ in seen.calls] == ["allreduce_"]
        one_device_step(plain, ranks, step, dtype)
        for o in optimizers:
            o.step()
        if how != "fsdp":
            assert_same_parameters(model, plain, exact, f"step {step}")
    whole = fsdp.full_state_dict(model) if how == "fsdp" else model.state_dict()
    for key, value in plain.state_dict().items():
        assert_equal(whole[key], value, exact or how == "fsdp", key)
    adapter, expected = lora.adapter_state_dict(model, state_dict=whole), lora.adapter_state_dict(plain)
    assert adapter.keys() == expected.keys()
    for key, value in adapter.items():
        assert_equal(value, expected[key], exact or how == "fsdp", key)


@pytest.mark.parametrize(("how", "quantize"), [("average", None), ("average", "nf4"), ("ddp", None), ("fsdp", None)])
@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "sgd"), (2, "momentum"), (2, "adamw"), (3, "adamw"), (4, "sgd")])
def test_data_parallel_equals_one_device(how, quantize, ranks, optimizer):
    pool.run(ranks, body_data_parallel, how, optimizer, quantize, torch.float64)


def test_data_parallel_quantised_under_fsdp_and_ddp_in_float32():
    for how in ("fsdp", "ddp", "average"):
        pool.run(2, body_data_parallel, how, "adamw", "nf4", torch.float32)


def body_unused():
    rank, model = pool.rank(), make_model()
    loss_of(model[0](make_batch(0, 0, torch.float64)) if rank else model(make_batch(0, 0, torch.float64))).backward()
    lora.average_adapters(model, pool.group())
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    return [p.grad for p in model.parameters() if p.requires_grad]


def test_parameters_unused_on_one_rank():
    first, second = pool.run(2, body_unused)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in first)


def body_two_dtypes():
    model = make_model()
    model[0].to(torch.float32)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.full_like(p, pool.rank())
    with Collectives() as seen:
        lora.average_adapters(model, pool.group())
    assert [name for name, _ in seen.calls] == ["allreduce_"]
    assert all(p.grad.dtype == p.dtype and (p.grad == 0.5).all() for p in trained)


def test_parameters_of_two_dtypes_are_averaged_at_once():
    pool.run(2, body_two_dtypes)


FAKE = """
import sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import lora
from shared import Collectives

N, rank = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=N)
model = lora.inject_lora(lora.language_model(), r=4, target_modules=("linear1", "linear2"))
phi = 4 * 2 * 4 * (192 + 768) * 4  # bytes: layers, matrices, r(d + k)
tokens = torch.randint(256, (1, 65))
lora.language_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
with Collectives() as seen, lora.SentBytes() as sent:
    lora.average_adapters(model)
assert seen.calls == [("allreduce_", phi)], seen.calls
assert abs(sent.total - 2 * phi * (N - 1) / N) < 1
print("ok")
"""


@pytest.mark.parametrize(("N", "rank"), [(8, 3), (64, 63), (1024, 0)])
def test_the_same_bytes_at_scale(N, rank):
    here = Path(__file__).parent
    environment = {"PYTHONPATH": f"{here}:{here.parent}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FAKE, str(N), str(rank)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "ok\n", done.stderr
