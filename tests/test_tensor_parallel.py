"""tensor_parallel.py against one device. The linear layers alone are in tests/claims."""

import copy
import itertools
import math
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from shared import (
    OPTIMIZERS,
    Collectives,
    Watch,
    fake_world,
    fake_world_on_meta,
    make_model,
    randn,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import tensor_parallel as tp

within = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
bitwise = partial(torch.testing.assert_close, rtol=0, atol=0)


def everyone(tensor):
    tensors = [torch.empty_like(tensor) for _ in range(pool.world_size())]
    dist.all_gather(tensors, tensor.detach().contiguous(), group=pool.group())
    return tensors


def alike(tensor):
    return all(torch.equal(tensor, other) for other in everyone(tensor))


LAYOUTS = [  # a collective sends, or changes, only a part of a tensor with gaps
    torch.clone,
    lambda x: torch.stack((x, x + 1), -1)[..., 0],
    lambda x: x.mT.contiguous().mT if pool.rank() else x.clone(),  # on some ranks only
]


@pool.on(1, 3)
def test_operators_and_their_gradients():
    group, t, rank = pool.group(), pool.world_size(), pool.rank()
    own = [randn((4 * t, 3, 2 * t), seed=r) for r in range(t)]
    same = own[0]
    rows, columns, rows_of_sum = same.chunk(t)[rank], same.chunk(t, -1)[rank], sum(own).chunk(t)
    cases = [  # operator, its input, its output, the output's gradient, the input's gradient
        (tp.copy_to_region, same, same, own[rank], sum(own)),
        (tp.reduce_from_region, own[rank], sum(own), same, same),
        (tp.scatter_to_region, same, columns, columns, same),
        (tp.gather_from_region, columns, same, same, columns),
        (tp.scatter_to_sequence, same, rows, rows, same),
        (tp.gather_from_sequence, rows, same, own[rank], rows_of_sum[rank]),
        (tp.reduce_scatter_to_sequence, own[rank], rows_of_sum[rank], rows, same),
    ]
    for layout, (operator, x, y, grad_y, grad_x) in itertools.product(LAYOUTS, cases):
        leaf = layout(x).requires_grad_()
        gradient = layout(grad_y).requires_grad_()
        output = operator(leaf, group)
        (grad,) = torch.autograd.grad(output, leaf, gradient, create_graph=True)
        (again,) = torch.autograd.grad(grad, gradient, x)
        within([output, grad, again], [y, grad_x, y], msg=str(operator))
        bitwise([leaf, gradient], [x, grad_y])  # autograd may still need them
        if operator is not tp.copy_to_region:
            output.mul_(2)  # as dropout in place
    A, B = randn((2 * t, 3 * t)), randn((3 * t, 2 * t), seed=1)
    y = tp.parallel_mlp(same, A.chunk(t, 1)[rank], B.chunk(t)[rank], group)
    within(y, F.gelu(same @ A) @ B)


class PlainLayer(nn.Module):
    def __init__(self, kv_heads, swiglu, bias=True, h=24, heads=12):
        super().__init__()
        self.swiglu = swiglu
        self.stack = (heads, kv_heads, kv_heads)
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv = nn.Linear(h, sum(self.stack) * h // heads, bias)
        self.self_attn.proj = nn.Linear(h, h, bias)
        self.mlp.linear1 = nn.Linear(h, 2 * h if swiglu else h, bias)
        self.mlp.linear2 = nn.Linear(h, h, bias)

    def forward(self, x):
        heads = self.self_attn.qkv(self.norm1(x)).unflatten(-1, (-1, 2)).movedim(0, 2)
        # A rank's part has fewer heads.
        q, k, v = heads.split([heads.shape[1] * n // sum(self.stack) for n in self.stack], 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.self_attn.proj(y.movedim(2, 0).flatten(2))
        hidden = self.mlp.linear1(self.norm2(x))
        if not self.swiglu:
            return x + self.mlp.linear2(F.gelu(hidden))
        gate, up = hidden.chunk(2, -1)
        return x + self.mlp.linear2(F.silu(gate) * up)


PLAN = {"[04]": "vocab", "2.*.proj": "row"}
PLAN |= {"2.*.linear2": "row", "2.norm?": "norm", "3": "norm"}


def plain_and_ours(kv_heads, swiglu, bias, tied, V, options):
    """Our transformer layer and a plain one in shards, beside two plain ones."""
    layers = [PlainLayer(kv_heads, swiglu, bias) for bias in (bias, True)]
    plain = nn.Sequential(nn.Embedding(V, 24), *layers, nn.LayerNorm(24), nn.Linear(24, V, bias))
    if tied:
        plain[4].weight = plain[0].weight
    plain[2].mlp.linear1.weight.requires_grad_(False)
    torch.manual_seed(0)  # as the pool did before: our layer draws the parameters of layers[0]
    kind = "swiglu" if swiglu else "gelu"
    first = tp.ParallelTransformerLayer(24, 12, 24, kv_heads, kind, bias=bias, **options)
    ours = nn.Sequential(plain[0], first, copy.deepcopy(plain[2]), *plain[3:])
    plan = PLAN | {"2.*.linear1": "swiglu" if swiglu else "column"}
    plan["2.*.qkv"] = "qkv" if kv_heads == 12 else (24, 2 * kv_heads, 2 * kv_heads)
    tp.parallelize(ours, plan, **options)
    if options["sequence_parallel"]:
        group = options["process_group"]
        ours[0].register_forward_hook(lambda m, _, output: tp.scatter_to_sequence(output, group))
    bitwise(tp.full_state_dict(ours), plain.state_dict())  # as drawn, and plain is left alone
    memory_of_plain = {parameter.data_ptr() for parameter in plain.parameters()}
    assert memory_of_plain.isdisjoint(parameter.data_ptr() for parameter in ours.parameters())
    return plain.double(), ours.double()


@pytest.mark.parametrize(
    ("kv_heads", "swiglu", "bias", "sp", "tied", "V", "ignore"),
    [
        (6, True, True, True, True, 13, 2),
        (6, False, False, True, False, 4, -100),  # of three ranks the last has only padding
        (12, False, True, False, False, 13, 2),
        (12, True, False, False, True, 4, -100),
    ],
)
@pool.on(1, 2, 3)
def test_a_model_trains_as_on_one_device(kv_heads, swiglu, bias, sp, tied, V, ignore):
    """Losses, clipped gradients, parameters, in two steps of two micro-batches."""
    group = pool.group()
    options = {"process_group": group, "sequence_parallel": sp}
    plain, ours = plain_and_ours(kv_heads, swiglu, bias, tied, V, options)
    optimizers = [OPTIMIZERS["momentum"](model.parameters()) for model in (plain, ours)]
    for step, scale in itertools.product(range(2), (1, 3000)):  # 3000 overflows exp()
        torch.manual_seed(step + scale)
        tokens, target = torch.randint(V, (2, 6, 3))
        target[0, 0] = ignore
        expected, logits = (model[4](scale * model[:4](tokens)) for model in (plain, ours))
        padded = torch.cat(everyone(logits), -1)  # with no more than needed
        within(padded / scale, F.pad(expected, (0, -V % group.size()), value=-torch.inf) / scale)

        plain_loss = partial(F.cross_entropy, ignore_index=ignore, reduction="none")
        reference = plain_loss(expected.movedim(-1, 1), target)
        loss = tp.vocab_parallel_cross_entropy(logits, target, group, ignore)
        within(loss / scale, reference / scale)
        low = tp.vocab_parallel_cross_entropy(logits.bfloat16(), target, group, ignore)
        in_float32 = plain_loss(expected.movedim(-1, 1).bfloat16().float(), target)
        torch.testing.assert_close(low, in_float32, rtol=1e-5, atol=2e-7)

        torch.autograd.backward([loss, reference], [randn((6, 3))] * 2)  # one for each token
        if scale > 1:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            within(tp.clip_grad_norm_(ours, 0.5, group) / norm, torch.ones_like(norm))
            for optimizer in optimizers:
                optimizer.step()
        within(tp.full_state_dict(ours), plain.state_dict())
        gradients = tp.whole_gradients(ours)
        within(gradients, {name: parameter.grad for name, parameter in plain.named_parameters()})
        for name in gradients.keys() - {name for name, *_ in tp.split_parameters(ours)}:
            assert alike(ours.get_parameter(name)), name
            assert alike(gradients[name]), name
    head = tp.ColumnParallelLinear.from_full(plain[4], pad=True, gather_output=True, **options)
    x = randn((2 * group.size(), 24))
    within(head(x.chunk(group.size())[pool.rank()] if sp else x), plain[4](x))
    tp.load_full_state_dict(ours, plain.state_dict())
    bitwise(tp.full_state_dict(ours), plain.state_dict())


@pool.on(2)
def test_a_layer_in_two_places_stays_one():
    layer = nn.Linear(4, 4)
    model = tp.parallelize(nn.Sequential(layer, layer), {"0": "column"}, pool.group())
    assert isinstance(model[0], tp.ColumnParallelLinear)
    assert model[1] is model[0]


@pool.on(2)
def test_evaluation_of_pytorchs_encoder_does_not_take_shards_for_whole_weights():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).double()
    plain = nn.TransformerEncoder(layer, 2).eval()
    plan = {"*.linear1": "column", "*.linear2": "row"}
    ours = tp.parallelize(copy.deepcopy(plain), plan, pool.group())
    x = randn((2, 5, 8))
    padding = torch.arange(5).expand(2, 5) > 3
    with torch.no_grad():
        within(ours(x), plain(x))
        y = ours(x, src_key_padding_mask=padding)
        within(y[~padding], plain(x[:, :4]).flatten(0, 1))


@pytest.mark.parametrize("sp", [False, True])
@pool.on(2)
def test_dropout_differs_inside_and_is_repeated_by_checkpoints(sp):
    group, x, seen, results = pool.group(), randn((4, 2, 8)).requires_grad_(), {}, []
    options = {"dropout": 0.5, "sequence_parallel": sp, "process_group": group}
    layer = tp.ParallelTransformerLayer(8, 4, **options).double()
    qkv, proj = layer.self_attn.qkv, layer.self_attn.proj
    qkv.weight.data = randn((2, 8)).repeat(6, 1)  # every head is the same, dropout differs
    qkv.bias.data.zero_()
    proj.register_forward_pre_hook(lambda m, inputs: seen.update(inside=inputs[0].detach()))
    layer.dropout.register_forward_hook(lambda m, _, y: seen.update(outside=y.detach() == 0))
    for how in (layer, partial(checkpoint, layer, use_reentrant=False)):
        tp.model_parallel_seed(3, group)
        y, after = how(x), torch.rand(3)
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], randn(y.shape))
        results.append([y.detach(), after, *gradients])
        assert not alike(seen["inside"])
        assert alike(seen["outside"]) != sp
    bitwise(*results)
    assert alike(after)
    between = tp.parallelize(nn.Sequential(nn.Dropout(0.5)), {"0": "dropout"}, group)
    assert not alike(between(torch.ones(50)))
    for evaluated in (layer.eval(), between.eval()):
        bitwise(evaluated(x).detach(), evaluated(x).detach())


REFUSED = {
    "tp.check_divides('heads', 12, 5)": r"12 heads .* by 5 .* in \[1, 2, 3, 4, 6, 12\]$",
    "tp.ParallelSelfAttention(9, 3, **g)": "3 attention heads",
    "tp.ParallelSelfAttention(24, 6, num_kv_heads=3, **g)": "3 key and value heads",
    "tp.ParallelMLP(4, 7, 'swiglu', **g)": r"7 features .* by 2 .* \[1, 7\]",
    "tp.ParallelMLP(4, 8, 'relu', **g)": "activation='relu': use 'gelu' or 'swiglu'",
    "tp.ColumnParallelLinear(4, 7, **g)": "7 features",
    "tp.RowParallelLinear(4, 4, sequence_parallel=True, **g)(ones(3, 2))": r"in \[1, 3\]",
    "tp.scatter_to_region(ones(2, 3), **g)": r"3 positions or features",
    "tp.VocabParallelEmbedding(7, 4, **g)(tensor([-1]))": r"\[-1\] .* of 7; use 0 to 6",
    "tp.VocabParallelEmbedding(7, 4, **g)(tensor([6, 7]))": r"\[7\] .* of 7",  # padding
    "tp.VocabParallelEmbedding.from_full(nn.Embedding(8, 4, padding_idx=0), **g)": "padding_idx",
    "tp.VocabParallelEmbedding.from_full(by_freq, **g)": "scale_grad_by_freq",
    "tp.parallelize(nn.Sequential(hooked), {'0': 'column'}, **g)": "'0' .* it has hooks",
    "tp.parallelize(nn.Sequential(clamped), {'0': 'row'}, **g)": "'0' .* it has hooks",
    "tp.parallelize(nn.Sequential(optimized), {'0': 'row'}, **g)": "'0' .* it has hooks",
    "tp.RowParallelLinear.from_full(nn.utils.spectral_norm(nn.Linear(4, 4)), **g)": "hooks",
    "tp.vocab_parallel_cross_entropy(ones(3, 4), tensor([7]), **g)": r"\[1\].*\[3, 4\]",
    "tp.vocab_parallel_cross_entropy(ones(1, 4), tensor([8]), **g)": r"\[8\] .* of 8; use 0 to 7",
    "tp.vocab_parallel_cross_entropy(ones(4), tensor(0), label_smoothing=0.1)": "smoothing=0.1 is",
    "tp.parallelize(tied, {'nothing': 'column'}, **g)": "no layer is named 'nothing'",
    "tp.parallelize(nn.Sequential(nn.LayerNorm(4)), {'0': 'row'}, **g)": "'0' .*LayerNorm.* 'row'",
    "tp.parallelize(nn.Sequential(nn.Linear(4, 14)), {'0': 'qkv'}, **g)": "'0' .* 14",
    "tp.parallelize(tied, {'first': 'row'}, **g)": "second.weight is tied",
    "tp.parallelize(tied_pair, {'0': 'column', '1': 'swiglu'}, **g)": "1.weight is tied",
    "tp.parallelize(nn.Sequential(nn.LayerNorm(4)), {'0': (2, 1, 1)}, **g)": r"'0' .* \(2, 1, 1\)",
    "tp.parallelize(nn.Sequential(nn.Linear(4, 8)), {'0': (5, 3)}, **g)": "5 features",
    "tp.parallelize(nn.Sequential(nn.Linear(4, 12)), {'0': (4, 2)}, **g)": "'0' .* exactly to 12",
    "tp.copy_to_region(ones(2), others)": "rank [01] is not a member",
    "tp.load_full_state_dict(tp.VocabParallelEmbedding(7, 4, **g), eight)": r"\[8, 4\].* in state",
    "tp.parallelize(nn.Sequential(linear), {'0': 'column'}, **g)": r"differ: 0.bias \(4,.*\(6,",
    "tp.parallelize(nn.Sequential(odd_on_rank_1), {'0': 'column'}, **g)": "7 features",
    "tp.parallelize(nn.Sequential(linear), {'0': ['column', 'row'][rank]}, **g)": "plan .*'row'",
    "tp.parallelize(tied, {}, others)": "rank [01] is not a member",
    "tp.parallelize(nn.Sequential(unseeded), {'0': 'column'}, **g)": "differ: .*seed all ranks",
}


@pool.on(2)
def test_what_is_wrong_is_an_error():
    groups = [dist.new_group([rank]) for rank in range(2)]
    names = {"tp": tp, "nn": nn, "ones": torch.ones, "tensor": torch.tensor}
    names |= {"g": {"process_group": pool.group()}, "others": groups[1 - pool.rank()]}
    names |= {"rank": pool.rank(), "tied": make_model("tied")}
    names |= {"eight": {"weight": torch.ones(8, 4)}}
    names |= {"tied_pair": nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 8))}
    names["tied_pair"][1].weight = names["tied_pair"][0].weight
    names |= {"hooked": nn.Linear(4, 4), "clamped": nn.Linear(4, 4), "optimized": nn.Linear(4, 4)}
    names["hooked"].register_forward_hook(lambda module, inputs, output: 2 * output)
    names["clamped"].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    names["optimized"].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    names |= {"by_freq": nn.Embedding(8, 4, scale_grad_by_freq=True)}
    torch.manual_seed(pool.rank())
    names |= {"unseeded": nn.Linear(4, 4), "linear": nn.Linear(4, 4 + 2 * pool.rank())}
    names |= {"odd_on_rank_1": nn.Linear(4, 6 + pool.rank())}
    for call, words in REFUSED.items():
        with Collectives() as seen, pytest.raises((ValueError, IndexError), match=words):
            eval(call, names)
        # One rank alone may be wrong, so parallelize() gathers all ranks' errors.
        assert not seen.calls or call.startswith("tp.parallelize"), call


