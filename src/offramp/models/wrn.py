"""Wide residual networks (Zagoruyko and Komodakis, BMVC 2016) for 32x32 images, with an exit after each group.

Three groups of residual blocks at 32, 16 and 8 pixels; a block is BatchNorm, ReLU and a 3x3 convolution, twice, beside
a shortcut. `depth` counts convolutions along the way (6n + 4), `width` multiplies the channels 16, 32, 64. Large dense
convolutions make it costly per image and fast on a GPU: a good teacher.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from offramp.models.exits import ExitNet
from offramp.models.registry import register_model

CHANNELS = (16, 32, 64)


class Block(nn.Module):
    """BN-ReLU-conv, twice, beside a shortcut; where the shape changes, a 1x1 convolution of the activated input."""

    def __init__(self, channels: int, out: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(out), nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(dropout)
        changes = channels != out or stride > 1
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        inner = self.dropout(F.relu(self.norm2(self.conv1(activated))))
        beside = x if self.shortcut is None else self.shortcut(activated)
        return beside + self.conv2(inner)


class PooledHead(nn.Module):
    """BatchNorm, ReLU, the mean over the map, linear."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm2d(channels), nn.Linear(channels, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The pooled feature under the linear classifier."""
        return F.adaptive_avg_pool2d(F.relu(self.norm(x)), 1).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.features(x))


def wrn(num_classes: int, *, depth: int = 28, width: int = 4, dropout: float = 0.0, image_size: int = 32) -> ExitNet:
    """Build a wide residual network of 6n + 4 layers with three exits."""
    if type(depth) is not int or depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth must be 10, 16, 22, 28 and so on (6n + 4), got {depth!r}")
    if type(width) is not int or width < 1:
        raise ValueError(f"width must be a whole number from 1 up, got {width!r}")
    blocks, channels, stages, heads = (depth - 4) // 6, CHANNELS[0], [], []
    for group, base in enumerate(CHANNELS):
        layers: list[nn.Module] = [] if group else [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for number in range(blocks):
            stride = 2 if group and not number else 1
            layers.append(Block(channels, base * width, stride, dropout))
            channels = base * width
        stages.append(nn.Sequential(*layers))
        heads.append(PooledHead(channels, num_classes))
    return ExitNet.from_parts(stages, heads, (3, image_size, image_size))


register_model("wrn28-4", wrn, about="wide residual network for CIFAR, 3 exits; a teacher for smaller networks")
