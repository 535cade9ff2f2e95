"""expert_parallel.py beyond its claims: capacity, balance by a bias, grids, states, bytes."""

import copy
import importlib.util
import math

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from shared import assert_equal, randn
from torch.utils.checkpoint import checkpoint

import expert_parallel as ep

H = 6  # hidden size


def make_model(dtype=torch.float64, num_experts=4, **options):
    """Two layers with a linear layer between them, the same on every rank."""
    torch.manual_seed(3)
    layers = [ep.MoE(H, 5, num_experts, **options), nn.Linear(H, H), ep.MoE(H, 5, num_experts)]
    return nn.Sequential(*layers).to(dtype)


def tokens_of(rank, count=5, step=0):
    return randn((count, H), seed=100 + 10 * step + rank)


def backward_as_one_device(model, ranks, count=5):
    for rank in range(ranks):
        (model(tokens_of(rank, count)).square().sum() / ranks).backward()


def assert_same_gradients(module, plain):
    gradients = ep.full_state_dict(module, gradients=True)
    for name, parameter in plain.named_parameters():
        assert_equal(gradients[name], parameter.grad, False, name)


# ---- capacity


def plain_moe_with_capacity(x, layer, capacity):
    """All first choices take places in the order of positions, then all second choices."""
    probabilities = (x @ layer.gate.weight.T).softmax(-1)
    values, chosen = probabilities.topk(2)
    values = values / values.sum(-1, keepdim=True)
    taken = [0] * layer.num_experts
    outputs = list(torch.zeros_like(x))
    for choice in range(2):
        for position, token in enumerate(x):
            expert = chosen[position, choice].item()
            taken[expert] += 1
            if taken[expert] > capacity:
                continue
            gate, up = (layer.experts.gate_up_proj[expert] @ token).chunk(2)
            result = layer.experts.down_proj[expert] @ (nn.functional.silu(gate) * up)
            outputs[position] = outputs[position] + values[position, choice] * result
    return torch.stack(outputs)


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
@pool.on(1, 2, 4)
def test_capacity_drops_in_gshards_order(factor):
    torch.manual_seed(3)
    plain = ep.MoE(H, 5, 4, capacity_factor=factor).double()
    layer = ep.parallelize(copy.deepcopy(plain), pool.group())
    x = tokens_of(pool.rank(), 7)
    capacity = math.ceil(factor * 2 * 7 / 4)

    output = layer(x)
    output.square().sum().backward()
    ep.average_gradients(layer, pool.group())

    N = pool.world_size()
    for rank in range(N):
        expected = plain_moe_with_capacity(tokens_of(rank, 7), plain, capacity)
        (expected.square().sum() / N).backward()
        if rank == pool.rank():
            assert_equal(output, expected, False, "output")
    assert_same_gradients(layer, plain)


@pool.on(2, 4)
def test_a_capacity_with_unequal_numbers_of_tokens_is_an_error_on_every_rank():
    layer = ep.parallelize(ep.MoE(H, 5, 4, capacity_factor=1.0), pool.group())
    with pytest.raises(ValueError, match=r"as many tokens, but they have \[3, 4"):
        layer(torch.randn(3 + pool.rank(), H))
    layer(torch.randn(3, H))  # the group still works


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 0), (4, 5)])
def test_top_k_is_at_most_the_number_of_experts(num_experts, top_k):
    with pytest.raises(ValueError, match=f"top_k={top_k} of 4 experts"):
        ep.MoE(H, 5, num_experts, top_k)


@pool.on(3)
def test_experts_that_the_ranks_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="4 experts do not divide by 3 ranks"):
        ep.parallelize(make_model(), pool.group())


# ---- shared experts, the bias, the balance loss


@pool.on(1, 2)
def test_shared_experts_see_every_token():
    plain = make_model(num_shared_experts=2)
    layer = ep.parallelize(copy.deepcopy(plain), pool.group())[0]
    x = tokens_of(pool.rank())
    shared = plain[0].shared_experts(x, [len(x)])
    plain[0].shared_experts = None
    assert_equal(layer(x), plain[0](x) + shared, False)
    assert layer.shared_experts.gate_up_proj.shape == (1, 2 * 2 * 5, H)


@pool.on(1, 2)
def test_the_bias_moves_towards_a_balance_and_changes_the_choice_alone():
    layer = ep.parallelize(make_model(bias_update_rate=0.25), pool.group())[0]
    x = tokens_of(pool.rank(), 32)
    probabilities = (x @ layer.gate.weight.T).softmax(-1)

    layer(x)
    load = layer.load.clone()
    layer.update_bias()
    weights, chosen = layer.route(x)

    assert load.sum() == 2 * 32 * pool.world_size()
    expected = 0.25 * (load.double().mean() - load).sign().float()
    assert torch.equal(layer.bias, expected)
    assert torch.equal(chosen, (probabilities + expected).topk(2).indices)
    assert_equal(weights.sum(-1), torch.ones(32, dtype=torch.float64), False)
    picked = probabilities.gather(1, chosen)
    assert_equal(weights, picked / picked.sum(-1, keepdim=True), False)
    layer.eval()
    before = layer.load.clone()
    layer(x)
    assert torch.equal(layer.load, before)


def test_a_balanced_router_has_an_aux_loss_of_1():
    layer = ep.MoE(4, 5, 4, top_k=1).double()
    layer.gate.weight.data = torch.eye(4, dtype=torch.float64)
    layer(torch.eye(4, dtype=torch.float64))
    assert layer.aux_loss.item() == pytest.approx(1.0)


