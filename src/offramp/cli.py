"""The command line: each verb is a typed function; heavy imports happen inside it.

A user's mistake is one plain sentence on standard error and exit code 2.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from offramp import __version__
from offramp.console import console, log_to_console, print_table
from offramp.extras import MissingExtra, explained
from offramp.stopping import Stopped

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Early-exit image classifiers: train them, measure them, run them.",
)

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto is the GPU if there is one.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder that holds the data set; digits needs none.")]
Times = Annotated[Path | None, typer.Option(help="Stage times that `offramp bench infer --json` wrote.")]
Measure = Annotated[str, typer.Option(help="Confidence: max_softmax, margin or entropy.")]
Temperature = Annotated[bool, typer.Option(help="Fit a temperature per exit first.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated.")
]


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


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
    from offramp.models.registry import list_models, model_entry

    if as_json:
        print(json.dumps(list_models()))
        return
    print_table("Models", ["name", "about"], [[name, model_entry(name).about] for name in list_models()])


@app.command()
def info(
    name: Annotated[str, typer.Argument(help="A model's name, or a model or run folder.")],
    num_classes: Annotated[int | None, typer.Option(help="Default: the model's own.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels.")] = None,
    lazy: Annotated[bool, typer.Option(help="Count what the lazy schedule runs before each exit.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Print what each exit of a network costs: params, the paper's mul-adds and plain MACs, cumulative."""
    from offramp.models.describe import describe

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
    from offramp.config import list_recipes, load_recipe

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
) -> None:
    """Train a network into a run folder.

    For example: offramp train digits-baseline --out runs/first --set train.epochs=3
    """
    from offramp.config import load_recipe, with_settings
    from offramp.train import train_run

    changes = list(settings or [])
    if data_dir is not None:
        changes.append(f"data.dir={json.dumps(str(data_dir), ensure_ascii=False)}")
    config = with_settings(load_recipe(recipe).config, changes)
    train_run(config, out, device=device, resume=resume)
    _say(f"trained: {out}\nnext: offramp eval {out}")


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A finished run folder.")],
    data_dir: DataDir = None,
    device: Device = "auto",
) -> None:
    """Evaluate every exit of a run on its calibration and test splits, and save the logits."""
    from offramp.evaluate import evaluate_run
    from offramp.tables import anytime_table

    print_table(*anytime_table(evaluate_run(run, data_dir=data_dir, device=device)))
    _say(f"saved: {run / 'eval'}\nnext: offramp calibrate {run}, or offramp report {run}")


@app.command()
def calibrate(
    run: Annotated[Path, typer.Argument(help="An evaluated run folder.")],
    q: Annotated[float | None, typer.Option(help="The paper's parameter: small leaves early, large late.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Mean mul-adds allowed per image, for example 15M.", metavar="COUNT")
    ] = None,
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
    from offramp.calibrate import PolicyRequest, calibrate_run
    from offramp.console import parse_count
    from offramp.tables import policy_table

    wanted = None if budget is None else parse_count(budget, "--budget")
    request = PolicyRequest(q, wanted, budget_ms, max_drop_points, risk, probability, family)
    found = calibrate_run(run, request, measure=measure, temperature=temperature, times=times, lazy=lazy, out=out)
    if as_json:
        print(json.dumps(found.policy.to_json()))
        return
    print_table(*policy_table(found))
    path = run / "policy.json" if out is None else out
    _say(f"saved, with {len(found.policies) - 1} others: {path}")


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
    from offramp.console import parse_count
    from offramp.report.write import write_report

    counts = [parse_count(part, "--budgets") for part in budgets.split(",")] if budgets else []
    found = write_report(runs, out, budgets=counts, times=times, measure=measure, temperature=temperature)
    _say(f"{found.answer}\nreport: {found.page}\nits figures (PNG, SVG) and tables (Markdown, CSV): {found.files}")


@app.command()
def figures(
    runs: Annotated[list[Path], typer.Argument(help="Folders that hold evaluated runs of the paper's recipes.")],
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("figures"),
) -> None:
    """Draw the paper's figures (ablations, CIFAR, IMTA, RANet, long tail) from whatever runs exist."""
    from offramp.report.paper import write_figures

    found = write_figures(runs, out)
    for path in found.files:
        _say(str(path))
    for name, recipes in found.missing.items():
        if recipes:
            _say(f"{name}: no run yet of {', '.join(recipes)}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder that was evaluated and calibrated.")],
    out: Annotated[Path, typer.Option(help="The bundle's folder; it must not be there yet.")],
    policy: Annotated[Path | None, typer.Option(help="A policy file; default: RUN/policy.json.")] = None,
    format: Annotated[str, typer.Option(help="torch, or onnx for boxes without torch.")] = "torch",
) -> None:
    """Write a bundle: the network, its policy and everything else that answering needs, verified.

    For example: offramp export runs/first --out bundle --format onnx
    """
    from offramp.export import export_run

    path = export_run(run, out, policy=policy, format=format)
    size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    _say(f"bundle: {path} ({format}, {size:.1f} MB), equal to its golden outputs\nnext: offramp predict {path} IMAGES")


