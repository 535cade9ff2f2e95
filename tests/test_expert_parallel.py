"""expert_parallel.py beyond its claims: the idea, grids, capacity, balance, states, bytes."""

import copy
import importlib.util
import math
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims import default_group, registry
from claims.moe import Ours, computes_as_one_device, plain_moe, whole_weights
from shared import Collectives, assert_equal, randn
from torch.utils.checkpoint import checkpoint

import amp
import ddp
import expert_parallel as ep
import fsdp
import zero

H = 6  # hidden size


def make_model(dtype=torch.float64, num_experts=4, **options):
    """Two layers with a linear layer between them, the same on every rank."""
    torch.manual_seed(3)
    first = ep.MoE(H, 5, num_experts, **options)
    last = ep.MoE(H, 5, num_experts, **options)
    model = nn.Sequential(first, nn.Linear(H, H), last)
    return model.to(dtype)


def split(model, **options):
    """A copy with its experts split over the ranks of the test."""
    return ep.parallelize(copy.deepcopy(model), pool.group(), **options)


def tokens_of(rank, count=5):
    return randn((count, H), seed=100 + rank)


def own_tokens(count=5):
    return tokens_of(pool.rank(), count)


def own_loss(model):
    output = model(own_tokens())
    return output.square().sum()


def plain_backward(plain):
    """One device: the gradients of the mean of the ranks' losses."""
    N = pool.world_size()
    for rank in range(N):
        output = plain(tokens_of(rank))
        (output.square().sum() / N).backward()


def backward(model, *groups):
    own_loss(model).backward()
    ep.average_gradients(model, *(groups or [pool.group()]))


def assert_same_gradients(model, plain):
    gradients = ep.full_state_dict(model, gradients=True)
    for name, parameter in plain.named_parameters():
        assert_equal(gradients[name], parameter.grad, False, name)


def assert_same_state(state, expected):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def grid():
    """Ranks 0 and 1 split the experts, and so do 2 and 3. Ranks 0 and 2 have the same ones."""
    process_group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    edp_group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    return process_group, edp_group


# ---- the idea


@pytest.mark.parametrize("top_k", [1, 2])
@pool.on(2, 4)
def test_the_naive_form_is_bitwise_the_layer_with_one_expert_per_rank(top_k):
    N = pool.world_size()
    plain = make_model(num_experts=N, top_k=top_k)[0]
    ours = split(plain)
    naive = split(plain)
    x = own_tokens()

    def expert(rows):
        return naive.experts(rows, torch.tensor([len(rows)]))

    expected = ours(x)
    found = ep.naive_moe(x, naive.gate, expert, top_k, pool.group())
    for output in (expected, found):
        output.square().sum().backward()
    ep.average_gradients(ours, pool.group())
    replicated = [naive.gate.weight]
    ep.naive_average_gradients(replicated, naive.experts.parameters(), pool.group())

    assert torch.equal(found, expected)
    for name, parameter in ours.named_parameters():
        assert torch.equal(naive.get_parameter(name).grad, parameter.grad), name


# ---- losses and grids


