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
# In the model "plain": the layers 6 to 33 and 33 to 17, but not layer 4.
inject = partial(lora.inject_lora, r=2, target_modules=["0", "2"])


def trained(model, seed=5):
    torch.manual_seed(seed)
    for factor in lora.trained_by(model):
        nn.init.normal_(factor, std=0.3)
    return model


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.booleans()),
    st.sampled_from([0.5, 1, 16]),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
    st.sampled_from([{}, {"quantize": "nf4"}, {"quantize": "nf4", "double_quant": True}]),
    st.sampled_from([(), (5,), (2, 3), (0, 4)]),
)
def test_a_layer_has_the_dense_weight_beside_or_merged(sizes, alpha, dropout, rslora, quant, batch):
    k, d, r, bias = sizes
    base = nn.Linear(k, d, bias).double()
    layer = trained(lora.LoRALinear(base, r, alpha, dropout, rslora, **quant))
    x = torch.randn(*batch, 2 * k, dtype=F64)[..., ::2].requires_grad_()  # strided
    W = layer.base_layer.weight
    A = layer.lora_A
    B = layer.lora_B
    scaling = alpha / r**0.5 if rslora else alpha / r
    for training in (True, False):
        torch.manual_seed(1)
        y = layer.train(training)(x)
        torch.manual_seed(1)
        dropped = F.dropout(x, dropout, training)  # for A only
        expected = F.linear(x, W, base.bias) + F.linear(dropped, scaling * B @ A)
        within(y, expected)
        for ours, theirs in zip(*(gradients(z, x, A, B) for z in (y, expected)), strict=True):
            within(ours, theirs)

    lora.merge(layer)
    lora.merge(layer)  # changes nothing
    assert "merged" not in layer.state_dict()
    bitwise(layer.merged, (W + scaling * B @ A).detach())
    within(layer(x), expected)
    with pytest.raises(ValueError, match=r"merged, .*unmerge\(model\) to train"):
        layer.train()(x)
    with torch.no_grad():
        within(layer(x), expected)
    lora.unmerge(layer)
    bitwise(layer.eval()(x), y)

    lora.merge(layer)
    layer.load_state_dict({name: 2 * tensor for name, tensor in layer.state_dict().items()})
    assert layer.merged is None  # it had the old A and B


def gradients(output, *inputs):
    return torch.autograd.grad(output, inputs, torch.ones_like(output).cumsum(-1))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_factors_of_a_layer_in_16_bits_or_under_autocast_are_in_fp32(dtype):
    layer = lora.LoRALinear(nn.Linear(100, 20).to(dtype), r=50)
    x = torch.randn(4, 100, dtype=dtype)
    A = layer.lora_A
    with torch.autocast("cpu", BF16, enabled=dtype == F32):
        bitwise(layer(x), layer.base_layer(x))  # B = 0
        assert layer(x).dtype == BF16
    assert A.dtype == layer.lora_B.dtype == F32
    assert -0.1 <= A.min() < -0.099 < 0.099 < A.max() <= 0.1  # uniform within k^-1/2, as peft's
    lora.merge(trained(layer))
    merged = layer.base_layer.weight + 16 / 50 * layer.lora_B @ A
    bitwise(layer.merged, merged.detach().to(dtype))  # rounded once, at the end


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"1.qkv", "1.proj", "1.linear1", "1.linear2", "3", "norm1"}),  # not "1.norm1"
        ({"target_modules": ["ear1", "1.linear2"]}, {"1.linear2"}),
        ({"target_modules": r"1\.linear|1\.proj"}, {"1.proj"}),
        ({"target_modules": ["1.linear"]}, r"\[\]; .* \['1\.qkv', .*'3', '4', 'norm1'\]"),
        ({"target_modules": ".*(norm|r)1"}, r"finds .*'1\.norm1'"),
        ({"r": 0}, "r=0 must be ≥ 1"),
        ({"lora_dropout": 1.0}, r"lora_dropout=1\.0 in \[0, 1\)"),
        ({"quantize": "int8"}, "quantize='int8' None or 'nf4'"),
    ],
    ids=str,
)
def test_targets_are_adapted_or_it_is_an_error_and_nothing_has_changed(arguments, expected):
    model = lora.language_model(C=4, heads=1, layers=1, V=5)
    model.append(model[3])  # one layer with two names, "3" and "4"
    model.norm1 = nn.Linear(4, 4)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            lora.inject_lora(model, **arguments)
        assert not lora.lora_layers(model)
        return
    adapted = lora.lora_layers(lora.inject_lora(model, **arguments))
    ranks = {name: len(layer.lora_A) for name, layer in adapted.items()}
    assert ranks == dict.fromkeys(expected, 8)
    assert model[3] is model[4]
    with pytest.raises(ValueError, match="has adapters already"):
        lora.inject_lora(model, **arguments)


