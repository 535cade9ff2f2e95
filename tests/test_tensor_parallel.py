"""tensor_parallel.py against one device. The linear layers alone are in tests/claims."""

import copy
import math
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from shared import Collectives, Watch, fake_world, randn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import tensor_parallel as tp

within = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
bitwise = partial(torch.testing.assert_close, rtol=0, atol=0)

SEQUENCE_PARALLEL = pytest.mark.parametrize(
    "sp",
    [False, True],
    ids=["whole", "sequence parallel"],
)
PAIR = {"0": "column", "2": "row"}


def everyone(tensor):
    """The tensors of all ranks."""
    tensors = [torch.empty_like(tensor) for _ in range(pool.world_size())]
    dist.all_gather(tensors, tensor.detach().contiguous(), group=pool.group())
    return tensors


def alike(tensor):
    return all(torch.equal(tensor, other) for other in everyone(tensor))


def mine(whole, dim=0):
    """This rank's part."""
    return whole.chunk(pool.world_size(), dim)[pool.rank()]


def split(plain, plan, sp=False):
    """A copy, split over the ranks of the test."""
    return tp.parallelize(copy.deepcopy(plain), plan, pool.group(), sp)


def split_layer(plain, kind):
    return split(nn.Sequential(plain), {"0": kind})[0]


def our_loss(shard, target, ignore=-100, **options):
    return tp.vocab_parallel_cross_entropy(shard, target, pool.group(), ignore, **options)


def assert_same_model(ours, plain):
    """Parameters and gradients, and that replicas agree bitwise."""
    state_dict = tp.full_state_dict(ours)
    within(state_dict, plain.state_dict())
    gradients = tp.whole_gradients(ours)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    within(gradients, expected)
    of_shards = {name for name, *_ in tp.split_parameters(ours)}
    for name in gradients.keys() - of_shards:
        assert alike(ours.get_parameter(name)), name
        assert alike(gradients[name]), name


def assert_trains_as_one_device(ours, plain, sp=False):
    """Steps of SGD with momentum. Gradients add up over the steps."""
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    optimizers = [sgd(ours.parameters()), sgd(plain.parameters())]
    for step in range(3):
        x = randn((2 * pool.world_size(), 3, 8), seed=step)
        weights = randn(x.shape, seed=9)
        plain(x).backward(weights)
        if sp:
            x = mine(x)
            weights = mine(weights)
        ours(x).backward(weights)
        assert_same_model(ours, plain)
        for optimizer in optimizers:
            optimizer.step()


# ---- section 1. The claims about the layers prove the operators and their gradients.


@pool.on(3)
def test_operators_take_what_is_transposed_on_some_ranks_and_do_not_change_it():
    x = randn((6, 6))
    own = x.clone()
    if pool.rank():
        own = x.mT.contiguous().mT
    total = tp.reduce_from_region(own, pool.group())
    part = tp.reduce_scatter_to_sequence(own, pool.group())
    whole = tp.gather_from_sequence(own, pool.group())
    within(total, 3 * x)
    within(part, 3 * mine(x))
    within(whole, x.repeat(3, 1))
    bitwise(own, x)


@pool.on(3)
def test_the_mlp_of_f_and_g_is_the_mlp_of_one_device():
    x = randn((6, 6))
    columns = mine(x, 1)
    rows = mine(x)
    y = tp.parallel_mlp(x, columns, rows, pool.group())
    within(y, F.gelu(x @ x) @ x)


def demo_model(V):
    torch.manual_seed(0)
    return tp.language_model(C=24, heads=12, V=V).double()


def scatter_after_embedding(model):
    """With sequence parallelism: dimension 0 is split."""
    scatter = partial(tp.scatter_to_sequence, process_group=pool.group())
    model[0].register_forward_hook(lambda module, inputs, output: scatter(output))


