"""Does a claim hold for an implementation? What the suite asks, and how it reports the answers."""

import re
import textwrap
from typing import NamedTuple

import pool

from claims.registry import CLAIMS, KINDS, run

# How an answer is reported: of a claim about results, and of one about a property.
WORDS = {
    "holds": ("holds", "yes"),
    "fails": ("WRONG", "no"),
    "raises": ("RAISES", "no"),
    "hangs": ("HANGS", "no"),
    "dies": ("DIES", "no"),
    "not offered": ("not offered", "not offered"),
    "not run": ("not run", "not run"),
}


class Verdict(NamedTuple):
    outcome: str  # a key of WORDS
    why: str = ""  # in one line

    @property
    def is_bad(self):
        return self.outcome in ("fails", "raises", "hangs", "dies")


def names_of_claims(kind):
    return [name for of, name in CLAIMS if of == kind]


def judge(kind, name, spec, worlds=None):
    """Try the claim on `spec`, in one world after the other until it does not hold."""
    worlds = worlds or CLAIMS[kind, name].worlds
    backend, largest = pool.planned()
    possible = [N for N in worlds if largest >= N]
    if not possible:
        return Verdict("not run", f"needs {min(worlds)} ranks; {backend} has {largest} here")
    for N in possible:
        verdict = _judge_in_world(N, kind, name, spec)
        if verdict.outcome != "holds":
            return verdict
    return Verdict("holds")


def _judge_in_world(N, kind, name, spec):
    try:
        answers = pool.run(N, run, kind, name, spec)
    except pool.BodyFailed as failure:
        return _what_happened(failure, N)
    finally:
        if name == "different_models":  # the ranks' connections may not survive it
            pool.shut_down(kill=True)
    if None in answers:
        return Verdict("not offered")
    for rank, answer in enumerate(answers):
        if answer:
            return Verdict("fails", f"{answer} (rank {rank} of {N})")
    return Verdict("holds")


def _what_happened(failure, N):
    if reason := pool.refusal_of_gloo(failure):
        return Verdict("not run", reason)
    if failure.errors:  # a rank's own exception says more than that the others wait for it
        rank, text = next(iter(failure.errors.items()))
        return Verdict("raises", f"{last_error(text)} (rank {rank} of {N})")
    if "hang" in failure.problem:
        return Verdict("hangs", f"{failure.problem} after {pool.HANGS_AFTER:.0f} s, of {N}")
    return Verdict("dies", f"{failure.problem}, of {N}")


def last_error(text):
    """Return the exception of a traceback, and the line of the user's code that it came through."""
    exception = text.strip().splitlines()[-1]
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    theirs = [frame for frame in frames if not re.search(r"/tests/|/torch/|<", frame[0])]
    if not theirs:
        return exception
    path, line, function = theirs[-1]
    return f"{exception}, at {path}:{line} in {function}"


def how_to_call(kind):
    """For --KIND --help."""
    yield KINDS[kind].called.strip()
    theirs = KINDS[kind].pytorchs or "none"
    yield f"\nOurs is {KINDS[kind].ours}; PyTorch's own, {theirs}. The claims:"
    for name in names_of_claims(kind):
        about = " (a property)" if CLAIMS[kind, name].about == "property" else ""
        yield f"\n  {name}{about}"
        yield textwrap.indent(textwrap.fill(CLAIMS[kind, name].sentence, 90), "      ")


def table(kind, verdicts):
    """Return lines, of the claims' verdicts by name: results, then properties, then the sum."""
    results = [name for name in verdicts if CLAIMS[kind, name].about == "result"]
    properties = [name for name in verdicts if CLAIMS[kind, name].about == "property"]
    yield "Results. Training goes wrong if one does not hold."
    yield from _rows(kind, verdicts, results, 0)
    if properties:
        yield "Properties. An implementation that lacks one is not wrong."
        yield from _rows(kind, verdicts, properties, 1)
    wrong = [name for name in results if verdicts[name].is_bad]
    lacking = [name for name in properties if verdicts[name].is_bad]
    yield f"Results that do not hold: {', '.join(wrong) or 'none'}."
    yield f"Properties that it lacks: {', '.join(lacking) or 'none'}."


def _rows(kind, verdicts, names, column):
    for name in names:
        outcome, why = verdicts[name]
        yield f"  {name:<28}{WORDS[outcome][column]:<13}{CLAIMS[kind, name].sentence}"
        if why:
            yield f"  {'':<41}{why}"
