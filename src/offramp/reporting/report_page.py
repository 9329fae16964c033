"""The report's page: figures, tables and images around a budget slider, everything inside one HTML file.

Text is escaped, data travel as JSON, and a content security policy forbids the page to load anything.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Any

import numpy as np
from PIL import Image

from offramp.common.formatting import Table, is_numeric
from offramp.measuring.confidence import predicted_classes
from offramp.measuring.policy import Policies, exits_taken, outcome
from offramp.reporting.drawing import Frame, Panels, inline, inline_framed
from offramp.reporting.groups import Group, RunData

SHEET_COLUMNS = 16


@dataclass(frozen=True)
class ReportPage:
    """What goes on the page: the words on top, the figures and the tables by name."""

    title: str
    headline: str
    facts: str
    groups: Sequence[Group]
    panels: dict[str, Panels]
    tables: dict[str, Table]
    repeat: str


def render(page: ReportPage) -> str:
    """The page's HTML."""
    main, frame = inline_framed(page.panels["accuracy"])
    sections = [
        _section("Accuracy against compute", _operating(page, main)),
        _section("What easy and hard look like", _images(page)),
        _section("Every exit on everything", _table(page.tables["anytime"]) + _optional(page, "budgeted")),
        _section("What the weight net learned", _weights(page)),
        _section("Calibration and overthinking", _trust(page)),
        _section("Training", _figure(page.panels["training"], "few") if "training" in page.panels else ""),
        _section("How to repeat it", page.repeat),
    ]
    return Template(_asset("page.html")).substitute(
        title=escape(page.title),
        answer=escape(page.headline),
        facts=escape(page.facts),
        style=_asset("page.css"),
        script=_asset("page.js"),
        sections="\n".join(section for section in sections if section),
        footer="Made by <b>offramp report</b> from saved logits. This file needs nothing but a browser.",
        data=_data(page, frame),
    )


def _asset(name: str) -> str:
    return (resources.files("offramp.reporting") / name).read_text(encoding="utf-8")


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


def _card(body: str) -> str:
    return f'<div class="card">{body}</div>'


def _figure(panels: Panels, kind: str = "") -> str:
    drawn = inline(panels)
    body = "\n".join(drawn) if len(drawn) == 1 else f'<div class="panels {kind}">{"".join(drawn)}</div>'
    caption = escape(panels.caption)
    return _card(
        f'<figure class="{kind}" role="img" aria-label="{caption}">{body}<figcaption>{caption}</figcaption></figure>'
    )


CONTROLS = """
<div class="card" id="operating">
<div class="controls">
<label>Run<select id="run"></select></label>
<fieldset><legend>Thresholds</legend>
<label><input type="radio" name="family" value="q" checked> the paper's rule</label>
<label><input type="radio" name="family" value="searched"> searched</label></fieldset>
<label for="budget">Budget: <b id="budget-text"></b> mul-adds per image on average</label>
<input type="range" id="budget" min="0" max="400" step="1">
</div>
<div class="ends"><span id="low"></span><span id="high"></span></div>
<div class="numbers">
<div><b id="top1"></b><span>top-1 on test</span></div>
<div><b id="cost"></b><span>mul-adds per image</span></div>
<div><b id="saved"></b><span>compute saved</span></div>
</div>
<p class="note" id="against"></p>
<div id="exits"></div>
</div>
"""


def _operating(page: ReportPage, main: str) -> str:
    caption = escape(page.panels["accuracy"].caption)
    figure = _card(
        f'<figure id="main-figure" role="img" aria-label="{caption}">{main}<figcaption>{caption}</figcaption></figure>'
    )
    timed = _figure(page.panels["accuracy-ms"]) if "accuracy-ms" in page.panels else ""
    if not _runs_with_policies(page.groups):
        return figure + timed
    note = (
        '<p class="note">Move the budget: the policy shown is the most expensive within it on the calibration '
        "split; "
        "accuracy, cost and shares are what it gives on the test split. Lines show the paper's rule.</p>"
    )
    return f'{note}<div class="split">{figure}{CONTROLS}</div>{timed}{_optional(page, "budgeted-ms")}'


def _images(page: ReportPage) -> str:
    if _sheet_run(page.groups) is None:
        return ""
    note = (
        '<p class="note">A random handful of test images, where they leave at the budget chosen above, and whether '
        "the exit they take is right about them.</p>"
    )
    difficulty = _optional(page, "difficulty")
    return f'{note}<div class="card" id="images"></div>{difficulty}'


def _weights(page: ReportPage) -> str:
    if "weights" not in page.panels:
        return ""
    found = _figure(page.panels["weights"]) + _figure(page.panels["weights-selected"], "few")
    return found + (_figure(page.panels["weights-by-epoch"], "few") if "weights-by-epoch" in page.panels else "")


def _trust(page: ReportPage) -> str:
    trust = _table(page.tables["trust"]) + _table(page.tables["overthinking"])
    return _figure(page.panels["calibration"]) + trust + _figure(page.panels["overthinking"], "half")


def _optional(page: ReportPage, name: str) -> str:
    return _table(page.tables[name]) if name in page.tables else ""


