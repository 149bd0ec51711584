"""Metrics of one's own."""

from torch import Tensor


def lateness(outputs: Tensor, targets: Tensor) -> float:
    """Windows that go by until a gesture is recognized for the first time, in the mean over the gestures one after the
    other in a recording; all of its windows where it never is."""
    right = (outputs.argmax(1) == targets).tolist()
    begins = [0, *((targets[1:] != targets[:-1]).nonzero().flatten() + 1).tolist()]  # of the gestures
    ends = [*begins[1:], len(right)]
    late = [next((k for k in range(a, b) if right[k]), b) - a for a, b in zip(begins, ends, strict=True)]
    return sum(late) / len(late)


lateness.higher_is_better = False  # type: ignore[attr-defined]
