"""lora.py against dense weights W + (α/r) B A, peft and bitsandbytes. tests/claims has more."""

import copy
import json
from functools import partial

import claims
import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from claims import registry
from claims.training import Trainer, trains_as_one_device
from hypothesis import given
from hypothesis import strategies as st
from shared import Collectives, fake_world, make_batch, make_model

import fsdp
import lora

F64, F32, BF16, INPUT = torch.float64, torch.float32, torch.bfloat16, make_batch(0, 0).double()
bitwise, within = (partial(torch.testing.assert_close, rtol=0, atol=atol) for atol in (0, 1e-12))
# In the model "plain": the layers 6 to 33 and 33 to 17, but not layer 4.
inject = partial(lora.inject_lora, r=2, target_modules=["0", "2"])


def trained(model, seed=5):
    torch.manual_seed(seed)
    for factor in lora.trained_by(model):
        nn.init.normal_(factor, std=0.3)
    return model


LAYERS = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.booleans())
OPTIONS = st.tuples(st.sampled_from([0.5, 1, 16]), st.sampled_from([0.0, 0.5]), st.booleans())
QUANTIZED = st.sampled_from([(None, False), ("nf4", False), ("nf4", True)])


@given(LAYERS, OPTIONS, QUANTIZED, st.sampled_from([(), (5,), (2, 3), (0, 4)]))
def test_a_layer_has_the_dense_weight_beside_or_merged_until_it_is_unmerged(
    sizes, options, quantize, batch
):
    (k, d, r, bias), (alpha, dropout, rslora) = sizes, options
    layer = trained(lora.LoRALinear(nn.Linear(k, d, bias).double(), r, *options, *quantize))
    x = torch.randn(*batch, 2 * k, dtype=F64)[..., ::2].requires_grad_()  # strided
    W, A, B, b = layer.base_layer.weight, layer.lora_A, layer.lora_B, layer.base_layer.bias
    assert lora.trained_by(layer) == [A, B]
    scaling = alpha / r**0.5 if rslora else alpha / r
    for training in (True, False):
        torch.manual_seed(1)
        y = layer.train(training)(x)
        torch.manual_seed(1)
        expected = F.linear(x, W, b) + F.linear(
            F.dropout(x, dropout, training), scaling * B @ A
        )  # before A only
        ours, theirs = (
            torch.autograd.grad(z, (x, A, B), torch.ones_like(z).cumsum(-1)) for z in (y, expected)
        )
        within((y, *ours), (expected, *theirs))
    within(lora.naive_lora(x, W, A, B, scaling) + (b if bias else 0), expected)
    lora.merge(layer), lora.merge(layer)  # the second changes nothing
    bitwise(layer.merged, (W + scaling * B @ A).detach())
    assert not layer.merged.requires_grad
    within(layer(x), expected)
    with pytest.raises(ValueError, match=r"merged, .*unmerge\(model\) to train"):
        layer.train()(x)
    lora.unmerge(layer)
    bitwise(layer.eval()(x), y)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_16_bits_lie_over_factors_in_32(dtype):
    layer, x = lora.LoRALinear(nn.Linear(100, 20).to(dtype), r=50), torch.randn(4, 100, dtype=dtype)
    base, A, B = layer.base_layer, layer.lora_A, layer.lora_B
    with torch.autocast("cpu", BF16, enabled=dtype == F32):
        bitwise(layer(x), base(x))  # B = 0
        assert (layer(x).dtype, A.dtype, B.dtype) == (BF16, F32, F32)
    assert -0.1 <= A.min() < -0.099 < 0.099 < A.max() <= 0.1  # uniform within k^-1/2, as peft's
    lora.merge(trained(layer))
    bitwise(
        layer.merged, (base.weight + 16 / 50 * B @ A).detach().to(dtype)
    )  # rounded once, at the end


