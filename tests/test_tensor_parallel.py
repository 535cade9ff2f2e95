"""tensor_parallel.py against one device; each linear layer alone, ours and PyTorch's, is in claims.py."""

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
from shared import OPTIMIZERS, Collectives, assert_equal
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tensor_parallel as tp

F32, BF16 = torch.float32, torch.bfloat16
close = partial(assert_equal, exact=False)
bitwise = partial(assert_equal, exact=True)


def run(N, body, *args):
    return pool.run(N, in_float64, body, *args)


def in_float64(body, *args):
    torch.set_default_dtype(torch.float64)
    try:
        return body(*args)
    finally:
        torch.set_default_dtype(torch.float32)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def everyone(tensor):
    tensors = [torch.empty_like(tensor) for _ in range(pool.world_size())]
    dist.all_gather(tensors, tensor.detach().contiguous(), group=pool.group())
    return tensors


def mine(x, dim=0):
    return x.chunk(pool.world_size(), dim)[pool.rank()]


def check_same(ours, plain, what=""):
    """State and gradients of all of `ours`; what every rank holds is bitwise the same on all."""
    state, split = tp.full_state_dict(ours), {name for name, *_ in tp.split_parameters(ours)}
    gradients, theirs = tp.full_state_dict(ours, gradients=True), dict(plain.named_parameters())
    assert set(state) == set(plain.state_dict())
    for name, parameter in ours.named_parameters():
        close(state[name], theirs[name].detach(), what=f"{what} {name}")
        close(gradients[name], theirs[name].grad, what=f"{what} gradient of {name}")
        for tensor in (parameter.detach(), parameter.grad) if name not in split else ():
            assert tensor is None or all(torch.equal(tensor, other) for other in everyone(tensor)), f"{name} by rank"


LAYOUTS = [  # a collective changes, or sends, only a part of what has gaps; clone() leaves the last as it is
    torch.clone,
    lambda x: torch.stack((x, x + 1), -1)[..., 0],
    lambda x: x.mT.contiguous().mT if pool.rank() else x.clone(),  # on some ranks only
]


def operators_are_each_the_others_transpose():
    """<y, gradient> = <x, grad>, over all ranks, where what all ranks have alike counts once."""
    group, t, rank = pool.group(), pool.world_size(), pool.rank()
    same, own = randn(4 * t, 3, 2 * t), [randn(t, 3, 2 * t, seed=1 + r) for r in range(t)]
    cases = [  # operator, input, expected output, whether all ranks have the same gradient
        (tp.copy_to_region, same, same, False),
        (tp.reduce_from_region, own[rank], sum(own), True),
        (tp.scatter_to_region, same, mine(same, -1), False),
        (tp.gather_from_region, own[rank], torch.cat(own, -1), True),
        (tp.scatter_to_sequence, same, mine(same), False),
        (tp.gather_from_sequence, own[rank], torch.cat(own), False),
        (tp.reduce_scatter_to_sequence, own[rank], mine(sum(own)), False),
    ]
    for copied, (operator, x, expected, same_gradient) in itertools.product(LAYOUTS, cases):
        leaf = copied(x).requires_grad_()
        y = operator(leaf, group)
        close(y.detach(), expected, what=str(operator))
        gradient = copied(randn(*y.shape, seed=0 if same_gradient else 7 + rank))
        kept = gradient.clone()
        (grad,) = torch.autograd.grad(y, leaf, gradient)
        assert torch.equal(leaf, x)
        assert torch.equal(gradient, kept)  # autograd may still need it
        left, right = (y * gradient).sum() / (t if same_gradient else 1), (x * grad).sum() / (t if x is same else 1)
        sides = torch.stack([left, right]).detach()
        dist.all_reduce(sides, group=group)
        close(*sides, what=str(operator))
        if operator is not tp.copy_to_region and t > 1:
            y.mul_(2)  # as dropout in place
    A, B = randn(2 * t, 3 * t), randn(3 * t, 2 * t, seed=1)
    close(tp.parallel_mlp(same, mine(A, 1), mine(B), group), F.gelu(same @ A) @ B)


def backward_is_the_same(ours, plain, x, sp):
    """Also the output, and the gradient of x: of all of it or of this rank's part."""
    part = mine if sp else torch.clone
    our_x, x = part(x).clone().requires_grad_(), x.requires_grad_()
    y, expected = ours(our_x), plain(x)
    weight = randn(*expected.shape, seed=5)
    close(y.detach(), part(expected.detach()))
    (y * part(weight)).sum().backward()
    (expected * weight).sum().backward()
    close(our_x.grad, part(x.grad))
    check_same(ours, plain)


