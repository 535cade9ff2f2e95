"""expert_parallel.py beyond its claims: capacity, balance by a bias, grids, states, bytes."""

import copy
import importlib.util
import math
from functools import partial
from unittest import mock

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims import default_group, registry
from claims.moe import Ours, computes_as_one_device, plain_moe, whole_weights
from shared import assert_equal, randn
from torch.utils.checkpoint import checkpoint

import amp
import expert_parallel as ep
import fsdp
import zero
from ddp import DistributedDataParallel

H = 6  # hidden size


def make_model(dtype=torch.float64, num_experts=4, **options):
    """Two layers with a linear layer between them, the same on every rank."""
    torch.manual_seed(3)
    first, last = (ep.MoE(H, 5, num_experts, **options) for _ in range(2))
    return nn.Sequential(first, nn.Linear(H, H), last).to(dtype)


def split(model):
    """A copy with its experts split over the ranks of the test."""
    return ep.parallelize(copy.deepcopy(model), pool.group())


def tokens_of(rank, count=5):
    return randn((count, H), seed=100 + rank)


def assert_same_gradients(model, plain):
    gradients = ep.full_state_dict(model, gradients=True)
    for name, parameter in plain.named_parameters():
        assert_equal(gradients[name], parameter.grad, False, name)


def plainly(layer, x):
    return layer(x)


def assert_gradients_of_one_device(model, plain, groups, call=plainly):
    """After backward on every rank, `model` has the gradients of the mean of the ranks' losses."""
    N = pool.world_size()
    for rank in range(N):
        (plain(tokens_of(rank)).square().sum() / N).backward()
    x = tokens_of(pool.rank()).requires_grad_()
    for layer in model:
        x = call(layer, x)
    x.square().sum().backward()
    ep.average_gradients(model, *groups)
    ep.average_gradients(model, *groups)  # changes nothing
    assert_same_gradients(model, plain)


@pool.on(1, 2, 4)
def test_the_naive_form_is_the_layer_with_one_choice_and_one_expert_per_rank():
    layer = split(make_model(num_experts=pool.world_size(), top_k=1, norm_topk_prob=False)[0])
    x = tokens_of(pool.rank()).requires_grad_()

    def expert(rows):
        return layer.experts(rows, [len(rows)])

    results = []
    for output in (ep.naive_moe(x, layer.gate, expert, pool.group()), layer(x)):
        loss = output.square().sum()
        dx, d_gate = torch.autograd.grad(loss, [x, layer.gate.weight], retain_graph=True)
        d_experts = torch.autograd.grad(loss, [*layer.experts.parameters()])
        results.append([output, dx, d_gate, *d_experts])
    naive, ours = results
    naive[3:] = [gradient / pool.world_size() for gradient in naive[3:]]  # of the losses' sum
    for a, b in zip(naive, ours, strict=True):
        assert_equal(a, b, False)


# ---- capacity and errors


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
@pool.on(1, 2, 4)
def test_capacity_drops_in_gshards_order(factor):
    def plain(x, weights):
        return plain_moe(x, weights, capacity=math.ceil(factor * 2 * len(x) / 4))

    registry._problems.clear()
    make = partial(Ours, ep.MoE)
    with default_group(pool.group()):
        computes_as_one_device(make, whole_weights(), [7, 4, 0, 7], plain, capacity_factor=factor)
    assert not registry._problems


@pool.on(3)
def test_what_does_not_fit_is_an_error_on_every_rank():
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=f"top_k={top_k} of 4 experts"):
            ep.MoE(H, 5, 4, top_k)
    with pytest.raises(ValueError, match="4 experts do not divide by 3 ranks"):
        split(make_model())
    pair = dist.new_group([0, 1])
    if pool.rank() == 2:
        with pytest.raises(ValueError, match="rank 2 is not in process_group"):
            ep.parallelize(make_model(), pair)
        with pytest.raises(ValueError, match=r"rank 2 is not in .* edp_group"):
            ep.average_gradients(make_model(), pool.group(), pair)


@pool.on(2)
def test_ddp_zero_and_fsdp_refuse_split_experts_and_their_copies():
    group = pool.group()
    for model in (split(make_model()), copy.deepcopy(split(make_model()))):
        for call in (
            lambda model: DistributedDataParallel(model, process_group=group),
            lambda model: zero.Zero1(model, torch.optim.SGD, group),
            lambda model: fsdp.fully_shard(model, process_group=group),
        ):
            with pytest.raises(ValueError, match="expert"):
                call(model)


@pool.on(2)
def test_a_model_that_the_backend_cannot_send_is_an_error():
    model = make_model().to("cpu")
    over_nccl = mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl")
    with over_nccl, pytest.raises(ValueError, match="move the module to its device first"):
        ep.parallelize(model, pool.group())


