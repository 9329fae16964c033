"""What a person would do without offramp: fine-tune one network of timm with timm's own parts, and time it.

    python results/plain_timm.py FOLDER --model tf_efficientnet_lite2 --size 192 --epochs 7

FOLDER has `train/CLASS` and `val/CLASS`. Optimiser (AdamW), schedule (cosine with an epoch of warm-up), transforms and
loss (label smoothing) are timm's, as its training script puts them together; everything is trained, BatchNorms as they
come. Of some rates the best on a tenth of the training images, held out, is taken; then all of them are trained on, and
`val` is tested on. It prints accuracy with its 95 % interval, the minutes of the last training, and milliseconds per
image by ONNX Runtime.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import create_transform, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder

from offramp.fitting.timing import Serving, stage_table
from offramp.measuring.intervals import proportion_interval
from offramp.models.backbones import with_exits
from offramp.models.libraries import EMBEDDED
from offramp.models.weights import load_matching, read_params

RATES = (1e-4, 3e-4, 1e-3)
BATCH, DECAY, SMOOTHING = 64, 0.05, 0.1


class FineTuning:
    """One network on one folder."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.device = asked, torch.device(asked.device)
        config = resolve_data_config({"input_size": (3, asked.size, asked.size)}, model=self.network(2))
        own = {key: config[key] for key in ("input_size", "mean", "std", "interpolation")}
        root = Path(asked.folder)
        self.train = ImageFolder(str(root / "train"), create_transform(is_training=True, **own))
        self.seen = ImageFolder(str(root / "train"), create_transform(crop_pct=config["crop_pct"], **own))
        self.test = ImageFolder(str(root / "val"), create_transform(crop_pct=config["crop_pct"], **own))

    def network(self, classes: int) -> torch.nn.Module:
        """As timm builds it, with the params that come with offramp where no hub can be reached."""
        model = timm.create_model(self.asked.model, num_classes=classes)
        path = EMBEDDED[f"timm/{self.asked.model}"].path()
        assert path is not None, "install offramp[backbones]"
        load_matching(model, read_params(path), path)
        return model.to(self.device, memory_format=torch.channels_last)

    def loader(self, data: Any, training: bool = False) -> DataLoader:
        batch = min(BATCH, len(data) // 2)
        return DataLoader(data, batch, shuffle=training, num_workers=self.asked.workers, drop_last=training)

    def trained(self, data: Any, rate: float) -> torch.nn.Module:
        """A network after so many epochs over some images."""
        torch.manual_seed(self.asked.seed)
        model, loss = self.network(len(self.train.classes)), LabelSmoothingCrossEntropy(SMOOTHING)
        optimizer = create_optimizer_v2(model, "adamw", lr=rate, weight_decay=DECAY)
        loader, step = self.loader(data, training=True), 0
        schedule, _ = create_scheduler_v2(
            optimizer,
            num_epochs=self.asked.epochs,
            warmup_epochs=1,
            warmup_prefix=False,
            step_on_epochs=False,
            updates_per_epoch=len(loader),
        )
        model.train()
        for _ in range(self.asked.epochs):
            for images, labels in loader:
                schedule.step_update(step)
                step += 1
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                    found = loss(model(self._there(images)), labels.to(self.device))
                optimizer.zero_grad()
                found.backward()
                optimizer.step()
        return model.eval()

    @torch.inference_mode()
    def right(self, model: torch.nn.Module, data: Any) -> int:
        return sum(
            int((model(self._there(images)).argmax(1).cpu() == labels).sum()) for images, labels in self.loader(data)
        )

    def _there(self, images: torch.Tensor) -> torch.Tensor:
        return images.to(self.device, memory_format=torch.channels_last)

    def best_rate(self) -> float:
        """By accuracy on held-out images."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(self.asked.seed)).tolist()
        held, rest = order[: len(order) // 10], order[len(order) // 10 :]
        found = {}
        for rate in RATES:
            model = self.trained(Subset(self.train, rest), rate)
            found[rate] = self.right(model, Subset(self.seen, held)) / len(held)
            print(f"rate {rate:g}: {100 * found[rate]:.1f} % of {len(held)} held-out images", flush=True)
        return max(found, key=lambda rate: found[rate])


def milliseconds(model: torch.nn.Module, size: int, batch: int) -> float:
    """Per image, as one stage by ONNX Runtime."""
    own = with_exits(model.cpu(), at=1, example=torch.zeros(2, 3, size, size))
    return float(stage_table(own, Serving("onnx", "cpu", batch))["stage_ms"]["1"][str(batch)]) / batch


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("folder")
    words.add_argument("--model", default="tf_efficientnet_lite2")
    for name, value in (("size", 192), ("epochs", 16), ("seed", 0), ("workers", 1)):
        words.add_argument(f"--{name}", type=int, default=value)
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = words.parse_args()
    own = FineTuning(asked)
    rate = own.best_rate()
    began = time.perf_counter()
    model = own.trained(own.train, rate)
    minutes = (time.perf_counter() - began) / 60
    right, samples = own.right(model, own.test), len(own.test)
    low, high = proportion_interval(right, samples)
    print(
        f"{asked.model} at {asked.size} px, {asked.epochs} epochs at rate {rate:g}, {minutes:.1f} minutes (as "
        f"many for each of {len(RATES)} rates): {100 * right / samples:.1f} % of {samples:,} test images right "
        f"({100 * low:.1f} to {100 * high:.1f} %), {milliseconds(model, asked.size, 1):.2f} ms per image"
    )


if __name__ == "__main__":
    main()
