"""The networks that `fit` trains, each in a run folder: pools of all members, and exits.

All members of a plan stand side by side in one network, a cascade of all of them, which is trained, evaluated and kept
as one run: the pool. There are up to two, one of frozen features with linear heads and one that is fine-tuned. Exits
are put on the largest member and start from it. What is there is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offramp.common.console import progress, say
from offramp.data import Dataset, load_dataset, prepared_for
from offramp.data.imagefolder import ImageFolderDataset, folds_of, not_tested_on
from offramp.fitting.candidates import FROZEN, NETWORKS, TUNED, Candidate, candidates, member_names, members_of
from offramp.fitting.features import Features, LinearHead, View, answers, extract, fitted, read_features, together
from offramp.fitting.plan import EXIT_EPOCHS, FOLDS, Member, Plan, photo_bytes, stay_on_device
from offramp.fitting.saved import Logits, is_written, write_logits, write_run
from offramp.models.cascade import Cascade
from offramp.models.exits import ExitNet
from offramp.models.registry import load_model
from offramp.runs.config import ModelConfig, ObjectiveConfig, RunConfig
from offramp.runs.outputs import read_outputs
from offramp.training.evaluate import SPLITS, evaluate_run
from offramp.training.objectives import without_exits
from offramp.training.probe import linear_layer
from offramp.training.train import new_model, train_run

FEATURES, START = "features", "start"
LEAST_BATCH = 8  # a loader batch is trained on in halves, and BatchNorm needs some images in each


def train_networks(plan: Plan, config: RunConfig, out: Path, device: torch.device) -> list[Candidate]:
    """Train, put together and evaluate whatever is not there yet."""
    found = candidates(plan, out)
    missing = {one.run.name for one in found if not is_written(one.run)}
    if any(name.startswith(FROZEN) for name in missing):
        _FrozenNetworks(plan, config, out, device).write()
    if any(name.startswith(TUNED) for name in missing):
        _tune(plan, config, out, device)
    return found


def single_config(member: Member, config: RunConfig) -> ModelConfig:
    """A member as a network of its own."""
    own = {key: value for key, value in config.model.overrides.items() if key == "options"}
    overrides = {**own, "exits": 1, "image_size": member.size}
    return ModelConfig(member.backbone, config.model.num_classes, config.model.pretrained, overrides)


def exits_on(member: Member, config: RunConfig, **more: Any) -> ModelConfig:
    """A member with exits, as many and where the configuration says."""
    single = single_config(member, config)
    named = {key: value for key, value in config.model.overrides.items() if key != "image_size"}
    return replace(single, overrides={**named, **more, "image_size": member.size})


def pool_config(members: Sequence[Member], config: RunConfig, sources: Sequence[bool | str]) -> ModelConfig:
    """All members as one network, each starting from its source."""
    singles = [replace(single_config(m, config), pretrained=s) for m, s in zip(members, sources, strict=True)]
    if len(singles) == 1:
        return singles[0]
    own: list[dict[str, Any]] = [
        {"name": one.name, "overrides": one.overrides, "pretrained": one.pretrained} for one in singles
    ]
    overrides = {"members": own, "image_sizes": [member.size for member in members]}
    return ModelConfig("cascade", config.model.num_classes, False, overrides)


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
    """The pool of frozen features and linear heads, and the largest member's exits, from one set of arrays."""

    def __init__(self, plan: Plan, config: RunConfig, out: Path, device: torch.device) -> None:
        self.plan, self.out, self.device = plan, out, device
        self.split = config if plan.folds else held_out(plan, config)
        shipped = everything(config) if plan.folds else self.split
        train = replace(config.train, epochs=0, probe=True, parts="heads", network_epochs=None)
        train = replace(train, freeze_norms=False, ema=None)
        self.shipped = replace(shipped, train=train, objective=ObjectiveConfig())
        self.data, self.final = read_data(self.split), read_data(self.shipped)
        assert isinstance(self.data, ImageFolderDataset)
        self.files = not_tested_on(self.data.listed)
        self.folds = folds_of(self.files, plan.folds, config.seed) if plan.folds else None
        sources = [config.model.pretrained] * len(plan.members)
        self.pool = new_model(self._with(pool_config(plan.members, config, sources)))
        self.networks = members_of(self.pool)
        self.exits: ExitNet | None = None
        if "exits" in plan.families:
            self.exits = new_model(self._with(exits_on(plan.reference, config, head="linear")))
            backbone = getattr(self.exits, "backbone").state_dict()  # noqa: B009
            getattr(self.networks[-1], "backbone").load_state_dict(backbone)  # noqa: B009

    def _with(self, model: ModelConfig) -> RunConfig:
        return replace(self.shipped, model=replace(model, num_classes=self.data.num_classes))

    def write(self) -> None:
        """Extract the features, fit the heads, write the pool and the exits."""
        views = self._views()
        self._extract(views)
        places = [(view, at) for view in views for at in range(len(view.model.heads))]
        heads: list[LinearHead] = []
        with progress(f"fitting linear heads{' by folds' if self.plan.folds else ''}", len(places)) as bar:
            for view, at in places:
                heads.append(self._head(view, at))
                _take(linear_layer(view.model.heads[at]), heads[-1])
                bar.advance(1, 0)
        lasts = [n for n, (view, at) in enumerate(places) if at == len(view.model.heads) - 1]
        _take(linear_layer(self.networks[-1].heads[-1]), heads[-1])  # as in the exits, which stood for it
        self._write_run(FROZEN, self.pool, [(*places[n], heads[n]) for n in lasts])
        if self.exits is not None:
            own = [(*place, head) for place, head in zip(places, heads, strict=True) if place[0] is views[-1]]
            self._write_run(f"{FROZEN}-exits", self.exits, own)

    def _views(self) -> list[View]:
        """The members as they stand in the pool; exits stand for the member they are on."""
        names = [name.replace(" ", "-") for name in member_names(self.plan.members)]
        models = [*self.networks[:-1], self.exits or self.networks[-1]]

        def sees(place: int) -> Any:
            def seen(images: Tensor) -> Tensor:
                return self.pool.seen_by(place, images) if isinstance(self.pool, Cascade) else images

            return seen

        return [View(name, model, sees(at)) for at, (name, model) in enumerate(zip(names, models, strict=True))]

    def _extract(self, views: Sequence[View]) -> None:
        splits = [split for split in ("train", "calibration", "test") if self.data.size(split)]
        data = prepared_for(self.pool, self.data)
        with progress("computing features", sum(self.data.size(split) for split in splits)) as bar:
            for split in splits:
                extract(data, views, split, self.out / FEATURES, self.device, bar)

    def _pooled(self, view: View) -> Features:
        """What is trained on: by folds everything but the test split, else the training split."""
        names = ["train", "calibration"] if self.plan.folds else ["train"]
        return together([read_features(self.out / FEATURES, view, name) for name in names if self.data.size(name)])

    def _folds(self, own: Features) -> np.ndarray | None:
        """The fold of each image that could be read."""
        return None if self.folds is None else self.folds[np.searchsorted(self.files.index, own.index)]

    def _head(self, view: View, at: int) -> LinearHead:
        pool = self._pooled(view)
        return fitted(pool.heads[at], pool.labels, self._folds(pool), self.data.num_classes)

    def _said(self, parts: Sequence[tuple[View, int, LinearHead]], split: str) -> Logits:
        """What some heads answer to a split; to the held-out images by heads that have not seen them."""
        by_folds, found = split == "calibration" and self.plan.folds, []
        for view, at, head in parts:
            own = self._pooled(view) if by_folds else read_features(self.out / FEATURES, view, split)
            found.append(answers(head, own.heads[at], self._folds(own) if by_folds else None))
        return Logits(np.stack(found), own.labels, own.index)

    def _write_run(self, name: str, model: ExitNet, parts: Sequence[tuple[View, int, LinearHead]]) -> None:
        model, run = model.cpu().eval(), self.out / NETWORKS / name
        data = prepared_for(model, self.final)
        splits = {name: self._said(parts, name) for name in ("calibration", "test") if self.data.size(name)}
        write_run(run, self.shipped, model, data)
        write_logits(run, model, data, splits, {"test": data, "calibration": prepared_for(model, self.data)})


