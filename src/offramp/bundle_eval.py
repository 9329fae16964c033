"""How a bundle does on a data set: every exit on all test images, and its policy with images really leaving."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offramp.bundle import Bundle, all_logits, load_bundle
from offramp.console import progress
from offramp.data import Dataset, load_dataset
from offramp.policy import Outcome, mean_cost, shares_of

BATCH = 256


@dataclass(frozen=True)
class BundleScore:
    """Top-1 of every exit on everything, and what the policy made of it."""

    samples: int
    exits: tuple[float, ...]
    policy: Outcome


def evaluate_bundle(
    source: str | Path, data: str, *, data_dir: str | Path | None = None, device: str = "auto", **options: Any
) -> BundleScore:
    """Run the test split of a data set through a bundle, or through a network that comes trained."""
    bundle = load_bundle(source, device=device, own_process=True)
    images = load_dataset(data, data_dir=data_dir, **options)
    _check(bundle, images, source)
    hits, runtime = np.zeros(len(bundle.costs), np.int64), bundle.runtime()
    right, exits = [], []
    with progress(f"evaluating {images.name}", images.size("test")) as bar:
        for part in images.sweep("test", BATCH, torch.device("cpu")):
            ready, labels = part.images.numpy(), part.labels.numpy()
            hits += (all_logits(bundle.engine, ready).argmax(-1) == labels).sum(1)
            result = runtime(ready)
            right.append(result.labels == labels)
            exits.append(result.exits)
            bar.advance(len(labels), len(labels))
    left = np.concatenate(exits)
    policy = Outcome(float(np.concatenate(right).mean()), mean_cost(left, bundle.costs), shares_of(left, len(hits)))
    return BundleScore(len(left), tuple((hits / len(left)).tolist()), policy)


def _check(bundle: Bundle, images: Dataset, source: str | Path) -> None:
    if bundle.classes != images.class_names:
        raise ValueError(f"{source} does not know the classes of {images.name}")
    if bundle.card.preprocessing != images.preprocessing:
        raise ValueError(f"{source} prepares images in another way than {images.name} does")
