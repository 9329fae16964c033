"""The report's figures: each function takes groups of runs and returns panels to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from offramp.common.formatting import millions
from offramp.measuring.metrics import rank_correlation, reliability
from offramp.reporting.drawing import INK, Panels
from offramp.reporting.groups import Group
from offramp.reporting.shipped import Shipped, StageTimes

M = 1e6
FEW = 3  # groups whose names fit into the picture


def _legend(axes: Axes, place: Any, **options: Any) -> None:
    """A legend that may be wider than its panel: long names must not squeeze what they name."""
    axes.legend(loc=place, **options).set_in_layout(False)


def accuracy_against_cost(groups: Sequence[Group], family: str = "q", shipped: Shipped | None = None) -> Panels:
    """The main figure: budgeted accuracy of every group, its exits, and the paper's where known."""
    ships = shipped is not None and shipped.chosen
    mark = " Diamond: the policy that ships." if ships else ""
    caption = f"Accuracy on the test split against mean mul-adds per image. {marks_of_accuracy(groups, family)}{mark}"
    draw = partial(_with_policy, groups, family, shipped if ships else None)
    words = " ".join(_in_words(group, group.curve(family)) for group in groups)
    return Panels("accuracy", caption, [draw], "main", "Accuracy against compute", words)


def _with_policy(groups: Sequence[Group], family: str, shipped: Shipped | None, axes: Axes) -> None:
    draw_accuracy(groups, family, axes)
    if shipped is not None:
        look: Any = {"color": shipped.group.colour, "markeredgecolor": INK, "linestyle": "", "zorder": 5}
        axes.plot(shipped.cost / M, 100 * shipped.top1, "D", markersize=9, label="ships", **look)
        _legend(axes, "lower right")


