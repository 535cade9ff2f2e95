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
from shared import Collectives, fake_world, make_batch, make_model, randn

import amp
import fsdp
import lora
import zero

F64 = torch.float64
F32 = torch.float32
BF16 = torch.bfloat16
INPUT = make_batch(0, 0, F64)
bitwise = partial(torch.testing.assert_close, rtol=0, atol=0)
within = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
inject = partial(lora.inject_lora, r=2, target_modules=["0", "2"])


def trained(model, seed=5):
    torch.manual_seed(seed)
    for factor in lora.trained_by(model):
        nn.init.normal_(factor, std=0.3)
    return model


def adapted(**options):
    """In the model "plain", two of three layers. Their factors are not zero."""
    model = make_model("plain", F64)
    return trained(inject(model, **options))


def make_layer(**options):
    """From 6 to 5 numbers, with a B that is not zero."""
    base = nn.Linear(6, 5).double()
    return trained(lora.LoRALinear(base, 4, 3, **options))


def gradients(output, *inputs):
    loss = output.square().sum()
    return torch.autograd.grad(loss, inputs)


# ---- the idea


def test_the_idea_is_a_layer_that_starts_alike_and_computes_alike():
    layer = make_layer()
    naive = lora.NaiveLoRA(layer.base_layer, 4, 3)
    bound = 6**-0.5  # as in peft
    assert bound / 2 < naive.lora_A.max() <= bound
    assert -bound <= naive.lora_A.min() < -bound / 2
    bitwise(naive(INPUT), layer.base_layer(INPUT))
    assert len(lora.trained_by(naive)) == 2
    nn.init.ones_(naive.lora_B)
    layer.load_state_dict(naive.state_dict())
    within(naive(INPUT), layer(INPUT))


# ---- layers

LAYERS = {
    "plain": {},
    "rank-stabilized": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.5},
    "4 bits": {"quantize": "nf4"},
    "4.127 bits": {"quantize": "nf4", "double_quant": True},
}


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_adds_the_product_of_its_factors(name, shape):
    layer = make_layer(**LAYERS[name])
    scaling = 3 / 2 if name == "rank-stabilized" else 3 / 4
    x = torch.randn(shape, dtype=F64, requires_grad=True)
    inputs = x, layer.lora_A, layer.lora_B
    torch.manual_seed(1)
    y = layer(x)
    torch.manual_seed(1)
    dropped = F.dropout(x, layer.lora_dropout)
    correction = F.linear(dropped, layer.lora_B @ layer.lora_A)
    expected = layer.base_layer(x) + scaling * correction
    within(y, expected)
    within(gradients(y, *inputs), gradients(expected, *inputs))


@pytest.mark.parametrize("name", LAYERS)
def test_a_merged_layer_computes_the_same_and_unmerging_restores_every_bit(name):
    layer = make_layer(**LAYERS[name])
    before = layer.eval()(INPUT)
    lora.merge(layer)
    lora.merge(layer)  # changes nothing
    within(layer(INPUT), before)
    with pytest.raises(ValueError, match="unmerge"):
        layer.train()(INPUT)
    lora.unmerge(layer)
    bitwise(layer.eval()(INPUT), before)
    lora.merge(layer)
    layer.load_state_dict(layer.state_dict())
    assert layer.merged is None  # because it is that of other factors


def test_a_layer_in_16_bits_has_factors_in_fp32_and_a_merged_weight_that_is_rounded_once():
    base = nn.Linear(100, 20).bfloat16()
    layer = trained(lora.LoRALinear(base, r=50))
    assert layer(torch.ones(100, dtype=BF16)).dtype == BF16
    lora.merge(layer)
    merged = base.weight + 16 / 50 * layer.lora_B @ layer.lora_A
    assert layer.lora_A.dtype == layer.lora_B.dtype == F32
    bitwise(layer.merged, merged.bfloat16().detach())


def test_pytorchs_encoder_which_reads_weights_reads_the_corrected_ones():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=F64)
    lora.inject_lora(model, r=2)
    trained(model).eval()
    x = torch.randn(3, 5, 8, dtype=F64)
    expected = model(x)
    with torch.no_grad():  # then it calls none of its layers
        within(model(x), expected.detach())


# ---- which layers are adapted


