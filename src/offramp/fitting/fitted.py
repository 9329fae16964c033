"""What comes out of `fit`, and the steps that a recipe and a folder of photos have in common."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offramp.common.pretrained import is_bundle
from offramp.measuring.confidence import Predictions
from offramp.measuring.policy import Outcome, Policies, exits_taken, outcome
from offramp.reporting.report import Report
from offramp.running.export import export_run
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
    new = new_name(bundle)
    for path in (bundle, new):
        refuse_other_folder(path)
    shutil.rmtree(new, ignore_errors=True)  # what a killed call left there
    export_run(run, new, format=format)
    shutil.rmtree(bundle, ignore_errors=True)
    return new.rename(bundle)


def new_name(bundle: Path) -> Path:
    """Where a bundle lies until it takes its place."""
    return bundle.with_name(f"{bundle.name}.new")


def refuse_other_folder(bundle: Path) -> None:
    """What is to be replaced must be a bundle."""
    if bundle.exists() and not is_bundle(bundle):
        raise ValueError(f"{bundle} is there and is not a bundle; choose another --out")


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