def _in_words(group: Group, found: tuple[np.ndarray, np.ndarray] | None, ms: bool = False) -> str:
    """Where a line begins, passes and ends; without a line, what the exits have."""
    if found is None:
        top1 = 100 * group.top1().mean(0)
        said = (f"{value:.1f} % at {millions(cost)}" for cost, value in zip(group.costs, top1, strict=True))
        return f"{group.label}: every image at one exit, {', '.join(said)}."
    grid, means = found[0], 100 * found[1].mean(0)
    show = "{:.3g} ms".format if ms else millions
    said = (f"{means[at]:.1f} % at {show(grid[at])}" for at in (0, len(grid) // 2, len(grid) - 1))
    return f"{group.label}: {', '.join(said)}."


def marks_of_accuracy(groups: Sequence[Group], family: str) -> str:
    """What the marks that `draw_accuracy` makes mean; nothing of those that are not there."""
    lines = [found for group in groups if (found := group.curve(family)) is not None]
    rule = "paper's rule" if family == "q" else "searched thresholds"
    said = {
        f"Lines: images leave at their exit by the {rule}, thresholds from the calibration split.": lines,
        "Bands: one standard deviation over seeds.": any(len(each) > 1 for _, each in lines),
        "Rings: each exit used for all images.": groups,
        "Crosses: the exits in the paper, after its full training.": any(group.paper_top1 for group in groups),
    }
    return " ".join(words for words, there in said.items() if there)


def draw_accuracy(groups: Sequence[Group], family: str, axes: Axes) -> None:
    """Lines of budgeted accuracy with their spread, rings at the exits, crosses at the paper's."""
    known = []  # the paper's rows that were drawn
    for group in groups:
        top1 = 100 * group.top1().mean(0)
        costs = np.array(group.costs) / M
        found = group.curve(family)
        if found is not None:
            grid, each = found[0] / M, 100 * found[1]
            axes.plot(grid, each.mean(0), color=group.colour, label=group.label)
            if len(each) > 1:
                spread = each.std(0, ddof=1)
                band = (each.mean(0) - spread, each.mean(0) + spread)
                axes.fill_between(grid, *band, color=group.colour, alpha=0.18, linewidth=0)
        label = None if found is not None else group.label
        axes.plot(costs, top1, "o", color=group.colour, markerfacecolor="none", markeredgewidth=1.6, label=label)
        if group.paper_top1 and group.paper_top1 not in known:
            axes.plot(costs, group.paper_top1, "x", color=group.colour, alpha=0.55, markersize=6)
            known.append(group.paper_top1)
    axes.plot([], [], "o", color=INK, markerfacecolor="none", markeredgewidth=1.6, label="one exit for all images")
    if known:
        axes.plot([], [], "x", color=INK, markersize=6, label="the paper's")
    axes.set_xlabel("mean mul-adds per image, millions")
    axes.set_ylabel("top-1, %")
    if len(groups) > FEW:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)  # above, where it hides nothing
    else:
        _legend(axes, "lower right")


def accuracy_against_time(groups: Sequence[Group], times: StageTimes) -> Panels | None:
    """Budgeted accuracy against milliseconds, from a measured table of stage times; None without inner exits."""
    caption = f"The same policies against milliseconds per image; mean over seeds; {times.about}."
    words = " ".join(_in_words(g, found, True) for g in groups if (found := g.curve("searched", times.milliseconds)))
    if not words:
        return None
    draws = [partial(_time, groups, times.milliseconds)]
    return Panels("accuracy-ms", caption, draws, "normal", "Accuracy against milliseconds", words)


def _time(groups: Sequence[Group], milliseconds: Sequence[float], axes: Axes) -> None:
    for group in groups:
        for family, dashes, words in (("q", "-", ""), ("searched", "--", ", searched")):
            found = group.curve(family, milliseconds)
            if found is not None:
                label = group.label + words
                axes.plot(found[0], 100 * found[1].mean(0), dashes, color=group.colour, linewidth=1.6, label=label)
    axes.set_xlabel("mean milliseconds per image")
    axes.set_ylabel("top-1, %")
    _legend(axes, "lower right")


def weight_against_loss(group: Group) -> Panels | None:
    """What the weight net learned: one panel per exit, samples by the exit they are allocated to."""
    samples = group.first.samples
    if samples is None:
        return None
    caption = (
        f"Weight of training samples against their loss, one panel per exit, in the last epoch of training "
        f"({group.label}, seed {group.first.config.seed}). In colour: samples that would leave at that exit."
    )
    exits = samples["weights"].shape[1]
    draws = [partial(_weights, samples, group.colour, k) for k in range(exits)]
    said = (f"exit {k + 1}: {_trend(samples['losses'][:, k], samples['weights'][:, k])}" for k in range(exits))
    words = f"Rank correlation of loss and weight: {', '.join(said)}."
    return Panels("weights", caption, draws, "small", "Weights against losses", words)


def _trend(losses: np.ndarray, weights: np.ndarray) -> str:
    return f"{rank_correlation(losses, weights):+.2f}"


def _weights(samples: dict[str, np.ndarray], colour: str, k: int, axes: Axes) -> None:
    own = samples["exits"] == k + 1
    losses, weights = samples["losses"][:, k], samples["weights"][:, k]
    axes.scatter(losses[~own], weights[~own], s=7, color="#9aa7b4", alpha=0.55, linewidths=0, label="others")
    axes.scatter(losses[own], weights[own], s=11, color=colour, alpha=0.9, linewidths=0, label="leave here")
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_title(f"exit {k + 1}")
    if k == 0:
        _legend(axes, "best", fontsize=7, markerscale=1.5)
    axes.set_xlabel("loss")
    axes.set_ylabel("weight")


def selected_weights(group: Group) -> Panels | None:
    """The weights, at every exit, of samples that exit 1 selects and of those it does not."""
    samples = group.first.samples
    if samples is None:
        return None
    caption = (
        "Training samples that would leave at exit 1 and all others: the weights that exit 1 gives them, and their "
        "mean weight at every exit, with its standard error."
    )
    draws = [partial(_first_exit, samples, group.colour), partial(_selected, samples, group.colour)]
    first = samples["exits"] == 1
    said = [
        f"{kind}: {', '.join(f'{weight:.2f}' for weight in samples['weights'][own].mean(0))}"
        for kind, own in (("samples that leave at exit 1", first), ("others", ~first))
        if own.any()
    ]
    words = f"Mean weights from exit to exit; {'; '.join(said)}."
    return Panels("weights-selected", caption, draws, title="Who the first exit favours", words=words)


def _first_exit(samples: dict[str, np.ndarray], colour: str, axes: Axes) -> None:
    first, weights = samples["exits"] == 1, samples["weights"][:, 0]
    bins = np.linspace(weights.min() - 1e-6, weights.max() + 1e-6, 24).tolist()
    axes.hist(weights[first], bins, color=colour, alpha=0.85, label="leave at exit 1")
    axes.hist(weights[~first], bins, color="#9aa7b4", alpha=0.6, label="go on")
    axes.set_xlabel("weight at exit 1")
    axes.set_ylabel("samples")
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.22)
    _legend(axes, "upper left", ncols=2)


def _selected(samples: dict[str, np.ndarray], colour: str, axes: Axes) -> None:
    first = samples["exits"] == 1
    exits = np.arange(1, samples["weights"].shape[1] + 1)
    for chosen, label, shade, shift in ((first, "leave at exit 1", colour, -0.2), (~first, "go on", "#9aa7b4", 0.2)):
        if chosen.any():
            own = samples["weights"][chosen]
            error = own.std(0) / np.sqrt(len(own))
            bars = {"ecolor": INK, "elinewidth": 1, "capsize": 2}
            axes.bar(exits + shift, own.mean(0), 0.38, color=shade, yerr=error, label=label, error_kw=bars)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xticks(exits)
    axes.set_xlabel("exit")
    axes.set_ylabel("mean weight")
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.22)
    _legend(axes, "upper left", ncols=2)


