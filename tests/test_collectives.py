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

ORDERS = {  # in which the numbers of 1, 2, 3, 4 ranks are added
    c.naive_all_reduce: [
        0,
        (0, 1),
        ((0, 1), 2),
        (((0, 1), 2), 3),
    ],
    c.tree_all_reduce: [
        0,
        (0, 1),
        ((0, 1), 2),
        ((0, 1), (2, 3)),
    ],
    c.recursive_doubling_all_reduce: [
        0,
        (0, 1),
        ((0, 2), 1),
        ((0, 1), (2, 3)),
    ],
}
broadcast = functools.partial(c.tree_broadcast, src=0)
broadcast.__name__ = "tree_broadcast"
SENT = {  # by the rank that sends most, in multiples of the tensor's bytes
    c.naive_all_reduce: lambda N: N - 1,
    c.tree_all_reduce: lambda N: (N - 1).bit_length(),
    c.recursive_doubling_all_reduce: lambda N: (N - 1).bit_length(),
    c.ring_all_reduce: lambda N: 2 * (N - 1) / N,
    broadcast: lambda N: (N - 1).bit_length(),
    c.ring_reduce_scatter: lambda N: (N - 1) / N,
    c.ring_all_gather: lambda N: (N - 1) / N,
    c.all_to_all: lambda N: (N - 1) / N,
}


@pytest.mark.parametrize("function", ORDERS, ids=lambda function: function.__name__)
def test_what_the_oracle_claims_of_the_ring_holds_for_all(function):
    """The slow claim "reused" runs once: all three wait for their messages in the same place."""
    claims = set(names_of_claims("all-reduce"))
    if function is not c.naive_all_reduce:
        claims.remove("reused")
    for claim in claims:
        verdict = judge("all-reduce", claim, f"collectives:{function.__name__}")
        assert verdict.outcome == "holds", (claim, verdict)


def in_order(x, order):
    """The sum of the ranks' x in `order`, a number or a pair of orders."""
    if isinstance(order, int):
        return x[order]
    first, second = order
    return in_order(x, first) + in_order(x, second)


def in_ring_order(x):
    """Part p starts at rank p + 1, and goes round."""
    N = len(x)
    sums = []
    for p in range(N):
        total = 0
        for i in range(N):
            parts = x[(p + 1 + i) % N].tensor_split(N)
            total = total + parts[p]
        sums.append(total.to(x[0].dtype))
    return torch.cat(sums)


def assert_adds(all_reduce, values, expected):
    mine = values[pool.rank()].clone()
    mine.requires_grad_(mine.is_floating_point())
    assert all_reduce(mine, pool.group()) is None
    assert torch.equal(mine, expected)


def values_of(size, dtype):
    values = []
    for rank in range(pool.world_size()):
        numbers = numbers_of(rank, (size,), torch.float32)
        values.append((90 * numbers).to(dtype))
    return values


DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", ORDERS, ids=lambda function: function.__name__)
@pool.on(1, 2, 3, 4)
def test_numbers_are_added_in_the_order_that_the_docstring_says(function, dtype):
    """Bitwise: in another order 30% of the sums would have other bits. Leaves may need gradients"""
    for size in (1001, 1):
        values = values_of(size, dtype)
        order = ORDERS[function][pool.world_size() - 1]
        assert_adds(function, values, in_order(values, order))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunks", [1, 3, 8])
@pool.on(1, 2, 3, 4)
def test_the_ring_adds_each_part_in_the_order_of_the_ring(chunks, dtype):
    """Also with more chunks than elements."""
    all_reduce = functools.partial(c.ring_all_reduce, chunks=chunks)
    for size in (1001, 5):
        values = values_of(size, dtype)
        assert_adds(all_reduce, values, in_ring_order(values))


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


@pool.on(4)
def test_a_rank_outside_the_group_is_an_error():
    group = dist.new_group([3, 1])
    if pool.rank() not in (1, 3):
        for function in SENT:
            with pytest.raises(ValueError, match="Invalid process group"):
                function(torch.zeros(4), process_group=group)


