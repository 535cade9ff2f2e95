"""Does a claim hold for an implementation? What the suite asks, and how it reports the answers."""

import inspect
import platform
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import environment
import pool
import torch

from claims.causes import NONE
from claims.registry import CLAIMS, KINDS, load, resolve, run

# How an answer is reported: of a claim about results, and of one about a property.
WORDS = {
    "holds": ("holds", "yes"),
    "fails": ("WRONG", "no"),
    "raises": ("RAISES", "no"),
    "hangs": ("HANGS", "no"),
    "dies": ("DIES", "no"),
    "refuses": ("refuses", "no"),
    "not offered": ("not offered", "not offered"),
    "not run": ("not run", "not run"),
}
BAD = ("fails", "raises", "hangs", "dies")
GROUPS = ("wrong", "refuses", "lacks", "not offered", "not run")  # what does not hold
MOST_HANGS = 3
FLOAT32_INSIDE = "In float32 it is right to 1e-5: a buffer, a message or a sum is float32 inside."
HELD = "holds on"  # some ranks, and is not offered on more


class Verdict(NamedTuple):
    outcome: str  # a key of WORDS
    why: str = ""  # if it holds, the dtype; else first of all one line

    @property
    def is_bad(self):
        return self.outcome in BAD


def names_of_claims(kind):
    return [name for of, name in CLAIMS if of == kind]


def group_of(kind, name, verdict):
    """Return "holds", or one of GROUPS."""
    if CLAIMS[kind, name].about == "property" and verdict.outcome in (*BAD, "refuses"):
        return "lacks"
    return "wrong" if verdict.is_bad else verdict.outcome


def by_group(kind, verdicts):
    """Return {group: names of claims} of what does not hold."""
    names = {group: [] for group in ("holds", *GROUPS)}
    for name, verdict in verdicts.items():
        names[group_of(kind, name, verdict)].append(name)
    return {group: names[group] for group in GROUPS if names[group]}


def as_json(kind, name, spec, verdict, diagnosis=NONE):
    claim = CLAIMS[kind, name]
    holds = verdict.outcome == "holds"
    return {
        "kind": kind,
        "implementation": spec,
        "claim": name,
        "sentence": claim.sentence,
        "about": claim.about,
        "verdict": group_of(kind, name, verdict),
        "finding": "" if holds else verdict.why,
        "explained by cause": name in diagnosis.explained,
        "worlds": list(claim.worlds),
        "dtype": verdict.why if holds else "",
    }


def versions():
    backend, _ = pool.planned()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": environment.DEVICE_TYPE,
        "backend": backend,
    }


_hangs = Counter()  # (kind, spec): how many claims


def judge(kind, name, spec, worlds=None):
    """Try the claim on `spec`, in float64, and in float32 if it does not hold."""
    worlds = worlds or CLAIMS[kind, name].worlds
    backend, largest = pool.planned()
    possible = [N for N in worlds if largest >= N]
    if not possible:
        return Verdict("not run", f"needs {min(worlds)} ranks; {backend} has {largest} here")
    if _hangs[kind, spec] >= MOST_HANGS:
        return Verdict("not run", f"{MOST_HANGS} claims before it hung")
    first, *others = CLAIMS[kind, name].dtypes
    verdict, asks = _judge_in(first, possible, kind, name, spec)
    # A rank dies if another one sends float32, and this one float64.
    if others and asks and verdict.outcome in ("fails", "raises", "refuses", "dies"):
        second, _ = _judge_in(*others, possible, kind, name, spec)
        is_better = second.outcome == "holds" or HELD in second.why
        if is_better or verdict.outcome != "fails":
            verdict = second
    if name == "float64" and verdict.outcome == "fails":
        second, _ = _judge_in(torch.float32, possible, kind, name, spec)
        if second.outcome == "holds":
            verdict = Verdict("fails", f"{verdict.why}\n{FLOAT32_INSIDE}")
    _hangs[kind, spec] += verdict.outcome == "hangs"
    return verdict


def _judge_in(dtype, worlds, kind, name, spec):
    """In one world after the other until it does not hold. Return also whether dtype matters."""
    is_alone = getattr(resolve(spec), "fresh", False)
    held = []
    for N in worlds:
        try:
            answers = pool.run(N, run, kind, name, spec, dtype, load=(load, spec), alone=is_alone)
        except pool.BodyFailed as failure:
            return _what_happened(failure, N, CLAIMS[kind, name]), True
        finally:
            if name == "different_models":  # the ranks' connections may not survive it
                pool.shut_down(kill=True)
        asks = any(answer.asks for answer in answers)
        for rank, answer in enumerate(answers):
            if not answer.is_offered:
                before = f" ({HELD} {held} ranks, not on {N})" if held else ""
                return Verdict("not offered", answer.problem + before), asks
            if answer.problem:
                return Verdict("fails", f"{answer.problem} (rank {rank} of {N})"), asks
        held.append(N)
    return Verdict("holds", str(dtype).removeprefix("torch.") if asks else ""), asks


def _what_happened(failure, N, claim):
    if reason := pool.refusal_of_gloo(failure):
        return Verdict("not run", reason)
    if failure.errors:  # a rank's own exception says more than that the others wait for it
        rank, text = next(iter(failure.errors.items()))
        exception, place = last_error(text)
        first, *more = exception.splitlines()
        why = "\n".join([f"{first}{place} (rank {rank} of {N})", *more[:20]])
        is_refusal = claim.may_refuse and len(failure.errors) == N and is_clear(exception)
        return Verdict("refuses" if is_refusal else "raises", why)
    if failure.stacks:
        places = [f"rank {rank}{where(text)}" for rank, text in failure.stacks.items()]
        return Verdict("hangs", f"{failure.problem}, of {N}\n" + "\n".join(places))
    return Verdict("dies", f"{failure.problem}, of {N}")


