"""How kinds of implementations and claims about them are declared, and how a claim fails.

A claim is a function that runs on every rank of a world. Its argument `make` calls the
implementation under test. `same` and `check` write down what does not hold and go on, because a
rank that left early would leave the others waiting.

A claim is about results, or about a property. An implementation is wrong if a result does not
hold. It lacks a property, such as overlap, or has it. A claim that computes in `precision()` is
tried in float64, and in float32 if it does not hold there.
"""

import importlib
import importlib.util
import inspect
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import environment
import pool
import torch
import torch.distributed as dist


class Kind(NamedTuple):
    called: str  # how an implementation is called, for --help
    make: callable  # make(implementation, …) calls it
    ours: str  # the implementation that runs when no option names another
    pytorchs: str | None  # PyTorch's own (lora: peft's)


class Claim(NamedTuple):
    sentence: str
    about: str  # "result" or "property"
    check: callable  # check(make)
    worlds: tuple  # the numbers of ranks to run it on
    may_refuse: bool  # a clear error on all ranks is not wrong
    dtypes: tuple = (torch.float64, torch.float32)  # precision() in the first try and the second


KINDS = {}  # name: Kind
CLAIMS = {}  # (kind, name): Claim


def add_kind(name, *, called, make, ours, pytorchs=None):
    """`called` says how an implementation of this kind is called: the docstring of its file."""
    KINDS[name] = Kind(called, make, ours, pytorchs)


def say(name, sentence, worlds, kinds, check, about="result", may_refuse=False, **how):
    """The claim that `check(make, **how)` finds nothing."""
    check = partial(check, **how)
    for kind in kinds.split():
        CLAIMS[kind, name] = Claim(sentence, about, check, worlds, may_refuse)


def say_in_float64(kinds, name):
    """The claim of this name, about float64 alone."""
    sentence = "It computes in float64: results are those of one device to 1e-12."
    for kind in kinds.split():
        claim = CLAIMS[kind, name]
        CLAIMS[kind, "float64"] = claim._replace(
            sentence=sentence, about="property", worlds=claim.worlds[:1], dtypes=(torch.float64,)
        )


def claim(kinds, *worlds, of=None, about="result", may_refuse=False):
    """The decorated function is a claim. With `of`, it builds what the check `of` looks at."""

    def register(function):
        check = partial(of, build=function) if of else function
        sentence = " ".join(function.__doc__.split())
        say(function.__name__, sentence, worlds, kinds, check, about, may_refuse)
        return function

    return register


class NotOffered(NotImplementedError):
    """The implementation has no such argument or method. That is not wrong."""


def resolve(spec):
    """'package.module:name' or 'path/to/file.py:name' -> the object, or a ValueError."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError(
            "give a module or file and a name with a colon between, as in mine.py:MyDDP"
        )
    try:
        module = _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name
        if is_missing and f"{place}.".startswith(f"{error.name}."):
            where = f"{environment.CALLED_FROM} or among the installed packages"
            raise ValueError(f"there is no module {error.name} in {where}") from error
        raise ValueError(f"{place} raised {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        names = [each for each, value in vars(module).items() if _is_of(value, module)]
        raise ValueError(f"{place} has no class or function {name}; it has {', '.join(names)}")
    return found


def _is_of(value, module):
    return callable(value) and getattr(value, "__module__", None) == module.__name__


_files = {}  # (path, when it was changed): module


def _load_file(place):
    path = Path(environment.CALLED_FROM) / place  # where the user stands
    version = path, path.stat().st_mtime_ns
    if version not in _files:
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        # A name of its own: a user's ddp.py or pool.py must not take the place of this project's.
        found = importlib.util.spec_from_file_location(f"under_test_{path.stem}", path)
        module = sys.modules[found.name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        _files[version] = module
    return _files[version]


def names_of(function):
    """Return its parameters by name. A class with **options may have those of its bases, too."""
    try:
        names = dict(inspect.signature(function).parameters)
    except ValueError:  # a builtin
        return {}
    if inspect.isclass(function) and takes_any(names):
        for base in function.__bases__:
            names = names_of(base) | names
    return names


def takes_any(names):
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())


def call(function, *args, needed=None, **welcome):
    """function(*args) with the `needed` keywords, and with those `welcome` ones that it knows."""
    names = names_of(function)
    needed = needed or {}
    for name in needed:
        if not takes_any(names) and name not in names:
            raise NotOffered(f"no argument {name}")
    known = {name: value for name, value in welcome.items() if name in names}
    return function(*args, **needed, **known)


@contextmanager
def default_group(group):
    """An implementation without process_group then communicates among the body's ranks."""
    before = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(before)


_problems = []  # what the running claim has found


def check(holds, what):
    if not holds:
        _problems.append(what)


@contextmanager
def error_from(what):
    """The statements inside must raise an error."""
    try:
        yield
    except NotOffered:
        raise
    except (RuntimeError, ValueError, LookupError, AssertionError):
        return
    check(False, f"no error from {what}")


_running = SimpleNamespace(dtype=torch.float64, asks=False)  # whether it computes in precision()


def precision():
    """The dtype that the running claim computes in: float64, or float32 in a second try."""
    _running.asks = True
    return _running.dtype


TOLERANCE = 1e-12  # a difference in float64, relative to the largest element
TOLERANCE_IN_FLOAT32 = 1e-5


def same(ours, plain, what, exact=False, coarser=1):
    """Bitwise if `exact`, else to the tolerance. `coarser` multiplies that of float32."""
    shape = None if ours is None else tuple(ours.shape)
    if shape != tuple(plain.shape):
        check(False, f"{what} is {shape}, not {tuple(plain.shape)}")
    elif not torch.equal(ours, plain):
        error = (ours.double() - plain.double()).abs().max().item()
        in_float64 = _running.dtype == torch.float64
        tolerance = TOLERANCE if in_float64 else TOLERANCE_IN_FLOAT32 * coarser
        bound = 0.0 if exact else tolerance * max(1.0, plain.abs().max().item())
        check(0 < error <= bound, f"{what} is off by {error:.1e}")


def same_on_all(tensor, what):
    """Bitwise."""
    everyone = [None] * pool.world_size()
    dist.all_gather_object(everyone, tensor.detach().cpu(), group=pool.group())
    check(all(torch.equal(everyone[0], other) for other in everyone), f"ranks differ in {what}")


class Answer(NamedTuple):
    problem: str  # the first that the claim found; "" if it holds
    is_offered: bool
    asks: bool  # whether the claim computes in precision()


def run(kind, name, spec, dtype=torch.float64):
    """Try a claim, on a worker."""
    return run_check(CLAIMS[kind, name].check, kind, spec, dtype)


def run_check(check, kind, spec, dtype):
    """Let check(make) look at an implementation."""
    _problems.clear()
    _running.asks = False
    _running.dtype = dtype
    try:
        with default_group(pool.group()):
            implementation = resolve(spec)
            check(partial(KINDS[kind].make, implementation))
    except NotImplementedError as error:
        if "Could not run" in str(error):  # torch's, about a device
            raise
        return Answer(str(error), False, _running.asks)
    finally:
        _running.dtype = torch.float64
    return Answer(_problems[0] if _problems else "", True, _running.asks)


def load(spec):
    """On a worker, import what the implementation imports."""
    resolve(spec)
