"""The demo: what leaving early saves, measured in this very run, on embedded digits or on a hundred embedded photos.

On digits a small network is trained with and without learned weights; photos go through `offramp fit`. Either way the
run ends with a bundle, answers from it, and a report.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from offramp.bench.infer import Subject, stage_milliseconds
from offramp.cli.options import command, trying
from offramp.common.console import print_table, say
from offramp.common.files import write_json
from offramp.common.formatting import Table, millions
from offramp.common.timing import timed_ms
from offramp.fitting.fit import fit
from offramp.measuring.calibrate import PolicyRequest, calibrate_run
from offramp.measuring.intervals import paired_interval, right_interval
from offramp.reporting.groups import gather
from offramp.reporting.headline import price_in_points
from offramp.reporting.report import Report, write_report
from offramp.reporting.shipped import Shipped, find_shipped
from offramp.running.bundle import Bundle, load_bundle
from offramp.running.engines.torch_engine import TorchEngine, whole_network
from offramp.running.export import export_run
from offramp.running.predict import predict, result_table
from offramp.runs.config import with_settings
from offramp.runs.folder import RESUMED
from offramp.runs.outputs import read_outputs
from offramp.runs.recipe import load_recipe
from offramp.training.evaluate import evaluate_run
from offramp.training.train import train_run

HANDFUL = 4
TURNS = 9  # of the two networks that are timed
SHIPPED = "baseline"
RECIPES = {SHIPPED: "digits-strong", "learned": "digits-strong-learned"}
WAYS = {SHIPPED: "conventional training", "learned": "the same with learned weights"}
QUICK = ("train.eval_every=5",)  # accuracy on calibration after the last epoch only, which saves seconds
PHOTOS = "clothes"


def run_demo(out: Path, device: str, settings: Sequence[str] = ()) -> Path:
    """Digits: run everything into a new folder under `out` and return it; `settings` change both recipes."""
    say(
        "A small network with three exits learns to read digits, once with conventional training and once with learned "
        "weights: about a minute on two idle cores."
    )
    with _one_thread(), _never_resumed():
        return _digits(out, device, settings)


@contextmanager
def _never_resumed() -> Iterator[None]:
    """A run that cannot be written says how to go on with it; a demo begins anew."""
    try:
        yield
    except OSError as error:
        raise OSError(str(error).replace(RESUMED, "another demo begins anew")) from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """So small a network gains little from more threads, and waits for the last of them where other programs run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _digits(out: Path, device: str, settings: Sequence[str]) -> Path:
    began, folder = time.monotonic(), _new_folder(out)
    for number, (name, recipe) in enumerate(RECIPES.items(), 1):
        say(f"\ntraining {number} of {len(RECIPES)}, {name}: {WAYS[name]}")
        config = with_settings(load_recipe(recipe).config, [*QUICK, *settings])
        run = train_run(config, folder / name, device=device)
        evaluate_run(run, device=device)
    calibrate_run(folder / SHIPPED)
    bundle = load_bundle(export_run(folder / SHIPPED, folder / "bundle"), device="cpu")
    speed = measure_speed(bundle, _some_images(folder / SHIPPED))
    report = _write_report(folder, list(RECIPES), bundle, speed)
    groups = gather([folder / name for name in RECIPES])
    shipped = find_shipped(groups)
    assert shipped is not None
    say(f"\n{saving(shipped, speed)}\n")
    print_table(*comparison(groups[0].first.predictions.right, groups[1].first.predictions.right, bundle.costs))
    say(
        "Brackets: 95 % intervals over the test images. One seed each, and another seed moves these numbers as well:\n"
        "over six seeds neither way is better on digits (offramp recipes). Where weights help is in\n"
        "docs/results/learned-weights.md.\n"
    )
    print_table(*result_table(predict(bundle, _image_files(folder)).rows), whole=True)
    _say_where(folder, folder / "images", report, began, f"training curves: tensorboard --logdir {folder}")
    return folder


def run_photos_demo(out: Path, device: str) -> Path:
    """Photos: what `offramp fit` does, on embedded ones; into a new folder under `out`."""
    began, folder = time.monotonic(), _new_folder(out)
    photos = Path(str(resources.files("offramp.data") / PHOTOS))
    say(
        f"A toy set: a hundred photos of clothes in five classes ({photos}; Clothing dataset (small) by Alexey "
        "Grigorev, CC0).\nAbout a minute on two idle cores for what this does: "
        f"{command('fit', photos, '--out', folder, '--anyway')}\n"
    )
    found = fit(str(photos), folder, PolicyRequest(anyway=True), device=device)
    files = sorted((photos / "val").rglob("*.jpg"))
    one = files[len(files) // 2]
    say(f"\n$ {command('predict', found.bundle, one)}")
    print_table(*result_table(predict(load_bundle(found.bundle), [str(one)]).rows), whole=True)
    say(f"{found.sentence}\nA toy set, so the interval is wide; it says little about photos of yours.")
    yours = command("fit", "PHOTOS", "--out", "OUT")
    _say_where(folder, photos / "val", found.report, began, f"photos of yours: {yours}")
    return folder


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
    title = f"Baseline and learned weights: top-1 in % of each exit on all {baseline.shape[1]:,} test images"
    return title, ["exit", "mul-adds", "baseline", "learned", "difference"], rows


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
    for path, image in zip(paths, _some_images(folder / SHIPPED), strict=False):
        Image.fromarray(image).save(path)
    return [str(path) for path in paths]


def _write_report(folder: Path, runs: Sequence[str], bundle: Bundle, speed: Speed) -> Report:
    """The report, with stage times that are measured now and kept beside it."""
    engine: Any = bundle.engine
    subject = Subject(engine, whole_network(engine), bundle.card.input_shape)
    times = folder / "times.json"
    policy = {"leaving_early": speed.ours_ms / speed.images, "whole_network": speed.whole_ms / speed.images}
    stages = stage_milliseconds(subject, [speed.images], TURNS)
    write_json(times, {"machine": engine.place, "stage_ms": stages, "policy_ms": policy})
    return write_report([folder / name for name in runs], folder / "report.html", times=times)


def _say_where(folder: Path, images: Path, report: Report, began: float, more: str) -> None:
    say(
        f"\ndone in {time.monotonic() - began:.0f} s; everything is in {folder}\n{more}\n"
        f"more answers: {trying(folder / 'bundle', images)}\n"
        f"The report, to be opened in a browser: {report.page}"
    )
