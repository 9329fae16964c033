"""What training cost, in baseline epochs. Runs may share a GPU, so measured ratios of steps say it, not clocks."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan, nan

from offramp.runs.config import RunConfig


def baseline_epochs(config: RunConfig, ratios: Mapping[str, float]) -> float | None:
    """How many epochs of conventional training a run took as long as.

    `ratios`: a step that trains the weight net beside a conventional one, by order; `second` and `second_ORDER` are a
    step of IMTA's second phase without and with the weight net (`offramp bench train`).
    """
    weighting = config.weighting
    steps = [(1.0, ratios.get(weighting.order))]
    if config.imta.collaboration:
        steps.append((ratios.get("second", nan), ratios.get(f"second_{weighting.order}")))
    if weighting.name != "learned":
        per_epoch = sum(plain for plain, _ in steps)
    else:
        share = weighting.until / weighting.interval  # of the steps, those that train the weight net
        per_epoch = sum(plain + share * ((nan if learned is None else learned) - plain) for plain, learned in steps)
    return None if isnan(per_epoch) else config.train.epochs * per_epoch
