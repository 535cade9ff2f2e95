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


def adapted(dtype=F64, **options):
    """In the model "plain", two of three layers. Their factors are not zero."""
    model = make_model("plain", dtype)
    return trained(inject(model, **options))


LAYERS = {
    "plain": {},
    "rank-stabilized": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.5},
    "4 bits": {"quantize": "nf4"},
    "4.127 bits": {"quantize": "nf4", "double_quant": True},
}


def make_layer(**options):
    """From 6 to 5 numbers, with a B that is not zero."""
    base = nn.Linear(6, 5).double()
    return trained(lora.LoRALinear(base, 4, 3, **options))


def gradients(output, *inputs):
    loss = output.square().sum()
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize(
    "shape",
    [(6,), (2, 3, 6), (0, 4, 6)],
    ids=str,
)
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


def test_dropout_is_off_in_evaluation():
    layer = make_layer(lora_dropout=0.5).eval()
    output = layer(INPUT)
    bitwise(layer(INPUT), output)


@pytest.mark.parametrize("name", LAYERS)
def test_a_merged_layer_computes_the_same_and_unmerging_restores_every_bit(name):
    layer = make_layer(**LAYERS[name]).eval()
    before = layer(INPUT)
    lora.merge(layer)
    lora.merge(layer)  # changes nothing
    within(layer(INPUT), before)
    assert "merged" not in layer.state_dict()
    lora.unmerge(layer)
    bitwise(layer(INPUT), before)


def test_a_merged_layer_does_not_train():
    layer = make_layer()
    lora.merge(layer)
    with torch.no_grad():
        layer(INPUT)
    with pytest.raises(ValueError, match="unmerge"):
        layer(INPUT)


def test_loading_a_state_dict_forgets_the_merged_weight():
    layer = make_layer()
    lora.merge(layer)
    layer.load_state_dict(layer.state_dict())
    assert layer.merged is None


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["autocast", "16-bit layer"])
def test_the_factors_of_a_layer_in_16_bits_or_under_autocast_are_in_fp32(dtype):
    base = nn.Linear(100, 20).to(dtype)
    layer = lora.LoRALinear(base, r=50)
    x = torch.randn(4, 100, dtype=dtype)
    with torch.autocast("cpu", BF16, enabled=dtype == F32):
        y = layer(x)
        bitwise(y, base(x))  # B = 0
    assert y.dtype == BF16
    assert layer.lora_A.dtype == layer.lora_B.dtype == F32


def test_a_merged_weight_is_rounded_once():
    base = nn.Linear(100, 20).bfloat16()
    layer = trained(lora.LoRALinear(base, r=50))
    lora.merge(layer)
    merged = base.weight + 16 / 50 * layer.lora_B @ layer.lora_A
    bitwise(layer.merged, merged.detach().bfloat16())


def test_A_starts_uniform_within_the_root_of_the_inputs_as_in_peft():
    layer = lora.LoRALinear(nn.Linear(100, 20), r=50)
    A = layer.lora_A
    assert -0.1 <= A.min() < -0.099
    assert 0.099 < A.max() <= 0.1


# ---- which layers are adapted


def small_model():
    """Its last layer has two names, "3" and "4"."""
    model = lora.language_model(C=4, heads=1, layers=1, V=5)
    model.append(model[3])
    model.norm1 = nn.Linear(4, 4)
    return model


TARGETS = {
    "all-linear": {"1.qkv", "1.proj", "1.linear1", "1.linear2", "3", "norm1"},
    r"1\.linear|1\.proj": {"1.proj"},  # an expression matches whole names
}


@pytest.mark.parametrize("targets", TARGETS)
def test_an_expression_or_all_linear_choose_the_layers(targets):
    model = lora.inject_lora(small_model(), target_modules=targets)
    assert lora.lora_layers(model).keys() == TARGETS[targets]
    assert model[3] is model[4]


def test_a_list_has_names_or_their_last_parts():
    model = lora.inject_lora(small_model(), target_modules=["ear1", "linear2", "1.proj"])
    assert lora.lora_layers(model).keys() == {"1.linear2", "1.proj"}


@pytest.mark.parametrize("targets", [["1.linear"], ".*norm1"], ids=["nothing", "a norm"])
def test_targets_that_are_not_linear_layers_are_an_error_that_lists_those(targets):
    model = small_model()
    with pytest.raises(ValueError, match=r"'1\.qkv'"):
        lora.inject_lora(model, target_modules=targets)
    assert not lora.lora_layers(model)