@app.command("serve")
def serve_command(
    bundle: Annotated[Path, typer.Argument(help="A bundle folder.")],
    host: Annotated[str, typer.Option(help="Address to listen on; loopback unless told otherwise.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes any that is free.")] = 8000,
    batch: Annotated[int, typer.Option(help="Images that a stage runs together at most.")] = 64,
    wait_ms: Annotated[float, typer.Option(help="How long an image may wait for a fuller batch.")] = 2.0,
    queue: Annotated[int, typer.Option(help="Images inside at most; more are answered 503.")] = 256,
    max_bytes: Annotated[int, typer.Option(help="Size of a request's body at most.")] = 10_000_000,
    max_images: Annotated[int, typer.Option(help="Images in a request at most.")] = 64,
    client_mul_adds_per_s: Annotated[
        str | None, typer.Option(help="Compute that one client may use, for example 2G.", metavar="COUNT")
    ] = None,
    overload_exit: Annotated[int | None, typer.Option(help="The last exit while over half the queue is taken.")] = None,
    deadline_ms: Annotated[float | None, typer.Option(help="For requests that bring none of their own.")] = None,
    reveal_exit: Annotated[bool, typer.Option(help="Say in answers which exit was taken.")] = False,
    trust_forwarded: Annotated[bool, typer.Option(help="A proxy in front names the client.")] = False,
    device: Device = "auto",
) -> None:
    """Answer images over HTTP: POST /predict, a page on /, /metrics; Ctrl-C finishes what is inside and stops."""
    from offramp.console import parse_count
    from offramp.serve import ServeConfig, serve

    ceiling = None if client_mul_adds_per_s is None else parse_count(client_mul_adds_per_s, "--client-mul-adds-per-s")
    config = ServeConfig(
        batch, wait_ms, queue, max_bytes, max_images, ceiling, overload_exit, reveal_exit, deadline_ms, trust_forwarded
    )
    serve(bundle, host, port, config, device)


@app.command("fit")
def fit_command(
    source: Annotated[str, typer.Argument(help="A folder with a folder of images per class, or a recipe.")],
    out: Annotated[Path, typer.Option(help="Folder for the run, the bundle and the report.")],
    budget: Annotated[
        str | None, typer.Option(help="Mean mul-adds allowed per image, for example 15M.", metavar="COUNT")
    ] = None,
    max_drop_points: Annotated[
        float | None, typer.Option(help="The cheapest policy within so many points of the whole network.")
    ] = None,
    format: Annotated[str, typer.Option(help="torch, or onnx for boxes without torch.")] = "torch",
    settings: Settings = None,
    device: Device = "auto",
) -> None:
    """Train, evaluate, calibrate, export and report in one go; called again, it goes on where it was.

    For example: offramp fit photos --budget 15M --out fitted
    """
    from offramp.calibrate import PolicyRequest
    from offramp.console import parse_count
    from offramp.fit import fit

    wanted = None if budget is None else parse_count(budget, "--budget")
    request = PolicyRequest(budget_mul_adds=wanted, max_drop_points=max_drop_points)
    found = fit(source, out, request, format=format, settings=tuple(settings or ()), device=device)
    _say(f"{found.report.answer}\nrun: {found.run}\nbundle: {found.bundle}\nreport: {found.report.page}")
    _say(f"next: offramp predict {found.bundle} IMAGES")


