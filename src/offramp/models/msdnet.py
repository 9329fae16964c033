"""MSDNet (Huang et al., ICLR 2018) as cells (layer, scale).

Scale 1 is the finest. Every layer adds `growth` x factor channels to each scale it keeps; the finest scales
are dropped one by one along the depth, and each drop halves the channels. A head reads the coarsest scale at
the end of its block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from torch import Tensor, nn

from offramp.models.cells import INPUT, Cell, CellNet
from offramp.models.layers import ConvBNReLU, DenseUnit, Head, TwoBranch, halved, head_pixels
from offramp.models.registry import register_model

STEMS = ("cifar", "strided", "imagenet")  # how much smaller scale 1 is than the images: 1, 2, 4


class Halved(nn.Module):
    """A cell followed by the 1x1 transition that halves its channels where a scale is dropped."""

    def __init__(self, cell: nn.Module, channels: int, out: int) -> None:
        super().__init__()
        self.cell = cell
        self.transition = ConvBNReLU(channels, out, kernel=1)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.transition(self.cell(*inputs))


def cell_name(layer: int, scale: int) -> str:
    """The name of a cell; layer 0 is the stem."""
    return f"layer{layer:02d}_scale{scale}"


def msdnet(
    num_classes: int,
    *,
    image_size: int = 32,
    blocks: Sequence[int] = (1, 2, 3, 4, 5),
    base_width: int = 16,
    growth: int = 6,
    factors: Sequence[int] = (1, 2, 4),
    scales: int | None = None,
    stem: str = "cifar",
    head_width: int | None = 128,
    head_dropout: float = 0.0,
    schedule: str = "eager",
) -> CellNet:
    """Build an MSDNet: `blocks` lists the layers of each block, one exit per block.

    `factors` holds the channel factor of each scale, finest first; `scales` takes only the first so many.
    `head_width` None makes each head as wide as its input. `head_dropout` is the share of features that a head's
    classifier does without in training.
    """
    factors = _first_scales(factors, scales)
    _check(blocks, base_width, growth, factors, stem)
    sizes = _scale_sizes(image_size, len(factors), stem)
    cells = list(_stem(base_width, factors, stem))
    heads: list[tuple[str, nn.Module]] = []
    ends = [sum(blocks[: k + 1]) for k in range(len(blocks))]
    interval = ceil(ends[-1] / len(factors))
    width = base_width
    for layer in range(1, ends[-1] + 1):
        stage = len(heads)
        first_in = 1 + max(0, layer - 2) // interval
        first_out = 1 + (layer - 1) // interval
        for scale in range(first_out, len(factors) + 1):
            cells.append(_cell(layer, scale, first_in, first_out, width, growth, factors, stage))
        width = _next_width(width, growth, dropped=first_out > first_in)
        if layer == ends[stage]:
            channels = width * factors[-1]
            head = Head(channels, head_width or channels, sizes[-1], num_classes, head_dropout)
            heads.append((cell_name(layer, len(factors)), head))
    return CellNet(cells, heads, (3, image_size, image_size), schedule)


def _cell(
    layer: int,
    scale: int,
    first_in: int,
    first_out: int,
    width: int,
    growth: int,
    factors: Sequence[int],
    stage: int,
) -> Cell:
    """The cell (layer, scale), where the layer reads scales from `first_in` on and keeps `first_out` on."""
    factor = factors[scale - 1]
    name, below = cell_name(layer, scale), cell_name(layer - 1, scale)
    module: nn.Module
    inputs: tuple[str, ...]
    if scale == first_in:  # the finest scale there is, and it stays
        module, inputs = DenseUnit(width * factor, growth * factor, factor), (below,)
    else:
        finer = factors[scale - 2]
        module = TwoBranch(width * factor, width * finer, growth * factor, factor, finer)
        inputs = (below, cell_name(layer - 1, scale - 1))
    if first_out > first_in:
        grown = (width + growth) * factor
        module = Halved(module, grown, _next_width(width, growth, dropped=True) * factor)
    return Cell(name, module, inputs, stage)


def _next_width(width: int, growth: int, dropped: bool) -> int:
    return (width + growth) // 2 if dropped else width + growth


def _stem(base_width: int, factors: Sequence[int], stem: str) -> Iterator[Cell]:
    """Scale 1 from the images, each coarser scale from the one before."""
    width = base_width * factors[0]
    first: nn.Module = ConvBNReLU(3, width, stride=2 if stem == "strided" else 1)
    if stem == "imagenet":
        first = nn.Sequential(ConvBNReLU(3, width, kernel=7, stride=2, bias=True), nn.MaxPool2d(3, 2, 1))
    yield Cell(cell_name(0, 1), first, (INPUT,), 0)
    for scale in range(2, len(factors) + 1):
        finer, here = (base_width * f for f in factors[scale - 2 : scale])
        yield Cell(cell_name(0, scale), ConvBNReLU(finer, here, stride=2), (cell_name(0, scale - 1),), 0)


def _scale_sizes(image_size: int, scales: int, stem: str) -> list[int]:
    """The side of every scale's map; refuse images too small for the heads."""
    sizes = [image_size]
    for _ in range(STEMS.index(stem) + scales - 1):
        sizes.append(halved(sizes[-1]))
    if head_pixels(sizes[-1]) < 1:
        raise ValueError(
            f"image_size {image_size} is too small for {scales} scales: the coarsest map is "
            f"{sizes[-1]} pixels wide and a head needs 5; use larger images or fewer scales"
        )
    return sizes