WANTED = [  # of 1.qkv, 1.proj, 1.linear1, 1.linear2, and 3, which is also 4
    ({}, {"1.qkv", "1.proj", "1.linear1", "1.linear2", "3"}),
    ({"target_modules": ["ear1", "1.linear2"]}, {"1.linear2"}),
    ({"target_modules": r"1\.linear|1\.proj"}, {"1.proj"}),
    (
        {"target_modules": ["1.linear"]},
        r"\[\]; .* \['1\.qkv', '1\.proj', '1\.linear1', '1\.linear2', '3', '4'\]",
    ),
    ({"target_modules": ".*(norm|r)1"}, r"finds .*'1\.norm1'"),
    ({"r": 0}, "r=0 must be ≥ 1"),
    ({"lora_dropout": 1.0}, r"lora_dropout=1\.0 in \[0, 1\)"),
    ({"quantize": "int8"}, "quantize='int8' None or 'nf4'"),
]


@pytest.mark.parametrize(("arguments", "expected"), WANTED, ids=str)
def test_what_is_named_is_adapted_or_it_is_an_error_and_nothing_has_changed(arguments, expected):
    model = lora.language_model(C=4, heads=1, layers=1, V=5)
    model.append(model[3])
    if found := isinstance(expected, set):
        assert lora.lora_layers(lora.inject_lora(model, **arguments)).keys() == expected
        assert model[3] is model[4]  # one layer in two places stays one
    with pytest.raises(ValueError, match="has adapters already" if found else expected):
        lora.inject_lora(model, **arguments)
    assert found or not lora.lora_layers(model)


def test_all_linear_takes_no_other_layer_whose_name_ends_alike():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2)))
    assert lora.lora_layers(lora.inject_lora(model)).keys() == {"0", "1.1"}
    assert model.lora_config["target_modules"] == r"0|1\.1"  # for peft, which may not know the word


@pytest.mark.parametrize(
    ("targets", "rslora"), [({"0", "2"}, False), ("[02]", True), ("all-linear", False)]
)
def test_an_adapter_is_loaded_as_it_was_saved_also_by_peft_and_from_peft(tmp_path, targets, rslora):
    pytest.importorskip("safetensors")
    plain, directory = make_model("plain", F64), tmp_path / "new" / "folder"
    options = {"r": 2, "lora_alpha": 6, "lora_dropout": 0.5}
    options |= {"target_modules": targets, "use_rslora": rslora}
    models = [lora.inject_lora(copy.deepcopy(plain), **options) for _ in range(2)]
    written, merged = trained(models[0], seed=5).eval(), trained(models[1], seed=6).eval()
    lora.save_adapter(written, directory)
    lora.merge(merged)
    for model in (copy.deepcopy(plain), merged):
        bitwise(lora.load_adapter(model, directory).eval()(INPUT), written(INPUT))
    peft = pytest.importorskip("peft")  # which knows the word all-linear for some models only
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), directory).eval()
    within(theirs(INPUT), written(INPUT))
    theirs.save_pretrained(tmp_path)
    bitwise(lora.load_adapter(plain, tmp_path).eval()(INPUT), written(INPUT))


SPOILT = [  # fields, tensors, what the error says; None: it is not there
    ({}, {"0.lora_A": None}, r"0\.lora_A\.weight is missing in the file, \[2, 6\] in"),
    ({}, {"0.lora_C": torch.ones(1)}, r"0\.lora_C\.weight is \[1\] in the file, missing in"),
    # copy_ would broadcast it
    ({}, {"0.lora_A": torch.ones(1, 6)}, r"0\.lora_A\.weight is \[1, 6\] in the file"),
    ({"r": None, "lora_alpha": None}, {}, "r is 8 in .*, 2 in .* lora_alpha is 8 .* 16"),
    ({"use_rslora": True}, {}, "use_rslora is True in the file, False in the model"),
    ({"peft_type": "IA3", "bias": "all"}, {}, "not supported: peft_type 'IA3', bias 'all'"),
    ({"init_lora_weights": "pissa", "later": 1}, {}, "init_lora_weights 'pissa', later 1"),
]


