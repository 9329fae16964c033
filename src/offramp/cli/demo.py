"""The demo: what leaving early saves, measured in this very run, on embedded digits or on a hundred embedded photos.

On digits a small network is trained with and without learned weights; on photos the embedded backbone stays as it is
and gets linear heads. Either way the run ends with a bundle, answers from it, and a report.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from offramp.bench.infer import Subject, stage_milliseconds
from offramp.cli.options import command
from offramp.common.console import print_table, say
from offramp.common.files import write_json
from offramp.common.formatting import Table, millions
from offramp.common.pretrained import DEFAULT_BACKBONE
from offramp.common.timing import timed_ms
from offramp.measuring.calibrate import PolicyRequest, calibrate_run
from offramp.measuring.intervals import paired_interval
from offramp.reporting.groups import gather
from offramp.reporting.headline import price_in_points
from offramp.reporting.report import Report, write_report
from offramp.reporting.shipped import Shipped, find_shipped, right_interval
from offramp.running.bundle import Bundle, load_bundle
from offramp.running.engines.torch_engine import TorchEngine, whole_network
from offramp.running.export import export_run
from offramp.running.predict import predict, result_table
from offramp.runs.config import RunConfig, with_settings
from offramp.runs.outputs import read_outputs
from offramp.runs.recipe import load_recipe
from offramp.training.evaluate import evaluate_run
from offramp.training.train import train_run

HANDFUL = 4
STAGE_BATCH = 32
TURNS = 9  # of the two networks that are timed
RECIPES = {"baseline": "digits-baseline", "learned": "digits-learned"}
QUICK = ("train.eval_every=5",)  # accuracy on calibration after the last epoch only, which saves seconds
PHOTOS = "clothes"
PHOTO_SIZE = 128
PHOTO_BUDGET = 0.65  # of the whole network's mul-adds


def run_demo(out: Path, device: str, settings: Sequence[str] = ()) -> Path:
    """Digits: run everything into a new folder under `out` and return it; `settings` change both recipes."""
    began, folder = time.monotonic(), _new_folder(out)
    say(
        "A small network with three exits learns to read digits, once with conventional training and once with learned "
        "weights: about two minutes on two idle cores."
    )
    for name, recipe_name in RECIPES.items():
        recipe = load_recipe(recipe_name)
        say(f"\n{name}: {recipe.claim}")
        run = train_run(with_settings(recipe.config, [*QUICK, *settings]), folder / name, device=device)
        evaluate_run(run, device=device)
    calibrate_run(folder / "learned")
    bundle = load_bundle(export_run(folder / "learned", folder / "bundle"), device="cpu")
    speed = measure_speed(bundle, _some_images(folder / "learned"))
    report = _write_report(folder, list(RECIPES), bundle, speed)
    groups = gather([folder / name for name in RECIPES])
    shipped = find_shipped(groups)
    assert shipped is not None
    say(f"\n{saving(shipped, speed)}\n")
    print_table(*comparison(groups[0].first.predictions.right, groups[1].first.predictions.right, bundle.costs))
    say("Brackets: 95 % intervals over the test images. One seed each; another seed moves these numbers as well.\n")
    print_table(*result_table(predict(bundle, _image_files(folder)).rows), whole=True)
    _say_where(folder, report, began, "training curves: tensorboard --logdir " + str(folder))
    return folder


def run_photos_demo(out: Path, device: str) -> Path:
    """Photos: linear heads on the embedded backbone, which stays as it is; into a new folder under `out`."""
    began, folder = time.monotonic(), _new_folder(out)
    photos = Path(str(resources.files("offramp.data") / PHOTOS))
    say(
        f"A toy set: a hundred photos of clothes in five classes ({photos}; Clothing dataset (small) by Alexey "
        f"Grigorev, CC0).\nEfficientNet-Lite0 from ImageNet at {PHOTO_SIZE} pixels stays as it is and gets four "
        "linear heads: some twenty seconds on two idle cores."
    )
    run = train_run(photos_config(photos), folder / "photos", device=device)
    summary = evaluate_run(run, device=device)
    # thresholds from so few images: the paper's rule has one number to choose, where a search has three
    calibrate_run(run, PolicyRequest(budget_mul_adds=PHOTO_BUDGET * summary.costs[-1], family="q"))
    bundle = load_bundle(export_run(run, folder / "bundle", format="torch"), device="cpu")
    files = sorted((photos / "val").rglob("*.jpg"))
    speed = measure_speed(bundle, files)
    report = _write_report(folder, ["photos"], bundle, speed)
    shipped = find_shipped(gather([run]))
    assert shipped is not None
    say(f"\n{saving(shipped, speed)}\nA toy set, so the intervals are wide; it says little about photos of yours.\n")
    one = files[len(files) // 2]
    say(f"$ {command('predict', folder / 'bundle', one)}")
    print_table(*result_table(predict(bundle, [str(one)]).rows), whole=True)
    _say_where(folder, report, began, f"photos of yours: {command('fit', 'PHOTOS', '--out', 'OUT')}")
    return folder


def photos_config(photos: Path) -> RunConfig:
    """The embedded backbone, frozen, with heads fitted as linear probes."""
    return with_settings(
        RunConfig(),
        [
            f"model.name={DEFAULT_BACKBONE}",
            "model.pretrained=true",
            f"model.overrides={{exits=4, image_size={PHOTO_SIZE}, head='linear'}}",
            "data.name=imagefolder",
            f"data.dir={str(photos)!r}",
            "data.calibration=20",
            "data.workers=0",
            "train.batch=20",
            "train.epochs=0",
            "train.parts=heads",
            "train.probe=true",
        ],
    )


@dataclass(frozen=True)
class Speed:
    """Milliseconds of one batch: the whole network's, and those of images that leave where they may."""

    images: int
    whole_ms: float
    ours_ms: float


