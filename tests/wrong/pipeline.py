"""Mistakes people make in pipeline schedules, and the claim that catches each."""

from pipeline import build_schedule


def forgets_the_last_backward(p, m, v=1):
    return [actions[:-1] for actions in build_schedule("1f1b", p, m, v)]


def backward_before_forward(p, m, v=1):
    """The first rank begins with what should be its last."""
    first, *others = build_schedule("1f1b", p, m, v)
    return [[first[-1], *first[:-1]], *others]


def last_in_first_out(p, m, v=1):
    """GPipe's own order: right to rounding, but not bit by bit."""
    schedule = build_schedule("gpipe", p, m, v)
    return [
        [a for a in actions if "F" in a] + [a for a in actions if "B" in a][::-1]
        for actions in schedule
    ]


MISTAKES = {  # of each kind: an implementation, and the claim that does not hold for it
    "pipeline-schedule": {
        "forgets_the_last_backward": "complete",
        "backward_before_forward": "no_deadlock",
        "last_in_first_out": "in_order",
    },
}