def make_tokens(V, step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(V, (12, 3), generator=generator)


@pool.on(4)  # the demo has the default group
def test_section_1_alone_has_the_loss_and_the_gradients_of_one_device():
    plain = demo_model(13)
    ours = copy.deepcopy(plain)
    tp.split_by_the_idea(ours)
    tokens = make_tokens(13)
    expected = tp.language_loss(plain(tokens), tokens)
    loss = tp.language_loss(ours(tokens), tokens)
    expected.backward()
    loss.backward()
    within(loss, expected)
    gradients, parameters = tp.join_naive(ours, plain)
    bitwise(parameters, [parameter.detach() for parameter in plain.parameters()])
    within(gradients, [parameter.grad for parameter in plain.parameters()])


# ---- training equals one device

PLAN = {"0": "vocab", "*.qkv": "qkv", "*.proj": "row", "*.linear1": "column"}
PLAN |= {"*.linear2": "row", "*.norm?": "norm", "5": "norm", "6": "vocab"}


@SEQUENCE_PARALLEL
@pytest.mark.parametrize(
    ("tied", "V"),
    [(True, 13), (False, 4)],
    ids=["tied", "fewer tokens than rows"],  # of 3 ranks one has only padding
)
@pool.on(1, 3)
def test_a_model_trains_as_on_one_device(tied, V, sp):
    """Losses, clipped gradients and parameters, over steps of two micro-batches."""
    plain = demo_model(V)
    plain[1].linear1.weight.requires_grad_(False)
    if tied:
        plain[6].weight = plain[0].weight
    ours = split(plain, PLAN, sp)
    if sp:
        scatter_after_embedding(ours)
    adam = partial(torch.optim.Adam, lr=1e-3, eps=1)
    optimizers = [adam(ours.parameters()), adam(plain.parameters())]
    for step in range(4):
        tokens = make_tokens(V, step)
        logits = plain(tokens).movedim(-1, 1)
        expected = F.cross_entropy(logits, tokens, reduction="none")
        losses = our_loss(ours(tokens), tokens)
        within(losses, expected)
        expected.sum().backward()
        losses.sum().backward()
        if step % 2:
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            norm = tp.clip_grad_norm_(ours, 0.5, pool.group())
            within(norm / expected, torch.ones_like(norm))
            assert_same_model(ours, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pool.on(2)
def test_a_split_layer_names_the_ranks_with_other_values():
    plain = nn.Linear(6, 12)
    from_full = partial(tp.RowParallelLinear.from_full, process_group=pool.group())
    layer = from_full(plain)
    assert layer.differ_between_ranks == layer.weight.differ_between_ranks == [0, 1]
    assert not hasattr(layer.bias, "differ_between_ranks")
    plain.weight.register_hook(print)  # which a copy would lack
    with pytest.raises(ValueError, match="hooks"):
        from_full(plain)


@pool.on(2)
def test_a_layer_with_two_names_is_split_once_by_either_name():
    layer = nn.Linear(6, 12).double()
    plain = nn.ModuleDict({"one": layer, "two": layer})
    ours = split(plain, {"two": "column"})
    x = randn((3, 6))
    within(ours["one"](x), mine(layer(x), -1))
    bitwise(tp.full_state_dict(ours), plain.state_dict())


@pool.on(2)
def test_tied_layers_are_one_if_their_plans_cut_alike():
    plain = nn.Sequential(nn.Linear(6, 12), nn.Linear(6, 12)).double()
    plain[1].weight = plain[0].weight
    ours = split(plain, {"0": "qkv", "1": (4, 4, 4)})
    assert ours[1].weight is ours[0].weight
    bitwise(tp.full_state_dict(ours), plain.state_dict())


@pool.on(2)
def test_a_hook_that_the_embedding_had_before_changes_its_output_as_on_one_device():
    plain = nn.Sequential(nn.Embedding(6, 4)).double()
    plain[0].register_forward_hook(lambda module, inputs, x: x[1:].movedim(0, 1))
    ours = split(plain, {"0": "vocab"})
    tokens = torch.tensor([[4, 3], [0, 5], [4, 1]])
    bitwise(ours(tokens), plain(tokens))


@pool.on(2)
def test_evaluation_of_pytorchs_layer_does_not_take_shards_for_whole_weights():
    plain = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    plain.double()
    plain.eval()
    ours = split(plain, {"linear1": "column", "linear2": "row"})
    x = randn((2, 5, 8))
    with torch.no_grad():
        within(ours(x), plain(x))


@pool.on(2)
def test_evaluation_of_pytorchs_encoder_does_not_pass_nested_tensors_to_collectives():
    plain_layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    plain = nn.TransformerEncoder(plain_layer, 1).double()
    plain.eval()
    plan = {"layers.*.linear1": "column", "layers.*.linear2": "row"}
    ours = split(plain, plan)
    x = randn((2, 5, 8))
    is_padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        y = ours(x, src_key_padding_mask=is_padding)
        expected = plain(x, src_key_padding_mask=is_padding)
    within(y[~is_padding], expected[~is_padding])


class OwnNorm(nn.Module):
    """Its forward calls another method, as those of some norms in transformers do."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_parameter("bias", None)

    def scale(self, x):
        return x * self.weight

    def forward(self, x):
        return self.scale(x / x.norm(dim=-1, keepdim=True))


class Conv1D(nn.Module):
    """A linear layer as transformers' GPT-2 has it: the weight is (inputs, outputs)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 10)
        self.bias = nn.Parameter(torch.randn(outputs) / 10)

    def forward(self, x):
        return x @ self.weight + self.bias


class Gate(nn.Module):
    """Stands for attention: it needs the same features of q, k and v."""

    def forward(self, x):
        q, k, v = x.chunk(3, -1)
        return q.sigmoid() * k + v


def model_with_norms():
    split_heads = nn.Unflatten(-1, (-1, 4))
    heads = [split_heads, OwnNorm(4), nn.Flatten(-2)]
    first = nn.Linear(8, 24)
    second = nn.Linear(24, 8)
    return nn.Sequential(OwnNorm(8), first, *heads, second)


def model_of_conv1d():
    first = Conv1D(8, 36)
    second = Conv1D(12, 8)
    return nn.Sequential(OwnNorm(8), first, Gate(), second)


class Grouped(nn.Module):
    """Stands for attention with grouped queries: two features of q to one of k and of v."""

    def forward(self, x):
        half = x.shape[-1] // 2
        q = x[..., :half]
        k, v = x[..., half:].chunk(2, -1)
        k = k.repeat_interleave(2, -1)
        v = v.repeat_interleave(2, -1)
        return q * k.sigmoid() + v


class SwiGLU(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


def model_of_stacks():
    return nn.Sequential(
        OwnNorm(8),
        nn.Linear(8, 24),
        Grouped(),
        nn.Linear(12, 8),
        nn.Linear(8, 24),
        SwiGLU(),
        nn.Linear(12, 8),
    )


STACKS = {
    "0": "norm",
    "1": (12, 6, 6),
    "3": "row",
    "4": "swiglu",
    "6": "row",
}
NORMS = {
    "0": "norm",
    "1": "column",
    "3": "replicated_with_grad_allreduce",
    "5": "row",
}
CONV1D = {"0": "norm", "1": "qkv", "3": "row"}


@SEQUENCE_PARALLEL
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (model_with_norms, NORMS),
        (model_of_conv1d, CONV1D),
        (model_of_stacks, STACKS),
    ],
    ids=["any norm, between pairs and inside", "stacked Conv1D", "grouped queries and SwiGLU"],
)
@pool.on(3)
def test_what_is_not_a_plain_linear_layer_trains_as_on_one_device(make, plan, sp):
    plain = make().double()
    ours = split(plain, plan, sp)
    tp.parallelize(ours, {"0": "norm"}, pool.group(), sp)  # again: sums no gradient twice
    assert_trains_as_one_device(ours, plain, sp)


@pool.on(2)
def test_the_boxes_of_matrices_that_are_interleaved_in_memory_are_an_error():
    layer = split_layer(Conv1D(6, 12), "qkv")
    with pytest.raises(ValueError, match=r"weight .* interleaved"):
        tp.boxes_of(layer, "weight", layer.weight.shape)
    boxes = tp.boxes_of(layer, "bias", layer.bias.shape)
    assert len(boxes) == 3


@pool.on(2)
def test_a_whole_parameter_is_one_box():
    layer = split_layer(nn.Linear(6, 4), "row")
    (box,) = tp.boxes_of(layer, "bias", layer.bias.shape)
    assert box == (0, [4], [4], [0])


@pytest.mark.parametrize("kind", ["vocab", "column"])  # T5's biases have a column per head
@pool.on(2)
def test_an_embedding_has_the_gradients_of_one_device(kind):
    embedding = nn.Embedding(6, 4, padding_idx=4)
    plain = nn.Sequential(embedding)
    ours = split(plain, {"0": kind})
    tokens = torch.tensor([4, 3, 0, 5, 4, 1])
    for model in (ours, plain):
        model(tokens).exp().sum().backward()
    assert_same_model(ours, plain)


@pool.on(2)
def test_tokens_of_an_embedding_may_be_given_by_name():
    embedding = nn.Embedding(6, 4, padding_idx=4)
    ours = split(nn.Sequential(embedding), {"0": "vocab"})[0]
    tokens = torch.tensor([4, 3, 0])
    assert torch.equal(ours(tokens=tokens), embedding(tokens))


# ---- the loss and the head


@pool.on(3)
def test_the_loss_and_its_gradient_are_those_of_one_device():
    """Of logits that overflow exp(), and with a target that is ignored."""
    whole = 3000 * randn((4, 3, 12))
    target = torch.arange(12).view(4, 3)
    shard = mine(whole, -1).requires_grad_()
    whole.requires_grad_()
    weights = randn((4, 3), seed=1)
    logits = whole.movedim(-1, 1)
    expected = F.cross_entropy(logits, target, ignore_index=2, reduction="none")
    expected.backward(weights)

    loss = our_loss(shard, target, ignore=2)
    loss.backward(weights)

    within(loss / 3000, expected / 3000)
    within(shard.grad, mine(whole.grad, -1))


LOSS = partial(F.cross_entropy, ignore_index=2, reduction="none")


def soft_cap(logits):
    return 2 * torch.tanh((logits - 20) / 2)


def clamp(logits):
    return logits.clamp(-1000, -900)


def in_place(logits):
    return logits.mul_(0.5)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("change", [soft_cap, clamp, in_place])
@pool.on(2, 4)  # of 4 ranks the last has only padding
def test_the_padding_of_a_head_does_not_count_whatever_the_model_does_to_it(change, smoothing):
    layer = nn.Linear(6, 5).double()
    plain = nn.Sequential(layer)
    head = split(plain, {"0": "vocab"})
    x = 100 * randn((2, 3, 6))
    target = torch.arange(6).view(2, 3) % 5
    weights = randn((2, 3), seed=1)
    logits = change(plain(x)).movedim(-1, 1)
    expected = LOSS(logits, target, label_smoothing=smoothing)
    expected.backward(weights)
    options = {"ignore": 2, "label_smoothing": smoothing}
    loss = our_loss(change(head(x)), target, **options)
    loss.backward(weights)
    within(loss / 100, expected / 100)
    assert_same_model(head, plain)
    with torch.no_grad():  # no graph leads to the head
        again = our_loss(change(head(x)), target, **options)
    given = our_loss(change(head(x)).detach(), target, vocab_size=5, **options)
    bitwise(again, loss)
    bitwise(given, loss)


@pytest.mark.parametrize("V", [5, 6])
@pool.on(2)
def test_the_loss_without_a_graph_takes_the_head_that_ran_last(V):
    target = torch.tensor([4])
    x = torch.zeros(1, 6)
    with torch.no_grad():
        other = split_layer(nn.Linear(6, 11 - V), "vocab")  # with as many columns
        other(x)
        head = split_layer(nn.Linear(6, V, bias=False), "vocab")
        loss = our_loss(head(x).clamp(min=0), target)
    within(loss, torch.full((1,), V).log())


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16],
    ids=str,
)
@pool.on(3)
def test_label_smoothing_is_over_the_words_of_all_ranks(dtype):
    whole = randn((4, 12), dtype=dtype)
    target = torch.tensor([2, 0, 9, 5])
    shard = mine(whole, -1).requires_grad_()
    loss_dtype = torch.promote_types(dtype, torch.float32)
    words = whole[:, :10].to(loss_dtype, copy=True)
    words.requires_grad_()
    expected = LOSS(words, target, label_smoothing=0.1)
    expected.sum().backward()
    loss = our_loss(shard, target, 2, label_smoothing=0.1, vocab_size=10)
    loss.sum().backward()
    precision = 1e-12 if dtype == torch.float64 else 2**-8
    close = partial(torch.testing.assert_close, rtol=precision, atol=precision)
    close(loss, expected)
    gradient = F.pad(words.grad, (0, 2)).to(dtype)
    close(shard.grad, mine(gradient, -1))


