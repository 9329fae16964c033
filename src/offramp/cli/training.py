"""The verbs that make run folders: recipes, train, eval, and the demo, which does it all on embedded data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offramp.cli.options import (
    DataDir,
    DataName,
    DataSettings,
    Device,
    RayAddress,
    Settings,
    WorkerCpus,
    WorkerGpus,
    Workers,
    command,
    numbers,
    with_data_dir,
)
from offramp.common.console import print_table, say

verbs = typer.Typer()


@verbs.command()
def recipes() -> None:
    """List the packaged recipes and what each of them claims."""
    from offramp.runs.recipe import list_recipes, load_recipe

    rows = []
    for recipe in map(load_recipe, list_recipes()):
        paper = " ".join(f"{top1:.2f}" for top1 in recipe.paper_top1 or ())
        rows.append([recipe.name, f"{recipe.claim} Paper: {paper} % top-1." if paper else recipe.claim])
    print_table("Recipes", ["name", "claim"], rows)


@verbs.command()
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

    config = with_settings(load_recipe(recipe).config, with_data_dir(settings, data_dir))
    jobs = [(config, out)]
    if seeds is not None:  # the same seed twice is one run
        own = dict.fromkeys(numbers(seeds, int))
        jobs = [(with_settings(config, [f"seed={seed}"]), out / f"seed-{seed}") for seed in own]
    train_runs(jobs, device=device, resume=resume)
    for _, run in jobs:
        say(f"trained: {run}\nnext: {command('eval', run)}")


@verbs.command("eval")
def evaluate(
    run: Annotated[
        str,
        typer.Argument(help="A finished run folder; or a saved model, a bundle, or a network that comes trained."),
    ],
    data: DataName = None,
    data_dir: DataDir = None,
    settings: DataSettings = None,
    device: Device = "auto",
    ray: RayAddress = None,
    workers: Workers = None,
    worker_cpus: WorkerCpus = 1.0,
    worker_gpus: WorkerGpus = 0.0,
) -> None:
    """Evaluate every exit of a run, or of a saved model, on calibration and test splits, and save the logits.

    A saved model is evaluated on data that are named: offramp eval MODEL --data imagefolder --data-dir D

    Of a bundle, nothing is saved: offramp eval msdnet5-cifar100 --data cifar100 --data-dir D
    """
    from offramp.cli.tables import anytime_table
    from offramp.common.pretrained import is_bundle

    if is_bundle(run):
        _evaluate_bundle(run, data, data_dir, settings or [], device, ray, (workers, worker_cpus, worker_gpus))
        return
    if ray is not None:
        raise ValueError(
            f"--ray is for bundles, and {run} is none; make one with: {command('export', run, '--out', 'B')}"
        )
    from offramp.runs.config import data_config
    from offramp.training.evaluate import evaluate_run

    if data is None and settings:
        raise ValueError(
            f"a run is evaluated on its own data; --set goes with --data, for bundles and saved models: {run}"
        )
    own = None if data is None else data_config(data, settings or [])
    summary = evaluate_run(run, data_dir=data_dir, device=device, data=own)
    print_table(*anytime_table(summary))
    following = [command("calibrate", run)] if "calibration" in summary.samples else []
    following += [command("report", run)] if "test" in summary.samples else []
    say(f"saved: {Path(run) / 'eval'}")
    for before, line in zip(("next", "  or"), following, strict=False):
        say(f"{before}: {line}")


def _evaluate_bundle(
    bundle: str,
    data: str | None,
    data_dir: Path | None,
    settings: list[str],
    device: str,
    ray: str | None,
    shape: tuple[int | None, float, float],
) -> None:
    from offramp.cli.tables import bundle_table
    from offramp.running.bundle import load_bundle
    from offramp.running.labelled import evaluate_bundle, labelled_images
    from offramp.runs.config import data_config

    if data is None:
        raise ValueError(f"{bundle} is a bundle; say which data set to try it on: --data cifar100, for example")
    own = data_config(data, settings)
    if ray is not None:
        from offramp.scaling.cluster import WorkerShape
        from offramp.scaling.evaluation import evaluate_on_ray

        score = evaluate_on_ray(bundle, own, data_dir, device=device, address=ray, shape=WorkerShape(*shape))
        print_table(*bundle_table(bundle, score))
        return
    loaded = load_bundle(bundle, device=device)
    print_table(*bundle_table(bundle, evaluate_bundle(loaded, labelled_images(loaded, own, data_dir, "test"))))


@verbs.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the demo's runs; a new one is made in it.")] = Path("runs"),
    device: Device = "auto",
    photos: Annotated[
        bool, typer.Option("--photos", help="On a hundred embedded photos of clothes, with a pretrained network.")
    ] = False,
) -> None:
    """Show what leaving early saves on this machine: train on embedded digits (or photos), measure, report, predict."""
    from offramp.cli.demo import run_demo, run_photos_demo

    run = run_photos_demo if photos else run_demo
    run(out, device)