CASES = {  # members, dtype, shape
    "strided": ([0, 1, 2, 3], torch.float64, (8, 6)),
    "uneven": ([0, 1, 2, 3], torch.int32, (5, 3)),
    "empty": ([0, 1, 2, 3], torch.int64, (0, 3)),
    "fewer rows than ranks": ([0, 1, 2, 3], torch.int16, (2,)),
    "another order": ([3, 1], torch.int64, (4, 3)),
    "three ranks": ([1, 0, 3], torch.int64, (6, 5)),
    "alone": ([2], torch.int64, (3,)),
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

    for src in range(N):
        copy = mine.clone()
        c.tree_broadcast(copy, dist.get_global_rank(group, src), group)
        assert torch.equal(copy, values[src])
    assert torch.equal(c.ring_all_gather(mine, group), torch.cat(values))
    part = c.ring_reduce_scatter(mine, group)
    torch.testing.assert_close(part, sum(values).tensor_split(N)[rank])
    assert part.untyped_storage().nbytes() == part.nbytes  # not a view that keeps the whole
    if shape[0] % N == 0:
        parts = [value.chunk(N)[rank] for value in values]
        assert torch.equal(c.all_to_all(mine, group), torch.cat(parts))
    assert torch.equal(mine, values[rank])


@pool.on(3)
def test_all_to_all_of_a_length_that_the_ranks_do_not_divide_is_an_error():
    with pytest.raises(ValueError, match="multiple of 3 ranks"):
        c.all_to_all(torch.zeros(4), pool.group())


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

    return max(end(rank, len(program) - 1) for rank, program in programs.items())


def record(function, N, rank, monkeypatch):
    """Return what the rank exchanges in a world that moves no data, and the bytes that it sends."""
    program = []
    real_start = c.start

    def start(group, *messages):
        peers = {operation: peer for operation, _, peer in messages}
        program.append((peers.get(dist.isend), peers.get(dist.irecv), messages[0][1].nbytes))
        return real_start(group, *messages)

    with monkeypatch.context() as patch, fake_world(N, rank), c.SentBytes() as sent:
        patch.setattr(c, "start", start)
        function(torch.zeros(12 if function is c.ring_all_gather else 12 * N))
    return program, sent.total


@pytest.mark.parametrize("function", SENT, ids=lambda function: function.__name__)
@pytest.mark.parametrize(
    "N",
    [1, 2, 3, 4, 5, 8, 13, 1024],
)
def test_messages_have_the_bytes_of_the_docstring_and_take_as_long_as_predicted(
    function, N, monkeypatch
):
    ranks = range(N) if N < 1024 else (0, 1, N - 1)
    nbytes = 12 * N * 4
    programs = {}
    sent = []
    for rank in ranks:
        programs[rank], total = record(function, N, rank, monkeypatch)
        sent.append(total)
    assert max(sent) == pytest.approx(SENT[function](N) * nbytes)
    if N < 1024:
        for alpha, bandwidth in ((1.0, float("inf")), (2.0, 2.0)):
            seconds = c.predict(function.__name__, N, nbytes, alpha, bandwidth)
            assert simulate(programs, alpha, 1 / bandwidth) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("factor", "faster"),
    [(7.9, "recursive_doubling"), (8.1, "ring")],
)
def test_ring_and_recursive_doubling_cross_at_8_alpha_over_beta_on_4_ranks(factor, faster):
    nbytes = factor * 1e-4 * 1e9
    costs = {}
    for name in ("naive", "tree", "ring", "recursive_doubling"):
        costs[name] = c.predict(name, 4, nbytes, 1e-4, 1e9)
    assert min(costs, key=costs.get) == faster


@pytest.mark.parametrize("algorithm", ["ring", "ring_all_reduce", c.ring_all_reduce])
def test_predict_takes_a_name_or_a_function(algorithm):
    assert c.predict(algorithm, 3, 9, 1, 1) == 16


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("star", 4), ("ring", 0)],
)
def test_predict_names_the_algorithms_that_it_knows(name, ranks):
    with pytest.raises(ValueError, match=f"{name} on {ranks} ranks: .* recursive_doubling"):
        c.predict(name, ranks, 1, 1, 1)