@pool.on(2)
def test_the_loss_of_bfloat16_logits_is_computed_in_float32():
    logits = randn((5, 8), dtype=torch.bfloat16)
    target = torch.arange(5)
    loss = our_loss(mine(logits, -1), target)
    expected = F.cross_entropy(logits.float(), target, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("make", [nn.Linear, Conv1D])
@pool.on(4)  # the last rank has only padding
def test_a_head_pads_its_logits_with_minus_infinity_and_gathers_them_without_padding(make):
    plain = make(6, 9).double()
    x = randn((2, 6))
    expected = plain(x)
    options = {"pad": True, "process_group": pool.group()}
    head = tp.ColumnParallelLinear.from_full(plain, **options)
    gathering_head = tp.ColumnParallelLinear.from_full(plain, gather_output=True, **options)
    logits = torch.cat(everyone(head(x)), -1)
    padded = F.pad(expected, (0, 3), value=-torch.inf)
    within(logits, padded)
    within(gathering_head(x), expected)
    other = make(6, 9).double().state_dict()
    tp.load_full_state_dict(head, other)
    bitwise(tp.full_state_dict(head), other)


@pool.on(2)
def test_stacked_matrices_are_gathered_in_the_order_of_the_plain_layer():
    plain = nn.Linear(6, 12).double()
    options = {"stack": 3, "gather_output": True, "process_group": pool.group()}
    layer = tp.ColumnParallelLinear.from_full(plain, **options)
    x = randn((2, 6))
    within(layer(x), plain(x))


@pool.on(2)
def test_on_a_gpu_what_is_outside_the_vocabulary_is_nan():
    plain = nn.Embedding(7, 4)
    embedding = tp.VocabParallelEmbedding.from_full(plain, process_group=pool.group())
    shard = torch.ones(3, 3, requires_grad=True)
    tokens = torch.tensor([5, -7, 8**9])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False)
        x = embedding(tokens)
        loss = our_loss(shard, tokens)
    loss.sum().backward()
    for each in (x, loss.unsqueeze(-1), shard.grad):
        is_nan = each.isnan().all(-1)
        assert is_nan.tolist() == [False, True, True]


