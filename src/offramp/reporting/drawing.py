"""How figures are made: panels drawn by small functions, as one picture for a file or one by one for the page.

Ink and grid carry marker colours; on the page they are replaced by the page's own, so that figures follow its
light or dark theme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offramp.common.files import writing

INK, FAINT = "#1b2733", "#d5dce3"  # replaced on the page by its variables
THEMED = {INK: "var(--ink)", FAINT: "var(--line)"}

STYLE: Any = {
    "font.size": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "font.family": ["DejaVu Sans"],
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "lines.linewidth": 2.0,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "figure.constrained_layout.use": True,
    "savefig.transparent": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "offramp",
}

Draw = Callable[[Axes], None]
SIZES = {
    "tall": (6.0, 6.2),
    "wide": (6.0, 5.0),
    "main": (5.0, 4.3),
    "normal": (4.6, 3.3),
    "third": (3.4, 2.7),
    "small": (2.5, 2.2),
}


@dataclass(frozen=True)
class Panels:
    """A figure: how it is to be read, one drawing function per panel, its title, and what it shows in words."""

    name: str
    caption: str
    draws: Sequence[Draw]
    size: str = "normal"
    title: str = ""
    words: str = ""


@dataclass(frozen=True)
class Frame:
    """Where a panel's data coordinates lie in its SVG: position = offset + factor * value, per axis."""

    x: tuple[float, float]
    y: tuple[float, float]


def inline(panels: Panels) -> list[str]:
    """One SVG per panel for the page, which describes them for people who cannot see them."""
    return [_svg(draw, panels)[0] for draw in panels.draws]


def inline_framed(panels: Panels) -> tuple[str, Frame]:
    """The first panel's SVG and its frame; its axes must be linear."""
    return _svg(panels.draws[0], panels)


def _svg(draw: Draw, panels: Panels) -> tuple[str, Frame]:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZES[panels.size])
        axes = figure.add_subplot()
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        frame = _frame(figure, axes)
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', _opening, svg, count=1)
    for colour, variable in THEMED.items():
        svg = svg.replace(colour, variable)
    return svg, frame


def _opening(found: re.Match[str]) -> str:
    space = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {space} {found[1]} aria-hidden="true" focusable="false">'


def _frame(figure: Figure, axes: Axes) -> Frame:
    scale = 72 / figure.dpi
    height = figure.get_figheight() * 72
    (x0, y0), (x1, y1) = axes.transData.transform([(0, 0), (1, 1)]) * scale
    return Frame((x0, x1 - x0), (height - y0, y0 - y1))


def save(panels: Panels, folder: Path) -> list[Path]:
    """All panels side by side as NAME.png and NAME.svg."""
    columns = min(len(panels.draws), 4)
    rows = -(-len(panels.draws) // columns)
    width, height = SIZES[panels.size]
    paths = []
    with mpl.rc_context({**STYLE, "savefig.transparent": False}):
        figure = Figure(figsize=(width * columns, height * rows))
        for at, draw in enumerate(panels.draws, 1):
            draw(figure.add_subplot(rows, columns, at))
        for kind in ("png", "svg"):
            paths.append(folder / f"{panels.name}.{kind}")
            with writing(paths[-1]) as file:
                metadata = {"Date": None} if kind == "svg" else None
                figure.savefig(file, format=kind, dpi=160, metadata=metadata, facecolor="white")
    return paths
