"""Mistakes in pipeline schedules, and the claim that catches each."""

from pipeline import build_schedule


def forgets_the_last_backward(p, m, v=1):
    return [actions[:-1] for actions in build_schedule("1f1b", p, m, v)]


def backward_before_forward(p, m, v=1):
    """The first rank begins with the action that should be its last."""
    first, *others = build_schedule("1f1b", p, m, v)
    return [[first[-1], *first[:-1]], *others]


def last_in_first_out(p, m, v=1):
    """The order of GPipe's paper: right, but gradients add up in another order."""
    if v > 1:
        raise ValueError("one stage for each rank")
    schedule = []
    for actions in build_schedule("gpipe", p, m, v):
        forwards = [action for action in actions if "F" in action]
        backwards = [action for action in actions if "B" in action]
        schedule.append(forwards + backwards[::-1])
    return schedule


MISTAKES = {
    "pipeline-schedule": {
        "forgets_the_last_backward": "complete",
        "backward_before_forward": "no_deadlock",
    },
}
RIGHT = {"pipeline-schedule": {"last_in_first_out": ["gradients_bitwise"]}}
