"""What comes out of `fit`, and the steps that a recipe and a folder of photos have in common."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offramp.common.files import read_json
from offramp.common.pretrained import MANIFEST, is_bundle
from offramp.measuring.confidence import Predictions
from offramp.measuring.policy import Outcome, Policies, exits_taken, outcome
from offramp.models.registry import load_model
from offramp.reporting.report import Report
from offramp.running.export import default_format, export_run
from offramp.runs.outputs import read_outputs


@dataclass(frozen=True)
class Fitted:
    """Where everything went, the bundle's policies, and the one sentence."""

    run: Path
    bundle: Path
    policies: Policies
    sentence: str
    report: Report
    warnings: tuple[str, ...] = ()


def replace_bundle(run: Path, bundle: Path, format: str | None) -> Path:
    """Export a calibrated run; its bundle takes the place of an earlier call's only once it is whole."""
    new = export_run(run, fresh_folder(bundle.with_name(f"{bundle.name}.new")), format=format)
    shutil.rmtree(bundle, ignore_errors=True)
    return new.rename(bundle)


def same_bundle(run: Path, bundle: Path, format: str | None) -> Path:
    """The bundle of a run that is not trained again, exported the first time only."""
    wanted = format or default_format(load_model(run))
    if not is_bundle(bundle) or read_json(bundle / MANIFEST).get("format") != wanted:
        return replace_bundle(run, bundle, format)
    return bundle


def fresh_folder(path: Path) -> Path:
    """A folder's name that is free; what a killed call left there goes."""
    shutil.rmtree(path, ignore_errors=True)
    return path


def tested_outcome(run: Path, policies: Policies) -> Outcome:
    """The chosen policy on the test split, from the saved outputs."""
    return outcome(_test(run, policies), policies.policy.thresholds, policies.costs)


def right_on_test(run: Path, policies: Policies) -> np.ndarray:
    """Which of the test images the chosen policy has right."""
    given = _test(run, policies)
    return given.right[exits_taken(given.confidences, policies.policy.thresholds) - 1, np.arange(given.samples)]


def _test(run: Path, policies: Policies) -> Predictions:
    saved = read_outputs(run, "test")
    return Predictions.of(saved.logits, saved.labels, policies.measure, policies.temperatures)