# ---- the norm of gradients


@pytest.mark.parametrize("norm_type", [1, 2.0, 3, math.inf])
@pool.on(3)
def test_clipping_takes_every_norm_and_counts_whole_parameters_once(norm_type):
    first = nn.Linear(6, 9)
    second = nn.Linear(9, 6)
    plain = nn.Sequential(first, nn.ReLU(inplace=True), second).double()
    ours = split(plain, PAIR)
    x = randn((2, 4, 6))
    for model in (ours, plain):
        model(x).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    norm = tp.clip_grad_norm_(ours, 0.5, pool.group(), norm_type)
    within(norm / expected, torch.ones_like(norm))
    assert alike(norm)
    assert_same_model(ours, plain)


@pool.on(2)
def test_a_parameter_that_a_user_has_split_counts_as_split():
    parameters = [torch.ones(3), torch.ones(3)]
    model = nn.ParameterList(parameters).double()
    model[0].differ_between_ranks = [0, 1]
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    norm = tp.clip_grad_norm_(model, 1e9, pool.group())
    expected = torch.tensor(9.0).double()
    within(norm**2, expected)


plain_linear = partial(nn.Linear, 2, 2)


@pytest.mark.parametrize(
    "make",
    [plain_linear, nn.ReLU],
    ids=["without gradients", "without parameters"],
)
@pool.on(2)
def test_the_norm_of_no_gradients_is_zero(make):
    model = make()
    norm = tp.clip_grad_norm_(model, 1.0, pool.group())
    bitwise(norm, torch.tensor(0.0))


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pool.on(2)
def test_one_ranks_nan_is_the_norm_on_all_ranks(norm_type):
    layer = split_layer(nn.Linear(2, 2), "column")
    gradient = math.nan if pool.rank() else 1.0
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    norm = tp.clip_grad_norm_(layer, 1.0, pool.group(), norm_type)
    assert norm.isnan()