def test_an_injected_layer_has_the_defaults_of_a_layer():
    base = nn.Linear(6, 5)
    layer = lora.LoRALinear(base)
    injected = lora.inject_lora(nn.Sequential(base))[0]
    assert layer.lora_A.shape == injected.lora_A.shape == (8, 6)
    assert layer.scaling == injected.scaling == 16 / 8
    assert layer.lora_dropout == injected.lora_dropout == 0


def small_model():
    """Its last layer has two names, "3" and "4"."""
    model = lora.language_model(C=4, heads=1, layers=1, V=5)
    model.append(model[3])
    model.norm1 = nn.Linear(4, 4)
    return model


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("all-linear", "1.qkv 1.proj 1.linear1 1.linear2 3 norm1"),
        (r"1\.linear|1\.proj", "1.proj"),  # an expression matches whole names
        (["ear1", "linear2", "1.proj"], "1.proj 1.linear2"),  # names, or their last parts
    ],
    ids=["all", "expression", "list"],
)
def test_targets_choose_the_layers(targets, names):
    model = lora.inject_lora(small_model(), target_modules=targets)
    assert " ".join(lora.lora_layers(model)) == names
    assert model[3] is model[4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ".*norm1"}, r"'1\.qkv'"),
        ({"quantize": "int8"}, "quantize='int8'"),
    ],
    ids=["a norm", "8 bits"],
)
def test_a_wrong_argument_is_named_and_changes_nothing(options, message):
    model = small_model()
    with pytest.raises(ValueError, match=message):
        lora.inject_lora(model, **options)
    assert not lora.lora_layers(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "r=0"),
        ({"r": "4"}, "r='4'"),
        ({"r": 4.0}, "r=4.0"),
        ({"r": True}, "r=True"),
        ({"lora_alpha": None}, "lora_alpha=None"),
        ({"lora_alpha": "16"}, "lora_alpha='16'"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
        ({"lora_dropout": None}, "lora_dropout=None"),
        ({"lora_dropout": 1.0}, "lora_dropout=1.0"),
        ({"use_rslora": "false"}, "use_rslora='false'"),
        ({"target_modules": None}, "target_modules None finds"),
        ({"target_modules": 7}, "target_modules 7 finds"),
        ({"target_modules": []}, "target_modules .* finds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("where", ["arguments", "a file"])
def test_a_value_that_is_no_value_is_named(tmp_path, where, options, message):
    pytest.importorskip("safetensors")
    model = make_model("plain")
    act = partial(inject, model, **options)
    if where == "a file":
        act = partial(lora.load_adapter, model, tmp_path)
        lora.save_adapter(inject(make_model("plain")), tmp_path)
        config = tmp_path / "adapter_config.json"
        fields = json.loads(config.read_text())
        config.write_text(json.dumps(fields | options))
    with pytest.raises(ValueError, match=message):
        act()
    assert not lora.lora_layers(model)


def test_new_layers_are_in_the_mode_of_those_that_they_replace(tmp_path):
    pytest.importorskip("safetensors")
    options = {"lora_dropout": 0.5, "quantize": "nf4"}
    model = make_model("plain").eval()
    model[2].train()
    inject(model, **options)
    assert [layer.training for layer in model[0].modules()] == [False, False]
    assert [layer.training for layer in model[2].modules()] == [True, True]
    lora.save_adapter(model, tmp_path)
    loaded = lora.load_adapter(make_model("plain").eval(), tmp_path)
    assert not any(layer.training for layer in loaded.modules())
    lora.merge(loaded)
    loaded(make_batch(0, 0))  # a merged layer would refuse to train


def test_a_model_is_adapted_once():
    with pytest.raises(ValueError, match="already"):
        inject(adapted())


# ---- files of adapters


@pytest.mark.parametrize(
    "targets", [{"0", "2"}, "[02]", "all-linear"], ids=["names", "pattern", "all"]
)
def test_peft_loads_ours_and_we_load_pefts(tmp_path, targets):
    peft = pytest.importorskip("peft")
    plain = make_model("plain", F64)
    rslora = targets == "[02]"
    options = {"r": 2, "lora_alpha": 6, "lora_dropout": 0.5, "use_rslora": rslora}
    model = lora.inject_lora(copy.deepcopy(plain), target_modules=targets, **options)
    trained(model).eval()
    lora.save_adapter(model, tmp_path / "new")
    output = model(INPUT)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "new").eval()
    within(theirs(INPUT), output)
    theirs.save_pretrained(tmp_path)
    lora.merge(trained(model, seed=6))  # loading forgets it
    for ours in (plain, model):
        lora.load_adapter(ours, tmp_path).eval()
        bitwise(ours(INPUT), output)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"2\.lora_A"),
        ({"r": 2, "use_rslora": True}, "'lora_alpha', 8.*'use_rslora', True"),  # peft's default
        ({"lora_alpha": 16}, "'r', 8"),
        ({"peft_type": "IA3", "later": 1}, "peft_type 'IA3', later 1"),
    ],
    ids=["other tensors", "another scaling", "another rank", "unknown fields"],
)
def test_files_that_do_not_fit_are_an_error_and_change_nothing(tmp_path, fields, message):
    pytest.importorskip("safetensors")
    saved = adapted() if fields else adapted(target_modules=["0"])
    lora.save_adapter(saved, tmp_path)
    if fields:
        config = tmp_path / "adapter_config.json"
        config.write_text(json.dumps(fields))
    model = trained(adapted(), seed=7)
    before = model(INPUT)
    with pytest.raises(ValueError, match=message):
        lora.load_adapter(model, tmp_path)
    bitwise(model(INPUT), before)


