"""Four worker processes for the whole test run: `run(world_size, body, *args)` runs `body(*args)` on each of them.

A body is a function of a test module. It finds itself in a gloo world: `group()` is the process group of the ranks
that take part, and torch.distributed's default group when all four do. Its return values come back in rank order.
`@on(2, 3)` makes a test of a body: it runs in a world of two ranks, then in one of three.
"""

import faulthandler
import functools
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

# Inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # PyTorch's DDP warns where it finds no unused parameter
sys.path.insert(0, str(Path(__file__).parent.parent))  # the technique files

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

torch.set_num_threads(1)

# What costs a process most is to import torch: once, in the process that the others are forked from.
forkserver = mp.get_context("forkserver")
forkserver.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.pipelining", "torch.testing", "pytest"]
)

MAX_WORLD = 4
HANGS_AFTER = 60.0  # seconds
TIMEOUT = timedelta(seconds=HANGS_AFTER / 3)  # of a collective whose other ranks do not come
_groups = {}  # in a worker: world size -> process group
_current = None  # in a worker: the world size of the running body


def group():
    """The process group of the running body's ranks."""
    return _groups[_current]


def rank():
    return dist.get_rank(group())


def world_size():
    return _current


def _worker(worker_rank, connection, folder):
    global _current
    torch.set_num_threads(1)
    stacks = (Path(folder) / f"stacks{worker_rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    store = dist.FileStore(str(Path(folder) / "store"), MAX_WORLD)
    dist.init_process_group(
        "gloo", store=store, rank=worker_rank, world_size=MAX_WORLD, timeout=TIMEOUT
    )
    for size in range(1, MAX_WORLD):
        _groups[size] = dist.new_group(range(size), timeout=TIMEOUT)
    _groups[MAX_WORLD] = dist.group.WORLD
    connection.send("ready")
    while (task := connection.recv()) is not None:
        number, _current, body, args = task
        # New groups are named by a count, which ranks that take no part in a body would be behind with.
        dist.distributed_c10d._world.group_count = 1000 * number
        for old in set(dist.distributed_c10d._world.pg_map) - set(_groups.values()):
            dist.destroy_process_group(
                old
            )  # of earlier bodies, which are over on all ranks: each has three threads
        try:
            torch.manual_seed(0)
            connection.send((True, body(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    dist.barrier()
    dist.destroy_process_group()


class Pool:
    def __init__(self):
        self.workers, self.number = [], 0

    def start(self):
        self.folder = tempfile.TemporaryDirectory()
        for worker_rank in range(MAX_WORLD):
            here, there = forkserver.Pipe()
            process = forkserver.Process(
                target=_worker, args=(worker_rank, there, self.folder.name), daemon=True
            )
            process.start()
            there.close()
            self.workers.append((process, here))
        for _, connection in self.workers:
            assert connection.recv() == "ready"

    def stop(self, kill=False):
        for process, connection in self.workers:
            if kill:
                process.kill()
            else:
                connection.send(None)
        for process, _ in self.workers:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self.workers = []
        self.folder.cleanup()

    def run(self, world_size, body, *args):
        """-> [body(*args) on rank 0, …]; AssertionError with rank and traceback where one raises, dies or hangs."""
        if not self.workers:
            self.start()
        workers = self.workers[:world_size]
        self.number += 1
        for _, connection in workers:
            connection.send((self.number, world_size, body, args))
        results, end = {}, time.monotonic() + HANGS_AFTER
        while len(results) < world_size:
            waiting = {
                connection: r for r, (_, connection) in enumerate(workers) if r not in results
            }
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                problem = f"ranks {sorted(waiting.values())} hang"
                self.fail(problem + "\n" + self.stacks(workers), results)
            for connection in ready:
                try:
                    results[waiting[connection]] = connection.recv()
                except EOFError:
                    self.fail(f"rank {waiting[connection]} died", results)
            if not all(
                ok for ok, _ in results.values()
            ):  # the others may wait for the failed rank: not for long
                end = min(end, time.monotonic() + 5)
        if not all(ok for ok, _ in results.values()):
            self.fail("the body raised", results)
        return [results[r][1] for r in range(world_size)]

    def fail(self, problem, results):
        self.stop(kill=True)  # what is left in flight would disturb the next body
        errors = [f"--- rank {r}:\n{text}" for r, (ok, text) in sorted(results.items()) if not ok]
        raise AssertionError("\n".join([problem, *errors]))

    def stacks(self, workers):
        for process, _ in workers:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(
            f"--- rank {r}:\n" + (Path(self.folder.name) / f"stacks{r}").read_text()
            for r in range(len(workers))
        )


_pool = Pool()
run = _pool.run

_bodies = {}  # (module, name): what `on` has decorated


def on(*world_sizes):
    """Its arguments may be parametrized; they are sent to the workers."""

    def decorate(body):
        place = body.__module__, body.__qualname__
        _bodies[place] = body

        @functools.wraps(body)  # and so pytest and hypothesis see its arguments
        def test(**arguments):
            for size in world_sizes:
                run(size, _call, place, arguments)

        return test

    return decorate


def _call(place, arguments):
    importlib.import_module(place[0])
    _bodies[place](**arguments)


def shut_down(kill=False):
    if _pool.workers:
        _pool.stop(kill)
