"""lora.py against dense weights W + (α/r) B A, peft and bitsandbytes; of whole models claims.py says more."""

import copy
import importlib.util
import json

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from claims import one_device
from hypothesis import given
from hypothesis import strategies as st
from shared import OPTIMIZERS, Collectives, assert_equal, loss_of, make_batch, make_model
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


F64, BF16, INPUT = torch.float64, torch.bfloat16, make_batch(0, 0)
NAMES = {"r": 2, "target_modules": ["0", "2"]}
PHI = 2 * (6 + 33) + 2 * (33 + 17)  # Σ r(d + k)


def adapted(dtype=F64, **arguments):
    """Linear layers 0 (6 to 33), 2 (33 to 17), and 4, without an adapter."""
    return fill(lora.inject_lora(make_model("plain", dtype), **NAMES | arguments)).eval()


SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12))
BATCHES = st.sampled_from([(), (5,), (2, 3), (0, 4)])


@given(SIZES, st.sampled_from([0.5, 1, 16]), st.booleans(), st.booleans(), BATCHES)
def test_forward_and_gradients_are_those_of_the_dense_weight(sizes, alpha, rslora, bias, batch):
    k, d, r = sizes
    base = nn.Linear(k, d, bias).double()
    layer = fill(lora.LoRALinear(base, r, alpha, use_rslora=rslora))
    x = torch.randn(*batch, 2 * k, dtype=F64)[..., ::2].requires_grad_()  # strided
    A, B, scaling = layer.lora_A, layer.lora_B, alpha / r**0.5 if rslora else alpha / r
    y, expected = layer(x), F.linear(x, base.weight + scaling * B @ A, base.bias)
    naive = lora.naive_lora(x, base.weight, A, B, scaling) + (base.bias if bias else 0)
    weights = torch.randn(expected.shape, dtype=F64)
    ours, theirs = (torch.autograd.grad(output, (x, A, B), weights) for output in (y, expected))
    for a, b in [(y, expected), (naive, expected), *zip(ours, theirs, strict=True)]:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_16_bits_lie_over_factors_in_32(dtype):
    base, x = nn.Linear(100, 20).to(dtype), torch.randn(4, 100, dtype=dtype)
    layer = lora.LoRALinear(base, r=50)
    A, B = layer.lora_A, layer.lora_B
    assert -0.1 <= A.min() < -0.099 < 0.099 < A.max() <= 0.1  # uniform within k^-1/2, as peft's
    with torch.autocast("cpu", BF16, enabled=dtype == torch.float32):
        assert torch.equal(layer(x), F.linear(x, base.weight, base.bias))  # B = 0: bitwise
        assert (layer(x).dtype, A.dtype, B.dtype) == (BF16, torch.float32, torch.float32)
    fill(layer)
    correction = 16 / 50 * x.float() @ A.t() @ B.t()
    error = (layer(x) - base(x) - correction).abs().max()
    assert error <= (1e-5 if dtype == torch.float32 else 2**-6) * correction.abs().max()


def test_dropout_is_before_A_only_and_off_in_eval():
    layer, x = fill(lora.LoRALinear(nn.Linear(50, 4).double(), lora_dropout=0.5)), torch.randn(3, 50).double()
    torch.manual_seed(1)
    ours = layer(x)
    torch.manual_seed(1)
    correction = 2 * F.dropout(x, 0.5) @ layer.lora_A.t() @ layer.lora_B.t()
    assert_equal(ours.detach(), (layer.base_layer(x) + correction).detach(), exact=False)
    assert not torch.equal(layer(x), ours)
    assert torch.equal(layer.eval()(x), layer(x))


def trained_names(model):
    return {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}


