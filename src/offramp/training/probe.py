"""Linear probes: heads that begin as the best linear classifiers of the features they read.

A network, its data and the heads that are new go in. The features of the training split, without augmentation, are
computed once; each head's `linear` layer is fitted to them by multinomial logistic regression and written back. It is
deterministic on the CPU. BatchNorms of a new head that have seen nothing first see a few batches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.common.device import exact_float32
from offramp.data import Dataset
from offramp.models.exits import ExitNet, State
from offramp.models.modules import modes_kept
from offramp.training.evaluate import BATCH_PIXELS

log = logging.getLogger("offramp")

RIDGE = 1e-3  # of the classifier's weights, for features of unit variance
ITERATIONS = 100
NORM_BATCHES = 8


def probe_heads(model: ExitNet, heads: Sequence[int], data: Dataset, seed: int, device: torch.device) -> None:
    """Fit the linear layers of the heads with these numbers (from 1); the network's mode is put back."""
    linears = {k: linear_layer(model.heads[k - 1]) for k in heads}
    log.info("fitting the linear layers of %d heads to the features under them", len(linears))
    with modes_kept(model), exact_float32():
        settle_norms(model.eval(), heads, data, seed, device)
        features, labels = features_of(model, heads, data, device)
        for k, linear in linears.items():
            fit_linear(linear, features.pop(k), labels)


def linear_layer(head: nn.Module) -> nn.Linear:
    """The classifier of a head, which reads what its `features` gives; a head may be a linear layer itself."""
    if isinstance(head, nn.Linear):
        return head
    linear = getattr(head, "linear", None)
    if not isinstance(linear, nn.Linear) or not hasattr(head, "features"):
        raise ValueError("train.probe needs heads with `features` and a `linear` layer, as ours have")
    return linear


@torch.no_grad()
def settle_norms(model: ExitNet, heads: Sequence[int], data: Dataset, seed: int, device: torch.device) -> None:
    """Let BatchNorms of the heads that have seen nothing see the first batches of training."""
    found = [m for k in heads for m in model.heads[k - 1].modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    fresh = [(norm, norm.momentum) for norm in found if norm.num_batches_tracked == 0]
    if not fresh:
        return
    for norm, _ in fresh:
        norm.momentum = None  # a plain mean over the batches
        norm.train()
    batch = min(batch_size(data), data.size("train"))
    for images, _ in islice(data.stream(batch, seed, device), NORM_BATCHES):
        model(images)
    for norm, momentum in fresh:
        norm.momentum = momentum
        norm.eval()


@torch.inference_mode()
def features_of(
    model: ExitNet, heads: Sequence[int], data: Dataset, device: torch.device
) -> tuple[dict[int, Tensor], Tensor]:
    """The feature under each linear layer for the whole training split, and the labels."""
    found: dict[int, list[Tensor]] = {k: [] for k in heads}
    labels = []
    for part in data.sweep("train", batch_size(data), device):
        state: State = (part.images,)
        for k in range(1, max(heads) + 1):
            feature, state = model.advance(k, state)
            if k in found:
                found[k].append(seen_by_linear(model.heads[k - 1], feature))
        labels.append(part.labels)
    return {k: torch.cat(parts) for k, parts in found.items()}, torch.cat(labels)


def seen_by_linear(head: nn.Module, feature: Tensor) -> Tensor:
    """What the linear layer of a head reads."""
    return feature if isinstance(head, nn.Linear) else head.features(feature)  # type: ignore[operator]


def fit_linear(linear: nn.Linear, features: Tensor, labels: Tensor) -> None:
    """Multinomial logistic regression with a small ridge, on standardised features; written into the layer."""
    features, labels = features.clone(), labels.clone()  # out of inference mode
    mean, std = features.mean(0), features.std(0).clamp(min=1e-6)
    seen = (features - mean) / std
    weight = torch.zeros_like(linear.weight, requires_grad=True)
    bias = torch.zeros(linear.out_features, device=seen.device, dtype=seen.dtype, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        value = F.cross_entropy(seen @ weight.T + bias, labels) + RIDGE / 2 * weight.square().sum()
        value.backward()
        return value

    solver.step(loss)
    with torch.no_grad():
        linear.weight.copy_(weight / std)
        if linear.bias is not None:
            linear.bias.copy_(bias - (weight / std) @ mean)


def batch_size(data: Dataset) -> int:
    """How many images go through the network at a time."""
    return max(1, BATCH_PIXELS // data.image_size**2)
