"""The gallery: which images leave at which exit, as pictures and tables.

    python docs/gallery.py cifar100 DATA docs/gallery.png
    python docs/gallery.py photos BUNDLE FOLDER docs/gallery-photos.png

DATA holds `cifar-100-python/`, whose test images go through `msdnet5-cifar100`. BUNDLE was fitted to FOLDER, the
Clothing data set, whose test photos are counted; shown are those of them that come with offramp. Images are drawn by a
fixed seed, right and wrong ones alike, so nobody chose the pretty ones. Classes of people are left out of picture and
table, not of the other numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

BUNDLE = "msdnet5-cifar100"
PEOPLE = ("baby", "boy", "girl", "man", "woman")
SHIPPED = Path(__file__).parents[1] / "src/offramp/data/clothes/val"
COLUMNS, SIDE, GAP, CAPTION, LEFT = 10, 64, 8, 14, 104
RIGHT, WRONG, INK = (11, 107, 88), (176, 32, 48), (34, 34, 34)


def drawn_rows(exits: np.ndarray, allowed: np.ndarray, num_exits: int, columns: int = COLUMNS) -> list[np.ndarray]:
    """For every exit some of the allowed images that left there, by a fixed seed."""
    draw = np.random.default_rng(0)
    rows = [np.flatnonzero((exits == k) & allowed) for k in range(1, num_exits + 1)]
    return [draw.choice(row, min(columns, len(row)), replace=False) for row in rows]


def picture(
    images: Sequence[np.ndarray],
    rows: Sequence[np.ndarray],
    guesses: Sequence[str],
    right: np.ndarray,
    shares: Sequence[float],
) -> Image.Image:
    """A row of images for every exit, each over what it was taken for; a wrong answer has a cross."""
    height = GAP + len(rows) * (SIDE + CAPTION + GAP)
    sheet = Image.new("RGB", (LEFT + COLUMNS * (SIDE + GAP), height), "white")
    pen, large, small = ImageDraw.Draw(sheet), ImageFont.load_default(14), ImageFont.load_default(10)
    for k, row in enumerate(rows, 1):
        top = GAP + (k - 1) * (SIDE + CAPTION + GAP)
        pen.text((6, top + 12), f"exit {k}", INK, large)
        pen.text((6, top + 34), f"{shares[k - 1]:.0%} leave here", INK, small)
        for column, index in enumerate(row):
            left = LEFT + column * (SIDE + GAP)
            sheet.paste(Image.fromarray(images[index]).resize((SIDE, SIDE), Image.Resampling.BICUBIC), (left, top))
            colour = RIGHT if right[index] else WRONG
            below, name = top + SIDE + 1, guesses[index].replace("_", " ")
            if not right[index]:
                pen.line((left, below + 4, left + 6, below + 10), WRONG, 2)
                pen.line((left, below + 10, left + 6, below + 4), WRONG, 2)
            indent = 0 if right[index] else 9
            pen.text((left + indent, below), name, colour, font_for(pen, name, SIDE + GAP - 2 - indent))
    return sheet


def font_for(pen: ImageDraw.ImageDraw, text: str, width: int) -> Any:
    """The largest font, of those that can be read, in which a text is no wider than this."""
    fonts = [ImageFont.load_default(size) for size in (10, 9, 8, 7)]
    return next((font for font in fonts if pen.textlength(text, font) <= width), fonts[-1])


def class_table(exits: np.ndarray, names: np.ndarray, few: int = 6) -> list[str]:
    """Markdown: the classes that leave first and those that go furthest, by their mean exit."""
    own = {name: exits[names == name] for name in dict.fromkeys(names.tolist()) if name not in PEOPLE}
    order = sorted(own, key=lambda name: float(own[name].mean()))
    lines = ["| class | mean exit | leave at exit 1 |", "|---|---|---|"]
    for name in order if len(order) <= 2 * few else (*order[:few], *order[-few:]):
        lines.append(f"| {name.replace('_', ' ')} | {own[name].mean():.2f} | {np.mean(own[name] == 1):.0%} |")
    return lines


class Answers:
    """What a bundle says of some images: the guessed names, the exits taken, and which are right."""

    def __init__(self, bundle: Any, images: Sequence[Any], names: Sequence[str], batch: int = 250) -> None:
        found = [bundle(images[at : at + batch]) for at in range(0, len(images), batch)]
        guessed, self.exits = (np.concatenate([getattr(r, name) for r in found]) for name in ("labels", "exits"))
        self.guesses = [bundle.classes[guess] for guess in guessed]
        self.names = np.array(names)
        self.right = self.names == np.array(self.guesses)
        self.shares = [float(np.mean(self.exits == k)) for k in range(1, len(bundle.costs) + 1)]

    def say(self) -> None:
        for k, share in enumerate(self.shares, 1):
            print(f"exit {k}: {share:.1%} leave, {self.right[self.exits == k].mean():.1%} of them right")
        print("\n".join(class_table(self.exits, self.names)))


def cifar100(data_dir: str, out: str) -> None:
    """All test images are counted, and some are shown."""
    import offramp

    data, bundle = offramp.load_dataset("cifar100", data_dir=data_dir), offramp.load_bundle(BUNDLE)
    images = data.thumbnails("test", range(data.size("test")))
    found = Answers(bundle, images, [data.class_names[label] for label in data.splits["test"].labels])
    allowed = ~np.isin(found.names, PEOPLE) & ~np.isin(found.guesses, PEOPLE)
    rows = drawn_rows(found.exits, allowed, len(bundle.costs))
    write(picture(images, rows, found.guesses, found.right, found.shares), out)
    found.say()


def photos(bundle_path: str, folder: str, out: str) -> None:
    """All test photos are counted; of those that come with offramp some are shown."""
    import offramp

    bundle = offramp.load_bundle(bundle_path)
    every = sorted(Path(folder, "val").rglob("*.jpg"))
    counted = Answers(bundle, every, [path.parent.name for path in every])
    here = sorted(SHIPPED.rglob("*.jpg"))
    shown = Answers(bundle, here, [path.parent.name for path in here])
    squares = [np.asarray(ImageOps.fit(Image.open(path).convert("RGB"), (2 * SIDE, 2 * SIDE))) for path in here]
    rows = drawn_rows(shown.exits, np.ones(len(here), bool), len(bundle.costs))
    write(picture(squares, rows, shown.guesses, shown.right, counted.shares), out)
    counted.say()


def write(sheet: Image.Image, out: str) -> None:
    sheet.quantize(255).save(out, optimize=True)
    print(f"{out}: {Path(out).stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    {"cifar100": cifar100, "photos": photos}[sys.argv[1]](*sys.argv[2:])
