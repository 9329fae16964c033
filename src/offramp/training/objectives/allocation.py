"""Which exit each sample of a batch would leave at.

Exit k takes its share of samples, the most confident among those not yet taken; the last exit takes the rest.
Every sample is at exactly one exit. No Python loop over samples, no wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offramp.measuring.shares import exit_counts


@torch.no_grad()
def allocate(confidences_NK: Tensor, q: float) -> Tensor:
    """The exit (1..K) of each sample; among equal confidences the earlier row goes first."""
    samples, num_exits = confidences_NK.shape
    exits = torch.full((samples,), num_exits, dtype=torch.int64, device=confidences_NK.device)
    lowest = torch.finfo(confidences_NK.dtype).min
    free = confidences_NK.nan_to_num(nan=lowest, neginf=lowest)  # a copy; minus infinity marks who has left
    for k, count in enumerate(exit_counts(samples, num_exits, q)[:-1], start=1):
        order = torch.sort(free[:, k - 1], descending=True, stable=True).indices
        taken = order[:count]
        exits.index_fill_(0, taken, k)
        free.index_fill_(0, taken, -torch.inf)
    return exits