@pytest.mark.parametrize(
    ("targets", "rslora"), [({"0", "2"}, False), ("[02]", True), ("all-linear", False)]
)
def test_an_adapter_is_loaded_as_it_was_saved_also_by_peft_and_from_peft(tmp_path, targets, rslora):
    pytest.importorskip("safetensors")
    directory = tmp_path / "new" / "folder"
    plain = make_model("plain", F64)
    adapt = partial(lora.inject_lora, r=2, lora_alpha=6, target_modules=targets, use_rslora=rslora)
    written = trained(adapt(copy.deepcopy(plain), lora_dropout=0.5)).eval()
    merged = trained(adapt(copy.deepcopy(plain)), seed=6).eval()
    lora.save_adapter(written, directory)
    lora.merge(merged)
    for model in (copy.deepcopy(plain), merged):
        bitwise(lora.load_adapter(model, directory).eval()(INPUT), written(INPUT))
    peft = pytest.importorskip("peft")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), directory).eval()
    within(theirs(INPUT), written(INPUT))
    theirs.save_pretrained(tmp_path)
    bitwise(lora.load_adapter(plain, tmp_path).eval()(INPUT), written(INPUT))


A0 = "base_model.model.0.lora_A.weight"
C0 = "base_model.model.0.lora_C.weight"


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),  # None: a field or a tensor that is not there
    [
        ({}, {A0: None}, r"\[\] in the files, \[.*0\.lora_A.* in the model"),
        ({}, {C0: torch.ones(1)}, r"0\.lora_C.* in the files, \[\] in the model"),
        ({}, {A0: torch.ones(1, 6)}, r"\[1, 6\].* in the files, .*\[2, 6\]"),  # no broadcast
        ({"r": None, "lora_alpha": None}, {}, r"\('lora_alpha', 8\), \('r', 8\)\] in the files"),
        ({"use_rslora": True}, {}, "'use_rslora', True.* in the files, .*'use_rslora', False"),
        ({"peft_type": "IA3", "bias": "all"}, {}, "not supported: peft_type 'IA3', bias 'all'"),
        ({"init_lora_weights": "pissa", "later": 1}, {}, "init_lora_weights 'pissa', later 1"),
    ],
)
def test_files_that_do_not_fit_are_refused_and_nothing_is_copied(
    tmp_path, fields, tensors, message
):
    safetensors = pytest.importorskip("safetensors.torch")
    model = inject(make_model("plain"))
    lora.save_adapter(model, tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(changed(json.loads(config.read_text()), fields)))
    content = tmp_path / "adapter_model.safetensors"
    safetensors.save_file(changed(safetensors.load_file(content), tensors), content)
    before = copy.deepcopy(trained(model, seed=7).state_dict())
    with pytest.raises(ValueError, match=message):
        lora.load_adapter(model, tmp_path)
    bitwise(model.state_dict(), before)


def changed(old, new):
    return {name: value for name, value in (old | new).items() if value is not None}


