"""Early-exit image classifiers: train them with learned sample weights, measure them, run them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names are imported on first use: a box that only serves needs no training code.
_HOME = {
    "Bundle": "offramp.bundle",
    "EvalSummary": "offramp.outputs",
    "ExitCost": "offramp.models.cost",
    "ExitNet": "offramp.models.exits",
    "ExitResult": "offramp.result",
    "LearnedWeights": "offramp.learned_weights",
    "Policies": "offramp.policy",
    "Policy": "offramp.policy",
    "PolicyRequest": "offramp.calibrate",
    "RunConfig": "offramp.config",
    "calibrate_run": "offramp.calibrate",
    "create_model": "offramp.models.registry",
    "evaluate_run": "offramp.evaluate",
    "exit_costs": "offramp.models.cost",
    "export_run": "offramp.export",
    "list_models": "offramp.models.registry",
    "list_recipes": "offramp.recipe",
    "load_bundle": "offramp.bundle",
    "load_dataset": "offramp.data",
    "load_model": "offramp.models.store",
    "load_recipe": "offramp.recipe",
    "read_policies": "offramp.policy",
    "register_model": "offramp.models.registry",
    "train_run": "offramp.train",
    "with_settings": "offramp.config",
    "write_report": "offramp.report.write",
}

__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from offramp.bundle import Bundle, load_bundle
    from offramp.calibrate import PolicyRequest, calibrate_run
    from offramp.config import RunConfig, with_settings
    from offramp.data import load_dataset
    from offramp.evaluate import evaluate_run
    from offramp.export import export_run
    from offramp.learned_weights import LearnedWeights
    from offramp.models.cost import ExitCost, exit_costs
    from offramp.models.exits import ExitNet
    from offramp.models.registry import create_model, list_models, register_model
    from offramp.models.store import load_model
    from offramp.outputs import EvalSummary
    from offramp.policy import Policies, Policy, read_policies
    from offramp.recipe import list_recipes, load_recipe
    from offramp.report.write import write_report
    from offramp.result import ExitResult
    from offramp.train import train_run


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offramp' has no attribute {name!r}")
    from offramp.extras import explained

    with explained():
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