# An IndexError, and what the interpreter or gloo raises, does not say what is refused.
ACCIDENTS = (
    "^(Attribute|Index|Key|Name|UnboundLocal|ZeroDivision|Recursion)Error"
    "|positional arg|NoneType|unsupported operand|is not (subscript|iter|call)able"
    "|Timed out waiting"
)


def is_clear(exception):
    """Does it say what is refused?"""
    _, _, message = exception.partition(":")
    return bool(message.strip()) and not re.search(ACCIDENTS, exception)


TESTS = Path(__file__).parent.parent
THE_SUITES = (str(TESTS / "claims"), str(TESTS / "pool.py"), str(TESTS / "shared.py"))
LIBRARY = str(Path(inspect.__file__).parent)  # Python's. Packages are in a folder of it


def is_theirs(path):
    """Is it neither of the suite, nor of torch or the standard library?"""
    if path.startswith((*THE_SUITES, "<")) or "-packages/torch/" in path:
        return False
    return "-packages/" in path or not path.startswith(LIBRARY)


def frames_in(text):
    """Return what to print of each frame of the user's code, as a traceback orders them."""
    frames = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', text)
    return [f", at {path}:{line} in {name}" for path, line, name in frames if is_theirs(path)]


def last_error(text):
    """Return the exception of a traceback, and the line of the user's code that it came through."""
    _, _, after = text.rpartition('\n  File "')
    exception = re.search(r"^\S.*", after.partition("\n")[2], re.MULTILINE | re.DOTALL)
    places = frames_in(text) or [""]
    return (exception or [text])[0].strip(), places[-1]


def where(stacks):
    """Return the innermost line of the user's code, where the stack begins."""
    _, _, main = stacks.rpartition("Thread 0x")
    places = frames_in(main) or [""]
    return places[0]


HELP = """
How the suite treats it
  The module that a claim makes is the one that is trained and called, unless the text above says
  otherwise. Numbers are float64 and must be right to 1e-12. If a claim does not hold, it is tried
  in float32 to 1e-5, and the table says which dtype it held in. Claims that say "bitwise" or "same
  bits" are in float32.
  torch.distributed's default group is that of the claim's ranks, so an implementation without
  process_group uses the default group. All claims run in the same four processes. If the library
  keeps state for each process, set `fresh = True` on the class or function. Then every claim runs
  in new processes that have the variables of torchrun.
  The file is executed once in each process. Import the library at its top: this does not count in
  the 12 s after which a claim hangs. After three hangs the other claims are not run.
  Keywords are passed if the signature has them. What is missing is "not offered". So is what
  raises NotImplementedError("why"). Where a claim says so, an implementation "refuses" if it raises
  an error with a message on all ranks. That is not wrong, unless it is an accident such as an
  IndexError.
  -k NAME tries the claims whose names have NAME in them."""


def how_to_call(kind):
    """For --KIND --help."""
    yield KINDS[kind].called.strip()
    yield HELP
    theirs = KINDS[kind].pytorchs or "none"
    yield f"\nOurs is {KINDS[kind].ours}; PyTorch's own, {theirs}. The claims:"
    for name in names_of_claims(kind):
        claim = CLAIMS[kind, name]
        property = " (a property)" if claim.about == "property" else ""
        refusal = " (may refuse)" if claim.may_refuse else ""
        yield f"\n  {name}{property}{refusal}"
        yield textwrap.indent(textwrap.fill(claim.sentence, 90), "      ")


def table(kind, verdicts, diagnosis=NONE):
    """Return lines, of the claims' verdicts by name: the cause, results, properties, the sums."""
    yield from _looks_like(diagnosis)
    headings = {
        "result": "Results. Training goes wrong if one is wrong.",
        "property": "Properties. An implementation that lacks one is not wrong.",
    }
    for column, (about, heading) in enumerate(headings.items()):
        names = [name for name in verdicts if CLAIMS[kind, name].about == about]
        if names:
            yield heading
        for name in names:
            is_explained = name in diagnosis.others
            yield from _row(kind, name, verdicts[name], column, is_explained)
    holding = sum(verdict.outcome == "holds" for verdict in verdicts.values())
    yield f"{holding} of {len(verdicts)} claims hold."
    others = {name: each for name, each in verdicts.items() if name not in diagnosis.others}
    for group, names in by_group(kind, others).items():
        yield f"{group}: {', '.join(names)}"
    if diagnosis.others:
        yield f"explained by the cause: {', '.join(diagnosis.others)}"


def _looks_like(diagnosis):
    if not diagnosis.cause:
        return
    yield "What it looks like:"
    yield textwrap.indent(textwrap.fill(diagnosis.sentence, 96), "  ")
    count = len(diagnosis.others)
    claims = "claim is" if count == 1 else "claims are"
    others = f" {count} other {claims} explained by it." if count else ""
    yield f"  Mend {diagnosis.first} first.{others}"


def _row(kind, name, verdict, column, is_explained):
    word = "explained" if is_explained else WORDS[verdict.outcome][column]
    reasons = verdict.why.splitlines()
    if verdict.outcome == "holds":
        word = f"{word:<7}{verdict.why}"  # the dtype
        reasons = []
    yield f"  {name:<28}{word:<16}{CLAIMS[kind, name].sentence}"
    for line in reasons:
        yield f"  {'':<44}{line}"
