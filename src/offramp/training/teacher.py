"""A teacher: the last exit of a finished run, which says once for a loader batch what it thinks of the images.

It is frozen and in evaluation mode. Images reach it as it knows them: at its own size and normalised as its data were.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.common.files import read_json
from offramp.data import Dataset, load_dataset, preprocessing_of
from offramp.data.listing import say_once
from offramp.models.exits import ExitNet
from offramp.models.registry import load_model
from offramp.runs.config import RunConfig
from offramp.runs.folder import DATA, read_config
from offramp.training.method import Prepare

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation per channel


class Teacher(nn.Module):
    """Called with images, gives its logits."""

    def __init__(self, model: ExitNet, known: Normalisation, given: Normalisation) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        (mean, std), (own_mean, own_std) = (map(torch.tensor, each) for each in (given, known))
        self.register_buffer("scale", (std / own_std).view(1, -1, 1, 1))
        self.register_buffer("shift", ((mean - own_mean) / own_std).view(1, -1, 1, 1))
        self.changes_colours = known != given

    def train(self, mode: bool = True) -> Teacher:
        """It stays in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.model.last(self.as_known(images))

    def as_known(self, images: Tensor) -> Tensor:
        """Images of the student as the teacher was trained on them."""
        if self.changes_colours:
            images = torch.addcmul(self.get_buffer("shift"), images, self.get_buffer("scale"))
        size = self.model.input_shape[-2:]
        if tuple(images.shape[-2:]) != tuple(size):
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        return images


class Taught(nn.Module):
    """A `prepare` of the method: what the student is called with (the images, or what `prepare` makes of them), and
    what the teacher says.
    """

    def __init__(self, teacher: Teacher, prepare: Prepare | None) -> None:
        super().__init__()
        self.teacher, self.prepare = teacher, prepare

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        given = images if self.prepare is None else self.prepare(images)[0]
        return given, self.teacher(images)


def load_teacher(run: str | Path, data: Dataset, student: RunConfig) -> Teacher:
    """The teacher of a run folder for a student of `data`; it must know the same classes."""
    run = Path(run)
    config, model = read_config(run), load_model(run)
    place = student.data.dir if config.data.dir is None else config.data.dir
    its = partial(load_dataset, config.data.name, data_dir=place, seed=config.seed, **config.data.given())
    if _may_have_seen_held_out(config, student) and _trained_on_held_out(its(), data):
        say_once(
            run,
            f"the teacher {run} was trained on images that this run holds out (its seed is {config.seed}), so "
            "thresholds found on them are a little bold; train one for each seed and name it with {seed}: "
            "RUN/seed-{seed}",
        )
    classes = read_json(run / DATA)["classes"] if (run / DATA).is_file() else None
    if config.model.num_classes != data.num_classes or classes not in (None, list(data.class_names)):
        raise ValueError(f"objective.options.teacher: {run} was trained on other classes than those of {data.name}")
    own, prepared = (data.mean, data.std), preprocessing_of(model)
    if prepared is not None:
        return Teacher(model, (prepared.mean, prepared.std), own)
    known = its()
    return Teacher(model, (known.mean, known.std), own)


def _may_have_seen_held_out(teacher: RunConfig, student: RunConfig) -> bool:
    """Whether a teacher of the same data holds out other images than its student, by their settings."""
    drawn = [(own.seed, own.data.calibration, own.data.options) for own in (teacher, student)]
    return teacher.data.name == student.data.name and drawn[0] != drawn[1]


def _trained_on_held_out(teacher: Dataset, student: Dataset) -> bool:
    """Whether a teacher learned from images that its student holds out."""
    return bool(np.isin(student.index("calibration"), teacher.index("train")).any())