@pytest.mark.parametrize("name", ["r", "lora_dropout", "quantize"])
def test_a_wrong_argument_is_named_and_changes_nothing(name):
    model = small_model()
    wrong = {"r": 0, "lora_dropout": 1.0, "quantize": "int8"}
    with pytest.raises(ValueError, match=f"{name}={wrong[name]!r}"):
        lora.inject_lora(model, **{name: wrong[name]})
    assert not lora.lora_layers(model)


def test_a_model_is_adapted_once():
    model = adapted()
    with pytest.raises(ValueError, match="already"):
        inject(model)


# ---- files of adapters


@pytest.mark.parametrize("targets", [{"0", "2"}, "[02]", "all-linear"], ids=str)
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_loads_ours_and_we_load_pefts(tmp_path, targets, rslora):
    peft = pytest.importorskip("peft")
    directory = tmp_path / "new" / "folder"
    plain = make_model("plain", F64)
    options = {"r": 2, "lora_alpha": 6, "lora_dropout": 0.5, "use_rslora": rslora}
    model = copy.deepcopy(plain)
    lora.inject_lora(model, target_modules=targets, **options)
    trained(model).eval()
    lora.save_adapter(model, directory)
    output = model(INPUT)
    base = copy.deepcopy(plain)
    theirs = peft.PeftModel.from_pretrained(base, directory).eval()
    within(theirs(INPUT), output)
    theirs.save_pretrained(tmp_path)
    loaded = lora.load_adapter(plain, tmp_path).eval()
    bitwise(loaded(INPUT), output)


def test_loading_an_adapter_forgets_the_merged_weight(tmp_path):
    pytest.importorskip("safetensors")
    model = adapted().eval()
    lora.save_adapter(model, tmp_path)
    output = model(INPUT)
    lora.merge(trained(model, seed=6))
    lora.load_adapter(model, tmp_path)
    bitwise(model(INPUT), output)


def assert_refused(directory, message, fields=None, tensors=None):
    """Change the files of an adapter. A field that is None is removed."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = adapted()
    lora.save_adapter(model, directory)
    config = directory / "adapter_config.json"
    saved = json.loads(config.read_text())
    saved |= fields or {}
    kept = {name: value for name, value in saved.items() if value is not None}
    config.write_text(json.dumps(kept))
    weights = directory / "adapter_model.safetensors"
    saved = safetensors.load_file(weights)
    safetensors.save_file(saved | (tensors or {}), weights)
    trained(model, seed=7)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        lora.load_adapter(model, directory)
    bitwise(model.state_dict(), before)


def test_a_tensor_that_the_model_lacks_is_refused(tmp_path):
    assert_refused(tmp_path, "lora_C", tensors={"lora_C": torch.ones(1)})


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    name = "base_model.model.0.lora_A.weight"
    assert_refused(tmp_path, r"\[1, 6\].*\[2, 6\]", tensors={name: torch.ones(1, 6)})


def test_another_scaling_is_refused(tmp_path):
    assert_refused(tmp_path, "'use_rslora', True", {"use_rslora": True})


def test_a_field_that_is_missing_has_pefts_default(tmp_path):
    assert_refused(tmp_path, r"\('lora_alpha', 8\), \('r', 8\)", {"r": None, "lora_alpha": None})


def test_fields_that_are_not_supported_are_listed(tmp_path):
    fields = {"peft_type": "IA3", "bias": "all", "later": 1}
    assert_refused(tmp_path, "peft_type 'IA3', bias 'all', later 1", fields)


def gpt2():
    """Its linear layers are Conv1D, and its output layer is tied to the embedding."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    torch.manual_seed(1)
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    return model.double().eval()


def test_gpt2s_layers_are_adapted_and_peft_loads_them(tmp_path):
    peft = pytest.importorskip("peft")
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    model = lora.inject_lora(gpt2(), r=1)
    trained(model).double().eval()
    output = model(tokens).logits
    assert len(lora.lora_layers(model)) == 4  # not the output layer
    lora.save_adapter(model, tmp_path)
    with pytest.warns(UserWarning, match="Conv1D"):  # peft notes that it transposes
        theirs = peft.PeftModel.from_pretrained(gpt2(), tmp_path).eval()
    within(theirs(tokens).logits, output)
    lora.merge(model)
    within(model(tokens).logits, output)


def test_all_linear_leaves_out_the_output_layer_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 20, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)  # its output layer is not tied
    lora.inject_lora(model)
    layers = lora.lora_layers(model)
    assert len(layers) == 7
    assert "lm_head" not in layers


# ---- the idea