def reliability_per_exit(groups: Sequence[Group]) -> Panels:
    """How far each exit's confidence can be trusted."""
    caption = (
        "Accuracy of test images against the exit's confidence (max softmax), in bins; on the dotted line confidence "
        "is what it says, below it the exit is too sure of itself. One seed each, without bins of fewer than ten."
    )
    exits = max(len(group.costs) for group in groups)
    draws = [partial(_reliability, groups, k) for k in range(exits)]
    said = (f"{g.label}: {', '.join(f'{100 * m.ece:.1f} %' for m in g.first.metrics)}" for g in groups)
    words = f"Mean gap between confidence and accuracy, exit by exit; {'; '.join(said)}."
    return Panels("calibration", caption, draws, "small", "What confidence is worth", words)


def _reliability(groups: Sequence[Group], k: int, axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], ":", color=INK, linewidth=0.8)
    for group in groups:
        if k < len(group.costs):
            given = group.first.plain
            counts, sure, hits = reliability(given.confidences[k], given.right[k], 10)
            shown = counts >= 10
            axes.plot(
                sure[shown], hits[shown], "o-", color=group.colour, markersize=3, linewidth=1.5, label=group.label
            )
    axes.set_title(f"exit {k + 1}")
    if k == 0:
        _legend(axes, "upper left", fontsize=7)
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("confidence")
    axes.set_ylabel("accuracy")


def overthinking_per_exit(groups: Sequence[Group]) -> Panels:
    """Right early, wrong at the end."""
    caption = "Test images that an exit answers right and the last exit wrong: what going on can lose."
    said = []
    for group in groups:
        lost = np.array([run.overthinking.right_then_wrong for run in group.runs]).mean(0)
        said.append(f"{group.label}: {', '.join(f'{100 * share:.1f} %' for share in lost) or 'one exit only'}")
    words = f"Shares from exit to exit; {'; '.join(said)}."
    return Panels(
        "overthinking", caption, [partial(_overthinking, groups)], "normal", "Right early, wrong at the end", words
    )


def _overthinking(groups: Sequence[Group], axes: Axes) -> None:
    width = 0.8 / len(groups)
    most = 1
    for at, group in enumerate(groups):
        lost = 100 * np.array([run.overthinking.right_then_wrong for run in group.runs])
        exits = np.arange(1, lost.shape[1] + 1)
        place = exits + (at - (len(groups) - 1) / 2) * width
        error = lost.std(0, ddof=1) if len(lost) > 1 else None
        bars = {"ecolor": INK, "elinewidth": 1, "capsize": 2}
        axes.bar(place, lost.mean(0), width * 0.94, color=group.colour, label=group.label, yerr=error, error_kw=bars)
        most = max(most, len(exits))
    axes.set_xticks(np.arange(1, most + 1))
    axes.set_xlabel("exit")
    axes.set_ylabel("right here, wrong at the end, %")
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.22)
    _legend(axes, "upper left", ncols=2)


def training_curves(groups: Sequence[Group]) -> Panels | None:
    """Loss and calibration accuracy by epoch."""
    draws = []
    if any(row.get("train_loss") for group in groups for row in group.first.log):
        draws.append(partial(_training, groups, "train_loss", "training loss, mean of exits", 1.0))
    if any(row.get("calibration_top1") for group in groups for row in group.first.log):
        for exit_at, words in ((0, "first exit"), (-1, "last exit")):
            title = f"top-1 on calibration, {words}, %"
            draws.append(partial(_training, groups, "calibration_top1", title, 100.0, exit_at=exit_at))
    if not draws:
        return None
    caption = "Training, by epoch: mean over seeds, thin lines are the seeds."
    said = []
    for group in groups:
        rows = [row["calibration_top1"] for row in group.first.log if row.get("calibration_top1")]
        if rows:
            said.append(f"{group.label} ends at {', '.join(f'{100 * top1:.1f} %' for top1 in rows[-1])}")
    words = f"Top-1 on calibration after the last epoch, exit by exit: {'; '.join(said)}." if said else caption
    return Panels("training", caption, draws, title="Loss and accuracy by epoch", words=words)


def _training(
    groups: Sequence[Group], key: str, title: str, factor: float, axes: Axes, exit_at: int | None = None
) -> None:
    for group in groups:
        logs = []
        for run in group.runs:
            rows = [row for row in run.log if row.get(key)]
            values = [np.mean(row[key]) if exit_at is None else row[key][exit_at] for row in rows]
            logs.append(([row["epoch"] for row in rows], factor * np.array(values)))
        for epochs, line in logs if len(logs) > 1 else []:
            axes.plot(epochs, line, color=group.colour, linewidth=0.7, alpha=0.45)
        if len({tuple(epochs) for epochs, _ in logs}) == 1 and logs[0][0]:
            mark = "o" if len(logs[0][0]) == 1 else None  # of one point there is no line
            axes.plot(logs[0][0], np.mean([v for _, v in logs], 0), marker=mark, color=group.colour, label=group.label)
    axes.set_title(title)
    axes.set_xlabel("epoch")
    axes.set_xlim(min(axes.get_xlim()[0], 0.5), max(axes.get_xlim()[1], 1.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if axes.get_legend_handles_labels()[0]:
        _legend(axes, "best")