def gpt2():
    """Its linear layers are Conv1D, and its output layer is tied to the embedding."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens)).double().eval()


ATTENTION = "transformer.h.0.attn.c_attn"
OTHERS = ["transformer.h.0.attn.c_proj", "transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"]
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])
TARGETS = [(["c_attn"], [ATTENTION]), ("all-linear", [ATTENTION, *OTHERS])]


@pytest.mark.parametrize(("targets", "expected"), TARGETS, ids=["c_attn", "all-linear"])
def test_gpt2s_layers_are_adapted_as_by_peft_which_loads_them_and_is_loaded(
    tmp_path, targets, expected
):
    peft = pytest.importorskip("peft")
    model = trained(lora.inject_lora(gpt2(), r=2, target_modules=targets)).double().eval()
    output = model(TOKENS).logits
    assert sorted(lora.lora_layers(model)) == sorted(expected)

    lora.save_adapter(model, tmp_path)
    with pytest.warns(UserWarning, match="Conv1D"):  # peft notes that it transposes
        theirs = peft.PeftModel.from_pretrained(gpt2(), tmp_path).eval()
    within(theirs(TOKENS).logits, output)
    theirs.save_pretrained(tmp_path / "theirs")
    back = lora.load_adapter(gpt2(), tmp_path / "theirs").double()
    bitwise(back.eval()(TOKENS).logits, output)

    lora.merge(model)
    within(model(TOKENS).logits, output)


def test_the_output_layer_is_left_out_by_all_linear_if_it_is_not_tied_either():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 20, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    layers = lora.lora_layers(lora.inject_lora(model))
    assert len(layers) == 7
    assert "lm_head" not in layers


def test_the_idea_is_a_layer_that_starts_alike_and_trains_alike():
    torch.manual_seed(0)
    naive = lora.NaiveLoRA(nn.Linear(6, 4).double(), r=2, lora_alpha=3)
    layer = lora.LoRALinear(copy.deepcopy(naive.base_layer), r=2, lora_alpha=3)
    bitwise(naive(INPUT), naive.base_layer(INPUT))
    assert naive.lora_A.abs().max() <= 6**-0.5
    trained(naive)
    layer.load_state_dict({"lora_A": naive.lora_A, "lora_B": naive.lora_B}, strict=False)
    within(naive(INPUT), layer(INPUT))
    for ours, theirs in zip(
        gradients(naive(INPUT), naive.lora_A, naive.lora_B),
        gradients(layer(INPUT), layer.lora_A, layer.lora_B),
        strict=True,
    ):
        within(ours, theirs)
    assert lora.trained_by(naive) == [naive.lora_A, naive.lora_B]


@pytest.mark.parametrize("block_size", [64, 32])
def test_the_idea_rounds_to_the_nf4_values_that_the_packed_weight_has(block_size):
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0), dtype=F64)
    packed = lora.quantize_nf4(weight, block_size)
    torch.testing.assert_close(lora.naive_nf4(weight, block_size), packed.weight)
    assert (lora.naive_nf4(weight, block_size) != weight).any()


TABLE = lora.NF4_TABLE
MIDDLES = (TABLE[:-1] + TABLE[1:]) / 2
TIES = torch.cat([TABLE, MIDDLES, TABLE.flip(0), torch.zeros(17)])  # a block
TIES = torch.outer(torch.tensor([1, 3, 7, 11, 0.3, 1e-5, 0]), TIES).flatten()
RANDOM = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (1, 65, 2**16)]


def quantize_plainly(numbers, table, block_size):
    """The codes, the absmax of each block, and the rounded numbers."""
    results = []
    for block in numbers.split(block_size):
        absmax = block.abs().max(0, keepdim=True).values
        relative = block * (1 / absmax.clamp_min(1e-38))
        codes = (relative.unsqueeze(1) > (table[:-1] + table[1:]) / 2).sum(1)
        results.append((codes.to(torch.uint8), absmax, table[codes] * absmax))
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize("weight", [TIES, *RANDOM], ids=len)
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize(("dtype", "double_quant"), [(F32, True), (BF16, False), (F64, True)])
def test_nf4_rounds_to_the_nearest_value_of_each_block(weight, block_size, dtype, double_quant):
    """It holds the bytes of its codes and no more, also after a cast and from a state dict."""
    weight = weight.unsqueeze(1).to(dtype)
    n = len(weight)
    q = lora.quantize_nf4(weight, block_size, double_quant)

    codes, absmax, _ = quantize_plainly(weight.flatten().float(), TABLE, block_size)
    expected_bytes = (n + 1) // 2 + 4 * len(absmax)
    if double_quant:
        mean = absmax.mean()
        stored, scales, rounded = quantize_plainly(absmax - mean, lora.DYNAMIC_TABLE, 256)
        bitwise((q.absmax, q.scales), (stored, scales))
        absmax = rounded + mean
        expected_bytes = (n + 1) // 2 + len(absmax) + 4 * len(scales) + 4
    unpacked = torch.stack([q.packed >> 4, q.packed & 15], 1).flatten()
    bitwise(unpacked, F.pad(codes, (0, n % 2), value=7))
    held = sum(buffer.untyped_storage().nbytes() for buffer in q.buffers())
    assert held == expected_bytes
    if (n, block_size, double_quant) == (2**16, 64, True):
        assert round(8 * held / n, 3) == 4.127

    expected = TABLE[codes.int()] * absmax.repeat_interleave(block_size)[:n]
    expected = expected.unsqueeze(1)
    cast = copy.deepcopy(q).half()
    other = lora.quantize_nf4(0 * weight, block_size, double_quant)
    other.load_state_dict(q.state_dict())
    bitwise(q.weight, expected.to(dtype))
    bitwise(cast.weight, expected.half())  # rounded once
    bitwise(lora.dequantize_nf4(q, BF16), expected.bfloat16())
    for copied in (cast, other):
        bitwise(dict(copied.named_buffers()), dict(q.named_buffers()))
    x = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        bitwise(q(x), expected.to(dtype).t())
    assert not saved


@pytest.mark.parametrize("autocast", [amp.autocast, partial(torch.autocast, "cpu")])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 64), (64,)])
def test_a_quantized_layer_has_the_gradients_of_its_dequantized_weight(autocast, enabled, shape):
    plain = nn.Linear(64, 6)
    q = lora.quantize_nf4(plain.weight)
    plain.weight.data = q.weight
    q.bias = nn.Parameter(plain.bias.detach().clone())
    gradients = []
    for layer in (plain, q):
        x = torch.randn(shape, generator=torch.manual_seed(0)).requires_grad_()
        with autocast(dtype=BF16, enabled=enabled):
            output = layer(x)
        output.square().sum().backward()
        gradients.append((output, x.grad, layer.bias.grad))
    bitwise(*gradients)


def test_pytorchs_attention_and_encoder_which_read_weights_read_the_corrected_ones():
    plain = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    model = trained(lora.inject_lora(copy.deepcopy(plain), r=2)).eval()
    for name, layer in lora.lora_layers(model).items():
        plain.get_submodule(name).weight.data += 8 * (layer.lora_B @ layer.lora_A).detach()
    x = torch.randn(3, 5, 8, dtype=F64)
    for change in (lora.unmerge, lora.merge):
        change(model)
        for is_training in (True, False):  # without gradients, the encoder reads all its weights
            with torch.set_grad_enabled(is_training):
                within(model(x), plain(x))


def test_nf4_has_the_bytes_of_bitsandbytes():
    """Its CPU kernel finds 8-bit codes by a table of 2^16, and may take one nearly as near."""
    some = lora.DYNAMIC_TABLE[[0, 127, 128, 129, 255]]
    assert some.tolist() == pytest.approx([-0.99296875, 0.0, 5.5e-7, 3.25e-6, 1.0])
    bnb = pytest.importorskip("bitsandbytes").functional
    for weight, block_size in ((TIES, 64), (RANDOM[2], 64), (RANDOM[2], 256)):
        packed, state = bnb.quantize_4bit(weight, blocksize=block_size, quant_type="nf4")
        ours = lora.quantize_nf4(weight, block_size)
        bitwise(packed.flatten(), ours.packed)
        bitwise(bnb.dequantize_4bit(packed, state).flatten(), lora.dequantize_nf4(ours))

    options = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": True}
    _, state = bnb.quantize_4bit(RANDOM[2], **options)
    ours = lora.quantize_nf4(RANDOM[2], double_quant=True)
    bitwise(state.state2.code, lora.DYNAMIC_TABLE)
    bitwise(state.state2.absmax, ours.scales)
    is_neighbour = (state.absmax.int() - ours.absmax.int()).abs() <= 1
    difference = lora.DYNAMIC_TABLE[state.absmax.int()] - lora.DYNAMIC_TABLE[ours.absmax.int()]
    assert (is_neighbour | (difference.abs() <= 2**-15)).all()


@pool.on(2, 3)
def test_average_adapters_is_the_mean_also_where_a_rank_has_not_used_one_and_only_A_and_B_travel():
    ranks = pool.world_size()
    rank = pool.rank()
    model = inject(make_model("plain", F64), quantize="nf4")
    for i, factor in enumerate(lora.trained_by(model)):
        factor.grad = None if i in (rank, 3) else torch.full_like(factor, 0.1 + rank)
    with Collectives() as seen:
        lora.average_adapters(model, pool.group())
    assert seen.calls == [("allreduce_", 8 * (2 * (6 + 33) + 2 * (33 + 17)))]  # Σ r(d + k)
    *used, unused = lora.trained_by(model)
    assert unused.grad is None  # on all ranks
    for i, factor in enumerate(used):
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


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pool.on(2)
def test_sharded_weights_are_merged_or_adapted_only_where_they_are_whole(quantize):
    in_zero3 = partial(zero.Zero3, optimizer_class=torch.optim.SGD, process_group=pool.group())
    in_fsdp = partial(fsdp.fully_shard, process_group=pool.group())
    optimizer = in_zero3(trained(inject(make_model("plain", F64), quantize=quantize)))
    model = optimizer.module
    expected = model(INPUT).detach()

    for module in (in_zero3(make_model("plain")).module, in_fsdp(make_model("plain"))):
        with pytest.raises(ValueError, match="Call inject_lora before Zero3 or fully_shard"):
            inject(module, quantize=quantize)
    for module in (model, in_fsdp(inject(make_model("plain")))):
        with pytest.raises(ValueError, match=r"merge in `with optimizer\.full_parameters\(\):`"):
            lora.merge(module)
    with optimizer.full_parameters():
        lora.merge(model)
    within(model.eval()(INPUT), expected)
