"""What training cost, in baseline epochs. Runs may share a GPU, so measured ratios of steps say it, not clocks."""

from __future__ import annotations

from collections.abc import Mapping

from offramp.config import RunConfig


def baseline_epochs(config: RunConfig, ratios: Mapping[str, float]) -> float | None:
    """How many epochs of conventional training a run took as long as.

    `ratios`: a step that trains the weight net beside a conventional one, by order (`offramp bench train`).
    """
    weighting, epochs = config.weighting, float(config.train.epochs)
    if config.imta.collaboration or (weighting.name == "learned" and weighting.order not in ratios):
        return None  # a second phase costs something else
    if weighting.name != "learned":
        return epochs
    return epochs * (1 + weighting.until * (ratios[weighting.order] - 1) / weighting.interval)