def test_the_idea_is_a_layer_that_starts_alike_and_computes_alike():
    base = nn.Linear(6, 4).double()
    naive = lora.NaiveLoRA(base, r=2, lora_alpha=3)
    layer = lora.LoRALinear(base, r=2, lora_alpha=3)
    bitwise(naive(INPUT), base(INPUT))
    assert lora.trained_by(naive) == [naive.lora_A, naive.lora_B]
    layer.load_state_dict(trained(naive).state_dict())
    within(naive(INPUT), layer(INPUT))


def test_the_idea_rounds_as_the_packed_weight():
    weight = numbers(6 * 64).view(6, 64)
    rounded = lora.naive_nf4(weight, 32)
    torch.testing.assert_close(rounded, lora.quantize_nf4(weight, 32).weight)


# ---- weights in 4 bits

TABLE = lora.NF4_TABLE


def numbers(count):
    return randn((count,), dtype=F32)


def ties():
    """Blocks with every value of the table, every middle between two, and a block of zeros."""
    middles = (TABLE[:-1] + TABLE[1:]) / 2
    block = torch.cat([TABLE, middles, TABLE.flip(0), torch.zeros(17)])
    return torch.outer(torch.tensor([1, 3, 0.3, 1e-5, 0]), block).flatten()


def quantize_plainly(tensor, table, block_size):
    """Return the code of each element and the rounded elements."""
    middles = (table[:-1] + table[1:]) / 2
    results = []
    for block in tensor.split(block_size):
        absmax = block.abs().max()
        inverse = 1 / absmax.clamp_min(1e-38)
        relative = block.unsqueeze(1) * inverse
        codes = (relative > middles).sum(1)
        results.append((codes, table[codes] * absmax))
    codes, rounded = zip(*results, strict=True)
    return torch.cat(codes), torch.cat(rounded)


WEIGHTS = {"ties": ties(), "one element": numbers(1), "an odd number": numbers(65)}