@torch.no_grad()
def _take(linear: nn.Linear, head: LinearHead) -> None:
    linear.weight.copy_(head.shipped.weight)
    if linear.bias is not None:
        linear.bias.copy_(head.shipped.bias)


def _tune(plan: Plan, config: RunConfig, out: Path, device: torch.device) -> None:
    """Fine-tune; by folds where the plan says so, so that what is chosen on was seen by no network that judges it."""
    if not plan.tuned_folds:
        _tune_once(plan, held_out(plan, config), out / NETWORKS, device)
        return
    folders = [out / "folds" / str(fold) for fold in range(1, plan.tuned_folds + 1)]
    for fold, folder in enumerate(folders, 1):
        if not all(is_written(folder / name) for name in _tuned_runs(plan)):
            say(f"fold {fold} of {len(folders)}")
            _tune_once(plan, with_fold(config, fold, plan.tuned_folds), folder, device, ("calibration",))
    _tune_once(plan, everything(config), out / NETWORKS, device)
    for name in _tuned_runs(plan):
        _add_held_out(out / NETWORKS / name, [folder / name for folder in folders], everything(config))


def _tuned_runs(plan: Plan) -> list[str]:
    return [TUNED, *([f"{TUNED}-exits"] if plan.tunes_exits else [])]


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


