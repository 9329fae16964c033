"""The report's tables, as text: title, columns, rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offramp.common.formatting import Table, millions, with_spread
from offramp.measuring.intervals import right_interval
from offramp.measuring.metrics import exit_difficulty
from offramp.reporting.groups import Group
from offramp.reporting.headline import percent_range
from offramp.reporting.shipped import Shipped, StageTimes, confusion, losing_classes

BUDGETS = 5
MISTAKES = 10  # pairs of classes, and classes that lose


def shipped_table(shipped: Shipped, times: StageTimes | None) -> Table:
    """The policy that ships beside the whole network: accuracy with its interval, cost, time."""
    found = shipped.milliseconds(times)
    kinds = [
        (policy_name(shipped), shipped.right, shipped.cost, 0),
        ("everybody goes to the last exit", shipped.whole_right, shipped.run.costs[-1], 1),
    ]
    rows = [
        [
            name,
            f"{100 * right.mean():.2f}",
            percent_range(right_interval(right)),
            millions(cost),
            f"{100 * cost / shipped.run.costs[-1]:.0f}",
            *([] if found is None else [f"{found[at]:.3g}", f"{found[1] / found[at]:.2f}"]),
        ]
        for name, right, cost, at in kinds
    ]
    timed = [] if found is None else ["ms", "times as fast"]
    columns = ["policy", "top-1 %", "95 % interval", "mul-adds", "% of the whole network", *timed]
    return f"Accuracy on {shipped.samples:,} test images, and what it costs per image", columns, rows


def policy_name(shipped: Shipped) -> str:
    """How the policy is called."""
    return "the policy that ships" if shipped.chosen else "suggested: at most half a point lost on calibration"


def leaving_table(shipped: Shipped, times: StageTimes | None) -> Table:
    """Exit by exit: who leaves there, how often that is right, what it costs."""
    timed = times is not None and shipped.milliseconds(times) is not None
    rows = []
    for k, cost in enumerate(shipped.run.costs, 1):
        here = shipped.taken == k
        last = k == len(shipped.run.costs)
        threshold = "all that is left" if last else _threshold(shipped.policy.thresholds[k - 1])
        right = f"{100 * shipped.right[here].mean():.1f}" if here.any() else "–"
        own = [f"{times.milliseconds[k - 1]:.3g}"] if timed and times is not None else []
        rows.append([str(k), threshold, f"{100 * here.mean():.1f}", right, millions(cost), *own])
    columns = [
        "exit",
        "leaves if confidence is at least",
        "share %",
        "of them right %",
        "mul-adds",
        *(["ms"] if timed else []),
    ]
    return f"Where test images leave under {policy_name(shipped).removeprefix('suggested: ')}", columns, rows


def _threshold(value: float) -> str:
    return f"{value:.4f}" if np.isfinite(value) else "nobody leaves"


def class_name(shipped: Shipped, label: int) -> str:
    """A class's name; its number where the names are not known."""
    names = shipped.run.summary.classes
    return names[label] if label < len(names) else f"class {label}"


def confusion_table(shipped: Shipped) -> Table:
    """All classes: rows are what an image is, columns what the network says."""
    counts = confusion(shipped)
    names = [class_name(shipped, label) for label in range(len(counts))]
    rows = [[name, *map(str, row)] for name, row in zip(names, counts.tolist(), strict=True)]
    title = "Confusion matrix: rows are what a test image is, columns what is said, under the policy shown first"
    return title, ["it is", *names], rows


def mistakes_table(shipped: Shipped) -> Table | None:
    """The pairs of classes that are mistaken most often."""
    counts = confusion(shipped)
    own = counts.sum(1)
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MISTAKES]
    rows = []
    for label, said in zip(*np.unravel_index(order, wrong.shape), strict=True):
        if wrong[label, said]:
            share = f"{100 * wrong[label, said] / own[label]:.1f}"
            rows.append([class_name(shipped, label), class_name(shipped, said), str(wrong[label, said]), share])
    return (
        ("The most frequent mistakes", ["true class", "predicted", "images", "of its class %"], rows) if rows else None
    )


def losing_table(shipped: Shipped) -> Table | None:
    """Classes that are right less often for leaving early."""
    found = losing_classes(shipped)
    rows = [
        [
            class_name(shipped, one.label),
            str(one.images),
            f"{100 * one.whole_top1:.1f}",
            f"{100 * one.top1:.1f}",
            f"{one.points:.1f}",
            f"{one.interval[0]:.1f} to {one.interval[1]:.1f}",
        ]
        for one in found[:MISTAKES]
    ]
    columns = ["class", "images", "last exit right %", "leaving early right %", "points lost", "95 % interval"]
    more = f", the first {MISTAKES} of {len(found)}" if len(found) > MISTAKES else ""
    return (f"Points lost, class by class{more}", columns, rows) if rows else None


