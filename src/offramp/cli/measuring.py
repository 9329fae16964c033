"""The verbs that ask questions of saved outputs: calibrate, report, figures, and results, which are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offramp.cli.options import (
    AsJson,
    Budget,
    DataDir,
    DataName,
    DataSettings,
    Device,
    Measure,
    Temperature,
    Times,
    command,
    trying,
)
from offramp.common.console import print_table, say
from offramp.common.formatting import parse_count

if TYPE_CHECKING:
    from offramp.running.bundle import Bundle
    from offramp.running.labelled import LabelledImages

verbs = typer.Typer()


@verbs.command("calibrate")
def calibrate_command(
    run: Annotated[str, typer.Argument(help="An evaluated run or model folder; or a bundle, with --data and --out.")],
    q: Annotated[float | None, typer.Option(help="The paper's parameter: small leaves early, large late.")] = None,
    budget: Budget = None,
    budget_ms: Annotated[float | None, typer.Option(help="Mean milliseconds per image; needs --times.")] = None,
    times: Times = None,
    max_drop_points: Annotated[
        float | None, typer.Option(help="The cheapest policy within so many points of the whole network.")
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Let images leave early even if too few images tell what that loses.")
    ] = False,
    risk: Annotated[
        float | None, typer.Option(help="Largest share of images lost: wrong, though the whole network is right.")
    ] = None,
    probability: Annotated[float, typer.Option(help="With which the promise about --risk holds.")] = 0.95,
    family: Annotated[str, typer.Option(help="searched or q: where --budget and --max-drop-points look.")] = "searched",
    measure: Measure = "max_softmax",
    temperature: Temperature = False,
    lazy: Annotated[bool, typer.Option(help="Count, and later run, only what each exit's own head needs.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write; default: RUN/policy.json. For a bundle: the new bundle's folder."),
    ] = None,
    data: DataName = None,
    data_dir: DataDir = None,
    settings: DataSettings = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Find when images may leave: thresholds from the calibration split, written to policy.json.

    For example: offramp calibrate runs/first --budget 1.2M

    A bundle gets new thresholds from labelled images, a folder of them per class, as a new bundle:
    offramp calibrate bundle --data imagefolder --data-dir photos --out new-bundle
    """
    from offramp.cli.tables import policy_table
    from offramp.common.pretrained import is_bundle
    from offramp.measuring.calibrate import PolicyRequest, calibrate_run

    wanted = None if budget is None else parse_count(budget, "--budget")
    request = PolicyRequest(q, wanted, budget_ms, max_drop_points, risk, probability, family, anyway)
    if is_bundle(run):
        from offramp.running.labelled import calibrate_bundle

        if data is None or out is None or lazy:
            raise ValueError(_new_thresholds(run, lazy))
        bundle, images = _bundle_and_images(run, data, data_dir, settings or [], device)
        options: dict[str, Any] = {"measure": measure, "temperature": temperature, "times": times, "silent": as_json}
        found = calibrate_bundle(bundle, images, out, request, **options)
        place, following = out, trying(out, data_dir)
    else:
        if data is not None or data_dir is not None or settings:
            raise ValueError(f"{run} is no bundle; a run is calibrated on its own calibration split, without --data")
        found = calibrate_run(run, request, measure=measure, temperature=temperature, times=times, lazy=lazy, out=out)
        place = Path(run) / "policy.json" if out is None else out
        following = _then_export(Path(run), out)
    if as_json:
        print(json.dumps(found.policy.to_json()))
        return
    print_table(*policy_table(found))
    say(f"saved, with {len(found.policies) - 1} other policies: {place}\nnext: {following}")


def _then_export(run: Path, policy: Path | None) -> str:
    """The command that makes a bundle; of a network that lies in no folder, the call in Python."""
    from offramp.running.bundle import in_python
    from offramp.runs.folder import CONFIG

    if not (run / CONFIG).is_file():
        return f"in Python: {in_python(run)}"
    return command("export", run, "--out", run / "bundle", *([] if policy is None else ["--policy", policy]))