def _tune_once(
    plan: Plan, config: RunConfig, folder: Path, device: torch.device, splits: Sequence[str] = SPLITS
) -> None:
    """Fine-tune the members side by side, train the exits from there, and evaluate both on some splits."""
    images = read_data(config).size("train")
    pool = folder / TUNED
    own = tuned_config(plan, config, device, images)
    if not is_written(pool):
        train_run(own, pool, device=str(device), resume=True)
        evaluate_run(pool, device=str(device), splits=splits)
    exits = folder / f"{TUNED}-exits"
    if plan.tunes_exits and not is_written(exits):
        start = members_of(load_model(pool))[-1].save(folder / START)
        train_run(exits_config(plan, config, own, start, images), exits, device=str(device), resume=True)
        evaluate_run(exits, device=str(device), splits=splits)


def tuned_config(plan: Plan, config: RunConfig, device: torch.device, images: int) -> RunConfig:
    """The members that are tuned, side by side: each learns from the answers of all of them too."""
    members = plan.members[: plan.tuned]
    model = pool_config(members, config, [config.model.pretrained] * len(members))
    data, objective = config.data, config.objective if len(members) > 1 else without_exits(config.objective)
    if data.augmentation == "crop" and stay_on_device(images, max(m.size for m in members), photo_bytes(device)):
        options = {key: value for key, value in data.augmentation_options.items() if key in ("scale", "flip")}
        data = replace(data, augmentation="device-crop", augmentation_options=options)
    return _for_epochs(replace(config, model=model, data=data, objective=objective), plan.epochs, images)


def exits_config(plan: Plan, config: RunConfig, tuned: RunConfig, start: Path, images: int) -> RunConfig:
    """Exits on the largest member as it was fine-tuned, all of it trained on for some more epochs."""
    model = replace(exits_on(plan.reference, config), pretrained=str(start.resolve()))
    own = replace(tuned, model=model, objective=without_exits(tuned.objective))
    return _for_epochs(own, max(1, round(EXIT_EPOCHS * plan.epochs)), images, probe=False)


def _for_epochs(config: RunConfig, epochs: int, images: int, probe: bool = True) -> RunConfig:
    """So many epochs, with a batch that suits the number of images."""
    few = max(LEAST_BATCH, images // 8 * 2)  # at least four loader batches an epoch, where there are enough
    batch = min(config.train.batch, few, images // 2 * 2)
    train = replace(
        config.train,
        epochs=epochs,
        batch=batch,
        eval_every=max(1, epochs // 4),
        probe=probe,
    )
    return replace(config, train=train)
