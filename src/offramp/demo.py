"""The demo: train a small network on the embedded digits, evaluate it, say where everything is."""

from __future__ import annotations

import time
from pathlib import Path

from offramp.config import load_recipe
from offramp.console import console, print_table
from offramp.evaluate import anytime_table, evaluate_run
from offramp.train import train_run


def run_demo(out: Path, device: str) -> Path:
    """Run everything into a new folder under `out` and return it."""
    began = time.monotonic()
    folder = out / time.strftime("demo-%Y%m%d-%H%M%S")
    recipe = load_recipe("digits-baseline")
    console.print(f"[bold]offramp demo[/bold]: {recipe.claim}", highlight=False, soft_wrap=True)
    run = train_run(recipe.config, folder / "baseline", device=device)
    summary = evaluate_run(run, device=device)
    print_table(*anytime_table(summary))
    console.print(
        f"done in {time.monotonic() - began:.0f} s\n"
        f"run folder (config, metrics, weights): {run}\n"
        f"saved logits and eval.json:            {run / 'eval'}\n"
        f"training curves:                       tensorboard --logdir {run / 'tensorboard'}",
        highlight=False,
        soft_wrap=True,
    )
    return folder