def _new_thresholds(bundle: str, lazy: bool) -> str:
    """How a bundle gets new thresholds."""
    if lazy:
        return "a bundle runs in the order that it was exported in; --lazy is for runs"
    return (
        f"{bundle} is a bundle, which holds its policies already; new ones come from labelled images, into a new "
        "folder: --data imagefolder --data-dir D --out NEW"
    )


def _bundle_and_images(
    source: str, data: str, data_dir: Path | None, settings: list[str], device: str
) -> tuple[Bundle, LabelledImages]:
    from offramp.running.bundle import load_bundle
    from offramp.running.labelled import labelled_images
    from offramp.runs.config import data_config

    bundle = load_bundle(source, device=device)
    return bundle, labelled_images(bundle, data_config(data, settings), data_dir, "calibration")


@verbs.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Evaluated run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="The page to write; its files go beside it.")] = Path("report.html"),
    budgets: Annotated[
        str | None, typer.Option(help="Budgets for the table, for example 8M,15M,25M.", metavar="COUNTS")
    ] = None,
    times: Times = None,
    measure: Annotated[
        str | None, typer.Option(help="Confidence: max_softmax, margin or entropy; default: the policy's own.")
    ] = None,
    temperature: Annotated[
        bool | None, typer.Option(help="Fit a temperature per exit first; default: as the policy has it.")
    ] = None,
) -> None:
    """Write one page about runs: what ships, a budget slider, images, tables; it needs nothing but a browser.

    It opens on the policy in RUN/policy.json, which `offramp calibrate` wrote and `offramp export` ships. With
    --times it shows milliseconds beside mul-adds. Runs that differ only in their seed are put together. For example:
    offramp report runs --out report.html
    """
    from offramp.reporting.report import write_report

    counts = [parse_count(part, "--budgets") for part in budgets.split(",")] if budgets else []
    found = write_report(runs, out, budgets=counts, times=times, measure=measure, temperature=temperature)
    say(f"{found.answer}\nreport: {found.page}\nits figures (PNG, SVG) and tables (Markdown, CSV): {found.files}")


@verbs.command()
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


results = typer.Typer(no_args_is_help=True, help="Keep the results of runs and write a page about them.")
verbs.add_typer(results, name="results")


@results.command("keep")
def keep_command(
    runs: Annotated[list[Path], typer.Argument(help="Evaluated runs, or folders that hold them.")],
    into: Annotated[Path, typer.Option(help="The section's folder, for example results/1-main.")],
    log_only: Annotated[
        bool, typer.Option("--log-only", help="Keep settings and log alone, also of runs that were not evaluated.")
    ] = False,
) -> None:
    """Keep settings, log, evaluation summary and budgeted curves of runs: text, some kilobytes each."""
    from offramp.reporting.groups import find_runs
    from offramp.reporting.kept_runs import keep_run, refuse_twins

    found = find_runs(runs, evaluated=not log_only)
    refuse_twins(found)
    for run in found:
        say(f"kept: {keep_run(run, into, log_only=log_only)}")


@results.command("page")
def page_command(
    folder: Annotated[Path, typer.Argument(help="The folder of sections, each with its section.toml.")],
    out: Annotated[Path, typer.Option(help="The Markdown page; its pictures go to a folder beside it.")],
) -> None:
    """Write the page from what is kept: tables, differences, pictures, and the commands to repeat each run.

    A section.toml has a title and a text. It may have:

    budgets = [8, 25] in millions of mul-adds, and shown = [30], more of them that the claim is not put to;

    split = "calibration" for what was tuned; beside = ["1-main/*-seed=0"] to show runs of other sections too;

    a table named ratios for what training costs.
    """
    from offramp.reporting.results_page import write_page

    say(f"written: {write_page(folder, out)}")
