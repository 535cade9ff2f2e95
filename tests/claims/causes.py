"""What does it look like? The mistake that predicts exactly what the claims found, or none.

A cause says what one device would compute if it made the mistake. A claim that failed is tried
again, with that in place of the right result. If it holds now, in every world and to 1e-12, the
mistake explains the finding. A cause is named only if no other one explains the same claim. Then
it is tried on the other claims that failed. Some causes cannot be predicted and have a check of
their own.
"""

import importlib
from contextlib import contextmanager
from typing import NamedTuple

import pool
import torch

from claims.registry import CLAIMS, load, resolve, run_check

CAUSES = {}  # name: Cause
ANY = "any"  # claim


class Cause(NamedTuple):
    name: str
    kinds: list
    witnesses: list  # the claims that it may be recognised by
    sentence: str  # with {} for the factor in each world
    factor: callable  # of the number of ranks: by how much the mistake multiplies
    also: list  # claims that it explains if they fail, although it does not predict how
    replaces: dict | None  # {"file.function": what computes the wrong result}
    variants: list  # causes that it includes
    look: callable  # look(make) checks what only this mistake does; None: the claim is tried again


class Diagnosis(NamedTuple):
    cause: str = ""  # a key of CAUSES
    sentence: str = ""
    first: str = ""  # the claim to mend first
    explained: tuple = ()  # the claims whose findings are explained, the first among them

    @property
    def others(self):
        return [name for name in self.explained if name != self.first]


NONE = Diagnosis()


def looks_like(kinds, witnesses, sentence, factor=None, also="", variants=""):
    """The decorated function returns what the cause replaces. Its name is that of the cause."""

    def register(function):
        add(function.__name__, kinds, witnesses, sentence, factor, also, variants, function())
        return function

    return register


def seen_directly(kinds, witnesses, sentence, also="", name=None):
    """The decorated function looks for what only this mistake does."""

    def register(function):
        add(name or function.__name__, kinds, witnesses, sentence, also=also, look=function)
        return function

    return register


def add(
    name, kinds, witnesses, sentence, factor=None, also="", variants="", replaces=None, look=None
):
    lists = {"kinds": kinds, "witnesses": witnesses, "also": also, "variants": variants}
    lists = {key: text.split() for key, text in lists.items()}
    others = {"sentence": sentence, "factor": factor, "replaces": replaces, "look": look}
    CAUSES[name] = Cause(name=name, **lists, **others)


@contextmanager
def replaced(functions):
    """In the files of claims."""
    before = {}
    for place, function in (functions or {}).items():
        file, _, name = place.partition(".")
        module = importlib.import_module(f"claims.{file}")
        before[module, name] = getattr(module, name)
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name), function in before.items():
            setattr(module, name, function)


def try_causes(kind, claim, spec, dtype, names):
    """On a worker, return for each cause whether nothing is left to find."""
    answers = []
    for name in names:
        cause = CAUSES[name]
        check = cause.look or CLAIMS[kind, claim].check
        torch.manual_seed(0)
        with replaced(cause.replaces):
            answer = run_check(check, kind, spec, dtype)
        answers.append(answer.is_offered and not answer.problem)
    return answers


def that_explain(kind, claim, spec, names):
    """Return the causes under which the claim holds: in float64, or if none does in float32."""
    for dtype in CLAIMS[kind, claim].dtypes:
        held = list(names)
        for N in worlds_of(kind, claim):
            if held:
                held = held_on(N, kind, claim, spec, dtype, held)
        if held:
            return held
    return []


def worlds_of(kind, claim):
    return [N for N in CLAIMS[kind, claim].worlds if pool.planned()[1] >= N]


def held_on(N, kind, claim, spec, dtype, names):
    is_alone = getattr(resolve(spec), "fresh", False)
    predicting = [name for name in names if not CAUSES[name].look]
    looking = [name for name in names if CAUSES[name].look]
    batches = [[name] for name in names] if is_alone else [predicting, looking]
    held = []
    for batch in filter(None, batches):
        arguments = (kind, claim, spec, dtype, batch)
        try:
            answers = pool.run(N, try_causes, *arguments, load=(load, spec), alone=is_alone)
        except pool.BodyFailed:
            continue  # the evidence cannot be had
        for name, on_ranks in zip(batch, zip(*answers, strict=True), strict=True):
            if all(on_ranks):
                held.append(name)
    return held


def find(kind, spec, verdicts):
    """Return the Diagnosis of an implementation, from {claim: verdict}, or NONE."""
    wrong = [name for name, verdict in verdicts.items() if verdict.outcome == "fails"]
    wrong = [name for name in wrong if CLAIMS[kind, name].about == "result"]
    for claim in wrong:
        name = decide(candidates(kind, claim, spec, is_first=claim == wrong[0]))
        if name:
            return diagnosis(kind, claim, spec, CAUSES[name], wrong)
    return NONE


def candidates(kind, claim, spec, is_first):
    """Return the causes that explain the claim."""
    places = {claim, ANY} if is_first else {claim}
    named = [
        name
        for name, cause in CAUSES.items()
        if kind in cause.kinds and places.intersection(cause.witnesses)
    ]
    return that_explain(kind, claim, spec, named) if named else []


def decide(held):
    """Return the cause's name. "" if none explains the claim, or several do.

    What was seen directly comes before what only predicts the numbers.
    """
    included = {variant for name in held for variant in CAUSES[name].variants}
    held = [name for name in held if name not in included]
    seen = [name for name in held if CAUSES[name].look]
    certain = seen or held
    return certain[0] if len(certain) == 1 else ""


def diagnosis(kind, claim, spec, cause, wrong):
    explained = [claim]
    for other in wrong:
        if other == claim:
            continue
        names = [name for name in (cause.name, *cause.variants) if not CAUSES[name].look]
        if other in cause.also or that_explain(kind, other, spec, names):
            explained.append(other)
    return Diagnosis(cause.name, say(cause, worlds_of(kind, claim)), claim, tuple(explained))


def say(cause, worlds):
    """Return the cause's sentence, with its factors: "2.000 times … on 2 ranks and …"."""
    if not cause.factor:
        return cause.sentence
    first, *others = [N for N in worlds if N > 1]
    text = f"{cause.factor(first):.3f} times the right one on {first} ranks"
    for N in others:
        text += f" and {cause.factor(N):.3f} times on {N}"
    return cause.sentence.format(text)


def sentence(kind, spec):
    """What the first wrong result of an implementation looks like, in a sentence. "" if unclear."""
    verdicts = importlib.import_module("claims.verdicts")
    witnesses = [name for of, name in CLAIMS if of == kind and is_witness(kind, name)]
    for name in witnesses:
        verdict = verdicts.judge(kind, name, spec)
        if verdict.outcome in ("raises", "hangs", "dies"):  # which says enough, and takes long
            return ""
        found = find(kind, spec, {name: verdict})
        if found.cause:
            return found.sentence
    return ""


def is_witness(kind, claim):
    return any(kind in cause.kinds and claim in cause.witnesses for cause in CAUSES.values())