# ---- shared experts and the bias


@pool.on(1, 2)
def test_shared_experts_see_every_token():
    plain = make_model(num_shared_experts=2)[0]
    layer = split(plain)
    x = tokens_of(pool.rank())
    output = layer(x)
    shared = layer.shared_experts(x, [len(x)])
    layer.shared_experts = None
    assert_equal(output, layer(x) + shared, False)
    assert plain.shared_experts.gate_up_proj.shape == (1, 2 * 2 * 5, H)


@pool.on(1, 2)
def test_the_bias_moves_towards_a_balance_and_changes_the_choice_alone():
    layer = split(make_model(bias_update_rate=0.25)[0])
    layer.update_bias()  # without a load nothing changes
    assert not layer.bias.any()
    x = tokens_of(pool.rank(), 32)
    probabilities = (x @ layer.gate.weight.T).softmax(-1)

    layer(x)
    layer(x)
    layer.eval()(x)  # is not counted
    load = layer.load
    layer.update_bias()
    weights, chosen = layer.route(x)

    assert load.sum() == 2 * 2 * 32 * pool.world_size()
    expected = 0.25 * (load.mean() - load).sign().float()
    assert torch.equal(layer.bias, expected)
    assert not layer.load.any()
    assert torch.equal(chosen, (probabilities + expected).topk(2).indices)
    picked = probabilities.gather(1, chosen)
    assert_equal(weights, picked / picked.sum(-1, keepdim=True), False)
    assert layer.bfloat16().bias.dtype == torch.float32
    assert layer.state_dict().keys() == {"bias", *ep.MoE(H, 5, 4).state_dict()}


def test_an_update_of_the_bias_needs_a_rate():
    with pytest.raises(ValueError, match="give MoE a bias_update_rate"):
        ep.MoE(H, 5, 4).update_bias()


@pool.on(1)
def test_the_bias_is_in_fp32_under_another_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = ep.MoE(H, 5, 4, bias_update_rate=0.25)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.bias.dtype == torch.float32


# ---- gradients, states, 16 bits


@pytest.mark.parametrize("use_reentrant", [False, True])
@pool.on(2)
def test_under_activation_checkpoints(use_reentrant):
    plain = make_model()
    call = partial(checkpoint, use_reentrant=use_reentrant)
    assert_gradients_of_one_device(split(plain), plain, [pool.group()], call)


@pool.on(4)
def test_a_grid_of_two_expert_parallel_by_two_data_parallel_ranks():
    """Ranks 0 and 1 split the experts, and so do 2 and 3. Ranks 0 and 2 have the same ones."""
    process_group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    edp_group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    groups = [process_group, edp_group]
    plain = make_model(num_experts=2)
    model = copy.deepcopy(plain)
    if pool.rank():
        nn.init.zeros_(model[1].weight)  # parallelize() begins with the weights of rank 0
    model = ep.parallelize(model, *groups)

    for forgotten in ([], [process_group]):
        with default_group(pool.group()), pytest.raises(ValueError, match="pass the process_group"):
            ep.average_gradients(model, *forgotten)
        with default_group(pool.group()), pytest.raises(ValueError, match="pass the process_group"):
            ep.clip_grad_norm_(model, 0.1, *forgotten)
    assert_gradients_of_one_device(model, plain, groups)
    norm = ep.clip_grad_norm_(model, 0.1, *groups)

    assert_equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), False)
    assert_same_gradients(model, plain)
    aux_loss = model[0].aux_loss
    plain(torch.cat([tokens_of(rank) for rank in range(4)]))
    assert_equal(aux_loss.detach(), plain[0].aux_loss.detach(), False)


@pool.on(4)
def test_groups_that_are_not_a_grid_or_not_those_of_the_experts_are_errors():
    rows, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    columns, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    diagonals, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    with pytest.raises(ValueError, match="ranks with the same number in process_groups"):
        ep.parallelize(make_model(), rows, diagonals)
    model = ep.parallelize(make_model(), rows, columns)
    for swapped in (ep.average_gradients, partial(ep.clip_grad_norm_, max_norm=1.0)):
        with pytest.raises(ValueError, match="pass the process_group and the edp_group"):
            swapped(model, process_group=columns, edp_group=rows)


@pool.on(4)
def test_all_ranks_of_a_crossed_grid_begin_with_the_same_weights():
    """The process group of ranks 0 and 3 is the first for rank 0, and the second for rank 3."""
    process_group, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    edp_group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    model = make_model()
    nn.init.constant_(model[1].weight, pool.rank())
    ep.parallelize(model, process_group, edp_group)
    assert not model[1].weight.any()


