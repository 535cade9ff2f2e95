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
    c.naive_all_reduce: [0, (0, 1), ((0, 1), 2), (((0, 1), 2), 3)],
    c.tree_all_reduce: [0, (0, 1), ((0, 1), 2), ((0, 1), (2, 3))],
    c.recursive_doubling_all_reduce: [0, (0, 1), ((0, 2), 1), ((0, 1), (2, 3))],
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
    for claim in names_of_claims("all-reduce"):
        if claim == "reused" and function is not c.naive_all_reduce:
            continue
        verdict = judge("all-reduce", claim, f"collectives:{function.__name__}")
        assert verdict.outcome == "holds", (claim, verdict)


def in_order(x, order):
    """The sum of the ranks' x in `order`, a number or a pair of orders."""
    return x[order] if isinstance(order, int) else in_order(x, order[0]) + in_order(x, order[1])


def in_ring_order(x):
    N = len(x)
    sums = []
    for p in range(N):
        parts = [x[(p + 1 + i) % N].tensor_split(N)[p] for i in range(N)]
        sums.append(functools.reduce(torch.add, parts))
    return torch.cat(sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool], ids=str)
@pool.on(1, 2, 3, 4)
def test_numbers_are_added_in_the_order_that_the_docstring_says(dtype):
    """Bitwise: in another order 30% of the sums would have other bits.

    Also for leaves that require gradients, and for more chunks than elements.
    """
    N = pool.world_size()
    for size in (1001, 5, 1):
        values = [numbers_of(r, (size,), torch.float32).mul(90).to(dtype) for r in range(N)]
        expected = {function: in_order(values, ORDERS[function][N - 1]) for function in ORDERS}
        for chunks in (1, 2, 3, 8):
            chunked = functools.partial(c.ring_all_reduce, chunks=chunks)
            expected[chunked] = in_ring_order(values)
        for all_reduce, total in expected.items():
            mine = values[pool.rank()].clone().requires_grad_(dtype.is_floating_point)
            assert all_reduce(mine, pool.group()) is None
            assert torch.equal(mine, total), all_reduce


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


CASES = [  # members, dtype, shape, strided?
    ([0, 1, 2, 3], torch.float64, (8, 6), True),
    ([0, 1, 2, 3], torch.int32, (5, 3), True),
    ([0, 1, 2, 3], torch.int64, (0, 3), False),
    ([0, 1, 2, 3], torch.int16, (2,), False),
    ([3, 1], torch.int64, (4, 3), True),
    ([1, 0, 3], torch.int64, (6, 5), False),
    ([2], torch.int64, (3,), False),
]


@pytest.mark.parametrize(("ranks", "dtype", "shape", "strided"), CASES, ids=str)
@pool.on(4)
def test_broadcast_gather_scatter_and_all_to_all(ranks, dtype, shape, strided):
    """Groups in any order of ranks. Inputs do not change. A rank outside raises a ValueError."""
    group = dist.new_group(ranks)
    if pool.rank() not in ranks:
        for function in SENT:
            with pytest.raises(ValueError, match="Invalid process group"):
                function(torch.zeros(4), process_group=group)
        return
    N = len(ranks)
    rank = dist.get_rank(group)
    values = [numbers_of(r, shape, dtype) for r in range(N)]
    mine = values[rank].t().contiguous().t() if strided else values[rank].clone()

    for src in range(N):
        copy = mine.clone()
        c.tree_broadcast(copy, dist.get_global_rank(group, src), group)
        assert torch.equal(copy, values[src])
    assert torch.equal(c.ring_all_gather(mine, group), torch.cat(values))
    part = c.ring_reduce_scatter(mine, group)
    torch.testing.assert_close(part, sum(values).tensor_split(N)[rank])
    assert part.untyped_storage().nbytes() == part.nbytes  # not a view that keeps the whole
    if shape[0] % N == 0:
        expected = torch.cat([value.chunk(N)[rank] for value in values])
        assert torch.equal(c.all_to_all(mine, group), expected)
    else:
        with pytest.raises(ValueError, match=f"must be a multiple of {N} ranks"):
            c.all_to_all(mine, group)
    assert torch.equal(mine, values[rank])


def simulate(programs, alpha, beta):
    """Return seconds by the α–β model. programs[r] is what rank r exchanges: (to, from, bytes)."""

    @functools.cache
    def end(rank, i):
        """When exchange i of a rank ends. Its messages leave when both of their ranks are there."""
        if i < 0:
            return 0.0
        ends = [end(rank, i - 1)]
        for side in (0, 1):
            peer = programs[rank][i][side]
            if peer is None:
                continue
            # The k-th message to that peer is the k-th that the peer receives from here.
            k = [exchange[side] for exchange in programs[rank][:i]].count(peer)
            theirs = [j for j, each in enumerate(programs[peer]) if each[1 - side] == rank]
            begin = max(end(rank, i - 1), end(peer, theirs[k] - 1))
            ends.append(begin + alpha + beta * programs[rank][i][2])
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
@pytest.mark.parametrize("N", [1, 2, 3, 4, 5, 8, 13, 1024])
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


def test_predict():
    """Ring and recursive doubling cross at 8α/β bytes on 4 ranks. An unknown name is an error."""
    for factor, faster in ((7.9, "recursive_doubling"), (8.1, "ring")):
        costs = {}
        for name in ("naive", "tree", "ring", "recursive_doubling"):
            costs[name] = c.predict(name, 4, factor * 1e-4 * 1e9, 1e-4, 1e9)
        assert min(costs, key=costs.get) == faster
    for algorithm in ("ring", "ring_all_reduce", c.ring_all_reduce):
        assert c.predict(algorithm, 3, 9, 1, 1) == 16
    for name, ranks in (("star", 4), ("ring", 0)):
        with pytest.raises(ValueError, match=f"{name} on {ranks} ranks: .* recursive_doubling"):
            c.predict(name, ranks, 1, 1, 1)