class LossOfItsOwn(torch.autograd.Function):
    """Returns `output`. In backward, `loss` gets a gradient of 1."""

    @staticmethod
    def forward(ctx, output, loss):
        ctx.loss_gradient = torch.ones_like(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        return grad, ctx.loss_gradient


@pool.on(2)
def test_the_auxiliary_loss_can_have_a_gradient_node_of_its_own():
    """For pipelines, whose loss is on another rank."""
    model = split(make_model())
    other = copy.deepcopy(model)
    (own_loss(model) + model[0].aux_loss).backward()

    hidden = other[0](own_tokens())
    hidden = LossOfItsOwn.apply(hidden, other[0].aux_loss)
    output = other[1:](hidden)
    output.square().sum().backward()

    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert_equal(ours.grad, theirs.grad, False)


@pool.on(2)
def test_a_loss_that_nobody_reads_is_not_reduced():
    layer = split(make_model()[0])
    with Collectives() as forward:
        layer(own_tokens())
    with Collectives() as reading, torch.no_grad():
        values = [layer.aux_loss, layer.z_loss, layer.aux_loss]
    assert {name for name, _ in forward.calls} == {"alltoall_base_"}
    assert reading.calls == [("allreduce_", 8 * (2 * 4 + 1))]
    assert all(value.requires_grad for value in values)


@pool.on(2)
def test_after_backward_the_losses_are_values_without_a_graph():
    layer = split(make_model()[0])
    first = layer(own_tokens()).sum()
    second = layer(own_tokens()).sum()
    aux_loss = layer.aux_loss
    first.backward()
    assert layer.aux_loss is aux_loss  # that of the second forward
    second.backward()
    assert torch.equal(layer.aux_loss, aux_loss)
    assert not layer.aux_loss.requires_grad
    assert not layer.z_loss.requires_grad


@pool.on(2)
def test_without_tokens_on_any_rank_the_losses_are_zero():
    layer = split(make_model()[0])
    layer(own_tokens(0))
    assert layer.aux_loss == layer.z_loss == 0


@pool.on(4)
def test_a_grid_of_two_expert_parallel_by_two_data_parallel_ranks():
    groups = grid()
    plain = make_model(num_experts=2)
    model = copy.deepcopy(plain)
    if pool.rank():
        nn.init.zeros_(model[1].weight)  # parallelize() begins with the weights of rank 0
    ep.parallelize(model, *groups)
    plain_backward(plain)

    backward(model, *groups)
    norm = ep.clip_grad_norm_(model, 0.1, *groups)

    assert_equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), False)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pool.on(4)
def test_a_sum_needs_a_loss_that_is_divided_and_a_mean_needs_one_that_is_not(loss):
    groups = grid()
    plain = make_model(num_experts=2)
    everything = torch.cat([tokens_of(rank) for rank in range(4)])
    output = plain(everything)
    aux_loss = plain[0].aux_loss + plain[2].z_loss
    (output.square().sum() / 4 + aux_loss).backward()
    model = ep.parallelize(copy.deepcopy(plain), *groups, loss=loss)

    ours = own_loss(model) / (4 if loss == "sum" else 1)
    our_aux_loss = model[0].aux_loss + model[2].z_loss
    (ours + our_aux_loss).backward()
    ep.average_gradients(model, *groups)

    assert_equal(our_aux_loss.detach(), aux_loss.detach(), False)
    assert_same_gradients(model, plain)


@pool.on(4)
def test_all_ranks_of_a_crossed_grid_begin_with_the_same_weights():
    """The process group of ranks 0 and 3 is the first for rank 0, and the second for rank 3."""
    process_group, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    edp_group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    model = make_model()
    nn.init.constant_(model[1].weight, pool.rank())
    ep.parallelize(model, process_group, edp_group)
    assert not model[1].weight.any()


@pytest.mark.parametrize("forgotten", ["both", "edp_group", "order"])
@pool.on(4)
def test_other_groups_than_those_of_the_experts_are_an_error(forgotten):
    groups = grid()
    model = ep.parallelize(make_model(), *groups)
    others = {"both": [], "edp_group": groups[:1], "order": groups[::-1]}[forgotten]
    with pytest.raises(ValueError, match="that parallelize"):
        ep.average_gradients(model, *others)
    with pytest.raises(ValueError, match="that parallelize"):
        ep.clip_grad_norm_(model, 1.0, *others)


@pool.on(4)
def test_an_edp_group_with_other_experts_is_an_error():
    process_group, _ = grid()
    diagonal, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    with pytest.raises(ValueError, match="same number"):
        ep.parallelize(make_model(), process_group, diagonal)


@pool.on(2)
def test_ranks_that_sum_and_average_are_an_error():
    with pytest.raises(ValueError, match="same loss"):
        split(make_model(), loss=["mean", "sum"][pool.rank()])
    with pytest.raises(ValueError, match="loss='avg'"):
        split(make_model(), loss="avg")