@pytest.mark.parametrize(("fields", "tensors", "message"), SPOILT)
def test_a_file_that_does_not_fit_is_refused_and_nothing_is_copied(
    tmp_path, fields, tensors, message
):
    safetensors, model = pytest.importorskip("safetensors.torch"), inject(make_model("plain"))
    lora.save_adapter(model, tmp_path)
    config, content = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    tensors = {f"base_model.model.{name}.weight": tensor for name, tensor in tensors.items()}
    spoilt = json.loads(config.read_text()) | fields, safetensors.load_file(content) | tensors
    fields, tensors = (
        {key: value for key, value in found.items() if value is not None} for found in spoilt
    )
    config.write_text(json.dumps(fields))
    safetensors.save_file(tensors, content)
    before = copy.deepcopy(trained(model, seed=7).state_dict())
    with pytest.raises(ValueError, match=message):
        lora.load_adapter(model, tmp_path)
    bitwise(model.state_dict(), before)


VALUES = lora.NF4_TABLE
TIES = torch.cat(
    [VALUES, (VALUES[:-1] + VALUES[1:]) / 2, VALUES.flip(0), torch.zeros(17)]
)  # a block
TIES = torch.outer(torch.tensor([1, 3, 7, 11, 0.3, 0.7, 0]), TIES).flatten()
WEIGHTS = [
    TIES,
    *(0.05 * torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (1, 65, 2**16)),
]


def quantize_plainly(x, values, block_size):
    """The largest of each block; for each x, relative to it, the nearest value's number."""
    absmax = torch.stack([block.abs().max() for block in x.split(block_size)])
    parts = x * (1 / absmax.clamp_min(1e-38)).repeat_interleave(block_size)[: len(x)]
    return absmax, sum(parts > middle for middle in (values[:-1] + values[1:]) / 2)


@pytest.mark.parametrize("weight", WEIGHTS, ids=len)
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize(("dtype", "double_quant"), [(F32, True), (BF16, False), (F64, True)])
def test_nf4_rounds_to_the_nearest_value_of_each_block(weight, block_size, dtype, double_quant):
    """It holds those bytes and no more, through casts and state dicts, and in a product."""
    n, weight, saved = len(weight), weight[:, None].to(dtype), []
    q = lora.quantize_nf4(weight, block_size, double_quant)
    absmax, codes = quantize_plainly(weight.flatten().float(), VALUES, block_size)
    bitwise(
        torch.stack([q.packed >> 4, q.packed & 15], 1).flatten().long(),
        F.pad(codes, (0, n % 2), value=7),
    )
    if double_quant:
        scales, codes_of_absmax = quantize_plainly(absmax - absmax.mean(), lora.DYNAMIC_MAP, 256)
        bitwise((q.absmax.long(), q.scales), (codes_of_absmax, scales))
        absmax = (
            lora.DYNAMIC_MAP[codes_of_absmax] * scales.repeat_interleave(256)[: len(absmax)]
            + absmax.mean()
        )
    held = -(-n // 2) + (
        len(absmax) + 4 * len(scales) + 4 if double_quant else 4 * len(absmax)
    )  # 4: the mean
    assert sum(buffer.untyped_storage().nbytes() for buffer in q.buffers()) == held
    assert (n, block_size, double_quant) != (2**16, 64, True) or round(8 * held / n, 3) == 4.127
    expected = (VALUES[codes] * absmax.repeat_interleave(block_size)[:n])[:, None]
    cast, other = copy.deepcopy(q).half(), lora.quantize_nf4(0 * weight, block_size, double_quant)
    rounded = expected.to(dtype), expected.half(), expected.bfloat16()
    bitwise((q.weight, cast.weight, lora.dequantize_nf4(q, BF16)), rounded)  # each once
    other.load_state_dict(q.state_dict())
    bitwise(
        [dict(copied.named_buffers()) for copied in (cast, other)], [dict(q.named_buffers())] * 2
    )
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        bitwise(q(torch.ones(1, 1, dtype=dtype, requires_grad=True)), expected.to(dtype).t())
    assert n == 1 or max(saved) < n


