"""The gallery: which CIFAR-100 test images leave `msdnet5-cifar100` at which exit, as a picture and a table.

    python docs/gallery.py DATA docs/gallery.png

DATA holds `cifar-100-python/`. Images are drawn by a fixed seed, right and wrong ones alike, so nobody chose the pretty
ones. Classes of people are left out of picture and table, not of the other numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

BUNDLE = "msdnet5-cifar100"
PEOPLE = ("baby", "boy", "girl", "man", "woman")
COLUMNS, SIDE, GAP, CAPTION, LEFT = 10, 64, 8, 14, 104
RIGHT, WRONG, INK = (11, 107, 88), (176, 32, 48), (34, 34, 34)


def drawn_rows(exits: np.ndarray, allowed: np.ndarray, num_exits: int, columns: int = COLUMNS) -> list[np.ndarray]:
    """For every exit some of the allowed images that left there, by a fixed seed."""
    draw = np.random.default_rng(0)
    rows = [np.flatnonzero((exits == k) & allowed) for k in range(1, num_exits + 1)]
    return [draw.choice(row, min(columns, len(row)), replace=False) for row in rows]


def picture(
    images: np.ndarray, rows: Sequence[np.ndarray], guesses: Sequence[str], right: np.ndarray, exits: np.ndarray
) -> Image.Image:
    """A row of images for every exit, each over what it was taken for; a wrong answer has a cross."""
    height = GAP + len(rows) * (SIDE + CAPTION + GAP)
    sheet = Image.new("RGB", (LEFT + COLUMNS * (SIDE + GAP), height), "white")
    pen, large, small = ImageDraw.Draw(sheet), ImageFont.load_default(14), ImageFont.load_default(10)
    for k, row in enumerate(rows, 1):
        top = GAP + (k - 1) * (SIDE + CAPTION + GAP)
        pen.text((6, top + 12), f"exit {k}", INK, large)
        pen.text((6, top + 34), f"{np.mean(exits == k):.0%} leave here", INK, small)
        for column, index in enumerate(row):
            left = LEFT + column * (SIDE + GAP)
            sheet.paste(Image.fromarray(images[index]).resize((SIDE, SIDE), Image.Resampling.BICUBIC), (left, top))
            colour = RIGHT if right[index] else WRONG
            below, name = top + SIDE + 1, guesses[index].replace("_", " ")
            if not right[index]:
                pen.line((left, below + 4, left + 6, below + 10), WRONG, 2)
                pen.line((left, below + 10, left + 6, below + 4), WRONG, 2)
            pen.text((left + (0 if right[index] else 9), below), name[: 13 if right[index] else 11], colour, small)
    return sheet


def class_table(exits: np.ndarray, labels: np.ndarray, names: Sequence[str], few: int = 6) -> list[str]:
    """Markdown: the classes that leave first and those that go furthest, by their mean exit."""
    own = {name: exits[labels == label] for label, name in enumerate(names) if name not in PEOPLE}
    order = sorted(own, key=lambda name: float(own[name].mean()))
    lines = ["| class | mean exit | leave at exit 1 |", "|---|---|---|"]
    for name in (*order[:few], *order[-few:]):
        lines.append(f"| {name.replace('_', ' ')} | {own[name].mean():.2f} | {np.mean(own[name] == 1):.0%} |")
    return lines


def main(data_dir: str, out: str) -> None:
    import offramp

    data = offramp.load_dataset("cifar100", data_dir=data_dir)
    bundle = offramp.load_bundle(BUNDLE)
    images = data.thumbnails("test", range(data.size("test")))
    labels = data.splits["test"].labels
    results = [bundle(images[at : at + 500]) for at in range(0, len(images), 500)]
    guessed, exits = (np.concatenate([getattr(r, name) for r in results]) for name in ("labels", "exits"))
    right = guessed == labels
    people = [data.class_names.index(name) for name in PEOPLE]
    allowed = ~np.isin(labels, people) & ~np.isin(guessed, people)
    rows = drawn_rows(exits, allowed, len(bundle.costs))
    sheet = picture(images, rows, [bundle.classes[g] for g in guessed], right, exits)
    sheet.quantize(255).save(out, optimize=True)
    print(f"{out}: {Path(out).stat().st_size / 1e3:.0f} kB")
    for k in range(1, len(bundle.costs) + 1):
        here = exits == k
        print(f"exit {k}: {here.mean():.1%} leave, {right[here].mean():.1%} of them right")
    print("\n".join(class_table(exits, labels, data.class_names)))


if __name__ == "__main__":
    main(*sys.argv[1:])