@pool.on(3)
def test_experts_that_do_not_divide_by_the_ranks_are_an_error():
    with pytest.raises(ValueError, match="4 experts do not divide by 3 ranks"):
        split(make_model())


@pool.on(3)
def test_ranks_outside_the_groups_raise():
    pair = dist.new_group([0, 1])
    if pool.rank() == 2:
        with pytest.raises(ValueError, match="rank 2 is not in process_group"):
            ep.parallelize(make_model(), pair)
        with pytest.raises(ValueError, match=r"rank 2 is not in .* edp_group"):
            ep.average_gradients(make_model(), pool.group(), pair)


@pytest.mark.parametrize("top_k", [0, 5])
def test_more_choices_than_experts_are_an_error(top_k):
    with pytest.raises(ValueError, match=f"top_k={top_k} of 4"):
        ep.MoE(H, 5, 4, top_k)


# ---- with other techniques


@pool.on(2)
def test_slices_of_tensor_parallelism_are_not_overwritten():
    block = nn.Sequential(nn.Linear(H, H), make_model()[0])
    block[0].differ_between_ranks = [0, 1]  # as tensor_parallel.py marks what it splits
    with pytest.raises(ValueError, match="call it on the MoE only"):
        ep.parallelize(block, pool.group())
    ep.parallelize(block[1], pool.group())
    with pytest.raises(ValueError, match="different values in experts"):
        ep.parallelize(block[1], pool.group())


@pool.on(4)
def test_fsdp_shards_experts_over_the_ranks_that_have_the_same():
    process_group, edp_group = grid()
    plain = make_model()
    plain_backward(plain)
    model = ep.parallelize(copy.deepcopy(plain), process_group, edp_group)
    fsdp.fully_shard(model[0].experts, process_group=edp_group)

    own_loss(model).backward()

    for name, parameter in model[0].experts.named_parameters():
        shards = [None, None]
        dist.all_gather_object(shards, parameter.grad.flatten(), group=edp_group)
        whole = plain[0].experts.get_parameter(name).grad
        own = whole.chunk(2)[pool.rank() % 2]  # two of the four experts
        assert_equal(torch.cat(shards), own.flatten(), False, name)


@pytest.mark.parametrize("copied", [False, True])
@pool.on(2)
def test_data_parallelism_refuses_split_experts_and_their_copies(copied):
    model = split(make_model())
    if copied:
        model = copy.deepcopy(model)
    group = pool.group()
    with pytest.raises(ValueError, match="expert"):
        ddp.DistributedDataParallel(model, process_group=group)
    with pytest.raises(ValueError, match="expert"):
        zero.Zero1(model, torch.optim.SGD, group)
    with pytest.raises(ValueError, match="expert"):
        fsdp.fully_shard(model, process_group=group)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pool.on(2)
def test_under_activation_checkpoints(use_reentrant):
    plain = make_model()
    plain_backward(plain)
    model = split(plain)
    x = own_tokens().requires_grad_()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    x.square().sum().backward()
    ep.average_gradients(model, pool.group())
    assert_same_gradients(model, plain)


@pool.on(1)
@pytest.mark.parametrize("autocast", [amp.autocast, torch.autocast])
def test_autocast_does_not_reach_the_router(autocast):
    if autocast is torch.autocast:
        autocast = partial(autocast, pool.device().type)
    layer = make_model(torch.float32)[0]
    x = tokens_of(0).float()
    weights, chosen = layer.route(x)
    with autocast(dtype=torch.bfloat16):
        within = layer.route(x)
    assert torch.equal(weights, within[0])
    assert torch.equal(chosen, within[1])


# ---- capacity, shared experts, the bias


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
@pool.on(1, 2, 4)
def test_capacity_drops_in_gshards_order(factor):
    def plain(x, weights):
        capacity = math.ceil(factor * 2 * len(x) / 4)
        return plain_moe(x, weights, capacity=capacity)

    registry._problems.clear()
    make = partial(Ours, ep.MoE)
    with default_group(pool.group()):
        computes_as_one_device(make, whole_weights(), [7, 4, 0, 7], plain, capacity_factor=factor)
    assert not registry._problems


