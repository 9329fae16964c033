"""The verbs of `offramp results`: keep what runs have shown, and write the page about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offramp.cli.options import say

results = typer.Typer(no_args_is_help=True, help="Keep the results of runs and write a page about them.")


@results.command("keep")
def keep_command(
    runs: Annotated[list[Path], typer.Argument(help="Evaluated runs, or folders that hold them.")],
    into: Annotated[Path, typer.Option(help="The section's folder, for example results/1-main.")],
    log_only: Annotated[
        bool, typer.Option("--log-only", help="Keep settings and log alone, also of runs that were not evaluated.")
    ] = False,
) -> None:
    """Keep settings, log, evaluation summary and budgeted curves of runs: text, some kilobytes each."""
    from offramp.reporting.gather import find_runs
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