@pool.on(2)
def test_the_norm_of_no_gradients_is_zero():
    layer = tp.ColumnParallelLinear(4, 4, process_group=pool.group())
    bitwise(tp.clip_grad_norm_(layer, 1.0, pool.group()), torch.zeros(()))


@pool.on(2)
def test_a_gradient_of_a_gradient_is_an_error_because_a_part_of_it_would_be_left_out():
    x = randn((4, 4)).requires_grad_()
    column = tp.ColumnParallelLinear(4, 4, process_group=pool.group()).double()
    losses = tp.vocab_parallel_cross_entropy(x, torch.arange(4), pool.group())
    for output in (column(x), losses):
        with pytest.raises(RuntimeError, match="gradients of gradients are left out"):
            torch.autograd.grad(output.sum(), x, create_graph=True)


@pool.on(2, 3)
def test_on_a_gpu_a_token_outside_the_vocabulary_is_nan_and_the_others_are_right():
    group, t, V = pool.group(), pool.world_size(), 7
    embedding = tp.VocabParallelEmbedding(V, 4, process_group=group).double()
    logits = randn((5, V)).requires_grad_()
    shards = F.pad(logits, (0, -V % t), value=-torch.inf).chunk(t, -1)
    target = torch.tensor([2, 6, -7, 8**9, -100])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False)
        found = embedding(torch.tensor([3, -1, V, 10**6, 6]))
        loss = tp.vocab_parallel_cross_entropy(shards[pool.rank()], target, group)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    everywhere = sum(everyone(gradient))
    within(found[[0, 4]], tp.full_state_dict(embedding)["weight"][[3, 6]])
    within(loss[:2], F.cross_entropy(logits[:2], target[:2], reduction="none"))
    assert loss[4] == 0
    assert everywhere[[0, 1, 4]].isfinite().all()
    for wrong in (found[1:4], loss[2:4], everywhere[2:4]):
        assert wrong.isnan().all()


