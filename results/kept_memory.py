"""What it is worth on a CPU that freed memory is kept (`offramp.common.allocator`): images/s with and without.

    python results/kept_memory.py

One process each, by turns, three times; printed are the medians and their ratio.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy
from torchvision.models import resnet50

import offramp
from offramp.common.allocator import keep_freed_memory
from offramp.common.formatting import to_markdown

TURNS, STEPS = 3, 5


def training() -> tuple[int, Callable[[], object]]:
    model = offramp.create_model("timm/tf_efficientnet_lite0", num_classes=10, exits=3).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    images, labels = torch.randn(32, 3, 160, 160), torch.arange(32) % 10

    def step() -> None:
        loss = sum(cross_entropy(logits, labels) for logits in model(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return len(images), step


def answering() -> tuple[int, Callable[[], object]]:
    model, images = resnet50().eval(), torch.randn(64, 3, 224, 224)
    return len(images), torch.inference_mode()(lambda: model(images))


WORK = {
    "training Lite0 with three exits, batches of 32 at 160 px": training,
    "answering with ResNet-50, batches of 64 at 224 px": answering,
}


def measure(name: str, kept: bool) -> float:
    """In a process of its own, for what malloc is told cannot be taken back."""
    run = subprocess.run([sys.executable, __file__, name, str(kept)], capture_output=True, text=True, check=True)
    return float(run.stdout)


def run_one(name: str, kept: bool) -> None:
    if kept:
        keep_freed_memory()
    images, work = WORK[name]()
    work()
    began = time.perf_counter()
    for _ in range(STEPS):
        work()
    print(STEPS * images / (time.perf_counter() - began))


def main() -> None:
    rows = []
    for name in WORK:
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(TURNS):
            for kept, found in rates.items():
                found.append(measure(name, kept))
        before, after = (statistics.median(rates[kept]) for kept in (False, True))
        rows.append([name, f"{before:.0f}", f"{after:.0f}", f"{after / before:.2f}"])
    print(to_markdown(["images/s", "given back", "kept", "times as fast"], rows))


if __name__ == "__main__":
    run_one(sys.argv[1], sys.argv[2] == "True") if len(sys.argv) > 1 else main()