@pool.on(1, 2)
def test_shared_experts_see_every_token():
    plain = make_model(num_shared_experts=2)[0]
    layer = split(plain)
    x = own_tokens()
    output = layer(x)
    shared = layer.shared_experts(x, torch.tensor([len(x)]))
    layer.shared_experts = None
    assert_equal(output, layer(x) + shared, False)
    assert plain.shared_experts.gate_up_proj.shape == (1, 2 * 2 * 5, H)


@pool.on(1, 2)
def test_the_bias_moves_towards_a_balance():
    layer = split(make_model(bias_update_rate=0.25)[0])
    layer.update_bias()  # without a load nothing changes
    assert not layer.bias.any()
    loads = torch.zeros(4)
    for rank in range(pool.world_size()):
        chosen = layer.route(tokens_of(rank, 32))[1]
        loads += 2 * chosen.flatten().bincount(minlength=4)
    x = own_tokens(32)
    layer(x)
    layer(x)
    layer.eval()(x)  # is not counted

    layer.update_bias()

    expected = 0.25 * (loads.mean() - loads).sign()
    assert torch.equal(layer.bias, expected)
    layer.update_bias()  # the load begins at 0 again
    assert torch.equal(layer.bias, expected)


@pool.on(1)
def test_the_bias_changes_the_choice_but_not_the_weights():
    layer = make_model(bias_update_rate=0.25)[0]
    layer.bias += torch.tensor([0.0, 1.0, 0.0, 1.0])
    x = tokens_of(0)
    weights, chosen = layer.route(x)
    picked = layer.gate(x).softmax(-1).gather(1, chosen)
    assert set(chosen.flatten().tolist()) == {1, 3}
    assert_equal(weights, picked / picked.sum(-1, keepdim=True), False)


