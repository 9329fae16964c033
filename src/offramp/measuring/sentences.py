"""What is known of a policy, in one sentence: accuracy and drop with their intervals, a promise, or why none leaves.

Every verb, the report and `fit` take their words from here, so that no number stands without its interval.
"""

from __future__ import annotations

from offramp.measuring.intervals import Interval
from offramp.measuring.policy import Policies, Policy, Promise, Withheld


def policy_sentence(found: Policies, policy: Policy | None = None) -> str:
    """What the calibration images say of a policy, the chosen one unless told, and how sure that is."""
    own = found.policy if policy is None else policy
    if own.samples is None:
        right = f"{100 * own.top1:.2f} % of the calibration images right"
        text = f"{right} (the policy file does not say how many there were)"
    else:
        text = f"{accuracy_text(own.top1, own.top1_interval)} of {own.samples:,} calibration images right"
    if own.drop_points is not None:
        text += f", {drop_text(own.drop_points, own.drop_interval)}"
    text += "."
    if found.folds is not None:
        text += (
            f" An estimate, not a promise, by {found.folds}-fold cross-validation: what ships was trained on all of "
            "these images."
        )
    if found.found_on is not None:
        text += f" An estimate, not a promise: the thresholds were found with {found.found_on}, trained in this way."
    if own.withheld is not None:
        text += f" {_withheld(own.withheld, own.samples)}"
    if own.promise is not None:
        text += f" {_promise(own.promise)}"
    return text


def accuracy_text(top1: float, interval: Interval | None) -> str:
    """83.40 % (95 %: 79.5 to 86.9)."""
    own = f"{100 * top1:.2f} %"
    return own if interval is None else f"{own} (95 %: {100 * interval[0]:.1f} to {100 * interval[1]:.1f})"


def drop_text(points: float, interval: Interval | None) -> str:
    """What is lost against the last exit, or gained."""
    if interval == (0.0, 0.0):
        return "all of them by the last exit"
    text = f"{abs(points):.2f} points {'more' if points < 0 else 'fewer'} than the last exit"
    return text if interval is None else f"{text} (95 %: {_from_to(*interval)})"


def fewer_right(points: float, interval: Interval) -> str:
    """0.25 points fewer right (95 %: 0.10 more to 0.60 fewer)."""
    return f"{abs(points):.2f} points {'more' if points < 0 else 'fewer'} right (95 %: {_from_to(*interval, digits=2)})"


def _from_to(low: float, high: float, digits: int = 1) -> str:
    """0.2 to 1.4 fewer, or 0.5 more to 1.4 fewer."""
    words = ["more" if end < 0 else "fewer" for end in (low, high)]
    first = f"{abs(low):.{digits}f}" if words[0] == words[1] else f"{abs(low):.{digits}f} {words[0]}"
    return f"{first} to {abs(high):.{digits}f} {words[1]}"


def _withheld(own: Withheld, samples: int | None) -> str:
    often = f"{abs(own.drop_points):.1f} points {'more' if own.drop_points < 0 else 'less'} often"
    return (
        f"Nobody leaves early: on {samples:,} images the policy that was asked for was right {often} (95 %: "
        f"{_from_to(*own.drop_interval)}), which is too uncertain to act on. Some {own.samples_needed:,} labelled "
        "images are needed to tell; --anyway takes the estimate."
    )


def _promise(own: Promise) -> str:
    return (
        f"With probability {own.probability:g} at most {100 * own.risk:g} % of images are lost, that is wrong here and "
        f"right for the whole network ({own.lost} of the {own.samples:,} it was certified on)."
    )
