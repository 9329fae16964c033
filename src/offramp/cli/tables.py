"""Tables that verbs print: every exit of a run or a bundle, a policy, what each exit of a network costs."""

from __future__ import annotations

import math

from offramp.common.formatting import Table, millions
from offramp.measuring.policy import Policies
from offramp.measuring.sentences import accuracy_text, drop_text, policy_sentence
from offramp.running.labelled import BundleScore
from offramp.runs.outputs import EvalSummary


def anytime_table(summary: EvalSummary) -> Table:
    """Every exit on the whole test split; on the calibration split where there is no other."""
    split = "test" if "test" in summary.samples else "calibration"
    rows = [
        [str(s.exit), millions(s.params), millions(s.mul_adds), f"{100 * s.top1:.2f}", f"{100 * s.top5:.2f}"]
        for s in summary.exits[split]
    ]
    title = f"{summary.model}: each exit on all {summary.samples[split]:,} {split} images"
    return title, ["exit", "params", "mul-adds", "top-1 %", "top-5 %"], rows


def bundle_table(name: str, score: BundleScore) -> Table:
    """Every exit of a bundle on labelled images, and who leaves there under its policy."""
    rows = [
        [str(k), f"{100 * top1:.2f}", f"{100 * share:.1f}"]
        for k, (top1, share) in enumerate(zip(score.exits, score.policy.shares, strict=True), 1)
    ]
    top1 = accuracy_text(score.policy.top1, score.top1_interval)
    title = (
        f"{name} on {score.samples:,} images, {score.about}: {top1} under its policy, at {millions(score.policy.cost)} "
        f"mul-adds per image, {drop_text(score.drop_points, score.drop_interval)}"
    )
    return title, ["exit", "top-1 % of all", "leave here %"], rows


def policy_table(found: Policies) -> Table:
    """The chosen policy, exit by exit, and what it gave on the calibration split."""
    policy = found.policy
    thresholds = [*(f"{t:.4f}" if math.isfinite(t) else "nobody" for t in policy.thresholds), "all the rest"]
    rows = [
        [str(k), millions(cost), text, f"{100 * share:.1f}"]
        for k, (cost, text, share) in enumerate(zip(found.costs, thresholds, policy.shares, strict=True), 1)
    ]
    saved = 100 * (1 - policy.mul_adds / found.costs[-1])
    how = f"q = {policy.q:g}" if policy.q is not None else policy.family
    title = f"{how}, {millions(policy.mul_adds)} mul-adds per image, {saved:.0f} % less than all stages"
    if policy.withheld is not None:
        title = f"the last exit for everybody, {millions(policy.mul_adds)} mul-adds per image"
    if policy.milliseconds is not None:
        title += f", {policy.milliseconds:.3g} ms"
    title += f": {policy_sentence(found)}"
    return title, ["exit", "mul-adds", f"leaves if {found.measure} is at least", "share %"], rows
