"""Early-exit image classifiers: train them with learned sample weights, measure them, run them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Names are imported on first use: a box that only serves needs no training code.
_HOME = {
    "ArrayDataset": "offramp.data",
    "Bundle": "offramp.running.bundle",
    "Dataset": "offramp.data",
    "EvalSummary": "offramp.runs.outputs",
    "ExitCost": "offramp.models.cost",
    "ExitNet": "offramp.models.exits",
    "ExitResult": "offramp.running.runtime",
    "LearnedWeights": "offramp.training.learned_weights",
    "Policies": "offramp.measuring.policy",
    "Policy": "offramp.measuring.policy",
    "PolicyRequest": "offramp.measuring.calibrate",
    "Preprocessing": "offramp.common.images",
    "RunConfig": "offramp.runs.config",
    "Split": "offramp.data",
    "Weighting": "offramp.training.weighting",
    "calibrate": "offramp.measuring.calibrate",
    "calibrate_run": "offramp.measuring.calibrate",
    "cascade": "offramp.models.cascade",
    "create_model": "offramp.models.registry",
    "evaluate": "offramp.training.evaluate",
    "evaluate_run": "offramp.training.evaluate",
    "exit_costs": "offramp.models.cost",
    "fit": "offramp.fitting.fit",
    "export": "offramp.running.export",
    "export_run": "offramp.running.export",
    "list_models": "offramp.models.registry",
    "list_recipes": "offramp.runs.recipe",
    "load_bundle": "offramp.running.bundle",
    "load_dataset": "offramp.data",
    "load_model": "offramp.models.registry",
    "load_recipe": "offramp.runs.recipe",
    "load_test": "offramp.bench.serve",
    "read_policies": "offramp.measuring.policy",
    "register_augmentation": "offramp.data.augment",
    "register_dataset": "offramp.data.dataset",
    "register_head": "offramp.models.heads",
    "register_fork": "offramp.training.forks",
    "register_model": "offramp.models.registry",
    "register_objective": "offramp.training.objectives",
    "register_optimizer": "offramp.training.optimizers",
    "register_weighting": "offramp.training.weighting",
    "train_run": "offramp.training.train",
    "with_exits": "offramp.models.backbones",
    "with_settings": "offramp.runs.config",
    "write_report": "offramp.reporting.report",
}

__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from offramp.bench.serve import load_test as load_test
    from offramp.common.images import Preprocessing as Preprocessing
    from offramp.data import ArrayDataset as ArrayDataset
    from offramp.data import Dataset as Dataset
    from offramp.data import Split as Split
    from offramp.data import load_dataset as load_dataset
    from offramp.data.augment import register_augmentation as register_augmentation
    from offramp.data.dataset import register_dataset as register_dataset
    from offramp.fitting.fit import fit as fit
    from offramp.measuring.calibrate import PolicyRequest as PolicyRequest
    from offramp.measuring.calibrate import calibrate as calibrate
    from offramp.measuring.calibrate import calibrate_run as calibrate_run
    from offramp.measuring.policy import Policies as Policies
    from offramp.measuring.policy import Policy as Policy
    from offramp.measuring.policy import read_policies as read_policies
    from offramp.models.backbones import with_exits as with_exits
    from offramp.models.cascade import cascade as cascade
    from offramp.models.cost import ExitCost as ExitCost
    from offramp.models.cost import exit_costs as exit_costs
    from offramp.models.exits import ExitNet as ExitNet
    from offramp.models.heads import register_head as register_head
    from offramp.models.registry import create_model as create_model
    from offramp.models.registry import list_models as list_models
    from offramp.models.registry import load_model as load_model
    from offramp.models.registry import register_model as register_model
    from offramp.reporting.report import write_report as write_report
    from offramp.running.bundle import Bundle as Bundle
    from offramp.running.bundle import load_bundle as load_bundle
    from offramp.running.export import export as export
    from offramp.running.export import export_run as export_run
    from offramp.running.runtime import ExitResult as ExitResult
    from offramp.runs.config import RunConfig as RunConfig
    from offramp.runs.config import with_settings as with_settings
    from offramp.runs.outputs import EvalSummary as EvalSummary
    from offramp.runs.recipe import list_recipes as list_recipes
    from offramp.runs.recipe import load_recipe as load_recipe
    from offramp.training.evaluate import evaluate as evaluate
    from offramp.training.evaluate import evaluate_run as evaluate_run
    from offramp.training.forks import register_fork as register_fork
    from offramp.training.learned_weights import LearnedWeights as LearnedWeights
    from offramp.training.objectives import register_objective as register_objective
    from offramp.training.optimizers import register_optimizer as register_optimizer
    from offramp.training.train import train_run as train_run
    from offramp.training.weighting import Weighting as Weighting
    from offramp.training.weighting import register_weighting as register_weighting


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offramp' has no attribute {name!r}")
    from offramp.common.extras import explained

    with explained():
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