@pool.on(1)
def test_the_bias_stays_in_fp32():
    layer = make_model(torch.bfloat16, bias_update_rate=0.25)[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        other = ep.MoE(H, 5, 4, bias_update_rate=0.25)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.bias.dtype == other.bias.dtype == torch.float32
    without = ep.MoE(H, 5, 4)
    assert layer.state_dict().keys() == {"bias", *without.state_dict()}


def test_an_update_of_the_bias_needs_a_rate():
    with pytest.raises(ValueError, match="bias_update_rate"):
        ep.MoE(H, 5, 4).update_bias()


# ---- gradients and states


@pool.on(2)
def test_averaging_twice_changes_nothing():
    plain = make_model()
    plain_backward(plain)
    model = split(plain)
    backward(model)
    ep.average_gradients(model, pool.group())
    assert_same_gradients(model, plain)


@pool.on(2)
def test_a_parameter_that_no_rank_used_has_a_gradient_of_zeros():
    model = split(make_model())
    model[2](own_tokens()).sum().backward()
    ep.average_gradients(model, pool.group())
    assert not model[1].weight.grad.any()


@pool.on(2)
def test_after_a_forward_a_layer_can_be_copied():
    layer = split(make_model()[0])
    x = own_tokens()
    output = layer(x)
    average = copy.deepcopy(layer)
    assert layer.aux_loss.requires_grad
    assert average.aux_loss is None
    assert torch.equal(average(x), output)


@pool.on(2)
def test_a_model_may_begin_on_the_meta_device():
    plain = make_model()
    plain_backward(plain)
    with torch.device("meta"):
        model = make_model(torch.bfloat16)
    ep.parallelize(model, pool.group())
    model = model.double().to_empty(device=pool.device())
    ep.load_full_state_dict(model, plain.state_dict())
    backward(model)
    assert_same_gradients(model, plain)
    assert model[0].bias.dtype == torch.float32


@pytest.mark.parametrize("gradients", [False, True])
@pool.on(2)
def test_a_whole_state_does_not_change_with_the_model(gradients):
    model = split(make_model())
    model(own_tokens()).sum().backward()
    state = ep.full_state_dict(model, gradients)
    before = copy.deepcopy(state)
    for parameter in model.parameters():
        parameter.data += 1
        parameter.grad += 1
    assert_same_state(state, before)


@pool.on(2)
def test_a_layer_with_two_names_has_a_whole_state():
    plain = make_model()[:2].append(nn.Identity())
    plain[2] = plain[0]
    plain_backward(plain)
    model = split(plain)
    backward(model)
    assert_same_gradients(model, plain)
    assert_same_state(ep.full_state_dict(model), plain.state_dict())


@pool.on(2)
def test_frozen_experts_have_no_gradient_in_the_whole_state():
    model = split(make_model())
    model[0].experts.requires_grad_(False)
    backward(model)
    gradients = ep.full_state_dict(model, gradients=True)
    assert gradients["0.experts.down_proj"] is None
    assert gradients["2.experts.down_proj"].shape == (4, H, 5)


@pool.on(4)
def test_a_state_of_two_ranks_loads_on_four_and_on_one():
    plain = make_model()
    state = plain.state_dict()
    pair = dist.new_group([0, 1])
    if pool.rank() < 2:
        state = ep.full_state_dict(ep.parallelize(copy.deepcopy(plain), pair))
    on_four = split(make_model())
    for parameter in on_four.parameters():
        parameter.data.zero_()

    ep.load_full_state_dict(on_four, state)

    assert on_four[0].experts.gate_up_proj.shape == (1, 10, H)
    assert_same_state(ep.full_state_dict(on_four), plain.state_dict())
    plain.load_state_dict(state)


@pool.on(2)
def test_bf16_is_as_close_as_on_one_device():
    plain = make_model(torch.bfloat16)
    exact = make_model()
    exact.load_state_dict(plain.state_dict())  # the rounded weights
    model = split(plain)
    x = own_tokens(50).bfloat16()
    expected = exact(x.double())
    error = (model(x) - expected).abs().max()
    assert error <= (plain(x) - expected).abs().max()
    assert error < 0.05
    assert model[0].aux_loss.dtype == torch.float32


# ---- bytes, and the mirrored class


class SentRows(Collectives):
    """`rows`: how many leave this rank in the exchanges of rows."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::alltoall_base_" and args[4]:
            self.rows += sum(args[4]) - args[4][pool.rank()]
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("capacity_factor", [None, 1.5])
@pool.on(1, 2, 4)
def test_rows_sent_equal_the_formula(capacity_factor):
    N = pool.world_size()
    rank = pool.rank()
    plain = make_model(capacity_factor=capacity_factor)[0]
    layer = split(plain)
    inputs = [tokens_of(each, 8).requires_grad_() for each in range(N)]
    with SentRows() as sent:
        layer(inputs[rank]).sum().backward()

    chosen = [plain.route(x)[1] for x in inputs]
    owners = torch.stack(chosen) // (4 // N)  # (rank, token, choice)
    leave = (owners[rank] != rank).sum().item()
    stay = (owners[rank] == rank).sum().item()
    arrive = (owners == rank).sum().item() - stay
    expected = 2 * (leave + arrive)
    if capacity_factor is not None:
        capacity = math.ceil(1.5 * 2 * 8 / 4)
        expected = 4 * 4 * capacity * (N - 1) / N
    assert sent.rows == expected


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_mixtrals_block(monkeypatch):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=H, intermediate_size=5, num_local_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    theirs = MixtralSparseMoeBlock(config).double()
    ours = ep.MoE(H, 5, 4).double()
    state = {}
    for seed, (name, tensor) in enumerate(theirs.state_dict().items()):
        state[name] = randn(tensor.shape, seed)
    x = randn((2, 7, H), seed=9).requires_grad_()
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)  # the router stays in float64

    results = []
    for layer in (ours, theirs):
        layer.load_state_dict(state)
        output = layer(x)
        leaves = [x, *(layer.get_parameter(name) for name in state)]
        loss = output.square().sum()
        results.append([output, *torch.autograd.grad(loss, leaves)])

    for name, found, expected in zip(["output", "x", *state], *results, strict=True):
        assert_equal(found, expected, False, name)
