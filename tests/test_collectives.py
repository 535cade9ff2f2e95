"""collectives.py: sums, their orders of addition, the bytes and messages of each algorithm."""

import functools
import types

import pool
import pytest
import torch
import torch.distributed as dist
from claims.all_reduce import numbers_of
from claims.verdicts import judge, names_of_claims
from shared import fake_world

import collectives as c

ORDERS = {  # in which the numbers of 3 ranks are added
    "naive_all_reduce": (0, 1, 2),
    "tree_all_reduce": (0, 1, 2),
    "recursive_doubling_all_reduce": (0, 2, 1),
}


@pytest.mark.parametrize("name", ORDERS)
def test_what_the_oracle_claims_of_the_ring_holds_for_all(name):
    """Not the slow claim "reused": all of them wait for their messages in the same place."""
    for claim in set(names_of_claims("all-reduce")) - {"reused"}:
        verdict = judge("all-reduce", claim, f"collectives:{name}")
        assert verdict.outcome == "holds", (claim, verdict)


def in_ring_order(x):
    """Part p starts at rank p + 1, and goes round."""
    a, b, c = (numbers.tensor_split(3) for numbers in x)
    first = b[0] + c[0] + a[0]
    second = c[1] + a[1] + b[1]
    third = a[2] + b[2] + c[2]
    return torch.cat([first, second, third])


def values_of(size):
    """Return what all ranks add, and what this rank adds."""
    values = [numbers_of(rank, (size,), torch.bfloat16) for rank in range(3)]
    mine = values[pool.rank()].clone()
    return values, mine.requires_grad_()


@pytest.mark.parametrize("name", ORDERS)
@pool.on(3)
def test_numbers_are_added_in_the_order_that_the_docstring_says(name):
    """Bitwise: in another order 30% of the sums would have other bits. Leaves may need gradients"""
    first, second, third = ORDERS[name]
    values, mine = values_of(1001)
    all_reduce = getattr(c, name)
    assert all_reduce(mine, pool.group()) is None
    assert torch.equal(mine, values[first] + values[second] + values[third])


@pytest.mark.parametrize("chunks", [1, 3])
@pool.on(3)
def test_the_ring_adds_each_part_in_the_order_of_the_ring(chunks):
    """Also with more chunks than elements."""
    for size in (1001, 5):
        values, mine = values_of(size)
        c.ring_all_reduce(mine, pool.group(), chunks=chunks)
        assert torch.equal(mine, in_ring_order(values))


def test_a_chunk_travels_while_another_is_added(monkeypatch):
    log = []

    def start(*_):
        number = log.count("start")
        log.append("start")
        return [types.SimpleNamespace(wait=lambda: log.append(number))]

    monkeypatch.setattr(c, "start", start)
    with fake_world(3, 1):
        c.ring_all_reduce(torch.zeros(64), chunks=2)
    reduce_scatter = ["start", "start", 0, 1, "start", "start", 2, 3]
    assert log == [*reduce_scatter, "start", 4, "start", 5]


