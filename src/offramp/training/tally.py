"""What is remembered of training: sums over an epoch, kept on the device, and a sample of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offramp.common.files import writing
from offramp.runs.folder import sample_name
from offramp.training.objectives import allocate
from offramp.training.processes import Processes
from offramp.training.step import HalfResult

SAMPLES_KEPT = 256
LOCAL = ("losses", "hits", "seen")  # of this process's samples only
MEANS = {"train_loss": "losses", "train_top1": "hits"}


class Tally:
    """Sums over an epoch, kept on the device: losses, hits, and the first step whose loss was not finite."""

    def __init__(self, num_exits: int, device: torch.device) -> None:
        self.tensors = {
            "losses": torch.zeros(num_exits, dtype=torch.float64, device=device),
            "hits": torch.zeros(num_exits, dtype=torch.int64, device=device),
            "seen": torch.zeros((), dtype=torch.int64, device=device),
            "meta_loss": torch.zeros((), dtype=torch.float64, device=device),
            "meta_updates": torch.zeros((), dtype=torch.int64, device=device),
            "first_bad": torch.full((), -1, dtype=torch.int64, device=device),
        }

    def add(self, half: HalfResult, step: int) -> None:
        sums = self.tensors
        sums["losses"] += half.losses_BK.sum(0, dtype=torch.float64)
        sums["hits"] += half.hits_K
        sums["seen"] += len(half.losses_BK)
        is_first = ~torch.isfinite(half.loss) & (sums["first_bad"] < 0)
        sums["first_bad"].masked_fill_(is_first, step)
        if half.meta_loss is not None:
            sums["meta_loss"] += half.meta_loss
            sums["meta_updates"] += 1

    def means(self, processes: Processes) -> dict[str, Any]:
        """What the epoch's row in the metrics says, over all processes."""
        sums = self.summed(processes)
        seen, meta_updates = sums["seen"].item(), sums["meta_updates"].item()
        means: dict[str, Any] = {name: (sums[key] / seen).tolist() for name, key in MEANS.items()}
        if meta_updates:
            means["meta_loss"] = sums["meta_loss"].item() / meta_updates
        return means

    def summed(self, processes: Processes) -> dict[str, Tensor]:
        """The sums over all processes; the rest is the same in each of them."""
        return {name: processes.sum(t) if name in LOCAL else t for name, t in self.tensors.items()}

    def load(self, sums: Mapping[str, Tensor], processes: Processes) -> None:
        """Put back what `summed` gave: the first process goes on with it, the others from zero."""
        for name, tensor in self.tensors.items():
            tensor.copy_(sums[name] if processes.rank == 0 or name not in LOCAL else torch.zeros_like(tensor))

    def refuse_non_finite(self, run: Path) -> None:
        step = int(self.tensors["first_bad"].item())
        if step >= 0:
            raise ValueError(f"the loss was not finite at step {step}; {kept_in(run)}")

    def reset(self) -> None:
        for name, tensor in self.tensors.items():
            tensor.fill_(-1 if name == "first_bad" else 0)


def save_samples(run: Path, epoch: int, half: HalfResult, q: float) -> None:
    """Keep what some samples of the epoch's last half looked like, for the report.

    A sample's weight at an exit is the mean over terms; with several terms, `term_weights` has them all, [n, terms, K].
    """
    rows = slice(SAMPLES_KEPT)
    terms = half.term_weights[rows]
    kept = {
        "losses": half.losses_BK[rows],
        "confidences": half.confidences_BK[rows],
        "weights": terms.mean(1),
        "exits": allocate(half.confidences_BK, q)[rows],
    }
    if terms.shape[1] > 1:
        kept["term_weights"] = terms
    with writing(run / sample_name(epoch)) as file:
        arrays: dict[str, Any] = {name: tensor.float().cpu().numpy() for name, tensor in kept.items()}
        np.savez_compressed(file, **arrays)


def kept_in(run: Path) -> str:
    """What to tell people whose run went wrong."""
    kept = f"the last good state is kept in {run / 'last'}" if (run / "last").exists() else "nothing was saved yet"
    return f"{kept}; try a lower train.learning_rate"
