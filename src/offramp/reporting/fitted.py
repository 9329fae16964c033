"""What `offramp fit` tried, as its report shows it: `fit.json` goes in, a chart of families and its table come out.

Families are single networks at some sizes, cascades and exits. Their points come from held-out images; the chosen one
is what ships.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from offramp.common.files import read_json
from offramp.common.formatting import Table, millions
from offramp.reporting.drawing import INK, Panels

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
    warnings: tuple[str, ...]

    @property
    def point(self) -> Point:
        return self.families[self.chosen[0]].points[self.chosen[1]]


def find_fit(runs: Iterable[Path]) -> Fit | None:
    """The `fit.json` in or above the folder of a run, if there is one."""
    for run in runs:
        whole = run.resolve()
        for folder in (whole, *list(whole.parents)[:ABOVE]):
            if (folder / FIT).is_file():
                return read_fit(folder / FIT)
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
            tuple(map(str, value.get("warnings", ()))),
        )
        _ = found.point
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is not what `offramp fit` writes; run it again") from error
    return found


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
    """All families against what they cost, with the chosen point marked."""
    unit = "milliseconds" if _in_ms(fit) else "mul-adds"
    caption = (
        f"Accuracy on held-out images against {unit} per image; bars are 95 % intervals. The ring marks what was "
        f"chosen. Asked for: {fit.asked}."
    )
    words = f"{len(fit.families)} things were tried. {' '.join(map(_words, fit.families))} {_chosen_words(fit)}"
    return Panels("families", caption, [partial(_draw, fit)], "main", f"What was tried on {fit.folder}", words)


def _words(family: Family) -> str:
    first, last = family.points[0], family.points[-1]
    start = f"{family.name}: {100 * first.top1:.1f} % at {millions(first.mul_adds)}"
    return (
        f"{start}." if len(family.points) == 1 else f"{start} to {100 * last.top1:.1f} % at {millions(last.mul_adds)}."
    )


def _chosen_words(fit: Fit) -> str:
    family, point = fit.families[fit.chosen[0]], fit.point
    time = "" if point.ms is None else f", {point.ms:.3g} ms"
    return f"Chosen: {family.name}, {100 * point.top1:.1f} % at {millions(point.mul_adds)} mul-adds{time} per image."


def _price(fit: Fit, point: Point) -> float:
    return point.ms if _in_ms(fit) and point.ms is not None else point.mul_adds / 1e6


def _draw(fit: Fit, axes: Axes) -> None:
    said: set[str] = set()
    for family in fit.families:
        colour, mark, words = LOOKS.get(family.family, (INK, "o", family.family))
        prices = [_price(fit, point) for point in family.points]
        top1 = [100 * point.top1 for point in family.points]
        reach = [
            [100 * max(0.0, p.top1 - p.interval[0]) for p in family.points],
            [100 * max(0.0, p.interval[1] - p.top1) for p in family.points],
        ]
        label = words if words not in said else None
        said.add(words)
        line = "-" if len(prices) > 1 else ""
        options: Any = {"color": colour, "linewidth": 1.6, "elinewidth": 0.8, "capsize": 2, "alpha": 0.9}
        axes.errorbar(prices, top1, reach, fmt=f"{mark}{line}", label=label, **options)
    at = _price(fit, fit.point), 100 * fit.point.top1
    ring: Any = {"markersize": 15, "markerfacecolor": "none", "markeredgewidth": 2.2, "color": INK, "linestyle": ""}
    axes.plot(*at, "o", label="chosen", **ring)
    axes.set_xlabel("milliseconds per image" if _in_ms(fit) else "mul-adds per image, millions")
    axes.set_ylabel("top-1 on held-out images, %")
    axes.legend(loc="lower right").set_in_layout(False)


def families_table(fit: Fit) -> Table:
    """Every point in words."""
    rows = []
    for at, family in enumerate(fit.families):
        for number, point in enumerate(family.points):
            rows.append(
                [
                    LOOKS.get(family.family, ("", "", family.family))[2],
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
