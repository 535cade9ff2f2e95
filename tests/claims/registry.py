"""How a kind of implementation and a claim about it are declared, and how a claim says what does not hold.

A claim is a function. Its docstring's first sentence is what it claims. It takes `make`, which calls
the implementation under test, and runs on every rank of a world of so many. `same` and `check` write
down what does not hold and go on: a rank that left early would leave the others waiting.
"""

import importlib
import importlib.util
import inspect
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pool
import torch
import torch.distributed as dist


class Kind(NamedTuple):
    called: str  # how an implementation is called, for --help
    make: callable  # make(implementation, …) calls it
    ours: str  # runs when no option names another
    pytorchs: str | None  # PyTorch's own (lora: peft's)


class Claim(NamedTuple):
    kind: str
    sentence: str
    check: callable  # check(make)
    worlds: tuple  # the numbers of ranks to run it on


KINDS = {}  # name: Kind
CLAIMS = {}  # (kind, name): Claim


def add_kind(name, *, called, make, ours, pytorchs=None):
    """`called` says how an implementation of this kind is called: the docstring of its file."""
    KINDS[name] = Kind(called, make, ours, pytorchs)


def say(name, sentence, worlds, kinds, check, **how):
    """The claim that `check`, called `how`, finds nothing."""
    for each in kinds.split():
        CLAIMS[each, name] = Claim(each, sentence, partial(check, **how), worlds)


def claim(kinds, *worlds, of=None):
    """The decorated function is a claim; with `of`, it builds what the check `of` looks at."""

    def register(function):
        check = partial(of, build=function) if of else function
        say(function.__name__, " ".join(function.__doc__.split()), worlds, kinds, check)
        return function

    return register


class NotOffered(Exception):
    """The implementation has no such argument or method, which is not wrong."""


def resolve(spec):
    """'package.module:name' or 'path/to/file.py:name' -> the object."""
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        found = importlib.util.spec_from_file_location(Path(place).stem, place)
        module = sys.modules[found.name] = importlib.util.module_from_spec(found)
        sys.path.append(str(Path(place).resolve().parent))
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return getattr(module, name)


def names_of(function):
    return inspect.signature(function).parameters


def call(function, *args, needed=None, **welcome):
    """function(*args) with the `needed` keywords, and with those of the `welcome` ones that it has a name for."""
    names, needed = names_of(function), needed or {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    if lacking := [name for name in needed if not takes_any and name not in names]:
        raise NotOffered(f"no argument {lacking[0]}")
    return function(
        *args, **needed, **{name: value for name, value in welcome.items() if name in names}
    )


@contextmanager
def default_group(group):
    """Who takes no process_group finds himself in a world of the body's ranks."""
    before = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(before)


_problems = []


def check(holds, what):
    if not holds:
        _problems.append(what)


@contextmanager
def error_from(what):
    """What is done inside must be an error."""
    try:
        yield
    except (RuntimeError, ValueError, AssertionError):
        return
    check(False, f"no error from {what}")


def same(ours, plain, what, exact=False):
    """Bitwise when `exact`, else to 1e-12 of the largest element."""
    if ours is None or ours.shape != plain.shape:
        check(
            False,
            f"{what} is {ours if ours is None else tuple(ours.shape)}, not {tuple(plain.shape)}",
        )
    elif not torch.equal(ours, plain):
        error, bound = (
            (ours.double() - plain.double()).abs().max().item(),
            1e-12 * max(1.0, plain.abs().max().item()),
        )
        check(error <= bound and not exact, f"{what} is off by {error:.1e}")


def same_on_all(tensor, what):
    """Bitwise."""
    everyone = [None] * pool.world_size()
    dist.all_gather_object(everyone, tensor.detach(), group=pool.group())
    check(all(torch.equal(everyone[0], theirs) for theirs in everyone), f"ranks differ in {what}")


def run(kind, name, spec):
    """On a worker: -> "" where the claim holds, else in a word why not; None where it is not offered."""
    _problems.clear()
    try:
        with default_group(pool.group()):
            CLAIMS[kind, name].check(partial(KINDS[kind].make, resolve(spec)))
    except NotOffered:
        return None
    return _problems[0] if _problems else ""