# ---- what checkpoints rely on


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [
        ("row", 36),
        ((18, 12, 6), 36),
        ("vocab", 13),
        ("vocab", 1),
    ],
    ids=str,
)
@pool.on(3)
def test_the_boxes_of_all_ranks_cover_the_whole_weight_once(kind, outputs):
    plain = nn.Linear(6, outputs)
    whole = plain.weight.detach()
    layer = split_layer(plain, kind)
    shard = layer.weight.detach()
    joined = torch.zeros_like(whole)
    for box in tp.boxes_of(layer, "weight", shard.shape):
        assert box.whole_shape == list(whole.shape)
        size = math.prod(box.shape)
        flat = shard.flatten().narrow(0, box.first, size)
        place = joined
        for dim in range(2):
            place = place.narrow(dim, box.offset[dim], box.shape[dim])
        place += flat.view(box.shape)
    bitwise(sum(everyone(joined)), whole)


# ---- dropout


DROPOUTS = {"0": "column", "1": "dropout", "2": "row"}


@SEQUENCE_PARALLEL
@pool.on(2)
def test_dropout_differs_between_ranks_only_where_activations_do_and_checkpoints_repeat_it(sp):
    plain = nn.Sequential(
        nn.Linear(8, 16),
        nn.Dropout(),
        nn.Linear(16, 8),
        nn.Dropout(),
    )
    plan = dict(DROPOUTS)
    if sp:
        plan["3"] = "dropout"
    layer = split(plain.double(), plan, sp)
    masks = []
    for dropout in layer[1::2]:
        dropout.register_forward_hook(lambda *args: masks.append(args[-1] == 0))
    x = randn((4, 2, 8)).requires_grad_()
    results = []
    needs_gradient = [x, *layer.parameters()]
    for call in (layer, partial(checkpoint, layer, use_reentrant=False)):
        torch.manual_seed(3)
        y = call(x)
        gradients = torch.autograd.grad(y, needs_gradient, randn(y.shape))
        random = torch.rand(3)
        results.append([y.detach(), random, *gradients])
    bitwise(*results)
    inside, outside = masks[:2]
    assert not alike(inside)
    assert alike(outside) != sp
    assert alike(random)


