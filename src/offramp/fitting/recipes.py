"""`offramp fit RECIPE`: one network, trained as a recipe says, to a bundle and a report.

Every step writes the folder that the next one reads, so a run that was stopped goes on where it was: training resumes,
what is evaluated is not evaluated again, and the cheap steps are repeated.
"""

from __future__ import annotations

from pathlib import Path

from offramp.common.files import write_json
from offramp.common.formatting import millions
from offramp.common.names import meant
from offramp.data import load_dataset
from offramp.fitting.fitted import Fitted, replace_bundle, right_on_test, tested_outcome
from offramp.fitting.timing import Serving, stage_table
from offramp.measuring.calibrate import PolicyRequest, calibrate_run
from offramp.measuring.intervals import right_interval
from offramp.measuring.policy import check_budget
from offramp.models.cost import exit_costs
from offramp.models.registry import load_model
from offramp.reporting.report import write_report
from offramp.runs.config import RunConfig, with_settings
from offramp.runs.outputs import EVAL, SUMMARY, read_summary
from offramp.runs.recipe import list_recipes, load_recipe
from offramp.training.evaluate import evaluate_run
from offramp.training.train import fit_to_data, new_model, train_run

TIMES = "times.json"


def fit_recipe(
    source: str, out: Path, request: PolicyRequest, serving: Serving, settings: tuple[str, ...], device: str
) -> Fitted:
    """Train, evaluate, calibrate, export and report, going on from what is there."""
    run = out / "run"
    config = with_settings(recipe_config(source), settings)
    if config.data.calibration == 0:
        raise ValueError("a policy needs a calibration split; leave data.calibration alone, or ask for some images")
    if request.budget_mul_adds is not None:
        _check_budget(request.budget_mul_adds, config)
    train_run(config, run, device=device, resume=True)
    if not (run / EVAL / SUMMARY).is_file():
        evaluate_run(run, device=device)
    times = None
    if request.budget_ms is not None:
        times = run / TIMES
        write_json(times, stage_table(load_model(run), serving))
    policies = calibrate_run(run, request, times=times)
    bundle = replace_bundle(run, out / "bundle", serving.format)
    whole, tested = read_summary(run).exits["test"][-1], tested_outcome(run, policies)
    right = right_on_test(run, policies)
    low, high = (100 * end for end in right_interval(right))
    sentence = (
        f"{bundle} has {100 * tested.top1:.1f} % of {len(right):,} test images right (95 % interval {low:.1f} to "
        f"{high:.1f} %) at {millions(tested.cost)} mul-adds per image; the whole network has {100 * whole.top1:.1f} % "
        f"at {millions(whole.mul_adds)}."
    )
    return Fitted(run, bundle, policies, sentence, write_report([run], out / "report.html", times=times))


def recipe_config(source: str) -> RunConfig:
    """A recipe's configuration."""
    if source not in list_recipes() and not source.endswith(".toml"):
        hint = meant(source, list_recipes()).replace("mean", "mean the recipe")
        raise ValueError(f"{source} is no folder of images here, and no recipe (offramp recipes lists them){hint}")
    return load_recipe(source).config


def _check_budget(budget: float, config: RunConfig) -> None:
    """A budget that does not fit is told before training, with the network that it does not fit."""
    data = load_dataset(config.data.name, data_dir=config.data.dir, seed=config.seed, **config.data.given())
    costs = [cost.mul_adds for cost in exit_costs(new_model(fit_to_data(config, data)))]
    try:
        check_budget(budget, costs)
    except ValueError as error:
        reach = f"{millions(costs[0])} to {millions(costs[-1])}"
        raise ValueError(f"{error}; the network is {config.model.name}, which takes {reach}") from error
