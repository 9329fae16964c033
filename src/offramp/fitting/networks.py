"""The networks that `fit` chooses between, each in a run folder of its own: singles, cascades, exits.

They share what can be shared. Frozen features of a size are computed once and serve a single network, a cascade's stage
and the exits; fine-tuning trains one network at all sizes side by side, the smaller ones also from the answers of the
largest, and takes them apart afterwards; exits start from the fine-tuned network. What is there is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from offramp.common.console import progress, say
from offramp.data import Dataset, load_dataset, prepared_for
from offramp.data.splits import fold_numbers
from offramp.fitting.features import Features, LinearHead, View, answers, extract, fitted, read_features, together
from offramp.fitting.plan import EXIT_EPOCHS, FOLDS, Plan
from offramp.fitting.saved import Logits, is_written, write_logits, write_run
from offramp.models.cascade import cascade
from offramp.models.exits import ExitNet
from offramp.models.registry import load_model
from offramp.runs.config import ModelConfig, ObjectiveConfig, RunConfig
from offramp.runs.outputs import read_outputs
from offramp.training.evaluate import evaluate_run
from offramp.training.objectives import without_exits
from offramp.training.probe import linear_layer
from offramp.training.train import new_model, train_run

NETWORKS, FEATURES, JOINT = "networks", "features", "joint"
CARRIES = (0.0, 1.0)  # a cascade's second network answers for itself, or with the sum of both
LEAST_BATCH = 8  # a loader batch is trained on in halves, and BatchNorm needs some images in each
KEPT_BYTES = 8 << 30  # photos that may lie on a GPU


@dataclass(frozen=True)
class Candidate:
    """A network that may be shipped. `whole`: its last exit answers as the single network does."""

    family: str
    name: str
    run: Path
    whole: bool = False


def candidates(plan: Plan, out: Path) -> list[Candidate]:
    """Everything that a plan trains, the single network that all are compared with first."""
    ways = [*(["tuned"] if plan.epochs else []), *(["frozen"] if plan.frozen else [])]
    return [one for way in ways for one in _of_one_way(plan, out / NETWORKS, way)]


def _of_one_way(plan: Plan, folder: Path, way: str) -> list[Candidate]:
    note = ", frozen" if way == "frozen" and plan.epochs else ""
    largest = plan.sizes[-1]
    found = [
        Candidate("single", f"{size} px{note}", folder / f"{way}-single-{size}", size == largest)
        for size in reversed(plan.sizes)
    ]
    for (small, large), carry in ((sizes, carry) for sizes in plan.cascades for carry in CARRIES):
        summed = ("-summed", ", logits summed") if carry else ("", "")
        name = f"{small} then {large} px{summed[1]}{note}"
        found.append(Candidate("cascade", name, folder / f"{way}-cascade-{small}-{large}{summed[0]}", not carry))
    if "exits" in plan.families:
        frozen = way == "frozen"
        found.append(Candidate("exits", f"exits at {largest} px{note}", folder / f"{way}-exits-{largest}", frozen))
    return found


def train_networks(plan: Plan, config: RunConfig, out: Path, device: torch.device) -> list[Candidate]:
    """Train, put together and evaluate whatever is not there yet."""
    found = candidates(plan, out)
    frozen = [one for one in found if one.run.name.startswith("frozen")]
    tuned = [one for one in found if one.run.name.startswith("tuned")]
    if not all(is_written(one.run) for one in frozen):
        _FrozenNetworks(plan, config, out, device).write(frozen)
    if not all(is_written(one.run) for one in tuned):
        _tune(plan, config, out, device, tuned)
    return found


def single_config(backbone: str, config: RunConfig, size: int | None) -> ModelConfig:
    """The backbone as it is, for images of a size; None is its own."""
    own = {key: value for key, value in config.model.overrides.items() if key == "options"}
    overrides = {**own, "exits": 1, **({} if size is None else {"image_size": size})}
    return ModelConfig(backbone, config.model.num_classes, config.model.pretrained, overrides)


def held_out(plan: Plan, config: RunConfig) -> RunConfig:
    """With the images held out that are chosen on, where nothing is done by folds."""
    return config if plan.held_out != "fifth" else with_fold(config, 1)


def with_fold(config: RunConfig, fold: int, folds: int = FOLDS) -> RunConfig:
    """With one fold held out of training."""
    options = {**config.data.options, "folds": folds, "fold": fold}
    return replace(config, data=replace(config.data, options=options))


def everything(config: RunConfig) -> RunConfig:
    """With all images that are not tested on trained on."""
    return replace(config, data=replace(config.data, calibration=0))


def read_data(config: RunConfig) -> Dataset:
    """The folder of photos, in the splits that the configuration says."""
    return load_dataset(config.data.name, data_dir=config.data.dir, seed=config.seed, **config.data.given())


class _FrozenNetworks:
    """Networks of frozen features and linear heads, all from one set of arrays."""

    def __init__(self, plan: Plan, config: RunConfig, out: Path, device: torch.device) -> None:
        self.plan, self.folder, self.device = plan, out / FEATURES, device
        self.split = config if plan.folds else held_out(plan, config)
        self.shipped = everything(config) if plan.folds else self.split
        train = replace(config.train, epochs=0, probe=True, parts="heads", network_epochs=None, warm_up_steps=0)
        self.shipped = replace(self.shipped, train=train, objective=ObjectiveConfig())
        self.data = read_data(self.split)
        self.final = read_data(self.shipped)
        self.singles = {size: new_model(self._with(single_config(plan.backbone, config, size))) for size in plan.sizes}
        self.exits: ExitNet | None = None
        if "exits" in plan.families:
            single = single_config(plan.backbone, config, plan.sizes[-1])
            exits = config.model.overrides.get("exits", 4)
            overrides = {**single.overrides, "exits": exits, "head": "linear"}
            self.exits = new_model(self._with(replace(single, overrides=overrides)))
            backbone = getattr(self.exits, "backbone").state_dict()  # noqa: B009
            getattr(self.singles[plan.sizes[-1]], "backbone").load_state_dict(backbone)  # noqa: B009

    def _with(self, model: ModelConfig) -> RunConfig:
        return replace(self.shipped, model=replace(model, num_classes=self.data.num_classes))

    def write(self, wanted: Sequence[Candidate]) -> None:
        """Extract the features, fit the heads, write every network."""
        self._extract()
        places = [(size, -1) for size in self.plan.sizes]
        if self.exits is not None:
            places += [(self.plan.sizes[-1], at) for at in range(len(self.exits.heads) - 1)]
        heads: dict[tuple[int, int], LinearHead] = {}
        with progress(f"fitting linear heads{' by folds' if self.plan.folds else ''}", len(places)) as bar:
            for size, at in places:
                heads[size, at] = self._head(self._direct(size), at)
                bar.advance(1, 0)
        singles = {size: heads[size, -1] for size in self.plan.sizes}
        for size, model in self.singles.items():
            _take(linear_layer(model.heads[-1]), singles[size])
        inner = [head for (_, at), head in heads.items() if at >= 0]
        if self.exits is not None:
            for layer, head in zip(self.exits.heads, [*inner, singles[self.plan.sizes[-1]]], strict=True):
                _take(linear_layer(layer), head)
        for one in wanted:
            self._write_one(one, singles, inner)

    def _direct(self, size: int) -> View:
        """Images read at their own size."""
        largest = size == self.plan.sizes[-1]
        return View(self.exits if largest and self.exits is not None else self.singles[size], size, size)

    def _resized(self, size: int) -> View:
        """Images read at the largest size and resized, as a cascade does."""
        return View(self.singles[size], size, self.plan.sizes[-1])

    def _extract(self) -> None:
        largest = self.plan.sizes[-1]
        resized = [self._resized(small) for small, _ in self.plan.cascades]
        splits = [split for split in ("train", "calibration", "test") if self.data.size(split)]
        total = sum(self.data.size(split) for split in splits) * len(self.plan.sizes)
        with progress("computing features", total) as bar:
            for size in reversed(self.plan.sizes):
                data = prepared_for(self.singles[size], self.data)
                for split in splits:
                    again = size == largest and (self.plan.folds or split != "train")
                    bar.show(f"computing features at {size} px")
                    views = [self._direct(size), *(resized if again else [])]
                    extract(data, views, split, self.folder, self.device, bar)

    def _pool(self, view: View) -> Features:
        """What is trained on: by folds everything but the test split, else the training split."""
        names = ["train", "calibration"] if self.plan.folds else ["train"]
        return together([read_features(self.folder, view, name) for name in names if self.data.size(name)])

    def _folds(self, labels: np.ndarray) -> np.ndarray | None:
        return fold_numbers(labels, self.plan.folds, self.shipped.seed) if self.plan.folds else None

    def _head(self, view: View, at: int) -> LinearHead:
        pool = self._pool(view)
        return fitted(pool.heads[at], pool.labels, self._folds(pool.labels), self.data.num_classes)

    def _said(self, parts: Sequence[tuple[View, int, LinearHead]], split: str, carry: float = 0.0) -> Logits:
        """What some heads answer to a split; to the held-out images by heads that have not seen them."""
        found: list[np.ndarray] = []
        for view, at, head in parts:
            by_folds = split == "calibration" and self.plan.folds
            own = self._pool(view) if by_folds else read_features(self.folder, view, split)
            said = answers(head, own.heads[at], self._folds(own.labels) if by_folds else None)
            found.append(said + carry * found[-1] if carry and found else said)
        return Logits(np.stack(found), own.labels, own.index)

    def _write_one(self, one: Candidate, heads: dict[int, LinearHead], inner: list[LinearHead]) -> None:
        largest, carry = self.plan.sizes[-1], 0.0
        if one.family == "exits":
            assert self.exits is not None
            model, view = self.exits, self._direct(largest)
            parts = [(view, at, head) for at, head in enumerate([*inner, heads[largest]])]
        elif one.family == "single":
            size = _sizes(one)[0]
            model, parts = self.singles[size], [(self._direct(size), -1, heads[size])]
        else:
            small, carry = _sizes(one)[0], 1.0 if one.run.name.endswith("summed") else 0.0
            model = cascade([self.singles[small], self.singles[largest]], [small, largest], carry=carry)
            parts = [(self._resized(small), -1, heads[small]), (self._direct(largest), -1, heads[largest])]
        model = model.cpu().eval()
        data = prepared_for(model, self.final)
        splits = {name: self._said(parts, name, carry) for name in ("calibration", "test") if self.data.size(name)}
        write_run(one.run, self.shipped, model, data)
        write_logits(one.run, model, data, splits, {"test": data, "calibration": prepared_for(model, self.data)})


def _sizes(one: Candidate) -> list[int]:
    """The sizes in a candidate's folder name."""
    return [int(word) for word in one.run.name.split("-") if word.isdigit()]