@app.command("predict")
def predict_command(
    bundle: Annotated[Path, typer.Argument(help="A bundle folder.")],
    images: Annotated[list[str], typer.Argument(help="Files, folders, globs, or - for a list on standard input.")],
    budget: Annotated[
        str | None, typer.Option(help="Mean mul-adds allowed per image, for example 15M.", metavar="COUNT")
    ] = None,
    q: Annotated[float | None, typer.Option(help="The bundle's policy nearest to this q.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write results to a .csv or .jsonl file.")] = None,
    batch: Annotated[int, typer.Option(help="Images that run together.")] = 64,
    max_exit: Annotated[int | None, typer.Option(help="No image goes beyond this exit.")] = None,
    max_mul_adds: Annotated[str | None, typer.Option(help="No image costs more than this.", metavar="COUNT")] = None,
    device: Device = "auto",
) -> None:
    """Classify images with a bundle; each pays for what it uses.

    An image that cannot be read is named in the results, and the exit code is 1 at the end.
    """
    from offramp.bundle import load_bundle
    from offramp.console import parse_count
    from offramp.predict import expand, predict, result_table, write_rows

    loaded = load_bundle(bundle, device=device)
    policy = loaded.policy(None if budget is None else parse_count(budget, "--budget"), q)
    limit = None if max_mul_adds is None else parse_count(max_mul_adds, "--max-mul-adds")
    if out is not None and out.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"--out must end in .csv or .jsonl, got {out}")
    found = predict(loaded, expand(images), policy=policy, batch=batch, max_exit=max_exit, max_mul_adds=limit)
    if out is None:
        print_table(*result_table(found.rows))
    else:
        write_rows(out, found.rows)
        _say(f"results: {out}")
    _say(str(found))
    if found.unreadable:
        raise typer.Exit(1)


bench = typer.Typer(no_args_is_help=True, help="Measure speed on this machine.")
app.add_typer(bench, name="bench")


@bench.command("train")
def bench_train_command(
    model: Annotated[str, typer.Option(help="A model's name.")] = "msdnet5",
    batch: Annotated[int, typer.Option(help="Loader batch: two updates of half of it.")] = 64,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Timed rounds; the median counts.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Time a training step with learned weights, by each engine, beside conventional training."""
    from offramp.bench import bench_train
    from offramp.device import device_name, pick_device

    place = device_name(pick_device(device))
    rows = bench_train(model, batch, device, precision, repeats, silent=as_json)
    if as_json:
        print(json.dumps({"model": model, "batch": batch, "device": place, "rows": [r.to_json() for r in rows]}))
        return
    cells = [
        [r.name, f"{r.milliseconds:,.1f}", f"{r.images_per_s:,.0f}", f"{r.peak_mb:,.0f}", f"{r.ratio:.2f}"]
        for r in rows
    ]
    title = f"{model}, loader batch {batch}, {place}"
    print_table(title, ["step", "ms", "images/s", "peak MB", "ratio"], cells)


@bench.command("infer")
def bench_infer_command(
    source: Annotated[str, typer.Argument(help="A bundle folder, or a model's name (fresh params).")],
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,64,256",
    q: Annotated[str, typer.Option(help="The shares of exits, by the paper's q.")] = "0.5,0.75",
    engine: Annotated[str, typer.Option(help="torch or onnx, for a model.")] = "torch",
    device: Device = "auto",
    repeats: Annotated[int, typer.Option(help="Timed calls of each kind.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Time leaving early against the whole network and against the ideal.

    The JSON holds stage_ms, which `offramp calibrate --budget-ms --times` reads.
    """
    from offramp.bench_infer import bench_table, infer_report

    found = infer_report(source, _numbers(batch, int), _numbers(q, float), engine, device, repeats, silent=as_json)
    if as_json:
        print(json.dumps(found))
        return
    print_table(*bench_table(found))
    for line in found["packing"]:
        _say(line)


@bench.command("serve")
def bench_serve_command(
    bundle: Annotated[Path, typer.Argument(help="A bundle folder.")],
    seconds: Annotated[float, typer.Option(help="How long to load the server.")] = 30.0,
    clients: Annotated[int, typer.Option(help="Connections, each with one request at a time.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Load a server on loopback until it is saturated, and check that every answer comes once and is right."""
    from offramp.serve.bench import bench_serve

    found = bench_serve(bundle, seconds, clients)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        _say(
            f"{found.accepted:,} requests answered in {found.seconds:.0f} s by {clients} clients, "
            f"{found.images_per_s:,.0f} images/s; p50 {found.p50_ms:.0f} ms, p95 {found.p95_ms:.0f} ms, "
            f"p99 {found.p99_ms:.0f} ms; {found.refused:,} refused, {found.wrong} wrong, {found.failed} failed"
        )
    if not found.passed:
        raise typer.Exit(1)


def _numbers(text: str, kind: type[Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{text!r} is not a list of numbers such as 1,8,64") from error


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the demo's runs; a new one is made in it.")] = Path("runs"),
    device: Device = "auto",
) -> None:
    """Train a small network on the embedded digits, conventionally and with learned weights, and compare."""
    from offramp.demo import run_demo

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
    except Stopped as error:
        code, message = 128 + error.signum, str(error)
    print(f"offramp: {message}", file=sys.stderr)
    sys.exit(code)
