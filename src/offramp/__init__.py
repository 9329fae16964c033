"""Early-exit image classifiers: train them with learned sample weights, measure them, run them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names are imported on first use: a box that only serves needs no training code.
_HOME = {
    "Bundle": "offramp.running.bundle",
    "EvalSummary": "offramp.runs.outputs",
    "ExitCost": "offramp.models.cost",
    "ExitNet": "offramp.models.exits",
    "ExitResult": "offramp.running.result",
    "LearnedWeights": "offramp.training.learned_weights",
    "Policies": "offramp.measuring.policy",
    "Policy": "offramp.measuring.policy",
    "PolicyRequest": "offramp.measuring.calibrate",
    "RunConfig": "offramp.runs.config",
    "calibrate_run": "offramp.measuring.calibrate",
    "create_model": "offramp.models.registry",
    "evaluate_run": "offramp.training.evaluate",
    "exit_costs": "offramp.models.cost",
    "export_run": "offramp.running.export",
    "list_models": "offramp.models.registry",
    "list_recipes": "offramp.runs.recipe",
    "load_bundle": "offramp.running.bundle",
    "load_dataset": "offramp.data",
    "load_model": "offramp.models.store",
    "load_recipe": "offramp.runs.recipe",
    "read_policies": "offramp.measuring.policy",
    "register_model": "offramp.models.registry",
    "train_run": "offramp.training.train",
    "with_settings": "offramp.runs.config",
    "write_report": "offramp.reporting.report",
}

__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from offramp.data import load_dataset
    from offramp.measuring.calibrate import PolicyRequest, calibrate_run
    from offramp.measuring.policy import Policies, Policy, read_policies
    from offramp.models.cost import ExitCost, exit_costs
    from offramp.models.exits import ExitNet
    from offramp.models.registry import create_model, list_models, register_model
    from offramp.models.store import load_model
    from offramp.reporting.report import write_report
    from offramp.running.bundle import Bundle, load_bundle
    from offramp.running.export import export_run
    from offramp.running.result import ExitResult
    from offramp.runs.config import RunConfig, with_settings
    from offramp.runs.outputs import EvalSummary
    from offramp.runs.recipe import list_recipes, load_recipe
    from offramp.training.evaluate import evaluate_run
    from offramp.training.learned_weights import LearnedWeights
    from offramp.training.train import train_run


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offramp' has no attribute {name!r}")
    from offramp.common.extras import explained

    with explained():
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
