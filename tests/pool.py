"""Worker processes for the whole test run: `run(world_size, body, *args)` runs `body(*args)` on
each.

A body is a function of a test module. `group()` is the process group of the ranks that take
part; it is torch.distributed's default group when all workers do. Its return values come back
in rank order. `@on(2, 3)` makes a test of a body: it runs in a world of two ranks, then in one
of three.

The suite runs on CPUs, also on a machine with GPUs. Under `--device cuda` bodies run on a GPU:
their default device is `device()`, and kernels are deterministic, so what is bitwise on CPUs is
bitwise there. Tests that need no worker stay on the CPU. A test marked `cpu` does not run under
`--device cuda`.
"""

import faulthandler
import functools
import importlib
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import environment
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

torch.set_num_threads(1)

# The import of torch takes longest. It happens once, in the process that is forked.
forkserver = mp.get_context("forkserver")
forkserver.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.pipelining", "torch.testing", "pytest"]
)

HANGS_AFTER = 60.0  # seconds
LOADS_WITHIN = 120.0  # seconds
TIMEOUT = timedelta(seconds=20)  # of a collective that some ranks do not join
_groups = {}  # in a worker: world size -> process group
_current = None  # in a worker: the world size of the running body


@functools.cache
def planned():
    """Return the backend and the largest world. NCCL wants a GPU for each rank, or shared GPUs."""
    if environment.DEVICE_TYPE == "cuda":
        gpus = torch.cuda.device_count()
        if gpus > 1 or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            return "nccl", min(4, max(2, gpus))
    return "gloo", 4  # on a single GPU: for what gloo can do with its tensors


def header():
    backend, largest = planned()
    return f"device {environment.DEVICE_TYPE}, backend {backend}, worlds of up to {largest} ranks"


def group():
    """The process group of the running body's ranks."""
    return _groups[_current]


def rank():
    return dist.get_rank(group())


def world_size():
    return _current


def device():
    """Where the running body's tensors are."""
    return torch.get_default_device()


def use_device(number):
    """Make a GPU the default device of this process, if the suite runs on GPUs."""
    if environment.DEVICE_TYPE == "cpu":
        return
    index = number % torch.cuda.device_count()
    torch.cuda.set_device(index)
    torch.set_default_device(f"cuda:{index}")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def _join_world(worker_rank, largest, folder):
    backend = planned()[0]
    torch.set_num_threads(1)
    use_device(worker_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=dist.FileStore(str(folder / "store"), largest),
        rank=worker_rank,
        world_size=largest,
        timeout=TIMEOUT,
    )
    for size in range(1, largest):
        _groups[size] = dist.new_group(range(size), timeout=TIMEOUT)
    _groups[largest] = dist.group.WORLD


def _forget_earlier_groups(number):
    world = dist.distributed_c10d._world
    # New groups are named by a count, which ranks without a part in earlier bodies are behind with.
    world.group_count = 1000 * number
    earlier = set(world.pg_map) - set(_groups.values())
    if earlier and torch.__version__.startswith("2.6"):
        # It holds the GIL while it waits for a group's threads, which may still need the GIL to
        # free the tensors of the last collective.
        time.sleep(0.1)
    for group in earlier:
        dist.destroy_process_group(group)  # each has three threads
    if earlier:
        _forget_meshes()