def anytime(groups: Sequence[Group], times: StageTimes | None = None) -> Table:
    """Top-1 of every exit on the whole test split, method beside method, and the paper's where known."""
    title = f"Top-1 in % of every exit on all {len(groups[0].first.test.labels):,} test images"
    if len({group.costs for group in groups}) > 1:
        return title, *_anytime_by_network(groups)
    means = [100 * group.top1() for group in groups]
    timed = times is not None and len(times.milliseconds) == len(groups[0].costs)
    columns = ["exit", "mul-adds", *(["ms"] if timed else []), *(group.label for group in groups)]
    cells = [[with_spread(top1[:, k]) for top1 in means] for k in range(len(groups[0].costs))]
    if len(groups) == 2:
        columns.append("difference")
        for k, row in enumerate(cells):
            row.append(f"{(means[1].mean(0) - means[0].mean(0))[k]:+.2f}")
    for group in groups:
        if group.paper_top1:
            columns.append(f"paper, {group.label}")
            for row, top1 in zip(cells, group.paper_top1, strict=True):
                row.append(f"{top1:.2f}")
    prices = [[f"{ms:.3g}"] for ms in times.milliseconds] if timed and times is not None else [[]] * len(cells)
    rows = [
        [str(k), millions(cost), *price, *row]
        for k, (cost, price, row) in enumerate(zip(groups[0].costs, prices, cells, strict=True), 1)
    ]
    return title, columns, rows


def _anytime_by_network(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for group in groups:
        for k, cost in enumerate(group.costs):
            paper = f"{group.paper_top1[k]:.2f}" if group.paper_top1 else "–"
            rows.append([group.label, str(k + 1), millions(cost), with_spread(100 * group.top1()[:, k]), paper])
    return ["method", "exit", "mul-adds", "top-1 %", "paper top-1 %"], rows


def budgeted(groups: Sequence[Group], budgets: Sequence[float], prices: Sequence[float] | None = None) -> Table:
    """Accuracy at fixed budgets, by the paper's family and by searched thresholds; in mul-adds, or at other prices.

    The last column is the area under the curve between the first and the last budget, divided by their distance.
    """
    show = millions if prices is None else "{:.3g} ms".format
    low, high = min(budgets), max(budgets)
    columns = ["method", "thresholds", *(f"at {show(b)}" for b in budgets)]
    columns += [f"mean, {show(low)} to {show(high)}"] if low < high else []
    rows = []
    for group in groups:
        every = [run.curves if prices is None else run.curves_by(prices) for run in group.runs]
        for family, words in (("q", "paper's rule"), ("searched", "searched")):
            curves = [found[family] for found in every if found]
            if curves:
                at = np.array([100 * curve.at(budgets) for curve in curves])
                area = np.array([100 * c.area(low, high) if c.costs[0] <= low < high else np.nan for c in curves])
                cells = [*at.T, *([area] if low < high else [])]
                rows.append([group.label, words, *("–" if np.isnan(v).any() else with_spread(v) for v in cells)])
    unit = "mul-adds" if prices is None else "milliseconds"
    return f"Accuracy in % on the test split at fixed budgets of mean {unit} per image", columns, rows


def span(groups: Sequence[Group], prices: Sequence[float] | None = None) -> tuple[float, float]:
    """From where every curve has begun to where the most expensive policy of any ends."""
    runs = [run for group in groups for run in group.runs]
    curves = [c for r in runs for c in (r.curves if prices is None else r.curves_by(prices)).values()]
    return max(c.costs[0] for c in curves), max(c.costs[-1] for c in curves)


def nice_budgets(groups: Sequence[Group], prices: Sequence[float] | None = None) -> list[float]:
    """A few round budgets between what the cheapest and the most expensive policies cost."""
    low, high = span(groups, prices)
    if not low * 1.1 < high:
        return [high]
    spread = np.geomspace(low * 1.05, high * 0.97, BUDGETS)
    return [b for b in sorted({float(f"{b:.1e}") for b in spread}) if low <= b <= high]


def trust(groups: Sequence[Group]) -> Table:
    """How far confidence can be trusted at each exit, and what going on can lose."""
    columns = ["method", "exit", "top-5 %", "NLL", "ECE %", "AURC %", "overthinking %"]
    rows = []
    for group in groups:
        for k in range(len(group.costs)):
            nll = [r.metrics[k].nll for r in group.runs]
            shares = ([100 * getattr(r.metrics[k], key) for r in group.runs] for key in ("top5", "ece", "aurc"))
            top5, ece, aurc = map(with_spread, shares)
            undone = [100 * u for r in group.runs for u in r.overthinking.right_then_wrong[k : k + 1]]
            lost = with_spread(undone) if undone else "–"
            rows.append([group.label, str(k + 1), top5, with_spread(nll, 3), ece, aurc, lost])
    return "How far confidence can be trusted", columns, rows


def overthinking_table(groups: Sequence[Group]) -> Table:
    """What a perfect choice of exits could reach, and what going on undoes."""
    rows = []
    for group in groups:
        last = with_spread([100 * r.metrics[-1].top1 for r in group.runs])
        any_exit = with_spread([100 * r.overthinking.oracle_top1 for r in group.runs])
        undone = with_spread([100 * r.overthinking.ever for r in group.runs])
        rows.append([group.label, last, any_exit, undone])
    columns = ["method", "last exit right %", "any exit right %", "undone at the last %"]
    return "What a perfect choice of exits could reach", columns, rows


def difficulty(groups: Sequence[Group]) -> Table | None:
    """Rank correlation between an image's true difficulty and its exit, where difficulty is known."""
    rows = []
    for group in groups:
        found = []
        for run in group.runs:
            if run.policies is not None and run.test.difficulty is not None:
                policy = run.policies.at_q(0.75)
                found.append(exit_difficulty(run.predictions, policy.thresholds, run.test.difficulty))
        if found:
            rows.append([group.label, with_spread(found, 3)])
    return ("Harder images leave later", ["method", "rank correlation of difficulty and exit"], rows) if rows else None