@pool.on(2)
def test_random_numbers_differ_in_a_parallel_region_and_agree_after_it():
    torch.manual_seed(3)
    with tp.parallel_region(pool.group()):
        inside = torch.rand(3)
    assert not alike(inside)
    assert alike(torch.rand(3))


def body_dropout_draws_as_on_one_device(is_training):
    plain = nn.Sequential(nn.Dropout()).train(is_training)
    ours = split(plain, {"0": "dropout"})
    x = randn((4, 8))
    results = []
    for dropout in (plain, ours):
        torch.manual_seed(3)
        y = dropout(x)
        results.append([y, torch.rand(3)])
    bitwise(*results)


@pytest.mark.parametrize(
    ("N", "is_training"),
    [(1, True), (2, False)],
    ids=["one rank", "evaluation"],
)
def test_on_one_rank_and_in_evaluation_dropout_draws_what_one_device_draws(N, is_training):
    pool.run(N, body_dropout_draws_as_on_one_device, is_training)


# ---- errors


def test_sizes_that_the_ranks_cannot_share_are_an_error_before_any_collective():
    with fake_world(2, 0), Collectives() as seen:
        with pytest.raises(ValueError, match=r"7 features .* by 2 .* in \[1, 7\]$"):
            tp.ColumnParallelLinear.from_full(nn.Linear(4, 7))
        with pytest.raises(ValueError, match="3 positions or features"):
            tp.scatter_to_region(torch.ones(2, 3))
        layer = tp.ColumnParallelLinear.from_full(nn.Linear(4, 8))
        with pytest.raises(ValueError, match=r"\[6, 4\].* 8"):
            tp.load_full_state_dict(layer, {"weight": torch.ones(6, 4)})
        assert not seen.calls


def hooked():
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(print)
    return nn.Sequential(layer)


def tied():
    first = nn.Linear(4, 8)
    second = nn.Linear(4, 8)
    second.weight = first.weight
    return nn.Sequential(first, second)


def split_already():
    layer = split_layer(nn.Linear(4, 4), "column")
    return nn.Sequential(layer)


def batch_norm():
    return nn.Sequential(nn.BatchNorm1d(4))


def embedding_with_max_norm():
    return nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))


