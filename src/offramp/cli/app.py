"""The command line: each verb is a typed function; heavy imports happen inside it.

A user's mistake is one plain sentence on standard error and exit code 2.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from offramp import __version__
from offramp.cli.bench import bench
from offramp.cli.options import AsJson, Budget, DataDir, Device, Measure, Settings, Temperature, Times, numbers, say
from offramp.cli.results import results
from offramp.cli.running import verbs
from offramp.common.console import log_to_console, print_table
from offramp.common.extras import MissingExtra, explained
from offramp.common.signals import Stopped

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Early-exit image classifiers: train them, measure them, run them.",
)

app.add_typer(verbs)
app.add_typer(bench, name="bench")
app.add_typer(results, name="results")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"offramp {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Import a Python module that registers models of yours."),
    ] = None,
) -> None:
    if plugin:  # it may lie in the folder one works in; last, so that no file there stands in for a package
        sys.path.append(os.getcwd())
    for module in plugin or []:
        try:
            import_module(module)
        except (ImportError, TypeError, SyntaxError) as error:
            raise ValueError(f"--import {module} failed: {error}") from error


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the networks that can be created by name."""
    from offramp.common.pretrained import pretrained_names
    from offramp.models.registry import list_models, model_entry

    if as_json:
        print(json.dumps(list_models()))
        return
    print_table("Models", ["name", "about"], [[name, model_entry(name).about] for name in list_models()])
    for name in pretrained_names():
        say(f"{name} comes trained: predict, serve, eval, export, info and bench take its name for a bundle")


