"""The demo: train a small network on the embedded digits, with and without learned weights; compare and report."""

from __future__ import annotations

import time
from pathlib import Path

from offramp.config import load_recipe
from offramp.console import console, print_table
from offramp.evaluate import evaluate_run
from offramp.outputs import EvalSummary
from offramp.report.write import write_report
from offramp.train import train_run

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
    say(
        f"done in {time.monotonic() - began:.0f} s\n"
        f"run folders (config, metrics, weights, saved logits): {folder}/baseline  {folder}/learned\n"
        f"training curves: tensorboard --logdir {folder}\n\n{report.answer}\n"
        f"The report, to be opened in a browser: {report.page}"
    )
    return folder


def comparison(baseline: EvalSummary, learned: EvalSummary) -> tuple[str, list[str], list[list[str]]]:
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


def say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