CASES = {  # members, dtype, shape
    "strided": (
        [0, 1, 2, 3],
        torch.float64,
        (8, 6),
    ),
    "fewer rows than ranks": (
        [1, 0, 3],
        torch.int16,
        (2, 3),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pool.on(4)
def test_broadcast_gather_scatter_and_all_to_all(case):
    """Inputs do not change."""
    ranks, dtype, shape = CASES[case]
    group = dist.new_group(ranks)
    if pool.rank() not in ranks:
        return
    N = len(ranks)
    rank = dist.get_rank(group)
    values = [numbers_of(r, shape, dtype) for r in range(N)]
    mine = values[rank].clone()
    if case == "strided":
        mine = mine.t().contiguous().t()

    copy = mine.clone()
    c.tree_broadcast(copy, ranks[-1], group)
    last = dist.get_group_rank(group, ranks[-1])
    assert torch.equal(copy, values[last])
    assert torch.equal(c.ring_all_gather(mine, group), torch.cat(values))
    part = c.ring_reduce_scatter(mine, group)
    torch.testing.assert_close(part, sum(values).tensor_split(N)[rank])
    assert part.untyped_storage().nbytes() == part.nbytes  # not a view that keeps the whole
    if case == "strided":
        parts = [value.chunk(N)[rank] for value in values]
        assert torch.equal(c.all_to_all(mine, group), torch.cat(parts))
    else:
        with pytest.raises(ValueError, match="multiple of 3 ranks"):
            c.all_to_all(mine, group)
    assert torch.equal(mine, values[rank])


def in_channels_last(x, *shape):
    layout = torch.empty(shape, dtype=x.dtype, memory_format=torch.channels_last)
    return layout.copy_(x.view(shape))


def conjugated(x):
    pairs = x.view(20, 2)
    return torch.view_as_complex(pairs).conj()


LAYOUTS = {
    "1 x 1 convolution": lambda x: in_channels_last(x, 5, 8, 1, 1),
    "depthwise convolution": lambda x: in_channels_last(x, 10, 1, 2, 2),
    "every second number": lambda x: x[::2],
    "every second one of two": lambda x: x[:2][::2],
    "a transposed row": lambda x: x.view(1, 40).T,
    "expanded": lambda x: x[:4].view(4, 1).expand(4, 6),
    "expanded to nothing": lambda x: x[:1].expand(0, 1),
    "conjugated": conjugated,
    "imaginary parts": lambda x: conjugated(x).imag,
}


@pytest.mark.parametrize("name", ["ring_all_reduce", *ORDERS])
@pytest.mark.parametrize("layout", LAYOUTS)
@pool.on(2)
def test_a_tensor_of_any_layout_becomes_the_sum(layout, name):
    """On rank 1 it is contiguous, so the numbers lie otherwise in memory."""
    numbers = [numbers_of(rank, (40,)) for rank in range(2)]
    views = [LAYOUTS[layout](each) for each in numbers]
    total = views[0] + views[1]
    mine = views[0]
    if pool.rank() == 1:
        mine = torch.empty_like(total)
        mine.copy_(views[1])
    part = c.ring_reduce_scatter(mine, pool.group())
    parts = total.tensor_split(2)
    assert torch.equal(part, parts[pool.rank()])
    gathered = c.ring_all_gather(mine, pool.group())
    assert torch.equal(gathered, torch.cat(views))
    all_reduce = getattr(c, name)
    all_reduce(mine, pool.group())
    assert torch.equal(mine, total)


@pytest.mark.parametrize("layout", LAYOUTS)
@pool.on(2)
def test_a_tensor_of_any_layout_is_broadcast(layout):
    make = LAYOUTS[layout]
    numbers = [numbers_of(rank, (40,)) for rank in range(2)]
    values = make(numbers[1].clone())
    mine = make(numbers[pool.rank()])
    source = dist.get_global_rank(pool.group(), 1)
    c.tree_broadcast(mine, source, pool.group())
    assert torch.equal(mine, values)


# ---- costs


def simulate(programs, alpha, beta):
    """Return seconds by the α–β model. programs[r] is what rank r exchanges: (to, from, bytes)."""

    @functools.cache
    def end(rank, i):
        """When exchange i of a rank ends. Its messages leave when both of their ranks are there."""
        if i < 0:
            return 0.0
        ready = end(rank, i - 1)
        ends = [ready]
        *peers, nbytes = programs[rank][i]
        for side, peer in enumerate(peers):
            if peer is None:
                continue
            # The k-th message to that peer is the k-th that the peer receives from here.
            earlier = [exchange[side] for exchange in programs[rank][:i]]
            theirs = [j for j, each in enumerate(programs[peer]) if each[1 - side] == rank]
            peer_is_ready = end(peer, theirs[earlier.count(peer)] - 1)
            ends.append(max(ready, peer_is_ready) + alpha + beta * nbytes)
        return max(ends)

    return max(end(rank, len(program) - 1) for rank, program in enumerate(programs))


def record(function, N, rank, monkeypatch):
    """Return what the rank exchanges in a world that moves no data."""
    program = []
    real_start = c.start

    def start(group, *messages):
        peers = {operation: peer for operation, _, peer in messages}
        to = peers.get(dist.isend)
        source = peers.get(dist.irecv)
        program.append((to, source, messages[0][1].nbytes))
        return real_start(group, *messages)

    with monkeypatch.context() as patch, fake_world(N, rank):
        patch.setattr(c, "start", start)
        size = 12 if function is c.ring_all_gather else 12 * N
        function(torch.zeros(size))
    return program


broadcast = functools.partial(c.tree_broadcast, src=0)
broadcast.__name__ = "tree_broadcast"


def steps(N):
    return (N - 1).bit_length()


def share(N):
    return (N - 1) / N


SENT = {  # by the rank that sends most, in multiples of the tensor's bytes
    c.naive_all_reduce: lambda N: N - 1,
    c.tree_all_reduce: steps,
    c.recursive_doubling_all_reduce: steps,
    c.ring_all_reduce: lambda N: 2 * share(N),
    broadcast: steps,
    c.ring_reduce_scatter: share,
    c.ring_all_gather: share,
    c.all_to_all: share,
}


@pytest.mark.parametrize("function", SENT, ids=lambda function: function.__name__)
@pytest.mark.parametrize("N", [1, 4, 13])
def test_messages_have_the_bytes_of_the_docstring_and_take_as_long_as_predicted(
    function,
    N,
    monkeypatch,
):
    nbytes = 12 * N * 4
    programs = [record(function, N, rank, monkeypatch) for rank in range(N)]
    sent = [sum(size for to, _, size in program if to is not None) for program in programs]
    assert max(sent) == pytest.approx(SENT[function](N) * nbytes)
    for alpha, bandwidth in ((1.0, float("inf")), (2.0, 2.0)):
        seconds = c.predict(function.__name__, N, nbytes, alpha, bandwidth)
        assert simulate(programs, alpha, 1 / bandwidth) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("ring", 0),
        ("gather", 4),
    ],
)
def test_times_of_no_ranks_or_unknown_algorithms_are_an_error(name, ranks):
    with pytest.raises(ValueError, match=f"{name} on {ranks} ranks"):
        c.predict(name, ranks, 1, 1.0, 1.0)


@pool.on(4)
def test_a_rank_outside_the_group_is_an_error():
    group = dist.new_group([3, 1])
    if pool.rank() not in (1, 3):
        for function in SENT:
            with pytest.raises(ValueError, match="Invalid process group"):
                function(torch.zeros(4), process_group=group)
