"""`offramp fit`: from a folder of images, or a recipe, to a bundle and a report in one command.

Every step writes the folder that the next one reads, so a run that was stopped goes on where it was: training
resumes, what is evaluated is not evaluated again, and the cheap steps are repeated.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offramp.calibrate import PolicyRequest, calibrate_run
from offramp.config import RunConfig, load_recipe, with_settings
from offramp.data.imagefolder import load_imagefolder
from offramp.evaluate import evaluate_run
from offramp.export import export_run
from offramp.images import UnreadableImage, read_image
from offramp.outputs import EVAL, SUMMARY
from offramp.report.write import Report, write_report
from offramp.train import train_run

SMALL_PIXELS = 64  # folders of images up to this side get the small network
LOOKED_AT = 25  # images, to tell how large they are


@dataclass(frozen=True)
class Fitted:
    """Where everything went, and the one sentence."""

    run: Path
    bundle: Path
    report: Report


def fit(
    source: str,
    out: str | Path,
    request: PolicyRequest | None = None,
    *,
    format: str = "torch",
    settings: tuple[str, ...] = (),
    device: str = "auto",
) -> Fitted:
    """Train with learned weights, evaluate, calibrate, export and report, going on from what is there."""
    out = Path(out)
    run, bundle = out / "run", out / "bundle"
    config = with_settings(configuration(source), settings)
    train_run(config, run, device=device, resume=True)
    if not (run / EVAL / SUMMARY).is_file():
        evaluate_run(run, device=device)
    calibrate_run(run, request)
    if bundle.is_dir():
        shutil.rmtree(bundle)  # made by an earlier call, perhaps for another budget
    export_run(run, bundle, format=format)
    return Fitted(run, bundle, write_report([run], out / "report.html"))


def configuration(source: str) -> RunConfig:
    """A recipe's configuration, or one that suits an image folder."""
    folder = Path(source)
    if not folder.is_dir():
        return load_recipe(source).config
    data = load_imagefolder(folder)
    side = typical_side([path for path in data.splits["train"].paths])
    small = side <= SMALL_PIXELS
    recipe = "cifar100-msdnet5-learned" if small else "imagenet-msdnet-s4-learned"
    batch = min(256, data.size("train") // 8 * 2)  # at least four loader batches an epoch
    if batch < 2:
        raise ValueError(f"{folder} has only {data.size('train')} images to train on; at least 8 are needed")
    epochs = 100 if data.size("train") < 20_000 else 60
    return with_settings(
        load_recipe(recipe).config,
        [
            "data.name=imagefolder",
            f"data.dir={str(folder.resolve())!r}",
            f"data.image_size={32 if small else 224}",
            "data.workers=2",
            f"train.batch={batch}",
            "train.learning_rate=none",
            f"train.epochs={epochs}",
            "weighting.interval=1",
        ],
    )


def typical_side(paths: list[Path]) -> int:
    """The median of the shorter sides of some of the images."""
    sides = []
    for path in paths[:: max(1, len(paths) // LOOKED_AT)]:
        try:
            sides.append(min(read_image(path).size))
        except UnreadableImage:
            continue
    if not sides:
        raise ValueError("none of the images that were tried can be read")
    return int(np.median(sides))