@torch.no_grad()
def _take(linear: nn.Linear, head: LinearHead) -> None:
    linear.weight.copy_(head.shipped.weight)
    if linear.bias is not None:
        linear.bias.copy_(head.shipped.bias)


def _tune(plan: Plan, config: RunConfig, out: Path, device: torch.device, wanted: Sequence[Candidate]) -> None:
    """Fine-tune; by folds where the plan says so, so that what is chosen on was seen by no network that judges it."""
    if not plan.tuned_folds:
        _tune_once(plan, held_out(plan, config), out / NETWORKS, device, wanted)
        return
    folders = [out / "folds" / str(fold) for fold in range(1, plan.tuned_folds + 1)]
    for fold, folder in enumerate(folders, 1):
        own = [replace(one, run=folder / one.run.name) for one in wanted]
        if not all(is_written(one.run) for one in own):
            say(f"fold {fold} of {len(folders)}")
            _tune_once(plan, with_fold(config, fold, plan.tuned_folds), folder, device, own)
    _tune_once(plan, everything(config), out / NETWORKS, device, wanted)
    for one in wanted:
        _add_held_out(one.run, [folder / one.run.name for folder in folders], everything(config))


def _add_held_out(run: Path, folds: Sequence[Path], config: RunConfig) -> None:
    """Give a run, as its calibration split, what the networks of the folds said of the images they had not seen."""
    parts = [read_outputs(fold, "calibration") for fold in folds]
    test = read_outputs(run, "test")
    order = np.argsort(np.concatenate([part.index for part in parts]), kind="stable")
    said = np.concatenate([part.logits for part in parts], axis=1)[:, order]
    labels, index = (np.concatenate([getattr(part, name) for part in parts])[order] for name in ("labels", "index"))
    model = load_model(run)
    data = prepared_for(model, read_data(config))
    splits = {
        "calibration": Logits(said, labels, index),
        "test": Logits(np.array(test.logits), test.labels, test.index),
    }
    write_logits(run, model, data, splits, {"test": data})