def _table(table: Table) -> str:
    title, columns, rows = table
    texts = [not is_numeric([row[at] for row in rows]) for at in range(len(columns))]
    kinds = [' class="text"' if text else "" for text in texts]
    head = "".join(f"<th{kind}>{escape(column)}</th>" for column, kind in zip(columns, kinds, strict=True))
    body, before = [], rows[0][0] if rows else ""
    for row in rows:
        cells = "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        body.append(f"<tr{' class=begins' if row[0] != before else ''}>{cells}</tr>")
        before = row[0]
    return _card(
        f'<h3>{escape(title)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _runs_with_policies(groups: Sequence[Group]) -> list[tuple[Group, RunData]]:
    return [(group, run) for group in groups for run in group.runs if run.policies is not None]


def _sheet_run(groups: Sequence[Group]) -> RunData | None:
    """The run whose saved images are shown."""
    runs = [run for _, run in _runs_with_policies(groups) if run.test.thumbs is not None]
    return runs[0] if runs else None


def _data(page: ReportPage, frame: Frame) -> str:
    shown = _sheet_run(page.groups)
    value = {
        "classes": list(page.groups[0].first.summary.classes),
        "frame": {"x": frame.x, "y": frame.y},
        "sheet": None if shown is None else _sheet(_shown_images(shown)),
        "runs": [_run_data(group, run, shown) for group, run in _runs_with_policies(page.groups)],
    }
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _run_data(group: Group, run: RunData, shown: RunData | None) -> dict[str, Any]:
    seeds = f", seed {run.config.seed}" if len(group.runs) > 1 else ""
    same = shown is not None and _same_images(run, shown)
    return {
        "label": group.label + seeds,
        "colour": group.colour,
        "costs": run.summary.costs,
        "full_top1": run.metrics[-1].top1,
        "families": {family: _family_data(run, family, same) for family in ("searched", "q")},
        "images": _guesses(run) if same else None,
    }


def _same_images(run: RunData, shown: RunData) -> bool:
    one, other = run.test.thumb_index, shown.test.thumb_index
    return one is not None and other is not None and one.tolist() == other.tolist()


def _family_data(run: RunData, family: str, images: bool) -> list[dict[str, Any]]:
    assert run.policies is not None
    found = run.policies.family(family)
    leaves = _leaves(run, run.policies, family) if images else [""] * len(found)
    values = []
    for policy, digits in zip(found, leaves, strict=True):
        on_test = outcome(run.predictions, policy.thresholds, run.summary.costs)
        values.append(
            {
                "budget": policy.mul_adds,
                "q": policy.q,
                "thresholds": policy.to_json()["thresholds"],
                "top1": on_test.top1,
                "mul_adds": on_test.cost,
                "shares": on_test.shares,
                "leaves": digits,
            }
        )
    return values


def _sheet(images: np.ndarray) -> dict[str, Any]:
    """All images [n, h, w, 3] in one JPEG as a data URI, with its grid."""
    count, height, width, _ = images.shape
    rows = -(-count // SHEET_COLUMNS)
    canvas = np.zeros((rows * SHEET_COLUMNS, height, width, 3), np.uint8)
    canvas[:count] = images
    whole = (
        canvas.reshape(rows, SHEET_COLUMNS, height, width, 3)
        .swapaxes(1, 2)
        .reshape(rows * height, SHEET_COLUMNS * width, 3)
    )
    data = io.BytesIO()
    Image.fromarray(whole).save(data, "JPEG", quality=90, subsampling=0)
    source = "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
    return {"src": source, "columns": SHEET_COLUMNS, "rows": rows, "count": count}


def _thumb_rows(run: RunData) -> np.ndarray:
    """The rows of the saved outputs that have an image; images whose sample could not be read have none."""
    assert run.test.thumb_index is not None
    order = np.argsort(run.test.index)
    at = np.searchsorted(run.test.index, run.test.thumb_index, sorter=order)
    rows = order[np.minimum(at, len(order) - 1)]
    return rows[run.test.index[rows] == run.test.thumb_index]


def _shown_images(run: RunData) -> np.ndarray:
    """The images that belong to `_thumb_rows`."""
    assert run.test.thumbs is not None and run.test.thumb_index is not None
    return run.test.thumbs[np.isin(run.test.thumb_index, run.test.index)]


def _guesses(run: RunData) -> dict[str, Any]:
    """What is shown of each image: its class, and what every exit says."""
    rows = _thumb_rows(run)
    return {
        "labels": run.test.labels[rows].tolist(),
        "guesses": predicted_classes(run.test.logits[:, rows]).tolist(),
    }


def _leaves(run: RunData, policies: Policies, family: str) -> list[str]:
    """For each policy of a family one digit per image: the exit it takes (exit 10 is `a`)."""
    own = run.predictions.confidences[:, _thumb_rows(run)]
    digits = np.array(list(" 123456789abcdefghijklmnopqrstuvwxyz"))
    return ["".join(digits[exits_taken(own, policy.thresholds)]) for policy in policies.family(family)]
