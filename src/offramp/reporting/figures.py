"""The report's figures: each function takes groups of runs and returns panels to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from offramp.measuring.metrics import reliability
from offramp.reporting.drawing import INK, Panels
from offramp.reporting.groups import Group

M = 1e6
FEW = 3  # groups whose names fit into the picture


def _legend(axes: Axes, place: Any, **options: Any) -> None:
    """A legend that may be wider than its panel: long names must not squeeze what they name."""
    axes.legend(loc=place, **options).set_in_layout(False)


def accuracy_against_cost(groups: Sequence[Group], family: str = "q") -> Panels:
    """The main figure: budgeted accuracy of every group, its exits, and the paper's where known."""
    caption = f"Accuracy on the test split against mean mul-adds per image. {marks_of_accuracy(groups, family)}"
    return Panels("accuracy", caption, [partial(draw_accuracy, groups, family)], "wide")


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


def accuracy_against_time(groups: Sequence[Group], milliseconds: Sequence[float]) -> Panels:
    """Budgeted accuracy against milliseconds, from a measured table of stage times."""
    caption = (
        "The same policies against milliseconds per image, from measured stage times of this network; mean over seeds."
    )
    return Panels("accuracy-ms", caption, [partial(_time, groups, milliseconds)], "normal")


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
    return Panels("weights", caption, [partial(_weights, samples, group.colour, k) for k in range(exits)], "small")


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
    return Panels("weights-selected", caption, draws)


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
    return Panels("calibration", caption, [partial(_reliability, groups, k) for k in range(exits)], "small")


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
    return Panels("overthinking", caption, [partial(_overthinking, groups)])


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
    return Panels("training", caption, draws)


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
