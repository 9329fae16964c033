"""`offramp bench finetune`: images per second of fine-tuning a library's network with exits, beside plain loops.

The plain loop is what one writes by hand: forward under autocast, sum of the exits' losses, backward, fused AdamW step;
once eagerly, once with the network under `torch.compile`. offramp makes the same updates. All of them read the same
random images, which lie on the device, and are timed in turn.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.bench.train import WARM_UP, step_ms
from offramp.common.console import progress
from offramp.common.device import pick_device, training_dtype
from offramp.models.libraries import is_library_name
from offramp.models.registry import create_model
from offramp.runs.config import RunConfig, TrainConfig, with_settings
from offramp.training.cuda_graph import CapturedStep
from offramp.training.method import Method
from offramp.training.optimizers import new_optimizer
from offramp.training.step import train_step
from offramp.training.weighting import Context, new_weighting

log = logging.getLogger("offramp")

EAGER, COMPILED, OURS, LEARNED = "plain loop", "plain loop, compiled", "offramp", "offramp, learned weights"
TRAIN = TrainConfig(optimizer="adamw", learning_rate=4e-4, weight_decay=0.05)


@dataclass(frozen=True)
class FinetuneBench:
    """One row: milliseconds of an update, images per second, and how many times as fast as the plain loop."""

    name: str
    update_ms: float
    images_per_s: float
    times_plain: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bench_finetune(
    name: str,
    image_size: int | None = None,
    exits: int = 4,
    batch: int = 64,
    device: str = "auto",
    repeats: int = 7,
    compiled: bool = True,
    silent: bool = False,
) -> list[FinetuneBench]:
    """Time updates on `batch` images by each way; `compiled` adds the loop whose network torch compiles."""
    if not is_library_name(name):
        raise ValueError(f"{name} is not a network of a library (timm/NAME, torchvision/NAME); see offramp bench train")
    if batch < 2 or repeats < 1:
        raise ValueError(f"batch must be 2 or more and repeats 1 or more, got {batch} and {repeats}")
    place = pick_device(device)
    rows = [row for row in (EAGER, COMPILED, OURS, LEARNED) if compiled or row != COMPILED]
    steps = {row: _new_step(row, name, image_size, exits, batch, place) for row in rows}
    if compiled and not _runs(steps[COMPILED]):
        del steps[COMPILED]
    times: dict[str, list[float]] = {row: [] for row in steps}
    with progress("bench", (repeats + WARM_UP) * len(steps), silent=silent) as bar:
        for repeat in range(repeats + WARM_UP):
            for row, step in steps.items():
                milliseconds = step_ms(step, place)
                if repeat >= WARM_UP:
                    times[row].append(milliseconds / 2)
                bar.advance(1, 2 * batch)
    medians = {_named(row, steps[row]): statistics.median(own) for row, own in times.items()}
    return [
        FinetuneBench(row, round(ms, 2), round(1e3 * batch / ms, 1), round(medians[EAGER] / ms, 2))
        for row, ms in medians.items()
    ]


def _runs(step: Callable[[], object]) -> bool:
    """Whether torch can compile here; the other rows do not depend on it."""
    try:
        step()
    except Exception as error:  # whatever its compilers raise
        log.warning("torch.compile failed, so its row is left out: %s", str(error).splitlines()[0])
        return False
    return True


def _named(row: str, step: Callable[[], object]) -> str:
    """The row, or that its step could not be captured as a CUDA graph."""
    own = getattr(step, "func", None)
    return f"{row}, not captured" if isinstance(own, CapturedStep) and not own.captures else row


def _new_step(
    row: str, name: str, image_size: int | None, exits: int, batch: int, device: torch.device
) -> Callable[[], object]:
    """Two updates on `batch` images each, as the row says."""
    torch.manual_seed(0)
    overrides: dict[str, Any] = {"exits": exits} | ({} if image_size is None else {"image_size": image_size})
    model = create_model(name, **overrides)
    model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    assert model.spec is not None
    images = torch.randn(2 * batch, *model.input_shape, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(model.spec.num_classes, (2 * batch,), device=device)
    dtype = training_dtype("auto", device)
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
    if row in (EAGER, COMPILED):
        fused = torch.optim.AdamW(
            model.parameters(), lr=TRAIN.initial_rate, weight_decay=TRAIN.weight_decay, fused=device.type == "cuda"
        )
        called = torch.compile(model) if row == COMPILED else model
        return partial(_plain_updates, called, fused, autocast, images, labels)
    settings = with_settings(RunConfig(), ["weighting.name=learned"]).weighting if row == LEARNED else None
    weighting = settings or RunConfig().weighting
    method = Method(new_weighting(weighting, Context(model.num_exits, device=device)), weighting, autocast=autocast)
    optimizer = new_optimizer(model, TRAIN)
    if device.type == "cuda":
        return partial(CapturedStep(model, optimizer, method), images, labels, 0)
    return partial(train_step, model, optimizer, method, images, labels, 0)


def _plain_updates(
    model: Callable[[Tensor], list[Tensor]],
    optimizer: torch.optim.Optimizer,
    autocast: Callable[[], Any],
    images: Tensor,
    labels: Tensor,
) -> None:
    for x, y in zip(images.chunk(2), labels.chunk(2), strict=True):
        with autocast():
            outputs = model(x)
        loss = torch.stack([F.cross_entropy(logits.float(), y) for logits in outputs]).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
