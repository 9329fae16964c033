"""offramp beside earlyon, the other package for early exits: the same network, the same exits, the same shares.

    pip install earlyon==0.3.0
    python results/earlyon_speed.py

ResNet-50 of torchvision, exits after its first three layers, random params (which cost what trained ones cost), 256
images of 224 pixels. Thresholds are set so that a half leaves at the first exit, a quarter at the second and an eighth
at the third, exactly. Every package runs its own heads on one image at a time and in batches of 64, by turns; the whole
network alone is the yardstick. offramp lays tensors out channels-last, so the others are timed with that too, and the
whole network by ONNX Runtime as well. Printed are images/s, the median of some turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from earlyon.models import custom_ee
from torchvision.models import resnet50

from offramp.common.allocator import keep_freed_memory
from offramp.common.formatting import to_markdown
from offramp.fitting.timing import Serving
from offramp.measuring.policy import Policy
from offramp.models.backbones import with_exits
from offramp.models.cost import exit_costs
from offramp.models.exits import ExitNet
from offramp.running.runtime import Runtime

AT = ["layer1", "layer2", "layer3"]
IMAGES, SIZE, CLASSES, TURNS = 256, 224, 100, 3
LEAVE = 0.5  # of those that come to an exit


def thresholds(logits: Sequence[np.ndarray]) -> list[float]:
    """So that at every exit half of those who are still there leave."""
    left, found = np.arange(IMAGES), []
    for own in logits:
        chances = np.exp(own - own.max(-1, keepdims=True))
        sure = (chances / chances.sum(-1, keepdims=True)).max(-1)
        found.append(float(np.sort(sure[left])[::-1][: round(LEAVE * len(left)) + 1][-2:].mean()))
        left = left[sure[left] < found[-1]]
    return found


def whole(images: torch.Tensor, layout: torch.memory_format = torch.contiguous_format) -> Callable[[int], object]:
    model, images = _network().to(memory_format=layout), images.contiguous(memory_format=layout)

    def run(batch: int) -> None:
        with torch.inference_mode():
            for part in images.split(batch):
                model(part)

    return run


def whole_onnx(images: torch.Tensor) -> Callable[[int], object]:
    """A network of one stage, of which every image pays for everything."""
    model = with_exits(_network(), at=1, example=images[:2]).eval()
    policy = Policy("searched", None, (), 0.0, (), 0.0)
    return _by_stages(model, policy, "onnx", images)


def earlyon(images: torch.Tensor, layout: torch.memory_format = torch.contiguous_format) -> Callable[[int], object]:
    """It leaves with whole batches, so those of more than one image go as far as the hardest of them."""
    model = custom_ee(_network(), exit_layers=AT, num_classes=CLASSES, input_shape=(1, 3, SIZE, SIZE)).eval()
    model, images = model.to(memory_format=layout), images.contiguous(memory_format=layout)
    with torch.inference_mode():
        parts = [model(part, mode="training") for part in images.split(32)]
    said = [torch.cat([part[k] for part in parts]).numpy() for k in range(len(AT))]
    model.config.confidence_thresholds = thresholds(said)

    def run(batch: int) -> None:
        for part in images.split(batch):
            model(part, mode="inference") if batch == 1 else model.forward_inference_batched(part)

    return run


def offramp(images: torch.Tensor, format_: str) -> Callable[[int], object]:
    model = with_exits(_network(), at=AT, example=images[:2], head="linear").eval()
    with torch.inference_mode():
        parts = [model(part) for part in images.split(32)]
    said = [torch.cat([part[k] for part in parts]).numpy() for k in range(len(AT))]
    return _by_stages(model, Policy("searched", None, tuple(thresholds(said)), 0.0, (), 0.0), format_, images)


def _by_stages(model: ExitNet, policy: Policy, format_: str, images: torch.Tensor) -> Callable[[int], object]:
    costs = [cost.mul_adds for cost in exit_costs(model)]
    runtime, ready = Runtime(Serving(format_, "cpu").engine(model), policy, costs), images.numpy()

    def run(batch: int) -> None:
        for at in range(0, IMAGES, batch):
            runtime(ready[at : at + batch])

    return run


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    return resnet50(num_classes=CLASSES).eval()


def main() -> None:
    keep_freed_memory()  # offramp does so on a CPU: here for all alike
    images = torch.randn(IMAGES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    ways = {
        "whole network, PyTorch": whole(images),
        "whole network, PyTorch, channels-last": whole(images, torch.channels_last),
        "whole network, ONNX Runtime": whole_onnx(images),
        "earlyon 0.3.0": earlyon(images),
        "earlyon 0.3.0, channels-last": earlyon(images, torch.channels_last),
        "offramp, PyTorch": offramp(images, "torch"),
        "offramp, ONNX Runtime": offramp(images, "onnx"),
    }
    spent: dict[tuple[str, int], list[float]] = {(way, batch): [] for way in ways for batch in (1, 64)}
    for turn in range(TURNS + 1):
        for (way, batch), seconds in spent.items():
            began = time.perf_counter()
            ways[way](batch)
            if turn:
                seconds.append(time.perf_counter() - began)
    rate = {key: IMAGES / statistics.median(seconds) for key, seconds in spent.items()}
    base = "whole network, PyTorch"
    rows = [
        [way, *(cell for b in (1, 64) for cell in (f"{rate[way, b]:.0f}", f"{rate[way, b] / rate[base, b]:.2f}"))]
        for way in ways
    ]
    print(to_markdown(["", "one at a time, images/s", "speed-up", "batches of 64, images/s", "speed-up"], rows))


if __name__ == "__main__":
    main()