WANTED = [
    ({}, {"0.linear1", "0.linear2", "1.head.linear1"}),
    ({"target_modules": ["ear1", "0.linear2"]}, {"0.linear2"}),
    ({"target_modules": r"0\.linear|1\.head\.linear1"}, {"1.head.linear1"}),
    ({"target_modules": ["0.linear"]}, r"\[\]; .* \['0\.linear1', '0\.linear2', '1\.head\.linear1'\]"),
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
    assert found or not lora.lora_layers(model)


def test_one_layer_in_two_places_stays_one():
    twice = nn.Linear(6, 6)
    model = lora.inject_lora(nn.Sequential(twice, nn.Sequential(twice)))
    assert isinstance(model[0], lora.LoRALinear)
    assert model[0] is model[1][0]


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("dtype", [F64, BF16])
@torch.no_grad()
def test_merged_is_the_dense_weight_and_unmerged_is_bitwise_as_before(quantize, dtype):
    model, x = adapted(dtype, quantize=quantize), INPUT.to(dtype)
    before, layer, output = copy.deepcopy(model.state_dict()), model[0], model(x)
    dense = layer.base_layer.weight.double() + 8 * layer.lora_B.double() @ layer.lora_A.double()
    once = dense.abs() * 2**-8 + 1e-6 if dtype == BF16 else torch.finfo(F64).eps * dense.abs().max()
    for _ in range(2):  # the second time changes nothing
        lora.merge(model)
        assert ((layer.merged - dense).abs() <= once).all()  # rounded once, at the end
    assert (layer.merged.dtype, layer.merged.requires_grad) == (dtype, False)
    assert (model(x) - output).abs().max() <= (1e-12 if dtype == F64 else 2**-5) * output.abs().max()
    with pytest.raises(ValueError, match=r"merged, .*unmerge\(model\) to train"), torch.enable_grad():
        model.train()(x)
    model.train()(x)  # without gradients it may
    lora.unmerge(model)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(model(x), output)


@needs("safetensors")
def test_keys_and_fields_are_peft_s(tmp_path):
    model = adapted(lora_dropout=0.1)
    found = {key: tuple(tensor.shape) for key, tensor in lora.adapter_state_dict(model).items()}
    shapes = {"0.lora_A": (2, 6), "0.lora_B": (33, 2), "2.lora_A": (2, 33), "2.lora_B": (17, 2)}
    assert found == {f"base_model.model.{key}.weight": shape for key, shape in shapes.items()}
    lora.save_adapter(model, tmp_path / "new" / "folder")
    config = tmp_path / "new" / "folder" / "adapter_config.json"
    fields = json.loads(config.read_text())
    expected = {"peft_type": "LORA", "lora_alpha": 16, "lora_dropout": 0.1, "use_rslora": False, "bias": "none"}
    assert fields == NAMES | expected | {"init_lora_weights": True}
    config.write_text(json.dumps({"peft_type": "LORA"} | NAMES))
    other = lora.load_adapter(make_model("plain"), config.parent)[0]  # what is not there is peft's default
    assert (other.scaling, other.lora_dropout) == (8 / 2, 0.0)


@needs("safetensors")
@pytest.mark.parametrize(("targets", "injected"), [("all-linear", None), ("[02]", "plain"), ({"0"}, "nf4")])
def test_an_adapter_is_loaded_as_it_was_saved(tmp_path, targets, injected):
    arguments = {"lora_alpha": 5, "use_rslora": True, "target_modules": targets}
    arguments["quantize"] = "nf4" if injected == "nf4" else None
    model, other, x = adapted(**arguments), make_model("plain", F64), INPUT.double()
    lora.save_adapter(model, tmp_path)
    if targets == "all-linear":  # a word that peft knows for some models only
        assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["0", "2", "4"]
    if injected:
        lora.merge(lora.inject_lora(other, r=2, **arguments))
    assert lora.load_adapter(other, tmp_path) is other
    assert torch.equal(other(x), model(x))  # and is merged no more
    assert trained_names(other) == trained_names(model)
    with pytest.raises(ValueError, match="lora_alpha is 5 in the file, 16 in the model; use_rslora is True"):
        lora.load_adapter(adapted(target_modules=targets), tmp_path)


UP = "base_model.model.0.lora_A.weight"
SPOILT = [  # fields, tensors, what the error says
    ({}, {UP: None}, r"0\.lora_A\.weight is missing in the file, \[2, 6\] in the model"),
    ({}, {"x": torch.ones(1)}, r"x is \[1\] in the file, missing in the model"),
    ({}, {UP: torch.ones(1, 6)}, r"0\.lora_A\.weight is \[1, 6\] in the file"),  # copy_ would broadcast it
    ({"r": 4}, {}, r"r is 4 in the file|0\.lora_A\.weight .*; .*2\.lora_B"),
    ({"peft_type": "IA3", "bias": "all"}, {}, "not supported: peft_type 'IA3', bias 'all'"),
    ({"init_lora_weights": "pissa"}, {}, "not supported: init_lora_weights 'pissa'"),
    ({"use_dora": True, "of_a_later_peft": 1}, {}, "not supported: use_dora True, of_a_later_peft 1"),
]


@needs("safetensors")
@pytest.mark.parametrize(("fields", "tensors", "message"), SPOILT)
def test_a_file_that_does_not_fit_is_refused_and_nothing_is_copied(tmp_path, fields, tensors, message):
    from safetensors.torch import load_file, save_file

    lora.save_adapter(adapted(), tmp_path)
    config, content = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    spoilt = load_file(content) | tensors
    save_file({key: tensor for key, tensor in spoilt.items() if tensor is not None}, content)
    for model in make_model("plain", F64), fill(adapted(), seed=7):
        before = model(INPUT.double())
        with pytest.raises(ValueError, match=message):
            lora.load_adapter(model, tmp_path)
        assert torch.equal(model(INPUT.double()), before)


@needs("peft")
@pytest.mark.filterwarnings("ignore:.*eva")
@pytest.mark.parametrize("arguments", [{}, {"use_rslora": True}, {"lora_dropout": 0.5, "init_lora_weights": "eva"}])
def test_peft_loads_ours_and_we_load_peft_s(tmp_path, arguments):
    import peft

    plain, x = make_model("plain", F64), INPUT.double()
    config = peft.LoraConfig(lora_alpha=6, **NAMES, **arguments)
    theirs = fill(peft.get_peft_model(copy.deepcopy(plain), config)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = lora.load_adapter(copy.deepcopy(plain), tmp_path / "theirs").eval()
    assert_equal(ours(x).detach(), theirs(x).detach(), exact=False)
    assert sorted(peft.get_peft_model_state_dict(theirs)) == sorted(lora.adapter_state_dict(ours))
    lora.save_adapter(fill(ours, seed=9), tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    assert_equal(ours(x).detach(), theirs(x).detach(), exact=False)


VALUES = torch.tensor(lora.NF4_VALUES)


def dequantize_by_definition(q, n):
    """One nibble at a time: code times scale, in float32."""
    nibbles, absmax = torch.stack([q.packed >> 4, q.packed & 15], 1).flatten()[:n], q.absmax
    if q.mean is not None:
        absmax = lora.DYNAMIC_MAP[absmax.long()] * q.scales[torch.arange(len(absmax)) // 256] + q.mean
    return VALUES[nibbles.long()] * absmax.repeat_interleave(q.block_size)[:n]


@given(
    st.integers(1, 700),
    st.sampled_from([32, 64, 256]),
    st.booleans(),
    st.sampled_from([torch.float32, BF16, F64]),
    st.integers(0, 10**6),
)
def test_nf4_rounds_to_the_nearest_value_of_each_block(n, block_size, double_quant, dtype, seed):
    weight = (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 5 - 2)).to(dtype)
    quantized, plain = lora.quantize_nf4(weight, block_size, double_quant), lora.quantize_nf4(weight, block_size)
    assert torch.equal(plain.packed, quantized.packed)  # the codes are those of the exact scale
    expected = dequantize_by_definition(quantized, n)
    assert_equal(lora.dequantize_nf4(quantized), expected.to(dtype), exact=True)  # rounded once
    assert_equal(lora.dequantize_nf4(quantized, torch.float16), expected.half(), exact=True)
    absmax = plain.absmax.repeat_interleave(block_size)[:n]
    relative, got = weight.float() / absmax, lora.dequantize_nf4(plain, torch.float32) / absmax
    nearest = (relative[:, None] - VALUES).abs().min(1).values
    assert torch.allclose((relative - got).abs(), nearest, atol=1e-6)
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


def test_nf4_multiplies_by_the_reciprocal_as_bitsandbytes_does():
    middle = (VALUES[:-1] + VALUES[1:]) / 2
    for absmax in torch.tensor([3.0, 7.0, 11.0, 0.3, 0.7]):
        codes = lora.quantize_nf4(torch.cat([middle * absmax, absmax[None]])).packed
        nibbles = torch.stack([codes >> 4, codes & 15], 1).flatten()[:-1]
        assert torch.equal(nibbles.long(), torch.bucketize(middle * absmax * (1 / absmax), middle))


@needs("bitsandbytes")
@pytest.mark.parametrize(("n", "dtype"), [(64 * 256 * 3, torch.float32), (100_002, BF16)])
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
    assert ((state.absmax.int() - ours.absmax.int()).abs() <= 1).logical_or((theirs - codes).abs() <= 2**-15).all()


@pytest.mark.parametrize(("bias", "double_quant", "dtype"), [(False, True, F64), (True, False, BF16)])
def test_a_quantised_layer_is_bitwise_the_layer_with_the_rounded_weight(bias, double_quant, dtype):
    base = nn.Linear(37, 23, bias=bias).to(dtype)
    plain = copy.deepcopy(base)
    plain.weight = nn.Parameter(lora.dequantize_nf4(lora.quantize_nf4(base.weight, double_quant=double_quant)))
    layers = lora.LoRALinear(base, 2, quantize="nf4", double_quant=double_quant), lora.LoRALinear(plain, 2)
    layers[0].lora_A.data.copy_(layers[1].lora_A)
    x, results = torch.randn(2, 5, 37, dtype=dtype), []
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
        model(torch.randn(3, 64, requires_grad=True))
    assert max(saved) < 64 * 640 // 2
    before = {name: buffer.clone() for name, buffer in model[0].base_layer.named_buffers()}
    assert before.keys() == {"packed", "absmax", "scales", "mean"}
    other.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model).to(BF16)
    for name, buffer in [*other[0].base_layer.named_buffers(), *copied[0].base_layer.named_buffers()]:
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer, before[name])
    assert copied(torch.randn(3, 64).bfloat16()).dtype == copied[0].base_layer.weight.dtype == BF16


def body_data_parallel(how, quantize, dtype):
    plain, model = adapted(dtype, quantize=quantize), adapted(dtype, quantize=quantize)
    for unit in (model[0], model[2], model) if how == "fsdp" else ():
        fsdp.fully_shard(unit, process_group=pool.group())
    optimizers = [OPTIMIZERS["adamw"](lora.trained_by(m)) for m in (model, plain)]
    for step in range(3):
        optimizers[0].zero_grad()
        with Collectives() as seen:
            loss_of(model(make_batch(pool.rank(), step, dtype))).backward()
            if how == "average":
                lora.average_adapters(model, pool.group())
                assert seen.calls == [("allreduce_", PHI * dtype.itemsize)]
        one_device(plain, [[make_batch(r, step, dtype)] for r in range(pool.world_size())])
        for optimizer in optimizers:
            optimizer.step()
    whole = fsdp.full_state_dict(model) if how == "fsdp" else model.state_dict()
    for key, value in plain.state_dict().items():
        assert_equal(whole[key], value, dtype == torch.float32 or how == "fsdp", key)
    assert lora.adapter_state_dict(model, whole).keys() == lora.adapter_state_dict(plain).keys()


@pytest.mark.parametrize("how", ["average", "fsdp"])
@pytest.mark.parametrize(("ranks", "quantize", "dtype"), [(2, "nf4", torch.float32), (3, None, F64)])
def test_data_parallel_equals_one_device_and_only_A_and_B_travel(how, ranks, quantize, dtype):
    pool.run(ranks, body_data_parallel, how, quantize, dtype)


def body_unused():
    rank, model, group = pool.rank(), adapted(), dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match=f"rank {rank} is not a member"):
            lora.average_adapters(model, group)
        return
    model[0].float()
    for p in lora.trained_by(model)[rank:]:
        p.grad = torch.full_like(p, 1.0 + rank)
    lora.average_adapters(model, group)
    assert [p.grad.dtype for p in lora.trained_by(model)] == [torch.float32] * 2 + [F64] * 2
    assert [p.grad.unique().item() for p in lora.trained_by(model)] == [0.5, 1.5, 1.5, 1.5]


def test_parameters_unused_on_one_rank_or_of_two_dtypes_and_a_rank_outside_the_group():
    pool.run(3, body_unused)