def _tune_once(plan: Plan, config: RunConfig, folder: Path, device: torch.device, wanted: Sequence[Candidate]) -> None:
    """Fine-tune all sizes side by side, take them apart, train the exits from there, and evaluate everything."""
    joint = folder / JOINT
    data = read_data(config)
    own = joint_config(plan, config, folder, device, data.size("train"))
    train_run(own, joint, device=str(device), resume=True)
    whole = load_model(joint)
    networks = dict(zip(plan.sizes, _members(whole), strict=True))
    largest = plan.sizes[-1]
    for one in wanted:
        if is_written(one.run):
            continue
        if one.family == "exits":
            exits = exits_config(plan, config, own, folder / f"tuned-single-{largest}", data.size("train"))
            train_run(exits, one.run, device=str(device), resume=True)
        else:
            model = _assembled(one, networks, largest)
            write_run(one.run, own, model, prepared_for(model, data))
        evaluate_run(one.run, device=str(device))


def _members(whole: ExitNet) -> list[ExitNet]:
    members = getattr(whole, "members", None)
    return [whole] if members is None else list(members)


def _assembled(one: Candidate, networks: dict[int, ExitNet], largest: int) -> ExitNet:
    if one.family == "single":
        return networks[_sizes(one)[0]]
    small = _sizes(one)[0]
    carry = 1.0 if one.run.name.endswith("summed") else 0.0
    return cascade([networks[small], networks[largest]], [small, largest], carry=carry)


