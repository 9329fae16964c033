"""The report's page: what ships first, then figures, tables and images around a budget slider, all in one HTML file.

What people who use a network want stands open; what only a researcher wants is folded away. Text is escaped, data
travel as JSON, and a content security policy forbids the page to load anything.
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

from offramp.common.formatting import Table
from offramp.measuring.confidence import predicted_classes
from offramp.measuring.intervals import proportion_interval
from offramp.measuring.policy import Policy, exits_taken, outcome
from offramp.reporting import page_parts as parts
from offramp.reporting.drawing import Frame, Panels, inline_framed
from offramp.reporting.groups import Group, RunData
from offramp.reporting.shipped import (
    Shipped,
    StageTimes,
    hardest_images,
    shown_family,
    shown_thumbs,
    thumb_rows,
)

SHEET_COLUMNS = 16


@dataclass(frozen=True)
class ReportPage:
    """What goes on the page: the words on top, the policy it opens on, the figures and the tables by name."""

    title: str
    answer: str
    more: Sequence[str]  # further sentences under the answer
    facts: str
    groups: Sequence[Group]
    shipped: Shipped | None
    times: StageTimes | None
    panels: dict[str, Panels]
    tables: dict[str, Table]
    repeat: str


def render(page: ReportPage) -> str:
    """The page's HTML."""
    main, frame = inline_framed(page.panels["accuracy"])
    ships = page.shipped is not None and page.shipped.chosen
    sections = [
        parts.section("What was tried, and what was chosen", _families(page)),
        parts.section("What ships" if ships else "What leaving early brings", _operating(page, main)),
        parts.section("Mistakes", _mistakes(page)),
        parts.section("The hardest images", _hardest(page)),
        parts.section("Classes that lose from leaving early", _losing(page)),
        parts.section("What easy and hard look like", _images(page)),
        parts.section(
            "Every exit, and other budgets", _tables(page, "anytime", "budgeted", "budgeted-ms") + _timed(page)
        ),
        parts.section("For researchers", _folds(page)),
    ]
    return Template(_asset("page.html")).substitute(
        title=escape(page.title),
        answer=escape(page.answer),
        more="\n".join(f'<p class="more">{escape(sentence)}</p>' for sentence in page.more),
        facts=escape(page.facts),
        style=_asset("page.css"),
        script=_asset("page.js"),
        sections="\n".join(section for section in sections if section),
        footer="Made by <b>offramp report</b> from saved logits. This file needs nothing but a browser.",
        data=_data(page, frame),
    )


def _asset(name: str) -> str:
    return (resources.files("offramp.reporting") / name).read_text(encoding="utf-8")


def _families(page: ReportPage) -> str:
    if "families" not in page.panels:
        return ""
    return parts.figure(page.panels["families"]) + parts.fold("All numbers", _tables(page, "families"))


CONTROLS = """
<div class="card" id="operating">
<h3>Try other budgets</h3>
<div class="controls">
<label>Run<select id="run"></select></label>
<fieldset><legend>Thresholds</legend>
<label><input type="radio" name="family" value="searched"$searched> searched</label>
<label><input type="radio" name="family" value="q"$q> the paper's rule</label></fieldset>
<label for="budget">Budget: <b id="budget-text"></b> per image on average</label>
<input type="range" id="budget" min="0" max="400" step="1">
</div>
<div class="ends"><span id="low"></span><span id="high"></span></div>
<p class="pinned"><span id="which"></span> <button type="button" id="back" hidden>back to it</button></p>
<div class="numbers">
<div><b id="top1"></b><span>top-1 on test<br><i id="interval"></i></span></div>
<div><b id="cost"></b><span>mul-adds per image<br><i id="saved"></i></span></div>
<div id="timed" hidden><b id="ms"></b><span>per image<br><i id="faster"></i></span></div>
</div>
<p class="note" id="against"></p>
<div id="exits"></div>
<p class="unseen" role="status" id="said"></p>
</div>
"""


def _operating(page: ReportPage, main: str) -> str:
    figure = parts.figure(page.panels["accuracy"], drawn=[main])
    if page.shipped is None:
        return figure
    family = shown_family(page.shipped)
    checked = {name: " checked" if name == family else "" for name in ("searched", "q")}
    text = (
        "Opens on the policy that ships, marked with a diamond. "
        if page.shipped.chosen
        else "No policy was chosen yet (offramp calibrate does); it opens on one that loses at most half a point on "
        "the calibration split. "
    )
    text += (
        "Move the budget: the policy shown is the most expensive within it on the calibration split; accuracy, cost "
        "and shares are what it gives on the test split."
    )
    tables = _tables(page, "shipped", "leaving")
    controls = Template(CONTROLS).substitute(checked)
    return f'{tables}{parts.note(text)}<div class="split">{figure}{controls}</div>'


def _mistakes(page: ReportPage) -> str:
    if page.shipped is None:
        return ""
    return f'<div class="split">{parts.matrix(page.shipped)}{_tables(page, "mistakes")}</div>'


