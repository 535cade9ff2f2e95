"""lora.py against dense weights W + (α/r) B A, peft and bitsandbytes; of whole models claims.py says more."""

import copy
import importlib.util
import json
import unittest.mock

import pool
import pytest
import shared
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from shared import OPTIMIZERS, Collectives, assert_equal, loss_of, make_batch
from torch.autograd.graph import saved_tensors_hooks

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
    """(B, T) integers to (B, T, 6)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mlp = nn.ModuleDict({"up": nn.Linear(6, 10), "down": nn.Linear(10, 6, bias=False)})

    def forward(self, tokens):
        x = self.embed(tokens)
        return x + self.mlp["down"](torch.tanh(self.mlp["up"](x)))


TOKENS = torch.randint(1, 11, (4, 7), generator=torch.Generator().manual_seed(0))
BOTH = ["up", "down"]


def make_net(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return Net().to(dtype)


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
    x = torch.randn(*batch, 2 * k, dtype=dtype)[..., ::2].requires_grad_()  # strided
    for autocast in (False, dtype == torch.float32):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert torch.equal(layer(x), F.linear(x, base.weight, base.bias))  # B = 0: bitwise
    assert layer.lora_A.abs().max() <= k**-0.5 <= 9 * layer.lora_A.abs().max() * k * r  # uniform, as peft's
    fill(layer)
    A, B, x64 = (t.detach().double().requires_grad_() for t in (layer.lora_A, layer.lora_B, x))
    scaling = alpha / r**0.5 if rslora else alpha / r
    y, expected = layer(x), F.linear(x64, W + scaling * B @ A, b)
    naive = lora.naive_lora(x64, W, A, B, scaling) + (0 if b is None else b)
    assert torch.allclose(naive, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (y.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    unit = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    for ours, theirs in [(y, expected), (x.grad, x64.grad), (layer.lora_A.grad, A.grad), (layer.lora_B.grad, B.grad)]:
        bound = 10 * unit * max([1.0, *theirs.detach().abs().flatten().tolist()]) * max(1, scaling)
        assert torch.allclose(ours.double(), theirs, rtol=0, atol=bound)
    assert (y.dtype, y.shape, base.weight.grad) == (dtype, expected.shape, None)
    assert layer.lora_A.dtype == torch.promote_types(dtype, torch.float32)


def test_dropout_is_before_A_only_and_off_in_eval():
    layer, x = fill(lora.LoRALinear(nn.Linear(50, 4).double(), lora_dropout=0.5)), torch.randn(3, 50).double()
    torch.manual_seed(1)
    ours = layer(x)
    torch.manual_seed(1)
    correction = 2 * F.dropout(x, 0.5) @ layer.lora_A.t() @ layer.lora_B.t()
    assert_equal(ours.detach(), (layer.base_layer(x) + correction).detach(), exact=False)
    assert not torch.equal(layer(x), ours)
    assert torch.equal(layer.eval()(x), layer(x))


# ---- injection


def trained_names(model):
    return {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}


WANTED = [
    ({"target_modules": "all-linear"}, {"0.linear1", "0.linear2", "1.head.linear1"}),
    ({"target_modules": ("head.linear1",)}, {"1.head.linear1"}),
    ({"target_modules": ["ear1", "0.linear2"]}, {"0.linear2"}),
    ({"target_modules": r"0\.linear|1\.head\.linear1"}, {"1.head.linear1"}),
    ({"target_modules": ["0.linear"]}, r"\[\]; .* \['0\.linear1', '0\.linear2', '1\.head\.linear1'\]"),
    ({"target_modules": ["head"]}, r"finds \['1\.head'\]; there are nn\.Linear"),
    ({"target_modules": ".*(norm|1)"}, r"finds .*'0\.norm'"),
    ({"r": 0}, "r=0 must be ≥ 1"),
    ({"lora_dropout": 1.0}, r"lora_dropout=1\.0 in \[0, 1\)"),
    ({"quantize": "int8"}, "quantize='int8' None or 'nf4'"),
]


@pytest.mark.parametrize(("arguments", "expected"), WANTED, ids=str)
def test_what_is_named_is_adapted_or_it_is_an_error_and_nothing_has_changed(arguments, expected):
    block = nn.ModuleDict({"linear1": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "linear2": nn.Linear(4, 4)})
    model = nn.ModuleList([block, nn.ModuleDict({"head": nn.ModuleDict({"linear1": nn.Linear(4, 4)})})])
    if found := isinstance(expected, set):
        assert lora.inject_lora(model, **arguments) is model
        assert trained_names(model) == expected
    with pytest.raises(ValueError, match="has adapters already" if found else expected):
        lora.inject_lora(model, **arguments)
    assert found or all(p.requires_grad for p in model.parameters())
    assert found or not lora.lora_layers(model)


def test_one_layer_in_two_places_stays_one_and_tied_weights_stay_tied():
    twice, embed, head = nn.Linear(6, 6), nn.Embedding(6, 6), nn.Linear(6, 6)
    embed.weight = head.weight
    model = lora.inject_lora(nn.Sequential(twice, nn.Sequential(twice), embed, head))
    assert isinstance(model[0], lora.LoRALinear)
    assert model[0] is model[1][0]
    assert len(lora.trained_by(model)) == 4
    before = embed.weight.detach().clone()
    lora.merge(fill(model))
    assert model[3].base_layer.weight is embed.weight
    assert torch.equal(embed.weight, before)  # the adapter of the head is not one of the embedding
    assert not torch.equal(model[3].merged, before)


# ---- merging


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_merged_is_the_dense_weight_and_unmerged_is_bitwise_as_before(quantize, dtype):
    model = fill(lora.inject_lora(make_net(dtype), quantize=quantize)).eval()
    before, layer = copy.deepcopy(model.state_dict()), model.mlp["up"]
    with torch.no_grad():
        output, W = model(TOKENS), layer.base_layer.weight
        lora.merge(model)
        dense = W.double() + 2 * layer.lora_B.double() @ layer.lora_A.double()
        assert (layer.merged - dense).abs().max() <= torch.finfo(dtype).eps * dense.abs().max()  # rounded once
        assert (layer.merged.dtype, layer.merged.requires_grad) == (dtype, False)
        merged = model(TOKENS)
        lora.merge(model)  # a second time changes nothing
        assert torch.equal(model(TOKENS), merged)
    assert (merged - output).abs().max() <= (1e-12 if dtype == torch.float64 else 2**-5) * output.abs().max()
    with pytest.raises(ValueError, match=r"merged, .*unmerge\(model\) to train"):
        model.train()(TOKENS)
    for _ in range(2):
        lora.unmerge(model)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        assert before.keys() == model.state_dict().keys()
        with torch.no_grad():
            assert torch.equal(model.eval()(TOKENS), output)


# ---- files


@needs("safetensors")
def test_keys_and_fields_are_peft_s(tmp_path):
    model = fill(lora.inject_lora(make_net(), r=2, lora_dropout=0.1, target_modules=("up", "down")))
    shapes = {"up.lora_A": (2, 6), "up.lora_B": (10, 2), "down.lora_A": (2, 10), "down.lora_B": (6, 2)}
    found = {key: tuple(tensor.shape) for key, tensor in lora.adapter_state_dict(model).items()}
    assert found == {f"base_model.model.mlp.{key}.weight": shape for key, shape in shapes.items()}
    lora.save_adapter(model, tmp_path / "new" / "folder")
    fields = json.loads((tmp_path / "new" / "folder" / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "r": 2, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": BOTH}
    assert fields == expected | {"use_rslora": False, "bias": "none", "init_lora_weights": True}
    fields = {key: fields[key] for key in ("peft_type", "r", "target_modules")}  # what is not there is peft's default
    (tmp_path / "new" / "folder" / "adapter_config.json").write_text(json.dumps(fields))
    other = lora.load_adapter(make_net(), tmp_path / "new" / "folder").mlp["up"]
    assert (other.scaling, other.lora_dropout) == (8 / 2, 0.0)


@needs("safetensors")
@pytest.mark.parametrize("target_modules", ["all-linear", r"mlp\.up", {"up"}], ids=str)
@pytest.mark.parametrize("injected", [None, "plain", "nf4"])
def test_an_adapter_is_loaded_as_it_was_saved(tmp_path, target_modules, injected):
    arguments = {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": target_modules}
    quantize = "nf4" if injected == "nf4" else None
    model = fill(lora.inject_lora(make_net(), **arguments, quantize=quantize)).eval()
    lora.save_adapter(model, tmp_path)
    if target_modules == "all-linear":  # a word that peft knows for some models only
        assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["mlp.up", "mlp.down"]
    other = make_net()
    if injected:
        lora.merge(lora.inject_lora(other, **arguments, quantize=quantize))
    assert lora.load_adapter(other, tmp_path) is other
    assert torch.equal(other.eval()(TOKENS), model(TOKENS))  # and is merged no more
    assert trained_names(other) == trained_names(model)
    with pytest.raises(ValueError, match="lora_alpha is 5 in the file, 16 in the model; use_rslora is True"):
        lora.load_adapter(lora.inject_lora(make_net(), r=3, target_modules=target_modules), tmp_path)


UP = "base_model.model.mlp.up.lora_A.weight"
REFUSED = ("use_dora", "modules_to_save", "alpha_pattern", "rank_pattern", "exclude_modules", "of_a_later_peft")
SPOILT = [  # fields, tensors, what the error says
    ({}, {UP: None}, r"mlp\.up\.lora_A\.weight is missing in the file, \[2, 6\] in the model"),
    ({}, {"x": torch.ones(1)}, r"x is \[1\] in the file, missing in the model"),
    ({}, {UP: torch.ones(1, 6)}, r"up\.lora_A\.weight is \[1, 6\] in the file"),  # copy_ would broadcast it
    ({"r": 4}, {}, r"r is 4 in the file|up\.lora_A\.weight .*; .*up\.lora_B"),
    ({"peft_type": "IA3", "bias": "all"}, {}, "not supported: peft_type 'IA3', bias 'all'"),
    ({"init_lora_weights": "pissa"}, {}, "not supported: init_lora_weights 'pissa'"),
    ({"target_modules": ["q_proj"]}, {}, "q_proj"),
    *(({name: ["up"]}, {}, rf"not supported: {name} \['up'\]") for name in REFUSED),
]


@needs("safetensors")
@pytest.mark.parametrize(("fields", "tensors", "message"), SPOILT)
def test_a_file_that_does_not_fit_is_refused_and_nothing_is_copied(tmp_path, fields, tensors, message):
    from safetensors.torch import load_file, save_file

    lora.save_adapter(fill(lora.inject_lora(make_net(), r=2, target_modules=["up"])), tmp_path)
    config, content = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    spoilt = load_file(content) | tensors
    save_file({key: tensor for key, tensor in spoilt.items() if tensor is not None}, content)
    models = [make_net(), fill(lora.inject_lora(make_net(), r=2, target_modules=["up"]), seed=7)]
    for model in models[: 1 if "target_modules" in fields else 2]:  # what is injected needs no names
        before = model(TOKENS)
        with pytest.raises(ValueError, match=message):
            lora.load_adapter(model, tmp_path)
        assert torch.equal(model(TOKENS), before)


@needs("peft")
@pytest.mark.filterwarnings("ignore:.*eva")
@pytest.mark.parametrize("arguments", [{}, {"use_rslora": True}, {"lora_dropout": 0.5, "init_lora_weights": "eva"}])
def test_peft_loads_ours_and_we_load_peft_s(tmp_path, arguments):
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=BOTH, **arguments)
    theirs = fill(peft.get_peft_model(make_net(), config)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = lora.load_adapter(make_net(), tmp_path / "theirs").eval()
    assert_equal(ours(TOKENS).detach(), theirs(TOKENS).detach(), exact=False)
    assert not torch.allclose(ours(TOKENS), make_net()(TOKENS), atol=1e-2)
    assert sorted(peft.get_peft_model_state_dict(theirs)) == sorted(lora.adapter_state_dict(ours))
    lora.save_adapter(fill(ours, seed=9), tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(make_net(), tmp_path / "ours").eval()
    assert_equal(ours(TOKENS).detach(), theirs(TOKENS).detach(), exact=False)


# ---- NF4


VALUES = torch.tensor(lora.NF4_VALUES)


def dequantize_by_definition(q, n):
    """One nibble at a time: code times scale, in float32."""
    nibbles, absmax = torch.stack([q.packed >> 4, q.packed & 15], 1).flatten()[:n], q.absmax
    if q.mean is not None:
        absmax = lora.DYNAMIC_MAP[absmax.long()] * q.scales[torch.arange(len(absmax)) // 256] + q.mean
    return VALUES[nibbles.long()] * absmax.repeat_interleave(q.block_size)[:n]


FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@given(st.integers(1, 700), st.sampled_from([32, 64, 256]), st.booleans(), FLOATS, st.integers(0, 10**6))
def test_nf4_rounds_to_the_nearest_value_of_each_block(n, block_size, double_quant, dtype, seed):
    weight = (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 5 - 2)).to(dtype)
    quantized, plain = lora.quantize_nf4(weight, block_size, double_quant), lora.quantize_nf4(weight, block_size)
    assert torch.equal(plain.packed, quantized.packed)  # the codes are those of the exact scale
    expected = dequantize_by_definition(quantized, n)
    assert_equal(lora.dequantize_nf4(quantized), expected.to(dtype), exact=True)  # rounded once
    assert_equal(lora.dequantize_nf4(quantized, torch.float16), expected.half(), exact=True)
    rounded, weight = lora.dequantize_nf4(plain, torch.float32), weight.float()
    for i in range(0, n, block_size):
        block, got = weight[i : i + block_size], rounded[i : i + block_size]
        nearest = (block[:, None] / block.abs().max() - VALUES).abs().min(1).values
        assert torch.allclose((block - got).abs() / block.abs().max(), nearest, atol=1e-6)
    for name, buffer in lora.quantize_nf4(weight, block_size, double_quant).named_buffers():
        assert buffer.untyped_storage().nbytes() == buffer.nbytes  # no padding is held
        assert torch.equal(getattr(quantized, name), buffer)  # quantised in fp32


def test_nf4_values_survive_ties_go_down_and_the_first_is_in_the_high_half():
    weight, every = VALUES * 3, [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    quantized = lora.quantize_nf4(torch.cat([weight, weight.flip(0), weight, weight]))
    assert torch.equal(lora.dequantize_nf4(quantized)[:16], weight)
    assert quantized.packed[:8].tolist() == every
    assert lora.quantize_nf4(torch.cat([(VALUES[:-1] + VALUES[1:]) / 2, torch.ones(1)])).packed.tolist() == every
    assert set(lora.quantize_nf4(torch.zeros(65)).packed.tolist()) == {0x77}
    assert lora.quantize_nf4(torch.ones(3, 3)).packed.tolist() == [0xFF] * 4 + [0xF7]  # the missing one is a zero


def test_nf4_takes_4_127_bits_a_parameter():
    weight = torch.randn(256, 1024)
    for double_quant, bits in ((False, 4.5), (True, 4.127)):
        quantized = lora.quantize_nf4(weight, double_quant=double_quant)
        held = sum(tensor.untyped_storage().nbytes() for tensor in quantized.buffers())
        assert round(8 * held / weight.numel(), 3) == bits
    exact, scales = lora.quantize_nf4(weight).absmax, quantized.scales.repeat_interleave(256)
    rounded = lora.DYNAMIC_MAP[quantized.absmax.long()] * scales + quantized.mean
    assert ((rounded - exact).abs() <= 0.0704 / 2 * scales * 1.001).all()  # half the widest gap of the 8-bit values
    chosen = lora.DYNAMIC_MAP[[0, 127, 128, 129, 253, 254, 255]].tolist()  # of bitsandbytes' create_dynamic_map()
    assert chosen == pytest.approx([-0.99296875, 0.0, 5.5e-7, 3.25e-6, 0.97890625, 0.99296875, 1.0])
    assert len(lora.DYNAMIC_MAP) == 256


def test_nf4_multiplies_by_the_reciprocal_as_bitsandbytes_does():
    middle = (VALUES[:-1] + VALUES[1:]) / 2
    for absmax in torch.tensor([3.0, 7.0, 11.0, 0.3, 0.7]):
        codes = lora.quantize_nf4(torch.cat([middle * absmax, absmax[None]])).packed
        nibbles = torch.stack([codes >> 4, codes & 15], 1).flatten()[:-1]
        assert torch.equal(nibbles.long(), torch.bucketize(middle * absmax * (1 / absmax), middle))


@needs("bitsandbytes")
@pytest.mark.parametrize(("n", "dtype"), [(64 * 256 * 3, torch.float32), (100_002, torch.bfloat16)])
def test_nf4_is_byte_for_byte_bitsandbytes(n, dtype):
    import bitsandbytes.functional as bnb

    weight = (0.05 * torch.randn(n)).to(dtype)
    for block_size in (64, 256):
        packed, state = bnb.quantize_4bit(weight, blocksize=block_size, quant_type="nf4")
        ours = lora.quantize_nf4(weight, block_size)
        assert torch.equal(packed.flatten(), ours.packed)
        assert torch.equal(state.absmax, ours.absmax)
        assert torch.equal(bnb.dequantize_4bit(packed, state).flatten(), lora.dequantize_nf4(ours))
    _, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    ours = lora.quantize_nf4(weight, double_quant=True)
    assert torch.equal(state.state2.code, lora.DYNAMIC_MAP)
    assert torch.equal(state.state2.absmax, ours.scales)
    # its CPU kernel finds the 8-bit code through a table of 2^16: it may take one nearly as near
    theirs, codes = (state.state2.code[absmax.int()] for absmax in (state.absmax, ours.absmax))
    close = (state.absmax.int() - ours.absmax.int()).abs() <= 1
    assert (close | ((theirs - codes).abs() <= 2**-15)).all()


# ---- QLoRA


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_quantised_layer_is_bitwise_the_layer_with_the_rounded_weight(bias, double_quant, dtype):
    base, plain = (nn.Linear(37, 23, bias=bias).to(dtype) for _ in range(2))
    plain.load_state_dict(base.state_dict())
    plain.weight = nn.Parameter(lora.dequantize_nf4(lora.quantize_nf4(base.weight, double_quant=double_quant)))
    layers = lora.LoRALinear(base, 2, quantize="nf4", double_quant=double_quant), lora.LoRALinear(plain, 2)
    layers[0].lora_A.data.copy_(layers[1].lora_A)
    x = torch.randn(2, 5, 37, dtype=dtype)
    results = []
    for layer in map(fill, layers):
        y = layer(inputs := x.clone().requires_grad_())
        loss_of(y).backward()
        results.append([y, inputs.grad, layer.lora_A.grad, layer.lora_B.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert {name for name, p in layers[0].named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_no_dequantised_weight_is_kept_and_bytes_survive_casts_and_state_dicts():
    arguments, saved = {"r": 2, "quantize": "nf4", "double_quant": True}, []
    model, other = (lora.inject_lora(nn.Sequential(nn.Linear(64, 640)), **arguments) for _ in range(2))
    with saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        output = model(torch.randn(3, 64, requires_grad=True))
    assert max(saved) < 64 * 640 // 2
    dequantize = unittest.mock.Mock(wraps=lora.dequantize_nf4)
    with unittest.mock.patch.object(lora, "dequantize_nf4", dequantize):
        output.sum().backward()
    assert dequantize.call_count == 1  # again, in backward
    before = {name: buffer.clone() for name, buffer in model[0].base_layer.named_buffers()}
    assert before.keys() == {"packed", "absmax", "scales", "mean"}
    other.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model).to(torch.bfloat16)
    for same in (other, copied):
        for name, buffer in same[0].base_layer.named_buffers():
            assert buffer.dtype == before[name].dtype
            assert torch.equal(buffer, before[name])
    assert copied(torch.randn(3, 64).bfloat16()).dtype == copied[0].base_layer.weight.dtype == torch.bfloat16


# ---- data parallelism


def make_model(dtype=torch.float64, quantize=None):
    return fill(lora.inject_lora(shared.make_model("plain", dtype), r=2, target_modules=["0", "2"], quantize=quantize))


PHI = 2 * (6 + 33) + 2 * (33 + 17)  # Σ r(d + k)


def body_data_parallel(how, quantize, dtype):
    """Against one device that accumulates the ranks' gradients in rank order."""
    ranks, rank, exact = pool.world_size(), pool.rank(), pool.world_size() <= 2 or how == "fsdp"
    plain, model = make_model(dtype, quantize), make_model(dtype, quantize)
    if how == "fsdp":
        for unit in (model[0], model[2], model):
            fsdp.fully_shard(unit, process_group=pool.group())
    optimizers = [OPTIMIZERS["adamw"](lora.trained_by(m)) for m in (model, plain)]
    for step in range(3):
        for o in optimizers:
            o.zero_grad()
        with Collectives() as seen:
            loss_of(model(make_batch(rank, step, dtype))).backward()
            if how == "average":
                lora.average_adapters(model, pool.group())
                assert seen.calls == [("allreduce_", PHI * dtype.itemsize)]
        for r in range(ranks):
            loss_of(plain(make_batch(r, step, dtype))).backward()
        for parameter in lora.trained_by(plain):
            parameter.grad /= ranks
        for o in optimizers:
            o.step()
    whole = fsdp.full_state_dict(model) if how == "fsdp" else model.state_dict()
    for key, value in plain.state_dict().items():
        assert_equal(whole[key], value, exact, key)
    for key, value in lora.adapter_state_dict(plain).items():
        assert_equal(lora.adapter_state_dict(model, whole)[key], value, exact, key)


