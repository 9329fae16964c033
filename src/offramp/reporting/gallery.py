"""Images for people to look at: a sheet of test images, and where each of them leaves under every policy."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from offramp.measuring.confidence import predictions
from offramp.measuring.policy import Policies, exits_taken
from offramp.reporting.gather import RunData

COLUMNS = 16


def sheet(images: np.ndarray) -> dict[str, Any]:
    """All images [n, h, w, 3] in one JPEG as a data URI, with its grid."""
    count, height, width, _ = images.shape
    rows = -(-count // COLUMNS)
    canvas = np.zeros((rows * COLUMNS, height, width, 3), np.uint8)
    canvas[:count] = images
    whole = canvas.reshape(rows, COLUMNS, height, width, 3).swapaxes(1, 2).reshape(rows * height, COLUMNS * width, 3)
    data = io.BytesIO()
    Image.fromarray(whole).save(data, "JPEG", quality=90, subsampling=0)
    source = "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
    return {"src": source, "columns": COLUMNS, "rows": rows, "count": count}


def thumb_rows(run: RunData) -> np.ndarray:
    """The rows of the saved outputs that have an image; images whose sample could not be read have none."""
    assert run.test.thumb_index is not None
    order = np.argsort(run.test.index)
    at = np.searchsorted(run.test.index, run.test.thumb_index, sorter=order)
    rows = order[np.minimum(at, len(order) - 1)]
    return rows[run.test.index[rows] == run.test.thumb_index]


def shown_images(run: RunData) -> np.ndarray:
    """The images that belong to `thumb_rows`."""
    assert run.test.thumbs is not None and run.test.thumb_index is not None
    return run.test.thumbs[np.isin(run.test.thumb_index, run.test.index)]


def guesses(run: RunData) -> dict[str, Any]:
    """What is shown of each image: its class, and what every exit says."""
    rows = thumb_rows(run)
    return {
        "labels": run.test.labels[rows].tolist(),
        "guesses": predictions(run.test.logits[:, rows]).tolist(),
    }


def leaves(run: RunData, policies: Policies, family: str) -> list[str]:
    """For each policy of a family one digit per image: the exit it takes (exit 10 is `a`)."""
    own = run.answers.confidences[:, thumb_rows(run)]
    digits = np.array(list(" 123456789abcdefghijklmnopqrstuvwxyz"))
    return ["".join(digits[exits_taken(own, policy.thresholds)]) for policy in policies.family(family)]