def _first_scales(factors: Sequence[int], scales: int | None) -> tuple[int, ...]:
    if scales is not None and not 1 <= scales <= len(factors):
        raise ValueError(f"scales {scales} must lie between 1 and {len(factors)}, the number of factors")
    return tuple(factors[:scales])


def _check(blocks: Sequence[int], base_width: int, growth: int, factors: Sequence[int], stem: str) -> None:
    if stem not in STEMS:
        raise ValueError(f"stem {stem!r} is unknown; choose one of: {', '.join(STEMS)}")
    numbers = {"base_width": [base_width], "growth": [growth], "blocks": blocks, "factors": factors}
    for field, values in numbers.items():
        if not values or any(type(v) is not int or v < 1 for v in values):
            raise ValueError(f"{field} must be made of whole numbers from 1 up, got {list(values)}")
    if len(factors) > 1 and growth * min(factors[1:]) < 2:
        raise ValueError(f"growth {growth} is too small for the two branches of a cell; use 2 or more")
    layers, scales = sum(blocks), len(factors)
    left = scales - (layers - 1) // ceil(layers / scales)
    if left > 1:
        raise ValueError(
            f"{layers} layers over {scales} scales leave {left} scales at the end, so params of the finer ones "
            "would never be used; change the number of layers (the sum of blocks) or of scales"
        )


register_model("msdnet5", msdnet, about="MSDNet for CIFAR, 5 exits")
register_model("msdnet7", msdnet, about="MSDNet for CIFAR, 7 exits", blocks=(1, 2, 3, 4, 5, 6, 7))
for _step in (4, 6, 7):
    register_model(
        f"msdnet-imagenet-s{_step}",
        msdnet,
        num_classes=1000,
        about=f"MSDNet for ImageNet, 5 exits, {_step} layers between them",
        image_size=224,
        blocks=(4, _step, _step, _step, _step),
        base_width=32,
        growth=16,
        factors=(1, 2, 4, 4),
        stem="imagenet",
        head_width=None,
    )
register_model(
    "msdnet-tiny",
    msdnet,
    num_classes=10,
    about="a small MSDNet for 32x32 images that trains on two CPU cores in about a minute, 3 exits",
    blocks=(1, 2, 3),
    base_width=16,
    growth=8,
    factors=(1, 2),
    stem="strided",
    head_width=32,
)