def layers_are_drawn_as_plain_ones():
    group, drawn = {"process_group": pool.group()}, []
    for column, row in ((nn.Linear, nn.Linear), (tp.ColumnParallelLinear, tp.RowParallelLinear)):
        torch.manual_seed(1)
        keywords = group if drawn else {}
        drawn.append(nn.Sequential(column(4, 12, **keywords), row(12, 4, **keywords)))
    drawn.append(tp.parallelize(copy.deepcopy(drawn[0]), {"0": "column", "1": "row"}, **group))
    for name, whole in drawn[0].state_dict().items():
        for ours in drawn[1:]:
            bitwise(tp.full_state_dict(ours)[name], whole)
    taken = tp.RowParallelLinear.from_full(drawn[0][1], **group)
    assert taken.bias.data_ptr() != drawn[0][1].bias.data_ptr()  # training ours leaves the plain one alone


def vocabulary_and_loss_equal_one_device(V, bias, tied, smoothing, ignore):
    group = pool.group()
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Embedding(V, 6), nn.Linear(6, V, bias))
    if tied:
        plain[1].weight = plain[0].weight
    ours = tp.parallelize(copy.deepcopy(plain), {"0": "vocab", "1": "vocab"}, group)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step, scale in enumerate((10, 3000)):  # which overflows exp()
        tokens, target = torch.randint(V, (2, 5, 3), generator=torch.Generator().manual_seed(step))
        target[0, 0] = ignore
        logits, expected = (m[1](scale * torch.tanh(m[0](tokens))) for m in (ours, plain))
        padded = torch.cat(everyone(logits), -1)
        assert V <= padded.shape[-1] < V + pool.world_size()  # no more padding than needed
        close(padded[..., :V], expected.detach())
        assert padded[..., V:].eq(-math.inf).all()
        loss = tp.vocab_parallel_cross_entropy(logits, target, group, ignore, smoothing)
        flat = expected.flatten(0, 1)
        reference = F.cross_entropy(flat, target.flatten(), None, None, ignore, None, "none", smoothing).view(5, 3)
        close(loss.detach(), reference.detach())
        weight = randn(5, 3, seed=step)  # each token's loss has a gradient of its own
        (loss * weight).sum().backward()
        (reference * weight).sum().backward()
        check_same(ours, plain, what=f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.cat(everyone(ours[0].weight))[V:].eq(0).all()
    gathered = tp.ColumnParallelLinear.from_full(plain[1], pad=True, gather_output=True, process_group=group)
    close(gathered(randn(2, 6)).detach(), plain[1](randn(2, 6)).detach())


class PlainLayer(nn.Module):
    def __init__(self, h, heads, kv_heads, f, swiglu, bias):
        super().__init__()
        self.heads, self.kv_heads, self.d, self.swiglu = heads, kv_heads, h // heads, swiglu
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv = nn.Linear(h, h + 2 * kv_heads * self.d, bias)
        self.self_attn.proj = nn.Linear(h, h, bias)
        self.mlp.linear1, self.mlp.linear2 = nn.Linear(h, (1 + swiglu) * f, bias), nn.Linear(f, h, bias)

    def forward(self, x):
        heads = self.self_attn.qkv(self.norm1(x)).unflatten(-1, (-1, self.d)).movedim(0, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.self_attn.proj(y.movedim(2, 0).flatten(2))
        gate, *up = self.mlp.linear1(self.norm2(x)).chunk(1 + self.swiglu, -1)
        return x + self.mlp.linear2(F.silu(gate) * up[0] if up else F.gelu(gate))


def a_clipped_layer_equals_one_device(kv_heads, swiglu, bias, sp):
    group, h, heads, f, s = pool.group(), 24, 12, 12, 12
    torch.manual_seed(3)
    plain = PlainLayer(h, heads, kv_heads, f, swiglu, bias)
    keywords = {"num_kv_heads": kv_heads, "activation": "swiglu" if swiglu else "gelu", "bias": bias}
    ours = tp.ParallelTransformerLayer(h, heads, f, sequence_parallel=sp, process_group=group, **keywords)
    tp.load_full_state_dict(ours, plain.state_dict())
    for step in range(2):  # clipped twice, as gradients accumulate
        backward_is_the_same(ours, plain, randn(s, 2, h, seed=step), sp)
        norm = tp.clip_grad_norm_(ours, 3.0, group)
        close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 3.0))
        assert norm > 3.0
        assert all(torch.equal(norm, other) for other in everyone(norm))
        check_same(ours, plain, what="clipped")