def measure_speed(bundle: Bundle, images: Sequence[Any] | np.ndarray) -> Speed:
    """Both by turns, so that a busy moment hits both; their medians."""
    ready, engine = bundle.prepare(images), bundle.engine
    assert isinstance(engine, TorchEngine)
    runtime, whole = bundle.runtime(), whole_network(engine)
    turns = [(timed_ms(lambda: whole(ready)), timed_ms(lambda: runtime(ready))) for _ in range(TURNS + 2)][2:]
    theirs, ours = np.median(turns, axis=0).tolist()
    return Speed(len(ready), theirs, ours)


def saving(shipped: Shipped, speed: Speed) -> str:
    """What leaving early saves, at what accuracy, on this machine."""
    first, last = (f"{100 * share:.1f}" for share in right_interval(shipped.right))
    return (
        f"Leaving early saves {100 * shipped.saved:.0f} % of the compute {price_in_points(shipped)}, and is "
        f"{speed.whole_ms / speed.ours_ms:.2f} times as fast on this machine.\n"
        f"{100 * shipped.top1:.1f} % ({first} to {last}) of {shipped.samples:,} test images are right at "
        f"{millions(shipped.cost)} mul-adds per image; the whole network has {100 * shipped.whole_top1:.1f} % at "
        f"{millions(shipped.run.costs[-1])}. Brackets: 95 % intervals.\n"
        f"{speed.images} test images in one batch: {speed.ours_ms:.0f} ms leaving early, {speed.whole_ms:.0f} ms for "
        "the whole network."
    )


def comparison(baseline: np.ndarray, learned: np.ndarray, costs: Sequence[int]) -> Table:
    """Both weightings on the same test images, exit by exit: which [K, N] are right, and the paired intervals."""
    rows = []
    for k, (before, after) in enumerate(zip(baseline, learned, strict=True)):
        low, high = paired_interval(after, before)
        top1 = [100 * float(right.mean()) for right in (before, after)]
        words = f"{top1[1] - top1[0]:+.2f} ({low:+.2f} to {high:+.2f})"
        rows.append([str(k + 1), millions(costs[k]), *(f"{value:.2f}" for value in top1), words])
    title = (
        f"Conventional training and learned weights: top-1 in % of each exit on all {baseline.shape[1]:,} test images"
    )
    return title, ["exit", "mul-adds", "conventional", "learned", "difference"], rows


def _new_folder(out: Path) -> Path:
    return out / time.strftime("demo-%Y%m%d-%H%M%S")


def _some_images(run: Path) -> np.ndarray:
    images = read_outputs(run, "test").thumbs
    assert images is not None
    return images


def _image_files(folder: Path) -> list[str]:
    """A handful of test images as files, for `predict`."""
    paths = [folder / "images" / f"{at:02d}.png" for at in range(HANDFUL)]
    paths[0].parent.mkdir()
    for path, image in zip(paths, _some_images(folder / "learned"), strict=False):
        Image.fromarray(image).save(path)
    return [str(path) for path in paths]


def _write_report(folder: Path, runs: Sequence[str], bundle: Bundle, speed: Speed) -> Report:
    """The report, with stage times that are measured now and kept beside it."""
    engine: Any = bundle.engine
    subject = Subject(engine, whole_network(engine), bundle.card.input_shape)
    times = folder / "times.json"
    policy = {"leaving_early": speed.ours_ms / speed.images, "whole_network": speed.whole_ms / speed.images}
    stages = stage_milliseconds(subject, [STAGE_BATCH], 5)
    write_json(times, {"machine": engine.place, "stage_ms": stages, "policy_ms": policy})
    return write_report([folder / name for name in runs], folder / "report.html", times=times)


def _say_where(folder: Path, report: Report, began: float, more: str) -> None:
    say(
        f"\ndone in {time.monotonic() - began:.0f} s; everything is in {folder}\n{more}\n"
        f"more answers: {command('predict', folder / 'bundle', 'IMAGES')}\n"
        f"The report, to be opened in a browser: {report.page}"
    )