# ---- grids, states, recomputation, 16 bits


@pool.on(4)
def test_a_grid_of_two_expert_parallel_by_two_data_parallel_ranks():
    """Ranks 0 and 1 split the experts, and so do 2 and 3. Ranks 0 and 2 have the same ones."""
    process_group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    edp_group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    plain = make_model(num_experts=2)
    model = ep.parallelize(copy.deepcopy(plain), process_group, edp_group)
    backward_as_one_device(plain, 4)

    model(tokens_of(pool.rank())).square().sum().backward()
    ep.average_gradients(model, process_group, edp_group)
    assert_same_gradients(model, plain)

    norm = ep.clip_grad_norm_(model, 0.1, process_group, edp_group)
    assert_equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), False)
    assert_same_gradients(model, plain)
    aux_loss = model[0].aux_loss
    plain(torch.cat([tokens_of(rank) for rank in range(4)]))
    assert_equal(aux_loss.detach(), plain[0].aux_loss.detach(), False)


@pool.on(4)
def test_a_state_of_two_ranks_loads_on_four_and_on_one():
    pair = dist.new_group([0, 1])
    plain = make_model()
    if pool.rank() < 2:
        model = ep.parallelize(copy.deepcopy(plain), pair)
        state = ep.full_state_dict(model)
    else:
        state = plain.state_dict()
    assert state.keys() == plain.state_dict().keys()
    on_four = ep.parallelize(make_model(), pool.group())
    with torch.no_grad():
        for parameter in on_four.parameters():
            parameter.zero_()
    ep.load_full_state_dict(on_four, state)
    for name, tensor in ep.full_state_dict(on_four).items():
        assert torch.equal(tensor, plain.state_dict()[name]), name
    plain.load_state_dict(state)
    assert on_four[0].experts.gate_up_proj.shape == (1, 10, H)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pool.on(2)
def test_under_activation_checkpoints(use_reentrant):
    plain = make_model()
    model = ep.parallelize(copy.deepcopy(plain), pool.group())
    backward_as_one_device(plain, 2)

    x = tokens_of(pool.rank()).requires_grad_()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    x.square().sum().backward()
    ep.average_gradients(model, pool.group())

    assert_same_gradients(model, plain)


@pool.on(2)
def test_bf16_is_as_close_as_on_one_device():
    exact = make_model()
    plain = make_model(torch.bfloat16)
    exact.load_state_dict(plain.state_dict())  # the rounded weights
    model = ep.parallelize(copy.deepcopy(plain), pool.group())
    x = tokens_of(pool.rank(), 50).bfloat16()
    expected = exact(x.double())
    error = (model(x) - expected).abs().max()
    assert error <= (plain(x) - expected).abs().max()
    assert error < 0.05
    assert model[0].aux_loss.dtype == torch.float32


def test_the_bias_is_in_fp32_and_saved_if_it_is_used():
    assert ep.MoE(H, 5, 4, bias_update_rate=0.1).bfloat16().bias.dtype == torch.float32
    assert "bias" in ep.MoE(H, 5, 4, bias_update_rate=0.1).state_dict()
    names = ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    assert list(ep.MoE(H, 5, 4).state_dict()) == names


@pool.on(2)
def test_experts_that_are_not_split_are_averaged_as_all_else():
    plain = make_model()
    model = copy.deepcopy(plain)
    backward_as_one_device(plain, 2)
    model(tokens_of(pool.rank())).square().sum().backward()
    ep.average_gradients(model, pool.group())
    assert_same_gradients(model, plain)


@pool.on(2)
def test_a_split_module_can_be_copied_and_unused_parameters_get_zero_gradients():
    model = copy.deepcopy(ep.parallelize(make_model(), pool.group()))
    model[2](tokens_of(pool.rank())).sum().backward()
    ep.average_gradients(model, pool.group())
    assert not model[1].weight.grad.any()


# ---- bytes


@pytest.mark.parametrize("capacity_factor", [None, 1.5])
@pool.on(1, 2, 4)
def test_bytes_sent_equal_the_formula(capacity_factor):
    N = pool.world_size()
    layer = make_model(capacity_factor=capacity_factor)[0]
    layer = ep.parallelize(layer, pool.group())
    x = tokens_of(pool.rank(), 8).requires_grad_()
    with ep.SentBytes() as sent:
        layer(x).sum().backward()

    a, b = layer.rows_sent
    rows = 2 * (a + b) * H * 8
    counts = 8 * 4 * (N - 1) / N
    losses = 2 * (2 * 4 + 2) * 8 * (N - 1) / N
    if capacity_factor is not None:
        capacity = math.ceil(1.5 * 2 * 8 / 4)
        rows = 4 * 4 * capacity * H * 8 * (N - 1) / N
        counts = 8 * (N - 1)
    assert sent.total == pytest.approx(rows + counts + losses)
    _, chosen = layer.route(x)
    owner = chosen // (4 // N)
    if capacity_factor is None:
        assert a == (owner != pool.rank()).sum()


# ---- against transformers


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
    theirs.load_state_dict(state)
    ours.load_state_dict(state, strict=False)
    x = randn((2, 7, H), seed=9).requires_grad_()
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)  # the router stays in float64

    results = []
    for layer in (ours, theirs):
        output = layer(x)
        gradients = torch.autograd.grad(
            output.square().sum(), [x, *map(layer.get_parameter, state)]
        )
        results.append([output, *gradients])

    for name, found, expected in zip(["output", "x", *state], *results, strict=True):
        assert_equal(found, expected, False, name)