@pool.on(2)
def test_after_a_forward_a_layer_can_be_copied():
    layer = split(make_model()[0])
    x = tokens_of(pool.rank())
    output = layer(x)
    average = copy.deepcopy(layer)
    assert layer.aux_loss.requires_grad
    assert average.aux_loss is None
    assert torch.equal(average(x), output)


@pool.on(2)
def test_a_model_may_begin_on_the_meta_device():
    plain = make_model()
    with torch.device("meta"):
        model = make_model(torch.bfloat16)
    ep.parallelize(model, pool.group())
    model = model.double().to_empty(device=pool.device())
    ep.load_full_state_dict(model, plain.state_dict())
    assert_gradients_of_one_device(model, plain, [pool.group()])
    assert model[0].bias.dtype == torch.float32
    assert not model[0].bias.any()


@pool.on(2)
def test_a_whole_state_does_not_change_with_the_model():
    model = split(make_model())
    model(tokens_of(pool.rank())).sum().backward()
    for gradients in (False, True):
        state = ep.full_state_dict(model, gradients)
        before = copy.deepcopy(state)
        for parameter in model.parameters():
            parameter.data += 1
            parameter.grad += 1
        for name, tensor in state.items():
            assert torch.equal(tensor, before[name]), name


@pool.on(2)
def test_experts_may_be_whole_modules_copied_and_parameters_unused():
    plain = make_model()
    assert_gradients_of_one_device(copy.deepcopy(plain), plain, [pool.group()])
    model = copy.deepcopy(split(make_model()))
    model[2](tokens_of(pool.rank())).sum().backward()
    ep.average_gradients(model, pool.group())
    assert not model[1].weight.grad.any()


@pool.on(2)
def test_a_layer_with_two_names_and_frozen_experts_has_a_whole_state():
    plain = make_model()[:2].append(nn.Identity())
    plain[2] = plain[0]
    model = split(plain)
    assert_gradients_of_one_device(model, plain, [pool.group()])
    for name, tensor in plain.state_dict().items():
        assert torch.equal(ep.full_state_dict(model)[name], tensor), name
    model[0].experts.requires_grad_(False).zero_grad()
    assert ep.full_state_dict(model, gradients=True)["2.experts.down_proj"] is None


@pool.on(2)
def test_if_no_rank_has_tokens_the_losses_are_zero():
    layer = split(make_model()[0])
    layer(tokens_of(pool.rank(), 0))
    assert layer.aux_loss == layer.z_loss == 0


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
    assert state.keys() == plain.state_dict().keys()
    for name, tensor in ep.full_state_dict(on_four).items():
        assert torch.equal(tensor, plain.state_dict()[name]), name
    plain.load_state_dict(state)


@pool.on(2)
def test_bf16_is_as_close_as_on_one_device():
    plain = make_model(torch.bfloat16)
    exact = make_model()
    exact.load_state_dict(plain.state_dict())  # the rounded weights
    model = split(plain)
    x = tokens_of(pool.rank(), 50).bfloat16()
    expected = exact(x.double())
    error = (model(x) - expected).abs().max()
    assert error <= (plain(x) - expected).abs().max()
    assert error < 0.05
    assert model[0].aux_loss.dtype == torch.float32


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


# ---- bytes


@pytest.mark.parametrize("capacity_factor", [None, 1.5])
@pool.on(1, 2, 4)
def test_bytes_sent_equal_the_formula(capacity_factor):
    N = pool.world_size()
    plain = make_model(capacity_factor=capacity_factor)[0]
    layer = split(plain)
    inputs = [tokens_of(rank, 8).requires_grad_() for rank in range(N)]
    with ep.SentBytes() as sent:
        layer(inputs[pool.rank()]).sum().backward()

    owners = torch.stack([plain.route(x)[1] // (4 // N) for x in inputs])  # (rank, token, choice)
    leave = (owners[pool.rank()] != pool.rank()).sum().item()
    arrive = (owners == pool.rank()).sum().item() - (2 * 8 - leave)
    rows = 2 * (leave + arrive)
    if capacity_factor is not None:
        capacity = math.ceil(1.5 * 2 * 8 / 4)
        rows = 4 * 4 * capacity * (N - 1) / N
    counts = 8 * 4 * (N - 1) / N
    losses = 2 * (2 * 4 + 1) * 8 * (N - 1) / N
    assert sent.total == pytest.approx(counts + losses)  # uneven exchanges do not count
    moved = sum(sum(rows) - rows[pool.rank()] for rows in layer.row_counts)
    assert 2 * moved == rows


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_mixtrals_block(monkeypatch):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes = {"hidden_size": H, "intermediate_size": 5}
    config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
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
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])

    for name, found, expected in zip(["output", "x", *state], *results, strict=True):
        assert_equal(found, expected, False, name)