@pytest.mark.parametrize("sp", [False, True])
def test_the_host_reads_nothing_in_a_step(sp):
    """The meta device stands for a GPU: it has no data, so that reading a tensor raises."""
    with fake_world_on_meta(2, 0):
        embedding, head = tp.VocabParallelEmbedding(9, 8), nn.Linear(8, 9)
        head = tp.ColumnParallelLinear.from_full(head, pad=True, sequence_parallel=sp)
        layer = tp.ParallelTransformerLayer(8, 4, dropout=0.5, sequence_parallel=sp)
        assert layer.mlp.linear2.in_features == 4 * 8
        tokens = torch.zeros(4, 3, dtype=torch.long)
        x = embedding(tokens)
        logits = head(layer(tp.scatter_to_sequence(x) if sp else x))
        tp.vocab_parallel_cross_entropy(logits, tokens).mean().backward()
        tp.clip_grad_norm_(nn.Sequential(embedding, layer, head), 1.0)


@pytest.mark.parametrize("autocast", [False, True])
@pool.on(2)
def test_sixteen_bits_are_right_to_their_precision(autocast):
    dtype, x = torch.float32 if autocast else torch.bfloat16, randn((8, 16), dtype=torch.float32)
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    ours = tp.parallelize(copy.deepcopy(plain).to(dtype), {"0": "column", "2": "row"}, pool.group())
    with torch.autocast(pool.device().type, torch.bfloat16, enabled=autocast):
        y = ours(x.to(dtype).requires_grad_())
    y.float().sum().backward()
    plain(x).sum().backward()
    for name, gradient in tp.whole_gradients(ours).items():
        theirs = plain.get_parameter(name).grad
        assert (gradient - theirs).abs().max() <= 8 * 2**-8 * theirs.abs().max(), name
        assert gradient.dtype == dtype
    assert y.dtype == torch.bfloat16
    assert tp.clip_grad_norm_(ours, 1e9, pool.group()).dtype == torch.float32