def _forget_meshes():
    """DTensor's caches have meshes of earlier groups, which equal the meshes of new ones."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    tensor = sys.modules["torch.distributed.tensor"]
    redistribute = sys.modules["torch.distributed.tensor._redistribute"]
    tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    for module, name in (
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),  # not in torch 2.6
        (redistribute._gen_transform_infos, "cache_clear"),
    ):
        getattr(module, name, int)()


def _worker(worker_rank, largest, environ, connection, folder):
    global _current
    os.environ.update(environ)
    stacks = (folder / f"stacks{worker_rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _join_world(worker_rank, largest, folder)
    connection.send("ready")
    while (task := connection.recv()) is not None:
        number, _current, body, args = task
        _forget_earlier_groups(number)
        try:
            torch.manual_seed(0)
            result = body(*args)
            if environment.DEVICE_TYPE == "cuda":
                torch.cuda.synchronize()  # an error on the GPU belongs to this body
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    dist.barrier()
    dist.destroy_process_group()


class BodyFailed(AssertionError):
    """A body raised, died or hung on some ranks. The text has all that is known of every rank."""

    def __init__(self, problem, errors, stacks):
        texts = [f"--- rank {rank}:\n{text}" for rank, text in (errors | stacks).items()]
        super().__init__("\n".join([problem, *texts]))
        self.problem = problem  # in one line
        self.errors = errors  # rank: traceback
        self.stacks = stacks  # rank that hangs: where each of its threads is


class Pool:
    def __init__(self):
        self.workers = []  # (process, connection), by rank
        self.number = 0  # of bodies that have run
        self.loaded = set()  # (world size, what was called before a body)
        self.are_alone = False

    def start(self, environs):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        for worker_rank, environ in enumerate(environs):
            here, there = forkserver.Pipe()
            arguments = (worker_rank, len(environs), environ, there, self.folder)
            process = forkserver.Process(target=_worker, args=arguments, daemon=True)
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
            process.kill()  # does nothing if it has ended
            process.join()
        self.workers = []
        self.loaded = set()
        self.temporary.cleanup()

    def run(self, world_size, body, *args, load=None, alone=False):
        """Return [body(*args) on rank 0, …]. BodyFailed if it raises, dies or hangs on a rank.

        `load`, (function, argument), is called before, the first time. It may take longer. If
        `alone`, the ranks are new processes, as torchrun starts them, and there are no others.
        """
        largest = planned()[1]
        if world_size > largest:
            pytest.skip(f"needs a world of {world_size} ranks ({header()})")
        if self.workers and (alone or self.are_alone):
            self.stop(kill=True)
        if not self.workers:
            self.are_alone = alone
            self.start(environment.of_torchrun(world_size) if alone else [{}] * largest)
        if load and (world_size, load) not in self.loaded:
            self.call(world_size, LOADS_WITHIN, *load)
            self.loaded.add((world_size, load))
        return self.call(world_size, HANGS_AFTER, body, *args)

    def call(self, world_size, limit, body, *args):
        self.number += 1
        waiting = {}  # connection: rank
        for rank, (_, connection) in enumerate(self.workers[:world_size]):
            connection.send((self.number, world_size, body, args))
            waiting[connection] = rank
        results = {}  # rank: (whether it returned, what it returned or its traceback)
        end = time.monotonic() + limit
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                hanging = sorted(waiting.values())
                self.fail(f"ranks {hanging} hang after {limit:.0f} s", results, hanging)
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    results[rank] = connection.recv()
                except EOFError:
                    self.fail(f"rank {rank} died", results)
                if not results[rank][0]:  # the others may wait for this rank: not for long
                    end = min(end, time.monotonic() + 5 * HANGS_AFTER / 60)
        if not all(returned for returned, _ in results.values()):
            self.fail("the body raised", results)
        return [results[rank][1] for rank in range(world_size)]

    def fail(self, problem, results, hanging=()):
        for rank in hanging:
            os.kill(self.workers[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5 if hanging else 0)
        stacks = {rank: (self.folder / f"stacks{rank}").read_text() for rank in hanging}
        self.stop(kill=True)  # messages in flight would disturb the next body
        errors = {rank: text for rank, (returned, text) in sorted(results.items()) if not returned}
        raise BodyFailed(problem, errors, stacks)


_pool = Pool()
run = _pool.run

_bodies = {}  # (module, name): a function that `on` has decorated


def on(*world_sizes):
    """The decorated function's arguments may be parametrized. They are sent to the workers."""

    def decorate(body):
        place = body.__module__, body.__qualname__
        _bodies[place] = body

        @functools.wraps(body)  # pytest and hypothesis see its arguments
        def test(**arguments):
            possible = [size for size in world_sizes if size <= planned()[1]]
            for size in possible or world_sizes:
                try:
                    run(size, _call, place, arguments)
                except BodyFailed as failure:
                    if reason := refusal_of_gloo(failure):
                        pytest.skip(reason)
                    raise

        return test

    return decorate


def refusal_of_gloo(failure):
    """Return the error, if gloo does not offer a collective for tensors on a GPU."""
    if environment.DEVICE_TYPE == "cuda" and planned()[0] == "gloo":
        for text in failure.errors.values():
            if re.search("(unsupported|[Ii]nvalid) device", text):
                return f"gloo, on a GPU: {text.strip().splitlines()[-1]}"
    return None


def _call(place, arguments):
    importlib.import_module(place[0])
    _bodies[place](**arguments)


def shut_down(kill=False):
    if _pool.workers:
        _pool.stop(kill)
