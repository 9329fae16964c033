"""RANet (Yang et al., CVPR 2020): sub-networks from low to high resolution, as cells.

Sub-network 1 works on the smallest map. Each later one works on a larger map; its first blocks fuse what the
sub-network before computed in the block of the same number, its remaining blocks each end in an exit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn

from offramp.models.cells import INPUT, Cell, CellNet
from offramp.models.layers import ConvBNReLU, DenseUnit, Head, Join, Unit, halved, head_pixels
from offramp.models.registry import register_model


@dataclass(frozen=True)
class Feature:
    """The first `channels` channels of a cell's output."""

    cell: str
    channels: int


@dataclass
class SubNet:
    """What is built of one sub-network so far; `lows[b-1]` is what block b offers to the next sub-network."""

    number: int
    factor: int
    growth: int
    fused_blocks: int
    down_blocks: set[int]
    transition_blocks: set[int]
    x: Feature
    lows: list[list[Feature]] = field(default_factory=list)


def resize(x: Tensor, like: Tensor) -> Tensor:
    """Bilinear (aligned corners) to the size of `like`."""
    if x.shape[-2:] == like.shape[-2:]:
        return x
    return F.interpolate(x, like.shape[-2:], mode="bilinear", align_corners=True)


class FusionLayer(nn.Module):
    """cat[x, up(U(low)), U(x)]; with stride 2 all three come out at the halved size."""

    def __init__(self, x: int, low: int, growth: int, share: int, factors: tuple[int, int], stride: int) -> None:
        super().__init__()
        self.low_channels = low
        self.from_low = Unit(low, share, factors[0])
        self.from_x = Unit(x, growth - share, factors[1], stride)
        self.join = Join()

    def forward(self, x: Tensor, low: Tensor) -> Tensor:
        new = self.from_x(x)
        added = self.from_low(low[:, : self.low_channels])
        return self.join(resize(x, new), resize(added, new), new)


class Closing(nn.Module):
    """cat[x, up(1x1 of the last low feature)]: the end of a fusion block."""

    def __init__(self, low: int, share: int) -> None:
        super().__init__()
        self.low_channels = low
        self.from_low = ConvBNReLU(low, share, kernel=1)
        self.join = Join()

    def forward(self, x: Tensor, low: Tensor) -> Tensor:
        return self.join(x, resize(self.from_low(low[:, : self.low_channels]), x))


def ranet(
    num_classes: int,
    *,
    image_size: int = 32,
    blocks: Sequence[int] = (2, 4, 6),
    scales: Sequence[int] = (1, 2, 3),
    factors: Sequence[int] = (4, 2, 1),
    base_width: int = 16,
    growth: int = 6,
    layer_step: int = 2,
    compress: float = 0.25,
    head_width: int = 128,
    head_dropout: float = 0.0,
    schedule: str = "eager",
) -> CellNet:
    """Build a RANet. `blocks`, `scales` and `factors` list the sub-networks from low to high resolution.

    Block b has `layer_step` x b layers; `compress` is the share of new channels that comes from below, `head_dropout`
    that of features which a head's classifier does without in training.
    """
    _check(blocks, scales, factors, base_width, growth, layer_step, compress)
    size = _coarsest_size(image_size, scales)
    cells = list(_base_features(base_width, scales, factors))
    heads: list[tuple[str, nn.Module]] = []
    before: SubNet | None = None
    for i, count in enumerate(blocks):
        sub = _sub_net(i, blocks, scales[i], factors[i], base_width, growth)
        for block in range(1, count + 1):
            cells.extend(_block(sub, before, block, layer_step * block, compress, stage=len(heads)))
            if block > sub.fused_blocks:
                heads.append((sub.x.cell, Head(sub.x.channels, head_width, size, num_classes, head_dropout)))
        before = sub
    _initialise([c for c in cells if c.inputs != (INPUT,) and not c.name.startswith("base")], heads)
    return CellNet(cells, heads, (3, image_size, image_size), schedule)