@pytest.mark.parametrize(
    ("make", "plan", "word"),
    [
        (hooked, {"0": "column"}, "'0' .*hooks"),
        (embedding_with_max_norm, {"0": "vocab"}, "'0' .*max_norm"),
        (model_with_norms, {"0": "row"}, "'0' .*OwnNorm"),
        (model_with_norms, {"1": (5, 3)}, "'1' .*add up to 24"),
        (model_with_norms, {"nothing": "norm"}, "'nothing'"),
        (batch_norm, {"0": "norm"}, "'0' .*buffers"),
        (split_already, {"0": "replicated_with_grad_allreduce"}, "'0' .*is split"),
        (split_already, {"0": "column"}, "'0' .*ColumnParallelLinear"),
        (tied, {"0": "row"}, r"1\.weight is tied"),
        (tied, {"0": "column", "1": "swiglu"}, r"1\.weight is tied"),
    ],
    ids=[
        "hooks",
        "max_norm",
        "kind",
        "sizes",
        "name",
        "buffers",
        "split, as a norm",
        "split twice",
        "tied to a plain layer",
        "tied to a stack",
    ],
)
@pool.on(2)
def test_a_plan_that_would_not_be_right_is_an_error_that_names_the_layer(make, plan, word):
    model = make()
    with pytest.raises(ValueError, match=f"(?s){word}"):
        tp.parallelize(model, plan, pool.group())


@pytest.mark.parametrize(
    ("kind", "seed", "word"),
    [("row", 0, "plan .*'row'"), ("column", 1, "seed all .* sum ")],
    ids=["plans", "seeds"],
)
@pool.on(2)
def test_what_differs_between_ranks_is_an_error_on_every_rank(kind, seed, word):
    if pool.rank() == 0:
        kind = "column"
        seed = 0
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=word):
        tp.parallelize(model, {"0": kind}, pool.group())


@pool.on(2)
def test_a_whole_parameter_inside_a_pair_is_an_error_in_the_first_forward_with_gradients():
    first = nn.Linear(8, 8)
    second = nn.Linear(8, 8)
    plain = nn.Sequential(first, nn.PReLU(4), second)
    model = split(plain, PAIR)
    x = torch.ones(2, 8)
    with torch.no_grad():
        model(x)
    with pytest.raises(ValueError, match=r"\(4,\).*'replicated_with_grad_allreduce'"):
        model(x)
    model[1].weight.differ_between_ranks = [0, 1]  # a user's own slice
    model(x)


@pool.on(2)
def test_a_group_without_this_rank_is_an_error():
    groups = [dist.new_group([rank]) for rank in range(2)]
    other = groups[1 - pool.rank()]
    x = torch.ones(2)
    with pytest.raises(ValueError, match="not in process_group"):
        tp.copy_to_region(x, other)


@pool.on(2)
def test_what_is_outside_the_vocabulary_is_an_error():
    plain = nn.Embedding(7, 4)
    embedding = tp.VocabParallelEmbedding.from_full(plain, process_group=pool.group())
    shard = torch.ones(2, 4)
    with pytest.raises(IndexError, match=r"\[7, -1\] .* of 7; use 0 to 6"):  # 7 is padding
        embedding(torch.tensor([6, 7, -1]))
    with pytest.raises(IndexError, match=r"\[8\] .* of 8"):
        our_loss(shard, torch.tensor([7, 8]))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"vocab_size": 9}, "use 1 to 8"),
        ({"vocab_size": 0}, "use 1 to 8"),
        ({"label_smoothing": 1.5}, "from 0 to 1"),
    ],
    ids=str,
)
@pool.on(2)
def test_options_of_the_loss_that_mean_nothing_are_an_error(options, word):
    shard = torch.ones(2, 4)
    target = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=word):
        our_loss(shard, target, **options)


@pytest.mark.parametrize("of", ["a column layer", "the loss"])
@pool.on(2)
def test_a_gradient_of_a_gradient_is_an_error_because_a_part_of_it_would_be_left_out(of):
    x = torch.ones(4, 4, requires_grad=True)
    if of == "the loss":
        y = our_loss(x, torch.arange(4))
    else:
        layer = split_layer(nn.Linear(4, 4), "column")
        y = layer(x)
    total = y.sum()
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(total, x, create_graph=True)


# ---- costs