@app.command()
def info(
    name: Annotated[str, typer.Argument(help="A model's name, or the folder of a model, a run or a bundle.")],
    num_classes: Annotated[int | None, typer.Option(help="Default: the model's own.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels.")] = None,
    lazy: Annotated[bool, typer.Option(help="Count what the lazy schedule runs before each exit.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Print what each exit of a network costs: params, the paper's mul-adds and plain MACs, cumulative."""
    from offramp.cli.info import describe

    table = describe(name, num_classes, image_size, "lazy" if lazy else None, settings or [])
    if as_json:
        print(json.dumps(table))
        return
    rows = [[str(e["exit"]), *(f"{e[key]:,}" for key in ("params", "mul_adds", "macs"))] for e in table["exits"]]
    title = f"{table['model']}, {table['num_classes']} classes, cumulative cost of each exit"
    print_table(title, ["exit", "params", "mul-adds", "MACs"], rows)


@app.command()
def recipes() -> None:
    """List the packaged recipes and what each of them claims."""
    from offramp.runs.recipe import list_recipes, load_recipe

    rows = []
    for recipe in map(load_recipe, list_recipes()):
        paper = " ".join(f"{top1:.2f}" for top1 in recipe.paper_top1 or ())
        rows.append([recipe.name, f"{recipe.claim} Paper: {paper} % top-1." if paper else recipe.claim])
    print_table("Recipes", ["name", "claim"], rows)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe (see `offramp recipes`) or a TOML file.")],
    out: Annotated[Path, typer.Option(help="The run folder to write.")],
    settings: Settings = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option(help="Go on with the run in --out.")] = False,
    seeds: Annotated[
        str | None, typer.Option(help="Several runs, such as 0,1,2, into --out/seed-0 and so on; at once on a GPU.")
    ] = None,
) -> None:
    """Train a network into a run folder.

    For example: offramp train digits-baseline --out runs/first --set train.epochs=3
    """
    from offramp.runs.config import with_settings
    from offramp.runs.recipe import load_recipe
    from offramp.training.train import train_runs

    changes = list(settings or [])
    if data_dir is not None:
        changes.append(f"data.dir={json.dumps(str(data_dir), ensure_ascii=False)}")
    config = with_settings(load_recipe(recipe).config, changes)
    jobs = [(config, out)]
    if seeds is not None:  # the same seed twice is one run
        own = dict.fromkeys(numbers(seeds, int))
        jobs = [(with_settings(config, [f"seed={seed}"]), out / f"seed-{seed}") for seed in own]
    train_runs(jobs, device=device, resume=resume)
    for _, run in jobs:
        say(f"trained: {run}\nnext: offramp eval {run}")


@app.command("eval")
def evaluate(
    run: Annotated[str, typer.Argument(help="A finished run folder; or a bundle, or a network that comes trained.")],
    data: Annotated[str | None, typer.Option(help="For a bundle: the data set to try it on, cifar100 say.")] = None,
    data_dir: DataDir = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="For a bundle: a setting of the data.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Evaluate every exit of a run on its calibration and test splits, and save the logits.

    Of a bundle, nothing is saved: offramp eval msdnet5-cifar100 --data cifar100 --data-dir D
    """
    from offramp.common.pretrained import is_bundle
    from offramp.common.tables import anytime_table
    from offramp.training.evaluate import evaluate_run

    if is_bundle(run):
        _evaluate_bundle(run, data, data_dir, settings or [], device)
        return
    if data is not None or settings:
        raise ValueError(f"{run} is no bundle; a run is evaluated on its own data, --data and --set are for bundles")
    summary = evaluate_run(run, data_dir=data_dir, device=device)
    print_table(*anytime_table(summary))
    policies = f"offramp calibrate {run}, or " if "calibration" in summary.samples else ""
    say(f"saved: {Path(run) / 'eval'}\nnext: {policies}offramp report {run}")


def _evaluate_bundle(bundle: str, data: str | None, data_dir: Path | None, settings: list[str], device: str) -> None:
    from offramp.common.tables import bundle_table
    from offramp.data import load_dataset
    from offramp.running.bundle import load_bundle
    from offramp.running.bundle_eval import evaluate_bundle
    from offramp.runs.config import data_config

    if data is None:
        raise ValueError(f"{bundle} is a bundle; say which data set to try it on: --data cifar100, for example")
    own = data_config(data, settings)
    loaded = load_bundle(bundle, device=device, own_process=True)
    images = load_dataset(own.name, data_dir=data_dir or own.dir, seed=loaded.card.seed, **own.options())
    print_table(*bundle_table(bundle, evaluate_bundle(loaded, images)))


@app.command()
def calibrate(
    run: Annotated[Path, typer.Argument(help="An evaluated run folder.")],
    q: Annotated[float | None, typer.Option(help="The paper's parameter: small leaves early, large late.")] = None,
    budget: Budget = None,
    budget_ms: Annotated[float | None, typer.Option(help="Mean milliseconds per image; needs --times.")] = None,
    times: Times = None,
    max_drop_points: Annotated[
        float | None, typer.Option(help="The cheapest policy within so many points of the whole network.")
    ] = None,
    risk: Annotated[
        float | None, typer.Option(help="Largest share of images lost: wrong, though the whole network is right.")
    ] = None,
    probability: Annotated[float, typer.Option(help="With which the promise about --risk holds.")] = 0.95,
    family: Annotated[str, typer.Option(help="searched or q: where --budget and --max-drop-points look.")] = "searched",
    measure: Measure = "max_softmax",
    temperature: Temperature = False,
    lazy: Annotated[bool, typer.Option(help="Count, and later run, only what each exit's own head needs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where to write; default: RUN/policy.json.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find when images may leave: thresholds from the calibration split, written to policy.json.

    For example: offramp calibrate runs/first --budget 1.2M
    """
    from offramp.common.console import parse_count
    from offramp.common.tables import policy_table
    from offramp.measuring.calibrate import PolicyRequest, calibrate_run

    wanted = None if budget is None else parse_count(budget, "--budget")
    request = PolicyRequest(q, wanted, budget_ms, max_drop_points, risk, probability, family)
    found = calibrate_run(run, request, measure=measure, temperature=temperature, times=times, lazy=lazy, out=out)
    if as_json:
        print(json.dumps(found.policy.to_json()))
        return
    print_table(*policy_table(found))
    path = run / "policy.json" if out is None else out
    say(f"saved, with {len(found.policies) - 1} others: {path}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Evaluated run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="The page to write; its files go beside it.")] = Path("report.html"),
    budgets: Annotated[
        str | None, typer.Option(help="Budgets for the table, for example 8M,15M,25M.", metavar="COUNTS")
    ] = None,
    times: Times = None,
    measure: Measure = "max_softmax",
    temperature: Temperature = False,
) -> None:
    """Write one page about runs: curves, a budget slider, images, tables; it needs nothing but a browser.

    Runs that differ only in their seed are put together. For example: offramp report runs --out report.html
    """
    from offramp.common.console import parse_count
    from offramp.reporting.report import write_report

    counts = [parse_count(part, "--budgets") for part in budgets.split(",")] if budgets else []
    found = write_report(runs, out, budgets=counts, times=times, measure=measure, temperature=temperature)
    say(f"{found.answer}\nreport: {found.page}\nits figures (PNG, SVG) and tables (Markdown, CSV): {found.files}")


@app.command()
def figures(
    runs: Annotated[list[Path], typer.Argument(help="Folders that hold evaluated runs of the paper's recipes.")],
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("figures"),
) -> None:
    """Draw the paper's figures (ablations, CIFAR, IMTA, RANet, long tail) from whatever runs exist."""
    from offramp.reporting.paper_figures import write_figures

    found = write_figures(runs, out)
    for path in found.files:
        say(str(path))
    for name, recipes in found.missing.items():
        if recipes:
            say(f"{name}: no run yet of {', '.join(recipes)}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the demo's runs; a new one is made in it.")] = Path("runs"),
    device: Device = "auto",
) -> None:
    """Train a small network on the embedded digits, conventionally and with learned weights, and compare."""
    from offramp.cli.demo import run_demo

    run_demo(out, device)


def main() -> None:
    """Run the command line; a mistake is one sentence, not a traceback."""
    log_to_console()
    code = 2
    try:
        with explained():
            app()
    except (ValueError, OSError, MissingExtra) as error:
        message = str(error)
    except MemoryError:
        message = "out of memory; use a smaller batch"
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        message = f"{str(error).splitlines()[0]} Use a smaller batch."
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    except SystemExit as error:  # typer's answer to Ctrl-C says nothing
        if error.code != 130:
            raise
        code, message = 130, "interrupted"
    except Stopped as error:
        code, message = 128 + error.signum, str(error)
    print(f"offramp: {message}", file=sys.stderr)
    sys.exit(code)
