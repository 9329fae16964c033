"""How a bundle does on a data set: every exit on all test images, and its policy with images really leaving."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from offramp.common.console import progress
from offramp.data import Dataset
from offramp.measuring.policy import Outcome, mean_cost, shares_of
from offramp.running.bundle import Bundle, all_logits

BATCH = 256


@dataclass(frozen=True)
class BundleScore:
    """Top-1 of every exit on everything, and what the policy made of it."""

    samples: int
    exits: tuple[float, ...]
    policy: Outcome


def evaluate_bundle(bundle: Bundle, data: Dataset) -> BundleScore:
    """Run the test split of a data set through a bundle."""
    if bundle.classes != data.class_names:
        raise ValueError(f"{bundle.folder.name} does not know the classes of {data.name}")
    if bundle.card.preprocessing != data.preprocessing:
        raise ValueError(f"{bundle.folder.name} prepares images in another way than {data.name} does")
    hits, runtime = np.zeros(len(bundle.costs), np.int64), bundle.runtime()
    right, exits = [], []
    with progress(f"evaluating {data.name}", data.size("test")) as bar:
        for part in data.sweep("test", BATCH, torch.device("cpu")):
            ready, labels = part.images.numpy(), part.labels.numpy()
            hits += (all_logits(bundle.engine, ready).argmax(-1) == labels).sum(1)
            result = runtime(ready)
            right.append(result.labels == labels)
            exits.append(result.exits)
            bar.advance(len(labels), len(labels))
    left = np.concatenate(exits)
    policy = Outcome(float(np.concatenate(right).mean()), mean_cost(left, bundle.costs), shares_of(left, len(hits)))
    return BundleScore(len(left), tuple((hits / len(left)).tolist()), policy)
