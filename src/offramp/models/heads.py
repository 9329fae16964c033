"""Heads as objects: classifiers for features of any layout, by name.

A head pools a feature over its places, whatever their layout, and ends in a `linear` layer; `features` gives what that
layer reads. `linear` is no more than that, `conv` widens the channels first, `chained` also reads what the exit before
it answered. One of your own is added with `register_head` and called as `factory(feature, num_classes, **options)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offramp.common.registry import Registry

LayoutName = Literal["vectors", "tokens", "maps", "maps_last"]
WIDTH = 512  # channels of a `conv` head
SIDE = 7  # a `conv` head averages larger maps down to about this first


@dataclass(frozen=True)
class Feature:
    """What a head reads: vectors [B, C], tokens [B, N, C], maps [B, C, H, W] or channels-last maps [B, H, W, C]."""

    layout: LayoutName
    channels: int
    side: int = 1  # of maps

    @staticmethod
    def of(shape: tuple[int, ...], channels_last: bool | None = None) -> Feature | None:
        """The feature of this shape, batch included; None where no head can read it.

        Unless it is known whether maps have their channels last, they are taken to have as many rows as columns: the
        dimension that differs from its neighbours holds the channels.
        """
        if len(shape) == 2:
            return Feature("vectors", shape[1])
        if len(shape) == 3:
            return Feature("tokens", shape[2])
        if len(shape) == 4:
            last = shape[1] == shape[2] != shape[3] if channels_last is None else channels_last
            return Feature("maps_last", shape[3], shape[1]) if last else Feature("maps", shape[1], shape[2])
        return None


def channels_last(shape: tuple[int, ...], image: tuple[int, int, int]) -> bool | None:
    """Whether maps of this shape have their channels last: rows and columns are to each other as the image's.

    None where both readings, or neither, would do.
    """
    _, height, width = image
    first, last = shape[2] * width == shape[3] * height, shape[1] * width == shape[2] * height
    return None if first == last else last


HeadFactory = Callable[..., nn.Module]
HEADS: Registry[HeadFactory] = Registry("head")
register_head = HEADS.register  # called as `factory(feature, num_classes, **options)`


class Head(nn.Module):
    """Norm or convolution, mean over all places, dropout, linear layer; may also read the exit before it.

    Vectors, tokens and channels-last maps come from networks without BatchNorm: these get a LayerNorm. With `width`,
    channels are widened to it at every place before they are averaged.
    """

    def __init__(
        self,
        feature: Feature,
        num_classes: int,
        width: int | None = None,
        dropout: float = 0.0,
        reads_before: bool = False,
    ) -> None:
        super().__init__()
        self.layout, self.reads_before = feature.layout, reads_before
        self.body = _body(feature, width)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(width or feature.channels, num_classes)
        if reads_before:  # one linear layer over both; it begins as one over the features alone
            self.before = nn.Linear(num_classes, num_classes, bias=False)
            nn.init.zeros_(self.before.weight)

    def features(self, x: Tensor) -> Tensor:
        """What the linear layer reads, [B, C]."""
        x = self.body(x)
        if self.layout == "vectors":
            return x
        places = {"tokens": (1,), "maps": (2, 3), "maps_last": (1, 2)}[self.layout]
        return x.mean(places)

    def forward(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        logits = self.linear(self.dropout(self.features(x)))
        if not self.reads_before or before is None:
            return logits
        said = torch.log_softmax(before, dim=1).to(logits.dtype)
        return logits + self.before(said)


def _body(feature: Feature, width: int | None) -> nn.Module:
    channels = feature.channels
    if feature.layout == "maps":
        if width is None:
            return nn.Identity()
        pool = nn.AvgPool2d(max(1, feature.side // SIDE))
        conv = nn.Conv2d(channels, width, 1, bias=False)
        return nn.Sequential(pool, conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    norm = nn.LayerNorm(channels)
    return norm if width is None else nn.Sequential(norm, nn.Linear(channels, width), nn.GELU())


@register_head("linear")
def _linear(feature: Feature, num_classes: int, dropout: float = 0.0) -> nn.Module:
    return Head(feature, num_classes, dropout=dropout)


@register_head("conv")
def _conv(feature: Feature, num_classes: int, width: int = WIDTH, dropout: float = 0.0) -> nn.Module:
    return Head(feature, num_classes, width, dropout)


@register_head("chained")
def _chained(feature: Feature, num_classes: int, width: int = WIDTH, dropout: float = 0.0) -> nn.Module:
    return Head(feature, num_classes, width, dropout, reads_before=True)


def new_head(name: str, feature: Feature, num_classes: int, options: Mapping[str, Any]) -> nn.Module:
    """The head of this name; options that it does not take are a sentence."""
    try:
        return HEADS[name](feature, num_classes, **options)
    except TypeError as error:
        raise ValueError(f"head_options do not fit the head {name!r}: {error}") from error