PLAN = {"0": "vocab", "*.qkv": "qkv", "[12].proj": "row", "*.linear1": "column", "*.linear2": "row", "4": "vocab"}
PLAN |= {"*norm?": "norm", "3": "norm"}


def gpt(tied=True):
    model = tp.language_model(C=12, heads=12, layers=2, V=29)
    if tied:
        model[-1].weight = model[0].weight
    return model


def parallel(model, sp):
    model = tp.parallelize(model, PLAN, pool.group(), sequence_parallel=sp)
    if sp:
        model[0].register_forward_hook(lambda module, inputs, output: tp.scatter_to_sequence(output, pool.group()))
    return model


def three_steps_of_a_gpt_equal_one_device(sp, tied):
    torch.manual_seed(6)
    plain = gpt(tied)
    plain[1].linear1.weight.requires_grad_(False)
    ours = parallel(copy.deepcopy(plain), sp)
    assert (ours[-1].weight is ours[0].weight) == tied
    optimizers = [OPTIMIZERS["momentum"](m.parameters()) for m in (ours, plain)]
    for step in range(3):
        window = torch.randint(29, (2 * pool.world_size(), 9), generator=torch.Generator().manual_seed(step))
        tokens, target = window[:, :-1], window[:, 1:]
        loss = tp.vocab_parallel_cross_entropy(ours(tokens), target, pool.group()).mean()
        expected = F.cross_entropy(plain(tokens).flatten(0, 1), target.flatten())
        close(loss.detach(), expected.detach())
        for optimizer, each in zip(optimizers, (loss, expected), strict=True):
            optimizer.zero_grad()
            each.backward()
        close(tp.clip_grad_norm_(ours, 0.5, pool.group()), nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        for optimizer in optimizers:
            optimizer.step()
    check_same(ours, plain)
    loaded = parallel(gpt(tied), sp)
    tp.load_full_state_dict(loaded, plain.state_dict())
    for name, value in tp.full_state_dict(loaded).items():
        bitwise(value, plain.state_dict()[name])


def dropout_differs_inside_and_is_repeated_by_checkpoints(sp):
    group, t = pool.group(), pool.world_size()
    layer = tp.ParallelTransformerLayer(8, 4, dropout=0.5, sequence_parallel=sp, process_group=group)
    with torch.no_grad():  # every head the same: what differs between ranks is dropout
        layer.self_attn.qkv.weight.copy_(randn(2, 8).repeat(12 // t, 1))
        layer.self_attn.qkv.bias.zero_()
    seen, results = {}, []
    layer.self_attn.proj.register_forward_pre_hook(lambda m, inputs: seen.update(inside=inputs[0].detach()))
    layer.dropout.register_forward_hook(lambda m, inputs, output: seen.update(outside=output.detach() == 0))
    for how in ("plain", "checkpointed"):
        tp.model_parallel_seed(3, group)
        layer.zero_grad()
        x = randn(4 if sp else 4 * t, 2, 8).requires_grad_()
        y = layer(x) if how == "plain" else checkpoint(layer, x, use_reentrant=False)
        after = torch.rand(3)
        (y * randn(*y.shape)).sum().backward()
        results.append([y.detach(), x.grad, after, *(p.grad.clone() for p in layer.parameters())])
        inside, outside = (len({tuple(o.flatten().tolist()) for o in everyone(seen[k])}) for k in ("inside", "outside"))
        assert (inside, outside) == (t, t if sp else 1)
    for a, b in zip(*results, strict=True):
        bitwise(a, b)
    bitwise(*everyone(after))  # what is drawn later is alike again
    between = tp.parallelize(nn.Sequential(nn.Dropout(0.5)), {"0": "dropout"}, group)
    assert not torch.equal(*everyone(between(torch.ones(50))))
    for evaluated in (layer.eval(), between.eval()):
        bitwise(evaluated(x).detach(), evaluated(x).detach())


REFUSED = {
    "tp.check_divides('heads', 12, 5)": r"12 heads do not divide by 5 .*; use a world size of 1, 2, 3, 4, 6 or 12$",
    "tp.ColumnParallelLinear(4, 7, **g)": "7 output features do not divide by 2 .* of 1 or 7",
    "tp.RowParallelLinear(7, 4, **g)": "7 input features",
    "tp.ParallelSelfAttention(9, 3, **g)": "3 attention heads",
    "tp.ParallelSelfAttention(24, 6, num_kv_heads=3, **g)": "3 key and value heads",
    "tp.ParallelMLP(4, 7, activation='swiglu', **g)": "7 output features",
    "tp.RowParallelLinear(4, 4, sequence_parallel=True, **g)(ones(3, 2))": "use a world size of 1 or 3",
    "tp.VocabParallelEmbedding(7, 4, **g)(tensor([-1]))": "out of range",
    "tp.VocabParallelEmbedding(7, 4, **g)(tensor([7]))": "out of range",  # on all ranks, the one with padding too
    "tp.VocabParallelEmbedding.from_full(nn.Embedding(8, 4, padding_idx=0), **g)": "no padding_idx",
    "tp.vocab_parallel_cross_entropy(ones(3, 4), tensor([7]), **g)": r"targets \(1,\), logits \(3, 4\)",
    "tp.parallelize(gpt, {'nothing': 'column'}, **g)": "'nothing'",
    "tp.parallelize(gpt, {'3': 'row'}, **g)": "'3' .*LayerNorm.* 'row'",
    "tp.parallelize(gpt, {'0': 'vocab'}, **g)": "4.weight is tied",
}


def what_is_wrong_is_an_error_before_any_collective():
    g, alone = {"process_group": pool.group()}, dist.new_group([0])
    names = {"tp": tp, "nn": nn, "ones": torch.ones, "tensor": torch.tensor, "gpt": gpt(), "g": g}
    for call, words in REFUSED.items():
        with Collectives() as seen, pytest.raises((ValueError, IndexError), match=words):
            eval(call, names)
        assert not seen.calls, call
    for token in (-1, 8):
        with pytest.raises(IndexError, match="out of bounds"):
            tp.vocab_parallel_cross_entropy(torch.ones(1, 4), torch.tensor([token]), **g)
    other = nn.Sequential(nn.Linear(4, 4 + 2 * pool.rank()))
    with pytest.raises(ValueError, match=r"differ: 0.bias \(4,\) .*, 0.bias \(6,\)"):
        tp.parallelize(other, {"0": "column"}, **g)
    if pool.rank() == 1:
        with pytest.raises(ValueError, match="rank 1 is not a member"):
            tp.copy_to_region(randn(2), alone)


def sixteen_bits_are_right_to_their_precision(autocast):
    torch.manual_seed(9)
    dtype, x = F32 if autocast else BF16, randn(8, 16)
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    ours = tp.parallelize(copy.deepcopy(plain).to(dtype), {"0": "column", "2": "row"}, pool.group())
    with torch.autocast("cpu", BF16, enabled=autocast):
        y = ours(x.to(dtype).requires_grad_())
    y.float().sum().backward()
    plain(x).sum().backward()
    for name, gradient in tp.full_state_dict(ours, gradients=True).items():
        theirs = plain.get_parameter(name).grad
        assert (gradient - theirs).abs().max() <= 8 * 2**-8 * theirs.abs().max(), name
    shard, reference = mine(y, -1).detach().requires_grad_(), y.detach().float().requires_grad_()
    loss = tp.vocab_parallel_cross_entropy(shard, torch.arange(8), pool.group())
    expected = F.cross_entropy(reference, torch.arange(8), reduction="none")
    loss.sum().backward(), expected.sum().backward()
    assert (y.dtype, gradient.dtype, loss.dtype, shard.grad.dtype) == (BF16, dtype, F32, BF16)
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert (shard.grad - mine(reference.grad, -1)).abs().max() <= 2**-8


class Events(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        self.seen += [name] if name in ("mm", "allreduce_", "_allgather_base_", "alltoall_base_") else []
        return func(*args, **(kwargs or {}))


def communication_overlaps_the_weights_gradient(sp):
    """The gradient of the input leaves before that of the weight is computed, and is waited for after."""
    layer = tp.ColumnParallelLinear(4, 6, sequence_parallel=sp, process_group=pool.group())
    y, events, wait = layer(randn(3, 4).requires_grad_()), Events(), tp.finish
    events.seen = []
    with pytest.MonkeyPatch.context() as patch, events:
        patch.setattr(tp, "finish", lambda *work: events.seen.append("wait") or wait(*work))
        y.sum().backward()
    plain = ["mm", "allreduce_", "mm", "wait"]
    assert events.seen == (["_allgather_base_", "mm", "alltoall_base_", "wait", "mm", "wait"] if sp else plain)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(("t", "rank"), [(8, 3), (1024, 0)])
def test_it_sends_and_holds_what_the_formula_says(t, rank, sp):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=t)
    try:
        s, b, h = t, 1, 1024
        layer = tp.ParallelTransformerLayer(h, 1024, 1024, sequence_parallel=sp)
        x = randn(s // t if sp else s, b, h).requires_grad_()
        with tp.SentBytes() as sent:
            layer(x).sum().backward()
        elements = 10 * b * s * h + 12 * h if sp else 8 * b * s * h
        assert sent.total == pytest.approx(4 * elements * (t - 1) / t)
        assert sum(p.numel() for p in layer.parameters()) == (6 * h * h + 4 * h) // t + 6 * h
        for smoothing, numbers in ((0.0, 6), (0.1, 10)):
            logits, zeros = randn(s, b, 5).requires_grad_(), torch.zeros(s, b, dtype=torch.long)
            with tp.SentBytes() as sent:
                tp.vocab_parallel_cross_entropy(logits, zeros, label_smoothing=smoothing).sum().backward()
            assert sent.total == pytest.approx(4 * numbers * b * s * (t - 1) / t)
    finally:
        dist.destroy_process_group()


def activations_kept_are_what_the_formula_says(sp):
    """In elements per sbh. Korthikanti's 10 + 24/t bytes, or 34/t, less two masks of dropout (2 bytes), halved."""
    t, (s, b, h, a), group = pool.world_size(), (16, 2, 48, 12), pool.group()
    layer = tp.ParallelTransformerLayer(h, a, sequence_parallel=sp, process_group=group)
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def kept(function, *args):
        saved = []  # alive, so that no address is used twice
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            function(*args)
        return tp.held_bytes(x for x in saved if x.untyped_storage().data_ptr() not in own) / 8

    whole = 4 / t if sp else 4  # inputs of the norms, which are the residuals, and of the column layers
    small = 4 / h / (t if sp else 1) + a / (h * t)  # norms keep mean and deviation, attention one number per row
    layer_keeps = kept(layer, randn(s // t if sp else s, b, h).requires_grad_())
    assert layer_keeps / (s * b * h) == pytest.approx(whole + 12 / t + small, rel=1e-12)
    logits, target = randn(s, b, 5000).requires_grad_(), torch.zeros(s, b, dtype=torch.long)
    loss_keeps = kept(tp.vocab_parallel_cross_entropy, logits, target, group)
    assert loss_keeps / logits.numel() == pytest.approx(1, abs=0.01)  # one float per logit; indices and masks


# ranks, tokens, bias, tied, smoothing, the ignored; kv_heads, swiglu, bias, sequence_parallel; sequence_parallel, tied
VOCABULARIES = [(1, 4, 1, 1, 0.1, 2), (2, 13, 1, 0, 0.0, -100), (3, 4, 0, 1, 0.1, 2), (4, 5, 1, 1, 0.1, -100)]
LAYERS = [(2, 4, 1, 1, 1), (3, 3, 1, 0, 1), (4, 4, 1, 1, 0), (2, 12, 0, 1, 1)]
TRAININGS = [(1, 1, 1), (2, 0, 1), (3, 1, 0)]
CLAIMS = [
    *((N, operators_are_each_the_others_transpose) for N in (1, 3)),
    (2, layers_are_drawn_as_plain_ones),
    *((N, vocabulary_and_loss_equal_one_device, *options) for N, *options in VOCABULARIES),
    *((N, a_clipped_layer_equals_one_device, *options) for N, *options in LAYERS),
    *((N, three_steps_of_a_gpt_equal_one_device, *options) for N, *options in TRAININGS),
    (2, what_is_wrong_is_an_error_before_any_collective),
    *((2, dropout_differs_inside_and_is_repeated_by_checkpoints, sp) for sp in (False, True)),
    *((2, sixteen_bits_are_right_to_their_precision, autocast) for autocast in (False, True)),
    *((2, communication_overlaps_the_weights_gradient, sp) for sp in (False, True)),
    *((4, activations_kept_are_what_the_formula_says, sp) for sp in (False, True)),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim[1].__name__}-{claim[0]}")
def test_in_a_world(claim):
    run(*claim)
