"""The demo: train a small network on the embedded digits, with and without learned weights; compare, report, run."""

from __future__ import annotations

import time
from pathlib import Path

from PIL import Image

from offramp.common.console import print_table, say
from offramp.common.formatting import Table
from offramp.common.timing import median_ms
from offramp.measuring.calibrate import calibrate_run
from offramp.reporting.report import write_report
from offramp.running.bundle import load_bundle
from offramp.running.engines.torch_engine import TorchEngine, whole_network
from offramp.running.export import export_run
from offramp.running.predict import predict, result_table
from offramp.runs.outputs import EvalSummary, read_outputs
from offramp.runs.recipe import load_recipe
from offramp.training.evaluate import evaluate_run
from offramp.training.train import train_run

HANDFUL = 8
RECIPES = {"baseline": "digits-baseline", "learned": "digits-learned"}


def run_demo(out: Path, device: str) -> Path:
    """Run everything into a new folder under `out` and return it."""
    began = time.monotonic()
    folder = out / time.strftime("demo-%Y%m%d-%H%M%S")
    summaries = {}
    for name, recipe_name in RECIPES.items():
        recipe = load_recipe(recipe_name)
        say(f"\n{name}: {recipe.claim}")
        run = train_run(recipe.config, folder / name, device=device)
        summaries[name] = evaluate_run(run, device=device)
    print_table(*comparison(summaries["baseline"], summaries["learned"]))
    report = write_report([folder / name for name in RECIPES], folder / "report.html")
    run_bundle(folder)
    say(
        f"done in {time.monotonic() - began:.0f} s\n"
        f"run folders (config, metrics, weights, saved logits): {folder}/baseline  {folder}/learned\n"
        f"training curves: tensorboard --logdir {folder}\n\n{report.answer}\n"
        f"The report, to be opened in a browser: {report.page}"
    )
    return folder


def run_bundle(folder: Path) -> None:
    """Export the learned network, answer a handful of test images with it, and time it against the whole network."""
    run = folder / "learned"
    calibrate_run(run)
    bundle = load_bundle(export_run(run, folder / "bundle"), device="cpu")
    images = read_outputs(run, "test").thumbs
    assert images is not None
    paths = [folder / "images" / f"{at:02d}.png" for at in range(HANDFUL)]
    paths[0].parent.mkdir()
    for path, image in zip(paths, images, strict=False):
        Image.fromarray(image).save(path)
    print_table(*result_table(predict(bundle, [str(path) for path in paths]).rows), whole=True)
    ready = bundle.prepare(images)
    assert isinstance(bundle.engine, TorchEngine)
    runtime, whole = bundle.runtime(), whole_network(bundle.engine)
    ours, theirs = median_ms(lambda: runtime(ready), 5), median_ms(lambda: whole(ready), 5)
    saved = 1 - runtime(ready).mul_adds.mean() / bundle.costs[-1]
    say(
        f"bundle: {folder / 'bundle'}\n"
        f"{len(ready)} test images in one batch: {theirs:.0f} ms for the whole network, {ours:.0f} ms leaving early: "
        f"{theirs / ours:.2f} times as fast, with {100 * saved:.0f} % of the mul-adds skipped\n"
    )


def comparison(baseline: EvalSummary, learned: EvalSummary) -> Table:
    """Title, columns and rows of both runs' top-1, exit by exit."""
    pairs = zip(baseline.exits["test"], learned.exits["test"], strict=True)
    rows = [
        [
            str(a.exit),
            f"{a.mul_adds:,}",
            f"{100 * a.top1:.2f}",
            f"{100 * b.top1:.2f}",
            f"{100 * (b.top1 - a.top1):+.2f}",
        ]
        for a, b in pairs
    ]
    title = f"{baseline.model}: top-1 in % of each exit on all {baseline.samples['test']:,} test images, one seed"
    return title, ["exit", "mul-adds", "baseline", "learned", "difference"], rows