def joint_config(plan: Plan, config: RunConfig, folder: Path, device: torch.device, images: int) -> RunConfig:
    """One network at all sizes, as a cascade that is trained side by side; the smaller learn from the largest too.

    Heads begin as linear probes: those that are there, unless they were fitted to what is held out now.
    """
    there = plan.frozen and not plan.folds
    members: list[dict[str, Any]] = []
    for size in plan.sizes:
        own = single_config(plan.backbone, config, size)
        begins = str((folder / f"frozen-single-{size}").resolve()) if there else own.pretrained
        members.append({"name": own.name, "overrides": own.overrides, "pretrained": begins})
    if len(members) == 1:
        model = replace(single_config(plan.backbone, config, plan.sizes[0]), pretrained=members[0]["pretrained"])
    else:
        overrides: dict[str, Any] = {"members": members, "image_sizes": list(plan.sizes)}
        model = ModelConfig("cascade", config.model.num_classes, False, overrides)
    data, objective = config.data, config.objective if len(members) > 1 else without_exits(config.objective)
    if device.type == "cuda" and data.augmentation == "crop" and _fits_gpu(images, plan.sizes[-1]):
        options = {key: value for key, value in data.augmentation_options.items() if key in ("scale", "flip")}
        data = replace(data, augmentation="device-crop", augmentation_options=options)
    return _for_epochs(replace(config, model=model, data=data, objective=objective), plan.epochs, not there, images)


def exits_config(plan: Plan, config: RunConfig, joint: RunConfig, single: Path, images: int) -> RunConfig:
    """Exits on the fine-tuned network, all of it trained on for some more epochs."""
    size = {"image_size": plan.sizes[-1]}
    model = ModelConfig(plan.backbone, config.model.num_classes, str(single.resolve()), config.model.overrides | size)
    return _for_epochs(replace(joint, model=model), max(1, round(EXIT_EPOCHS * plan.epochs)), False, images)


def _for_epochs(config: RunConfig, epochs: int, probe: bool, images: int) -> RunConfig:
    """So many epochs, with a batch and a warm-up that suit the number of images."""
    few = max(LEAST_BATCH, images // 8 * 2)  # at least four loader batches an epoch, where there are enough
    batch = min(config.train.batch, few, images // 2 * 2)
    steps = epochs * max(1, images // batch)
    train = replace(
        config.train,
        epochs=epochs,
        batch=batch,
        warm_up_steps=min(config.train.warm_up_steps, steps // 10),
        eval_every=max(1, epochs // 4),
        probe=probe,
    )
    return replace(config, train=train)


def _fits_gpu(images: int, size: int) -> bool:
    """Whether all photos can lie on a GPU, as squares somewhat larger than what is cut from them."""
    return images * 3 * (1.25 * size) ** 2 < KEPT_BYTES