OVERLAP = "aten::mm c10d::allreduce_ aten::mm wait"
OVERLAP_OF_SEQUENCES = "c10d::_allgather_base_ aten::mm c10d::alltoall_base_ wait aten::mm wait"
OVERLAPPING = {*OVERLAP.split(), *OVERLAP_OF_SEQUENCES.split()}


def kept(function, *args, but=()):
    """The result, and the float32 numbers that autograd keeps for backward, but parameters."""
    saved = []  # alive, so that no address is used twice
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        result = function(*args)
    but = {parameter.untyped_storage().data_ptr() for parameter in but}
    return result, tp.held_bytes(x for x in saved if x.untyped_storage().data_ptr() not in but) / 4


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(("t", "rank"), [(8, 3), (1024, 0)])
def test_a_layer_sends_holds_keeps_and_overlaps_as_the_formulas_say(t, rank, sp, monkeypatch):
    """Kept: Korthikanti's 10 + 24/t or 34/t bytes, less 2 for dropout, as numbers of 2 bytes."""
    s, b, h = t, 1, 1024
    issued = Watch(lambda: None)
    work_class = getattr(torch._C._distributed_c10d, "FakeWork", dist.Work)  # newer torch
    monkeypatch.setattr(work_class, "wait", lambda work: issued.seen.append(("wait", None)))
    with fake_world(t, rank):
        layer = tp.ParallelTransformerLayer(h, h, h, sequence_parallel=sp)
        x = torch.randn(s // t if sp else s, b, h, requires_grad=True)
        with tp.SentBytes() as sent, issued:
            y, keeps = kept(layer, x, but=layer.parameters())
            y.sum().backward()
    elements = 10 * b * s * h + 12 * h if sp else 8 * b * s * h
    assert sent.total == pytest.approx(4 * elements * (t - 1) / t)
    assert sum(p.numel() for p in layer.parameters()) == (6 * h * h + 4 * h) // t + 6 * h
    # Between pairs, the inputs of norms and column layers, and means and deviations. Inside a
    # pair six of h, and one number for each row and head.
    between, inside = 4 + 4 / h, 6 + 1
    assert keeps / (s * b * h) == pytest.approx(between / (t if sp else 1) + inside / t, rel=1e-12)
    # The gradient of x leaves before that of the weight is computed, and is waited for after it.
    order = " ".join(name for name, _ in issued.seen if name in OVERLAPPING)
    assert order.count(OVERLAP_OF_SEQUENCES if sp else OVERLAP) == 2


def test_the_loss_sends_three_numbers_a_token_and_keeps_one_tensor_of_logits():
    with fake_world(8, 3), tp.SentBytes() as sent:
        logits = torch.randn(8, 2, 5000, requires_grad=True)
        target = torch.zeros(8, 2, dtype=torch.long)
        loss, keeps = kept(tp.vocab_parallel_cross_entropy, logits, target)
        loss.sum().backward()
    assert sent.total == pytest.approx(4 * 6 * 16 * 7 / 8)
    assert keeps / logits.numel() == pytest.approx(1, abs=0.01)  # and a mask


@pytest.mark.parametrize("kind", ["column", "row", "qkv", (18, 12, 6), "vocab"], ids=str)
@pool.on(1, 2, 3)
def test_the_boxes_of_all_ranks_cover_the_whole_parameter_once(kind):
    plain = nn.Linear(6, 13 if kind == "vocab" else 36)
    whole = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    layer = tp.parallelize(nn.Sequential(plain), {"0": kind}, pool.group())[0]
    for name, shard in layer.named_parameters():
        covered = torch.zeros_like(whole[name])
        for box in tp.boxes_of(layer, name, shard.shape):
            assert box.whole_shape == list(covered.shape)
            begins = zip(box.offset, box.shape, strict=True)
            block = tuple(slice(begin, begin + length) for begin, length in begins)
            flat = shard.detach().flatten()[box.first :][: math.prod(box.shape)]
            bitwise(flat.view(box.shape), whole[name][block])
            covered[block] += 1
        owners = 1 if name in layer.split_dims else pool.world_size()
        bitwise(sum(everyone(covered)), torch.full_like(covered, owners))