@pytest.mark.parametrize("name", WEIGHTS)
def test_each_element_is_rounded_to_the_nearest_value_of_its_block(name):
    """Every element takes half a byte, and every block four bytes."""
    weight = WEIGHTS[name]
    n = len(weight)
    q = lora.quantize_nf4(weight, 32)
    codes, rounded = quantize_plainly(weight, TABLE, 32)
    first = (q.packed >> 4).long()
    bitwise(first, codes[::2])
    bitwise(q.weight, rounded)
    blocks = -(-n // 32)
    assert held_by(q) == (n + 1) // 2 + 4 * blocks


def held_by(module):
    storages = [buffer.untyped_storage() for buffer in module.buffers()]
    return sum(storage.nbytes() for storage in storages)


def test_double_quantization_rounds_the_largest_of_each_block_too():
    weight = numbers(2**16)
    q = lora.quantize_nf4(weight, double_quant=True)
    blocks = weight.view(-1, 64)
    absmax = blocks.abs().amax(1)
    mean = absmax.mean()
    _, rounded = quantize_plainly(absmax - mean, lora.DYNAMIC_TABLE, 256)
    rounded += mean
    codes, _ = quantize_plainly(weight, TABLE, 64)
    bitwise(q.weight, TABLE[codes] * rounded.repeat_interleave(64))
    assert round(8 * held_by(q) / 2**16, 3) == 4.127


@pytest.mark.parametrize("double_quant", [False, True])
def test_a_cast_and_a_state_dict_keep_the_bytes(double_quant):
    q = lora.quantize_nf4(numbers(130), double_quant=double_quant)
    cast = copy.deepcopy(q).half()
    loaded = lora.quantize_nf4(torch.zeros(130), double_quant=double_quant)
    loaded.load_state_dict(q.state_dict())
    bitwise(cast.state_dict(), q.state_dict())
    bitwise(loaded.weight, q.weight)
    bitwise(cast.weight, q.weight.half())  # rounded once
    bitwise(lora.dequantize_nf4(q, BF16), q.weight.bfloat16())


def test_no_dequantized_weight_is_kept_for_backward():
    layer = make_layer(quantize="nf4")
    x = INPUT.clone().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        layer.base_layer(x)
    assert not saved


@pytest.mark.parametrize("enabled", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize(
    "shape",
    [(3, 5, 64), (64,)],
    ids=str,
)
def test_a_quantized_layer_has_the_gradients_of_its_dequantized_weight(enabled, shape):
    plain = nn.Linear(64, 6)
    q = lora.quantize_nf4(plain.weight)
    plain.weight.data = q.weight
    q.bias = plain.bias
    x = randn(shape, dtype=F32).requires_grad_()
    results = []
    for layer in (plain, q):
        with amp.autocast(BF16, enabled):
            output = layer(x)
        results.append((output, *gradients(output, x, plain.bias)))
    bitwise(*results)


@pytest.mark.parametrize(
    "weight",
    [ties(), numbers(2**16)],
    ids=["ties", "random"],
)
def test_nf4_has_the_bytes_of_bitsandbytes(weight):
    bnb = pytest.importorskip("bitsandbytes").functional
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    ours = lora.quantize_nf4(weight)
    bitwise(packed.flatten(), ours.packed)
    rounded = bnb.dequantize_4bit(packed, state)
    bitwise(rounded.flatten(), ours.weight)


def test_double_quantization_has_the_table_and_scales_of_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes").functional
    weight = numbers(2**16)
    options = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": True}
    _, state = bnb.quantize_4bit(weight, **options)
    ours = lora.quantize_nf4(weight, double_quant=True)
    bitwise(state.state2.code, lora.DYNAMIC_TABLE)
    bitwise(state.state2.absmax, ours.scales)
    difference = state.absmax.int() - ours.absmax.int()
    assert (difference.abs() <= 1).float().mean() > 0.99  # its CPU kernel is not exact


def test_the_table_for_8_bits_has_bitsandbytes_values():
    some = lora.DYNAMIC_TABLE[[0, 127, 128, 129, 255]]
    assert some.tolist() == pytest.approx([-0.99296875, 0.0, 5.5e-7, 3.25e-6, 1.0])


# ---- other code


def test_pytorchs_encoder_which_reads_weights_reads_the_corrected_ones():
    plain = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    model = copy.deepcopy(plain)
    trained(lora.inject_lora(model, r=2)).eval()
    layers = lora.lora_layers(model)
    for name, layer in layers.items():
        weight = plain.get_submodule(name).weight
        weight.data += 8 * (layer.lora_B @ layer.lora_A).detach()
    x = torch.randn(3, 5, 8, dtype=F64)
    expected = plain(x)
    within(model(x), expected)
    with torch.no_grad():  # then it calls none of its layers
        within(model(x), expected)
    lora.merge(model)
    within(model(x), expected)


# ---- several ranks


@pool.on(2, 3)
def test_adapters_are_averaged_also_where_a_rank_has_not_used_one():
    """Rank i has not used parameter i, and no rank the last."""
    ranks = pool.world_size()
    model = adapted(quantize="nf4")
    *used, unused = factors = lora.trained_by(model)
    for i, factor in enumerate(used):
        if i != pool.rank():
            factor.grad = torch.full_like(factor, 0.1 + pool.rank())
    with Collectives() as seen:
        lora.average_adapters(model, pool.group())
    sent = sum(factor.nbytes for factor in factors)
    assert seen.calls == [("allreduce_", sent)]
    assert unused.grad is None
    for i, factor in enumerate(used):
        mean = sum(0.1 + r for r in range(ranks) if r != i) / ranks
        within(factor.grad, torch.full_like(factor, mean))


@pool.on(2)
def test_averaging_over_a_group_without_this_rank_is_an_error():
    groups = [dist.new_group([rank]) for rank in (1, 0)]
    with pytest.raises(ValueError, match=f"rank {pool.rank()} is not a member"):
        lora.average_adapters(adapted(), groups[pool.rank()])


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


@pytest.mark.parametrize(
    ("N", "rank"),
    [(2, 0), (8, 3)],
)
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


def shard(model, how):
    """Return the sharded model, and what zero.py's optimizer is or None."""
    if how == "fsdp":
        return fsdp.fully_shard(model, process_group=pool.group()), None
    optimizer = zero.Zero3(model, torch.optim.SGD, pool.group())
    return model, optimizer


@pytest.mark.parametrize("how", ["fsdp", "zero3"])
@pool.on(2)
def test_sharded_weights_are_not_adapted(how):
    model, _ = shard(make_model("plain"), how)
    with pytest.raises(ValueError, match="inject_lora before"):
        inject(model)


@pytest.mark.parametrize("how", ["fsdp", "zero3"])
@pool.on(2)
def test_sharded_weights_are_not_merged(how):
    model, _ = shard(adapted(), how)
    with pytest.raises(ValueError, match="full_parameters"):
        lora.merge(model)


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pool.on(2)
def test_weights_that_zero3_has_gathered_are_merged(quantize):
    model, optimizer = shard(adapted(quantize=quantize), "zero3")
    expected = model(INPUT).detach()
    with optimizer.full_parameters():
        lora.merge(model)
    within(model.eval()(INPUT), expected)