@pytest.mark.parametrize(
    "autocast",
    [False, True],
    ids=["bfloat16 model", "autocast"],
)
@pool.on(2)
def test_sixteen_bits_are_right_to_their_precision(autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    first = nn.Linear(16, 32)
    second = nn.Linear(32, 16)
    plain = nn.Sequential(first, nn.GELU(), second)
    plain.to(dtype)
    ours = split(plain, PAIR)
    x = randn((8, 16), dtype=dtype)
    x.requires_grad_()
    device = pool.device()
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        y = ours(x)
    assert y.dtype == torch.bfloat16
    plain.float()
    same_x = x.float()
    expected = plain(same_x)
    y.sum().backward()
    expected.sum().backward()
    for name, gradient in tp.whole_gradients(ours).items():
        assert gradient.dtype == dtype
        expected = plain.get_parameter(name).grad
        largest = expected.abs().max()
        difference = gradient.float() - expected
        assert difference.abs().max() <= 2**-5 * largest
    norm = tp.clip_grad_norm_(ours, 1e9, pool.group())
    assert norm.dtype == torch.float32


def kept(function, *args, but=()):
    """The result, and the float32 numbers that autograd keeps for backward, but parameters."""
    saved = []  # alive, so that no address is used twice
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        result = function(*args)
    parameters = list(but)
    kept_bytes = tp.held_bytes(saved + parameters) - tp.held_bytes(parameters)
    return result, kept_bytes / 4


@SEQUENCE_PARALLEL
def test_a_layer_sends_holds_and_keeps_what_the_formulas_say(sp):
    """Kept: Korthikanti's 10 + 24/t or 34/t bytes, less 2 for dropout, as numbers of 2 bytes."""
    t = 8
    s = t
    h = 256
    heads = 8
    with fake_world(t, 3):
        layer = tp.Block(h, heads)
        model = nn.Sequential(layer)
        plan = {name: kind for name, kind in PLAN.items() if name.startswith("*")}
        tp.parallelize(model, plan, sequence_parallel=sp)
        x = torch.randn(s // t if sp else s, 1, h, requires_grad=True)
        with tp.SentBytes() as sent:
            y, keeps = kept(layer, x, but=layer.parameters())
            y.sum().backward()
    elements = 8 * s * h
    if sp:
        elements = 10 * s * h + 12 * h
    itemsize = 4
    expected = itemsize * elements * (t - 1) / t
    assert sent.total == pytest.approx(expected)
    holds = sum(p.numel() for p in layer.parameters())
    assert holds == (12 * h * h + 7 * h) // t + 6 * h
    # Between pairs, the inputs of norms and column layers, and means and deviations. Inside a
    # pair twelve of h, and one number for each row and head.
    between = 4 + 4 / h
    if sp:
        between /= t
    inside = (12 + heads / h) / t
    assert keeps / (s * h) == pytest.approx(between + inside, rel=1e-12)


def test_a_column_layer_computes_while_it_communicates(monkeypatch):
    """The gradient of x leaves before that of the weight is computed, and is awaited after it."""
    issued = Watch(lambda: None)
    work_class = getattr(torch._C._distributed_c10d, "FakeWork", dist.Work)  # newer torch
    monkeypatch.setattr(work_class, "wait", lambda work: issued.seen.append(("wait", None)))
    with fake_world(8, 3):
        plain = nn.Linear(16, 16)
        layer = tp.ColumnParallelLinear.from_full(plain, sequence_parallel=True)
        y = layer(torch.randn(8, 2, 16, requires_grad=True))
        with issued:
            y.sum().backward()
    order = "c10d::_allgather_base_ aten::mm c10d::alltoall_base_ wait aten::mm wait"
    names = [name for name, _ in issued.seen if name in order.split()]
    assert " ".join(names).endswith(order)  # after the gather of forward


def test_the_loss_sends_three_numbers_a_token_and_keeps_one_tensor_of_logits():
    with fake_world(8, 3), tp.SentBytes() as sent:
        logits = torch.randn(16, 5000, requires_grad=True)
        target = torch.arange(16)
        loss, keeps = kept(tp.vocab_parallel_cross_entropy, logits, target)
        loss.sum().backward()
    assert sent.total == pytest.approx(4 * 6 * 16 * 7 / 8)
    assert keeps / logits.numel() == pytest.approx(1, abs=0.01)  # and a mask