@pytest.mark.parametrize("how", ["average", "fsdp"])
@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_data_parallel_equals_one_device_and_only_A_and_B_travel(how, quantize, ranks):
    pool.run(ranks, body_data_parallel, how, quantize, torch.float32 if ranks == 2 else torch.float64)


def body_unused():
    rank, model, group = pool.rank(), make_model(), dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match=f"rank {rank} is not a member"):
            lora.average_adapters(model, group)
        return
    model[0].float()
    for p in lora.trained_by(model)[rank:]:
        p.grad = torch.full_like(p, 1.0 + rank)
    lora.average_adapters(model, group)
    for i, p in enumerate(lora.trained_by(model)):
        assert p.grad.dtype == p.dtype
        assert (p.grad == (1.5 if i else 0.5)).all()


def test_parameters_unused_on_one_rank_or_of_two_dtypes_and_a_rank_outside_the_group():
    pool.run(3, body_unused)


@pytest.mark.parametrize(("N", "rank"), [(8, 3), (1024, 0)])
def test_the_same_bytes_at_scale(N, rank):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=N)
    try:
        model = lora.inject_lora(lora.language_model(), r=4, target_modules=["linear1", "linear2"])
        phi = 4 * 2 * 4 * (192 + 768) * 4  # bytes: layers, matrices, r(d + k)
        tokens = torch.randint(256, (1, 65))
        lora.language_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        with Collectives() as seen, lora.SentBytes() as sent:
            lora.average_adapters(model)
        assert seen.calls == [("allreduce_", phi)]
        assert abs(sent.total - 2 * phi * (N - 1) / N) < 1
    finally:
        dist.destroy_process_group()