def _hardest(page: ReportPage) -> str:
    found = [] if page.shipped is None else hardest_images(page.shipped)
    if page.shipped is None or not found:
        return ""
    kept = len(thumb_rows(page.shipped.run))
    text = (
        f"Of {kept:,} test images that were kept for this page, those whose own class gets the least probability in "
        "the mean over exits, with what each exit said."
    )
    return parts.note(text) + parts.hardest(page.shipped, found)


def _losing(page: ReportPage) -> str:
    if page.shipped is None:
        return ""
    if "losing" not in page.tables:
        return parts.note("None: leaving early takes right answers from no class, on the whole.")
    text = (
        "Points of accuracy that a class loses against the last exit. An interval that holds 0 may be chance; with few "
        "images of a class it is wide."
    )
    return parts.note(text) + _tables(page, "losing")


def _images(page: ReportPage) -> str:
    if _sheet_run(page.groups) is None:
        return ""
    text = (
        "A random handful of test images, where they leave under the policy shown above, and whether the exit they "
        "take is right about them. Arrow keys go from image to image."
    )
    seen = '<p class="note" id="looked-at" role="status">Point at an image, or go there with the Tab key.</p>'
    return f"{parts.note(text)}{parts.card(f'{seen}<div></div>', 'images')}{_tables(page, 'difficulty')}"


def _timed(page: ReportPage) -> str:
    return parts.figure(page.panels["accuracy-ms"], "half") if "accuracy-ms" in page.panels else ""


def _folds(page: ReportPage) -> str:
    training = parts.figure(page.panels["training"], "few") if "training" in page.panels else ""
    return "\n".join(
        [
            parts.fold("What the weight net learned", _weights(page)),
            parts.fold("Calibration and overthinking", _trust(page)),
            parts.fold("Training", training),
            parts.fold("How to repeat it", page.repeat),
        ]
    )


def _weights(page: ReportPage) -> str:
    named = (("weights", ""), ("weights-selected", "few"), ("weights-by-epoch", "few"))
    return "".join(parts.figure(page.panels[name], kind) for name, kind in named if name in page.panels)


def _trust(page: ReportPage) -> str:
    tables = _tables(page, "trust", "overthinking")
    return parts.figure(page.panels["calibration"]) + tables + parts.figure(page.panels["overthinking"], "half")


def _tables(page: ReportPage, *names: str) -> str:
    return "".join(parts.table(page.tables[name]) for name in names if name in page.tables)


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
        "sheet": None if shown is None else _sheet(shown_thumbs(shown)),
        "runs": [_run_data(page, group, run, shown) for group, run in _runs_with_policies(page.groups)],
    }
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _run_data(page: ReportPage, group: Group, run: RunData, shown: RunData | None) -> dict[str, Any]:
    seeds = f", seed {run.config.seed}" if len(group.runs) > 1 else ""
    same = shown is not None and _same_images(run, shown)
    policies = run.policies
    assert policies is not None
    times = None if page.times is None or len(page.times.milliseconds) != len(run.costs) else page.times.milliseconds
    opens = page.shipped is not None and page.shipped.run is run
    first = policies.policy if run.chosen else page.shipped.policy if opens and page.shipped is not None else None
    timed = page.shipped.milliseconds(page.times) if opens and page.shipped is not None else None
    return {
        "label": group.label + seeds,
        "colour": group.colour,
        "costs": run.costs,
        "ms": times,
        "full_top1": run.metrics[-1].top1,
        "families": {name: [_policy_data(run, p, same) for p in policies.family(name)] for name in ("searched", "q")},
        "first": None if first is None else _policy_data(run, first, same),
        "first_ms": timed,
        "opens": opens,
        "chosen": run.chosen,
        "images": _guesses(run) if same else None,
    }


def _same_images(run: RunData, shown: RunData) -> bool:
    one, other = run.test.thumb_index, shown.test.thumb_index
    return one is not None and other is not None and one.tolist() == other.tolist()


def _policy_data(run: RunData, policy: Policy, images: bool) -> dict[str, Any]:
    """A policy, what it gives on the test split, and where each shown image leaves under it."""
    on_test = outcome(run.predictions, policy.thresholds, run.costs)
    samples = run.predictions.samples
    return {
        "budget": policy.mul_adds,
        "q": policy.q,
        "thresholds": policy.to_json()["thresholds"],
        "top1": on_test.top1,
        "interval": proportion_interval(round(on_test.top1 * samples), samples),
        "mul_adds": on_test.cost,
        "shares": on_test.shares,
        "leaves": _leaves(run, policy) if images else "",
    }


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


def _guesses(run: RunData) -> dict[str, Any]:
    """What is shown of each image: its class, and what every exit says."""
    rows = thumb_rows(run)
    return {
        "labels": run.test.labels[rows].tolist(),
        "guesses": predicted_classes(run.test.logits[:, rows]).tolist(),
    }


def _leaves(run: RunData, policy: Policy) -> str:
    """One digit per shown image: the exit it takes (exit 10 is `a`)."""
    own = run.predictions.confidences[:, thumb_rows(run)]
    digits = np.array(list(" 123456789abcdefghijklmnopqrstuvwxyz"))
    return "".join(digits[exits_taken(own, policy.thresholds)])
