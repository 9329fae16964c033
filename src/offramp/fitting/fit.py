"""`offramp fit`: from a folder of images, or a recipe, to a bundle and a report in one command.

Every step writes the folder that the next one reads, so a run that was stopped goes on where it was: training
resumes, what is evaluated is not evaluated again, and the cheap steps are repeated.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offramp.common.formatting import millions
from offramp.common.images import UnreadableImage, open_image
from offramp.common.names import meant, unknown
from offramp.common.pretrained import is_bundle
from offramp.data import load_dataset
from offramp.data.imagefolder import load_imagefolder
from offramp.measuring.calibrate import PolicyRequest, calibrate_run
from offramp.measuring.confidence import Predictions
from offramp.measuring.policy import Outcome, Policies, check_budget, outcome
from offramp.models.cost import exit_costs
from offramp.reporting.report import Report, write_report
from offramp.running.bundle import FORMATS
from offramp.running.export import export_run
from offramp.runs.config import RunConfig, with_settings
from offramp.runs.outputs import EVAL, SUMMARY, read_outputs, read_summary
from offramp.runs.recipe import list_recipes, load_recipe
from offramp.training.evaluate import evaluate_run
from offramp.training.train import fit_to_data, new_model, train_run

SMALL_PIXELS = 64  # folders of images up to this side get the small network
LOOKED_AT = 25  # images, to tell how large they are
ANY_SIZE = 1 << 40  # pixels


@dataclass(frozen=True)
class Fitted:
    """Where everything went, the bundle's policies, and what the chosen one does on the test split."""

    run: Path
    bundle: Path
    policies: Policies
    tested: Outcome
    report: Report

    @property
    def answer(self) -> str:
        """The one sentence."""
        whole = read_summary(self.run).exits["test"][-1]
        return (
            f"The bundle's policy has {100 * self.tested.top1:.1f} % of the test images right at "
            f"{millions(self.tested.cost)} mul-adds per image; the whole network has {100 * whole.top1:.1f} % at "
            f"{millions(whole.mul_adds)}."
        )


def fit(
    source: str,
    out: str | Path,
    request: PolicyRequest | None = None,
    *,
    format: str | None = None,
    settings: tuple[str, ...] = (),
    device: str = "auto",
) -> Fitted:
    """Train with learned weights, evaluate, calibrate, export and report, going on from what is there."""
    out = Path(out)
    run, bundle = out / "run", out / "bundle"
    _refuse_mistakes(source, out, bundle, format)
    config = with_settings(configuration(source), settings)
    if config.data.calibration == 0:
        raise ValueError("a policy needs a calibration split; leave data.calibration alone, or ask for some images")
    if request is not None and request.budget_mul_adds is not None:
        _check_budget(request.budget_mul_adds, config)
    train_run(config, run, device=device, resume=True)
    if not (run / EVAL / SUMMARY).is_file():
        evaluate_run(run, device=device)
    policies = calibrate_run(run, request)
    _replace(bundle, export_run(run, fresh_folder(out / "bundle.new"), format=format))
    return Fitted(run, bundle, policies, _tested(run, policies), write_report([run], out / "report.html"))


def _tested(run: Path, policies: Policies) -> Outcome:
    """The chosen policy on the test split, from the saved outputs."""
    saved = read_outputs(run, "test")
    given = Predictions.of(saved.logits, saved.labels, policies.measure, policies.temperatures)
    return outcome(given, policies.policy.thresholds, policies.costs)


def _refuse_mistakes(source: str, out: Path, bundle: Path, format: str | None) -> None:
    """What would only be found out after training is found out before."""
    if format not in (None, *FORMATS):
        raise ValueError(unknown("bundle format", format, FORMATS))
    if bundle.exists() and not is_bundle(bundle):
        raise ValueError(f"{bundle} is there and is not a bundle; choose another --out")
    if Path(source).is_dir() and out.resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(f"{out} lies inside {source}; choose an --out outside the images")


def _check_budget(budget: float, config: RunConfig) -> None:
    """Whoever gives a folder has not chosen the network: a budget that does not fit is told which it is."""
    costs = costs_of(config)
    try:
        check_budget(budget, costs)
    except ValueError as error:
        reach = f"{millions(costs[0])} to {millions(costs[-1])}"
        raise ValueError(f"{error}; the network is {config.model.name}, which takes {reach}") from error


def costs_of(config: RunConfig) -> list[int]:
    """What each exit of the network will cost."""
    data = load_dataset(config.data.name, data_dir=config.data.dir, seed=config.seed, **config.data.given())
    return [cost.mul_adds for cost in exit_costs(new_model(fit_to_data(config, data)))]


def fresh_folder(path: Path) -> Path:
    """A folder's name that is free; what a killed call left there goes."""
    shutil.rmtree(path, ignore_errors=True)
    return path


def _replace(bundle: Path, new: Path) -> None:
    """Put the new bundle in the place of an earlier call's."""
    shutil.rmtree(bundle, ignore_errors=True)
    new.rename(bundle)


def configuration(source: str) -> RunConfig:
    """A recipe's configuration, or one that suits an image folder."""
    folder = Path(source)
    if not folder.is_dir():
        if source not in list_recipes() and not source.endswith(".toml"):
            hint = meant(source, list_recipes())
            raise ValueError(f"{source} is no folder of images here, and no recipe (offramp recipes lists them){hint}")
        return load_recipe(source).config
    data = load_imagefolder(folder)
    side = typical_side([path for path in data.splits["train"].paths])
    small = side <= SMALL_PIXELS
    recipe = "cifar100-msdnet5-learned" if small else "imagenet-msdnet-s4-learned"
    batch = min(256, data.size("train") // 8 * 2)  # at least four loader batches an epoch
    if batch < 2:
        raise ValueError(f"{folder} has only {data.size('train')} images to train on; at least 8 are needed")
    epochs = 100 if data.size("train") < 20_000 else 60
    return with_settings(
        load_recipe(recipe).config,
        [
            "data.name=imagefolder",
            f"data.dir={str(folder.resolve())!r}",
            f"data.image_size={32 if small else 224}",
            "data.workers=2",
            f"train.batch={batch}",
            "train.learning_rate=none",
            f"train.epochs={epochs}",
            "weighting.bound=true",
            "weighting.interval=4",  # level with every step on CIFAR-100, for half the cost (docs/results.md),
            "weighting.objective=whole",  # and a little better than allocated samples
        ],
    )


def typical_side(paths: list[Path]) -> int:
    """The median of the shorter sides of some of the images."""
    sides = []
    for path in paths[:: max(1, len(paths) // LOOKED_AT)]:
        try:
            with open_image(path, max_pixels=ANY_SIZE) as image:  # only its head is read
                sides.append(min(image.size))
        except UnreadableImage:
            continue
    if not sides:
        raise ValueError("none of the images that were tried can be read")
    return int(np.median(sides))