def test_nf4_is_byte_for_byte_bitsandbytes():
    assert lora.DYNAMIC_MAP[[0, 127, 128, 129, 255]].tolist() == pytest.approx(
        [-0.99296875, 0.0, 5.5e-7, 3.25e-6, 1.0]
    )
    bnb, weight = pytest.importorskip("bitsandbytes").functional, torch.cat(WEIGHTS)
    for block_size, double_quant in ((64, False), (256, False), (64, True)):
        packed, state = bnb.quantize_4bit(weight, None, None, block_size, double_quant, "nf4")
        ours = lora.quantize_nf4(weight, block_size, double_quant)
        bitwise(packed.flatten(), ours.packed)
        if not double_quant:
            bitwise(bnb.dequantize_4bit(packed, state).flatten(), lora.dequantize_nf4(ours))
    bitwise((state.state2.code, state.state2.absmax), (lora.DYNAMIC_MAP, ours.scales))
    # its CPU kernel finds the 8-bit code through a table of 2^16: it may take one nearly as near
    theirs, codes = (state.state2.code[absmax.int()] for absmax in (state.absmax, ours.absmax))
    assert (
        ((state.absmax.int() - ours.absmax.int()).abs() <= 1)
        .logical_or((theirs - codes).abs() <= 2**-15)
        .all()
    )


@pool.on(2, 3)
def test_average_adapters_is_the_mean_also_where_a_rank_has_not_used_one_and_only_A_and_B_travel():
    ranks, rank = pool.world_size(), pool.rank()
    model = inject(make_model("plain", F64), quantize="nf4")
    for i, factor in enumerate(lora.trained_by(model)):
        factor.grad = None if i == rank else torch.full_like(factor, 0.1 + rank)
    with Collectives() as seen:
        lora.average_adapters(model, pool.group())
    assert seen.calls == [("allreduce_", 8 * (2 * (6 + 33) + 2 * (33 + 17)))]  # Σ r(d + k)
    for i, factor in enumerate(lora.trained_by(model)):
        mean = sum(0.1 + r for r in range(ranks) if r != i) / ranks
        within(factor.grad, torch.full_like(factor, mean))
    outside = [dist.new_group([r]) for r in range(ranks)][rank - 1]
    with pytest.raises(ValueError, match=f"rank {rank} is not a member"):
        lora.average_adapters(model, outside)


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pool.on(2, 3)
def test_an_adapted_model_trains_under_ddp_and_fsdp_as_on_one_device(kind, quantize):
    make = partial(Trainer, kind, claims.resolve(claims.KINDS[kind].ours))
    exact = pool.world_size() == 2

    def adapted():
        return trained(inject(make_model("plain"), quantize=quantize))

    def adapter(trainer):
        return lora.adapter_state_dict(trainer.module, trainer.whole())

    registry._problems.clear()
    with claims.default_group(pool.group()):
        trains_as_one_device(make, adapted, "adamw", exact, after=adapter)

    assert not registry._problems


@pytest.mark.parametrize(("N", "rank"), [(2, 0), (8, 3)])
def test_over_fsdp_all_weights_are_gathered_twice_and_only_adapters_send_gradients(N, rank):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    lora.inject_lora(model)
    trained = sum(factor.numel() for factor in lora.trained_by(model))
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trained
    with fake_world(N, rank):
        for layer in (*model, model):
            fsdp.fully_shard(layer)
        with fsdp.SentBytes() as sent:
            model(torch.randn(4, 64, requires_grad=True)).sum().backward()
    assert sent.total == 4 * (2 * frozen + 3 * trained) * (N - 1) / N