def _sub_net(i: int, blocks: Sequence[int], scale: int, factor: int, base_width: int, growth: int) -> SubNet:
    earlier = [0, *blocks[:i]]
    return SubNet(
        number=i + 1,
        factor=factor,
        growth=growth * factor,
        fused_blocks=earlier[-1],
        down_blocks=set(earlier[len(earlier) - (scale - 1) :]),
        transition_blocks={(j + 1) * blocks[i] // scale for j in range(scale - 1)},
        x=Feature(f"base{i + 1}", base_width * factor),
    )


def _block(sub: SubNet, before: SubNet | None, block: int, layers: int, compress: float, stage: int) -> Iterator[Cell]:
    """The cells of one block; moves `sub.x` on and records what the next sub-network may use."""
    prefix = f"sub{sub.number}_block{block}"
    fused = before is not None and block <= sub.fused_blocks
    shrinks = fused and block in sub.down_blocks
    entries = [sub.x]
    for layer in range(1, layers + 1):
        name, stride = f"{prefix}_layer{layer:02d}", 2 if shrinks and layer == layers else 1
        module: nn.Module
        if fused:
            assert before is not None
            low = before.lows[block - 1][layer - 1]
            share = int(compress * sub.growth)
            factors = (before.factor, sub.factor)
            module = FusionLayer(sub.x.channels, low.channels, sub.growth, share, factors, stride)
            yield Cell(name, module, (sub.x.cell, low.cell), stage)
        else:
            module = DenseUnit(sub.x.channels, sub.growth, sub.factor)
            yield Cell(name, module, (sub.x.cell,), stage)
        if stride == 2:  # what came before has another size: the last entry of that size stands for it
            entries = _as_prefixes(entries)
        sub.x = Feature(name, sub.x.channels + sub.growth)
        entries.append(sub.x)
    sub.lows.append(entries if shrinks else _as_prefixes(entries))
    if fused:
        assert before is not None
        low, share = before.lows[block - 1][-1], int(compress * sub.x.channels)
        yield Cell(f"{prefix}_closing", Closing(low.channels, share), (sub.x.cell, low.cell), stage)
        sub.x = Feature(f"{prefix}_closing", sub.x.channels + share)
    if block in sub.transition_blocks:
        half = sub.x.channels // 2
        transition = ConvBNReLU(sub.x.channels, half, kernel=1)
        yield Cell(f"{prefix}_transition", transition, (sub.x.cell,), stage)
        sub.x = Feature(f"{prefix}_transition", half)


def _as_prefixes(entries: list[Feature]) -> list[Feature]:
    """Dense layers only append channels, so earlier entries are the first channels of the last one."""
    return [Feature(entries[-1].cell, entry.channels) for entry in entries]


def _base_features(base_width: int, scales: Sequence[int], factors: Sequence[int]) -> Iterator[Cell]:
    """One map per sub-network, the largest first; all of them run before exit 1."""
    channels, source, finer_scale = 3, INPUT, scales[-1]
    for i in reversed(range(len(scales))):
        width, stride = base_width * factors[i], 2 if scales[i] < finer_scale else 1
        yield Cell(f"base{i + 1}", ConvBNReLU(channels, width, stride=stride), (source,), 0)
        channels, source, finer_scale = width, f"base{i + 1}", scales[i]


def _initialise(cells: Sequence[Cell], heads: Sequence[tuple[str, nn.Module]]) -> None:
    """He fan-out in blocks, transitions and heads, zero linear bias; base features keep the default."""
    for module in [c.module for c in cells] + [head for _, head in heads]:
        for part in module.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(part, nn.Linear):
                nn.init.zeros_(part.bias)


def _coarsest_size(image_size: int, scales: Sequence[int]) -> int:
    """The side of the map that every head reads."""
    size = image_size
    for _ in range(scales[-1] - 1):
        size = halved(size)
    if head_pixels(size) < 1:
        raise ValueError(
            f"image_size {image_size} is too small for scales up to {scales[-1]}: the smallest map is "
            f"{size} pixels wide and a head needs 5"
        )
    return size


def _check(
    blocks: Sequence[int],
    scales: Sequence[int],
    factors: Sequence[int],
    base_width: int,
    growth: int,
    layer_step: int,
    compress: float,
) -> None:
    if not (len(blocks) == len(scales) == len(factors) > 0):
        raise ValueError("blocks, scales and factors must list the same number of sub-networks")
    numbers = [*blocks, *scales, *factors, base_width, growth, layer_step]
    if any(type(n) is not int or n < 1 for n in numbers):
        raise ValueError("blocks, scales, factors, widths and growth must be whole numbers from 1 up")
    if any(b <= a for a, b in zip(blocks, blocks[1:], strict=False)):
        raise ValueError(f"blocks must grow from sub-network to sub-network, got {list(blocks)}")
    steps = [b - a for a, b in zip(scales, scales[1:], strict=False)]
    if scales[0] != 1 or any(step not in (0, 1) for step in steps):
        raise ValueError(f"scales must start at 1 and grow by 0 or 1, got {list(scales)}")
    if not 1 <= compress * growth * min(factors) < growth * min(factors):
        raise ValueError(f"compress {compress} leaves a branch without channels at growth {growth}")


register_model("ranet-c1", ranet, about="RANet Model-C-1 for CIFAR, 6 exits")
register_model(
    "ranet-c2",
    ranet,
    about="RANet Model-C-2 for CIFAR, 8 exits",
    blocks=(2, 4, 6, 8),
    scales=(1, 2, 2, 3),
    factors=(4, 2, 2, 1),
)
