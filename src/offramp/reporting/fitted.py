"""What `offramp fit` tried, as its report shows it: `fit.json` goes in, a chart of families and its table come out.

Families are single networks at some sizes, cascades and exits. Their points come from held-out images; the chosen one
is what ships.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from offramp.common.files import read_json
from offramp.common.formatting import Table, millions
from offramp.measuring.intervals import Interval, proportion_interval
from offramp.measuring.sentences import fewer_right
from offramp.reporting.drawing import INK, Panels
from offramp.reporting.headline import percent_range

FIT = "fit.json"
ABOVE = 3  # folders above a run in which fit.json may lie
SCHEMA = 1
LOOKS = {
    "single": ("#7c8a98", "s", "one network"),
    "cascade": ("#2a8f6d", "^", "cascade"),
    "exits": ("#d9601a", "o", "exits"),
}


@dataclass(frozen=True)
class Point:
    """An operating point on held-out images: what it costs, how often it is right, its 95 % interval."""

    mul_adds: float
    ms: float | None
    top1: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Family:
    """Operating points of one thing that was trained, cheapest first."""

    family: str
    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Fit:
    """What is read of `fit.json`."""

    folder: str
    sentence: str
    asked: str
    unit: str
    families: tuple[Family, ...]
    chosen: tuple[int, int]  # the family's and the point's place
    chosen_run: Path
    reference: Mapping[str, Any] | None
    test: Mapping[str, Any]
    warnings: tuple[str, ...]
    held_out: int | None = None  # images that were chosen on
    drop: tuple[float, Interval] | None = None  # lost against the single network there, in points
    certified_on: int | None = None  # images that certify a promise; the drop is on these
    folds: int = 0  # by which the held-out images were judged; 0: by networks that ship

    @property
    def point(self) -> Point:
        return self.families[self.chosen[0]].points[self.chosen[1]]


def find_fit(runs: Iterable[Path]) -> Fit | None:
    """The `fit.json` in or above the folder of a run, if that is the one it chose."""
    for run in runs:
        whole = run.resolve()
        for folder in (whole, *list(whole.parents)[:ABOVE]):
            found = read_fit(folder / FIT) if (folder / FIT).is_file() else None
            if found is not None and found.chosen_run.resolve() == whole:
                return found
    return None


def read_fit(path: Path) -> Fit:
    """Read it; what does not belong there is a sentence."""
    value = read_json(path)
    try:
        if value["schema"] != SCHEMA:
            raise ValueError(f"{path}: schema {value['schema']!r} is not known to this version of offramp")
        families = tuple(_family(one) for one in value["families"])
        chosen = value["chosen"]
        names = [(one.family, one.name) for one in families]
        if (chosen["family"], chosen["name"]) not in names or not all(one.points for one in families):
            raise ValueError(f"{path}: what was chosen is not among what was tried, or has no points")
        at = names.index((chosen["family"], chosen["name"])), int(chosen["point"])
        found = Fit(
            str(value["folder"]),
            str(value["sentence"]),
            str(value["asked"]),
            str(value["unit"]),
            families,
            at,
            path.parent / str(chosen["run"]),
            value.get("reference"),
            value.get("test", {}),
            tuple(map(str, value.get("warnings", ()))),
            value.get("held_out", {}).get("samples"),
            _drop(value.get("drop")),
            (value.get("drop") or {}).get("certified_on"),
            int(value.get("held_out", {}).get("folds", 0)),
        )
        _ = found.point
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is not what `offramp fit` writes; run it again") from error
    return found


def _drop(value: Mapping[str, Any] | None) -> tuple[float, Interval] | None:
    return (
        None if value is None else (float(value["points"]), (float(value["interval"][0]), float(value["interval"][1])))
    )


def _family(value: Mapping[str, Any]) -> Family:
    points = [
        Point(
            float(p["mul_adds"]),
            None if p["ms"] is None else float(p["ms"]),
            float(p["top1"]),
            (float(p["interval"][0]), float(p["interval"][1])),
        )
        for p in value["points"]
    ]
    return Family(str(value["family"]), str(value["name"]), tuple(points))


def _in_ms(fit: Fit) -> bool:
    return fit.unit == "ms" and all(point.ms is not None for family in fit.families for point in family.points)


def families_chart(fit: Fit) -> Panels:
    """The best of each kind of network against what it costs, with the chosen point marked."""
    unit = "milliseconds" if _in_ms(fit) else "mul-adds"
    caption = (
        f"Accuracy on held-out images against {unit} per image: for each kind of network the best at every cost, and "
        "faintly everything else; what lies lower is in the table. Bars are 95 % intervals. The ring marks what was "
        f"chosen. Asked for: {fit.asked}."
    )
    kinds = dict.fromkeys(family.family for family in fit.families)
    words = " ".join([f"{len(fit.families)} networks were tried.", *(_words(fit, kind) for kind in kinds)])
    title = f"What was tried on {fit.folder}"
    return Panels("families", caption, [partial(_draw, fit)], "main", title, f"{words} {_chosen_words(fit)}")


Named = tuple[str, Point]  # a point, and the name of the network that it is of


def _of_kind(fit: Fit, kind: str) -> list[Named]:
    """All points of a kind of network, cheapest first."""
    found = [(one.name, point) for one in fit.families if one.family == kind for point in one.points]
    return sorted(found, key=lambda named: _price(fit, named[1]))


def _best(named: Sequence[Named]) -> list[Named]:
    """Of points, cheapest first, those that are better than all that cost less."""
    found: list[Named] = []
    for name, point in named:
        if not found or point.top1 > found[-1][1].top1:
            found.append((name, point))
    return found


def _words(fit: Fit, kind: str) -> str:
    """The cheapest and the best of a kind."""
    (_, first), *_, (_, last) = 2 * _best(_of_kind(fit, kind))
    start = f"{_look(kind)[2]}: {_accuracy(first)} at {millions(first.mul_adds)}"
    return f"{start}." if first is last else f"{start} to {_accuracy(last)} at {millions(last.mul_adds)}."


def _accuracy(point: Point) -> str:
    """92.1 % (89.9 to 94.0 %)."""
    return f"{100 * point.top1:.1f} % ({percent_range(point.interval)})"


def _chosen_words(fit: Fit) -> str:
    family, point = fit.families[fit.chosen[0]], fit.point
    time = "" if point.ms is None else f", {point.ms:.3g} ms"
    return f"Chosen: {family.name}, {_accuracy(point)} at {millions(point.mul_adds)} mul-adds{time} per image."


def _price(fit: Fit, point: Point) -> float:
    return point.ms if _in_ms(fit) and point.ms is not None else point.mul_adds / 1e6


def _look(kind: str) -> tuple[str, str, str]:
    """Colour, mark and name of a kind of network."""
    return LOOKS.get(kind, (INK, "o", kind))


def _draw(fit: Fit, axes: Axes) -> None:
    for kind in dict.fromkeys(family.family for family in fit.families):
        colour, mark, words = _look(kind)
        every = _of_kind(fit, kind)
        best = _best(every)
        axes.plot(*_places(fit, every), ".", color=colour, alpha=0.18, markersize=5)
        line = "--" if kind == "single" else "-"
        axes.plot(*_places(fit, best), f"{mark}{line}", color=colour, label=words, linewidth=1.6, markersize=5)
        if kind == "single":
            _bars(fit, [point for _, point in best], colour, axes)
            for (name, _), at in zip(best, zip(*_places(fit, best), strict=True), strict=True):
                axes.annotate(name, at, xytext=(5, -11), textcoords="offset points", fontsize=8, color=INK)
    _bars(fit, [fit.point], INK, axes)
    ring: Any = {"markersize": 15, "markerfacecolor": "none", "markeredgewidth": 2.2, "color": INK, "linestyle": ""}
    axes.plot(_price(fit, fit.point), 100 * fit.point.top1, "o", label="chosen", **ring)
    axes.set_xlabel("milliseconds per image" if _in_ms(fit) else "mul-adds per image, millions")
    axes.set_ylabel("top-1 on held-out images, %")
    axes.set_ylim(*_shown(fit))
    axes.margins(x=0.1)
    axes.legend(loc="lower right").set_in_layout(False)


def _places(fit: Fit, named: Sequence[Named]) -> tuple[list[float], list[float]]:
    return [_price(fit, point) for _, point in named], [100 * point.top1 for _, point in named]


def _bars(fit: Fit, points: Sequence[Point], colour: str, axes: Axes) -> None:
    """95 % intervals."""
    reach = [[100 * max(0.0, end) for end in (p.top1 - p.interval[0], p.interval[1] - p.top1)] for p in points]
    prices, top1 = [_price(fit, p) for p in points], [100 * p.top1 for p in points]
    down, up = zip(*reach, strict=True)
    axes.errorbar(prices, top1, [down, up], fmt="none", ecolor=colour, elinewidth=0.8, capsize=2, alpha=0.7)


def _shown(fit: Fit) -> tuple[float, float]:
    """From below the cheapest of the best single networks, and what was chosen, to above everything."""
    singles = [point for _, point in _best(_of_kind(fit, "single"))] or [fit.point]
    low = min(fit.point.interval[0], *(point.interval[0] for point in singles))
    high = max(point.top1 for family in fit.families for point in family.points)
    high = max(high, fit.point.interval[1], *(point.interval[1] for point in singles))
    room = 0.08 * (high - low) + 0.005
    return 100 * (low - 4 * room), 100 * (high + room)


def drop_sentence(fit: Fit) -> str | None:
    """What was lost against the single network where the choice was made, if it is another."""
    if fit.drop is None or fit.held_out is None or fit.drop[1] == (0.0, 0.0):
        return None
    than = f"it has {fewer_right(*fit.drop)} than the single network"
    if fit.certified_on is not None:
        return f"On the {fit.certified_on:,} held-out images that certify the promise, {than}."
    folds = f" by {fit.folds}-fold cross-validation" if fit.folds else ""
    return (
        f"An estimate{folds}, from the {fit.held_out:,} held-out images that it was chosen on: {than}; the interval "
        "allows for the choice."
    )


def tested_table(fit: Fit) -> Table | None:
    """What ships beside the single network, on test images: accuracy with its interval, cost and time."""
    try:
        samples, reference = int(fit.test["samples"]), fit.reference or {}
        whole = {key: float(reference[key]) for key in ("top1", "mul_adds", "ms")}
        ours = {key: float(fit.test[key]) for key in ("top1", "mul_adds", "ms")}
        name = str(reference["name"])
    except KeyError:  # written by an earlier version
        return None
    family = fit.families[fit.chosen[0]]
    lost = "–" if "drop" not in fit.test else _against(float(fit.test["drop"]), fit.test["drop_interval"])
    rows = [(family.name, ours, lost), (name, whole, "–")] if name != family.name else [(name, ours, "–")]
    cells = [
        [
            own,
            f"{100 * seen['top1']:.1f}",
            percent_range(proportion_interval(round(seen["top1"] * samples), samples)),
            against,
            millions(seen["mul_adds"]),
            f"{100 * seen['mul_adds'] / whole['mul_adds']:.0f}",
            f"{seen['ms']:.3g}",
            f"{whole['ms'] / seen['ms']:.2f}",
        ]
        for own, seen, against in rows
    ]
    columns = ["network", "top-1 %", "95 % interval", "difference, points (95 %)"]
    columns += ["mul-adds", "mul-adds, %", "ms", "times as fast"]
    return f"What ships, beside the single network: {samples:,} test images", columns, cells


def _against(drop: float, interval: Interval) -> str:
    """What is right more often than by the single network: -1.00 (-2.40 to +0.40)."""
    return f"{0 - drop:+.2f} ({0 - interval[1]:+.2f} to {0 - interval[0]:+.2f})"  # of nothing -x would be -0.00


def families_table(fit: Fit) -> Table:
    """Every point in words."""
    rows = []
    for at, family in enumerate(fit.families):
        for number, point in enumerate(family.points):
            rows.append(
                [
                    _look(family.family)[2],
                    family.name,
                    millions(point.mul_adds),
                    "–" if point.ms is None else f"{point.ms:.3g}",
                    f"{100 * point.top1:.1f}",
                    f"{100 * point.interval[0]:.1f} to {100 * point.interval[1]:.1f}",
                    "chosen" if (at, number) == fit.chosen else "",
                ]
            )
    columns = ["family", "name", "mul-adds", "ms", "top-1 %", "95 % interval", ""]
    return "Everything that was tried, on held-out images", columns, rows
