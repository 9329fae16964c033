"""Pieces of the report's page: sections, folds, figures, tables, the confusion matrix, the hardest images.

Values go in, HTML comes out; every text is escaped. A figure has a heading, a description for people who do not see it,
and a caption; whatever may be wider than a phone lies in a region that scrolls and takes the keyboard's focus.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np
from PIL import Image

from offramp.common.formatting import Table, is_numeric
from offramp.reporting.drawing import Panels, inline
from offramp.reporting.report_tables import class_name
from offramp.reporting.shipped import HardImage, Shipped, confusion

MOST_CLASSES = 20  # in a confusion matrix that people read; of more classes those with the most mistakes are shown
SHOWN_CLASSES = 12


def section(title: str, body: str) -> str:
    """A part of the page, nothing where it would be empty."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


def fold(title: str, body: str) -> str:
    """What only some people want: closed until it is asked for."""
    return f'<details class="fold"><summary>{escape(title)}</summary>\n{body}\n</details>' if body else ""


def card(body: str, name: str = "") -> str:
    named = f' id="{name}"' if name else ""
    return f'<div class="card"{named}>{body}</div>'


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def figure(panels: Panels, kind: str = "", drawn: Sequence[str] | None = None) -> str:
    """A figure's card; `drawn` are its panels where somebody has drawn them already."""
    found = inline(panels) if drawn is None else drawn
    name = f"figure-{panels.name}"
    many = f"panels {kind}".strip() if len(found) > 1 else ""
    words = escape(f"{panels.title}. {panels.words}", quote=True)
    return (
        f'<figure class="card {kind}" id="{name}" aria-labelledby="{name}-title">'
        f'<h3 id="{name}-title">{escape(panels.title)}</h3>'
        f'<div class="drawing {many}" role="img" aria-label="{words}">{"".join(found)}</div>'
        f"<figcaption>{escape(panels.caption)}</figcaption></figure>"
    )


def table(given: Table) -> str:
    """A table's card, under its title."""
    title, columns, rows = given
    texts = [not is_numeric([row[at] for row in rows]) for at in range(len(columns))]
    kinds = [' class="text"' if text else "" for text in texts]
    head = "".join(_head(column, kind) for column, kind in zip(columns, kinds, strict=True))
    grouped = len({row[0] for row in rows}) < len(rows)
    body, before = [], rows[0][0] if rows else ""
    for row in rows:
        cells = "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True))
        begins = " class=begins" if grouped and row[0] != before else ""
        body.append(f'<tr{begins}><th scope="row"{kinds[0]}>{escape(row[0])}</th>{cells}</tr>')
        before = row[0]
    return card(f"<h3>{escape(title)}</h3>{scrolling(title, _whole(title, head, body))}")


def _head(column: str, kind: str) -> str:
    return f'<th scope="col"{kind}>{escape(column)}</th>' if column else "<td></td>"


def _whole(title: str, head: str, body: Sequence[str], kind: str = "") -> str:
    return (
        f'<table{kind}><caption class="unseen">{escape(title)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def scrolling(title: str, body: str) -> str:
    """What may be wider than the screen: it scrolls by keyboard too, and says that it does."""
    label = escape(title, quote=True)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}">{body}</div>'
        '<p class="hint" aria-hidden="true" hidden>scrolls sideways →</p>'
    )


def matrix(shipped: Shipped) -> str:
    """The confusion matrix as a table with shaded cells; of many classes, those that are mistaken most."""
    counts = confusion(shipped)
    wrong = counts - np.diag(np.diag(counts))
    involved = wrong.sum(0) + wrong.sum(1)
    many = len(counts) > MOST_CLASSES
    shown = np.sort(np.argsort(-involved, kind="stable")[:SHOWN_CLASSES]) if many else np.arange(len(counts))
    names = [class_name(shipped, label) for label in shown.tolist()]
    kind = ' class="matrix long"' if max(map(len, names)) > 3 else ' class="matrix"'
    head = '<th scope="col" class="text">it is</th>' + "".join(
        f'<th scope="col"><span>{escape(name)}</span></th>' for name in names
    )
    body = [_matrix_row(name, label, counts, shown) for name, label in zip(names, shown.tolist(), strict=True)]
    which = f", the {len(shown)} of {len(counts)} classes with the most mistakes" if many else ""
    title = f"What is taken for what{which}"
    text = (
        "Rows are what a test image is, columns what is said of it. The diagonal is right; the darker another cell, "
        "the larger its part of the row."
    )
    return card(f"<h3>{escape(title)}</h3>{note(text)}{scrolling(title, _whole(title, head, body, kind))}")


def _matrix_row(name: str, label: int, counts: np.ndarray, shown: np.ndarray) -> str:
    cells = []
    whole = max(int(counts[label].sum()), 1)
    for said in shown.tolist():
        count = int(counts[label, said])
        step = min(4, int(np.ceil(20 * count / whole))) if said != label else 0
        kind = "right" if said == label else f"wrong-{step}"
        cells.append(f'<td class="{kind}">{count or "·"}</td>')
    return f'<tr><th scope="row" class="text">{escape(name)}</th>{"".join(cells)}</tr>'


def hardest(shipped: Shipped, images: Sequence[HardImage]) -> str:
    """Images in a row of cards: the picture, what it is, what each exit said and how sure it was."""
    return f'<ul class="hardest">{"".join(_hard_image(shipped, one) for one in images)}</ul>' if images else ""


def _hard_image(shipped: Shipped, one: HardImage) -> str:
    name = class_name(shipped, one.label)
    rows = []
    for k, (said, sure) in enumerate(zip(one.said, one.confidences, strict=True), 1):
        verdict = "right" if said == one.label else "wrong"
        left = ", leaves here" if k == one.left else ""
        rows.append(
            f'<li class="{verdict}{" left" if left else ""}">exit {k}: <b>{escape(class_name(shipped, said))}</b> '
            f"({verdict}, confidence {sure:.2f}{left})</li>"
        )
    return (
        f'<li class="card"><img src="{_data_uri(one.image)}" width="72" height="72" '
        f'alt="{escape(f"Test image {one.number}, which is: {name}", quote=True)}">'
        f"<div><h3>It is: {escape(name)}</h3><ol>{''.join(rows)}</ol></div></li>"
    )


def _data_uri(image: np.ndarray) -> str:
    data = io.BytesIO()
    Image.fromarray(image).save(data, "PNG" if max(image.shape[:2]) <= 32 else "JPEG", quality=88)
    kind = "png" if max(image.shape[:2]) <= 32 else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"