def test_gpt2s_layers_are_adapted_and_merged_which_have_transposed_weights():
    """Its output layer is left out. It is tied to the embedding."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    before = model(tokens).logits
    lora.inject_lora(model, r=1)
    bitwise(model(tokens).logits, before)
    assert len(lora.lora_layers(model)) == 4
    output = trained(model).eval()(tokens).logits
    lora.merge(model)
    within(model(tokens).logits, output)


# ---- weights in 4 bits

TABLE = lora.NF4_TABLE


def numbers(count):
    return randn((count,), dtype=F32)


def ties():
    """Blocks with every value of the table, every middle between two, and a block of zeros."""
    middles = (TABLE[:-1] + TABLE[1:]) / 2
    block = torch.cat([TABLE, middles, torch.zeros(1)])
    scales = torch.tensor([1, 3, 0.3, 1e-5, 0])
    return torch.outer(scales, block).flatten()


def rounded_plainly(tensor, table, block_size):
    middles = (table[:-1] + table[1:]) / 2
    rounded = []
    for block in tensor.split(block_size):
        absmax = block.abs().max()
        inverse = 1 / absmax.clamp_min(1e-38)
        relative = block.unsqueeze(1) * inverse
        codes = (relative > middles).sum(1)
        rounded.append(table[codes] * absmax)
    return torch.cat(rounded)


@pytest.mark.parametrize(
    "weight", [ties(), numbers(1), numbers(65)], ids=["ties", "one element", "an odd number"]
)
def test_each_element_is_rounded_to_the_nearest_value_of_its_block(weight):
    """Every element takes half a byte, and every block four bytes."""
    q = lora.quantize_nf4(weight, 32)
    rounded = rounded_plainly(weight, TABLE, 32)
    bitwise(q.weight, rounded)
    blocks = -(-len(weight) // 32)
    assert lora.held_bytes(q.buffers()) == (len(weight) + 1) // 2 + 4 * blocks


def test_double_quantization_rounds_the_largest_of_each_block_too():
    weight = numbers(2**16)
    q = lora.quantize_nf4(weight, double_quant=True)
    expected = lora.quantize_nf4(weight)
    bitwise(lora.naive_nf4(weight), expected.weight)
    mean = expected.absmax.mean()
    rounded = rounded_plainly(expected.absmax - mean, lora.DYNAMIC_TABLE, 256)
    expected.absmax = rounded + mean
    bitwise(q.weight, expected.weight)
    bits = 8 * lora.held_bytes(q.buffers())
    assert round(bits / 2**16, 3) == 4.127


def test_a_layers_weight_is_rounded_once_by_default():
    base = nn.Linear(64, 5)
    rounded = lora.naive_nf4(base.weight)
    layer = lora.LoRALinear(base, quantize="nf4")
    bitwise(layer.base_layer.weight, rounded)


def test_codes_have_bitsandbytes_order_and_values():
    packed = lora.quantize_nf4(TABLE).packed.tolist()
    assert packed == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    some = lora.DYNAMIC_TABLE[[0, 127, 128, 129, -1]]
    assert some.tolist() == pytest.approx([-0.99296875, 0.0, 5.5e-7, 3.25e-6, 1.0])


def test_a_cast_and_a_state_dict_keep_the_bytes():
    q = lora.quantize_nf4(numbers(130), double_quant=True)
    loaded = lora.quantize_nf4(torch.zeros(130), double_quant=True)
    loaded.load_state_dict(q.state_dict())
    bitwise(loaded.weight, q.weight)
    loaded.half()
    bitwise(loaded.state_dict(), q.state_dict())
    bitwise(loaded.weight, q.weight.half())  # rounded once
    bitwise(lora.dequantize_nf4(q, BF16), q.weight.bfloat16())


def test_no_dequantized_weight_is_kept_for_backward():
    layer = make_layer(quantize="nf4")
    x = INPUT.clone().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        layer.base_layer(x)
    assert not saved


def test_a_quantized_layer_has_the_gradients_of_its_dequantized_weight():
    plain = nn.Linear(64, 6)
    q = lora.quantize_nf4(plain.weight)
    plain.weight.data = q.weight
    q.bias = plain.bias
    x = torch.randn(3, 5, 64, requires_grad=True)
    results = []
    for layer in (plain, q):
        with amp.autocast(BF16):
            output = layer(x)
        results.append((output, *gradients(output, x, plain.bias)))
    bitwise(*results)


# ---- several ranks


@pool.on(2)
def test_a_gradient_of_minus_zero_on_one_rank_is_one_on_all():
    """Otherwise weight decay would change the parameter on that rank only."""
    model = adapted()
    factors = lora.trained_by(model)
    if pool.rank() == 0:
        for factor in factors:
            factor.grad = torch.full_like(factor, -0.0)
    lora.average_adapters(model, pool.group())
    assert all(factor.grad.eq(0).all() for factor in factors)


@pool.on(2, 3)
def test_adapters_are_averaged_also_where_a_rank_has_not_used_one():
    """Rank i has not used parameter i, and no rank the last."""
    model = adapted(quantize="nf4")
    *used, unused = factors = lora.trained_by(model)
    for i, factor in enumerate(used):
        if i != pool.rank():
            factor.grad = torch.full_like(factor, 1.0 + pool.rank())
    with Collectives() as seen:
        lora.average_adapters(model, pool.group())
    assert seen.calls == [("allreduce_", sum(factor.nbytes for factor in factors))]
    assert unused.grad is None
    for i, factor in enumerate(used):
        ranks = range(pool.world_size())
        mean = sum(1.0 + rank for rank in ranks if rank != i) / len(ranks)
        assert (factor.grad - mean).abs().max() < 1e-12


@pool.on(2)
def test_averaging_over_a_group_without_this_rank_is_an_error():
    groups = [dist.new_group([rank]) for rank in (1, 0)]
    with pytest.raises(ValueError, match=f"rank {pool.rank()} is not a member"):
        lora.average_adapters(adapted(), groups[pool.rank()])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pool.on(2)
def test_a_quantized_model_trains_under_ddp_and_fsdp_as_on_one_device(kind):
    make = partial(Trainer, kind, claims.resolve(claims.KINDS[kind].ours))

    def adapted():
        model = inject(make_model("plain"), quantize="nf4")
        return trained(model)

    def adapter(trainer):
        return lora.adapter_state_dict(trainer.module, trainer.whole())

    registry._problems.clear()
    with claims.default_group(pool.group()):
        trains_as_one_device(make, adapted, "adamw", True, after=adapter)

    assert not registry._problems


def test_over_fsdp_all_weights_are_gathered_twice_and_only_adapters_send_gradients():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    lora.inject_lora(model)
    trained = sum(factor.numel() for factor in lora.trained_by(model))
    whole = sum(parameter.numel() for parameter in model.parameters())
    with fake_world(8, 3):
        for layer in (*model, model):
            fsdp.fully_shard(layer)
        with fsdp.SentBytes() as sent:
            y = model(torch.randn(4, 64, requires_grad=True))
            y.sum().backward()
    assert sent.total == 4 * (2 * whole + trained) * 7 / 8


def shard(model, how):
    if how == "fsdp":
        return fsdp.fully_shard(model, process_group=pool.group())
    zero.Zero3(model, torch.optim.SGD, pool.group())
    return model


@pytest.mark.parametrize("how", ["fsdp", "zero3"])
@pool.on(2)
def test_sharded_weights_are_neither_adapted_nor_merged(how):
    plain = shard(make_model("plain"), how)
    with pytest.raises(ValueError, match="inject_lora before"):
        inject(plain)
    model = shard(adapted(), how)
    with pytest.raises(ValueError, match="full_parameters"):
        lora.merge(model)
