"""The verbs that put a trained network to work: export, predict, serve, and fit, which does it all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offramp.cli.options import (
    ON_RAY,
    AsJson,
    Budget,
    BundlePath,
    Device,
    Format,
    MaxPixels,
    RayAddress,
    Settings,
    WorkerCpus,
    WorkerGpus,
    Workers,
    pixels_allowed,
    trying,
    with_data_dir,
)
from offramp.common.console import print_table, say
from offramp.common.extras import require
from offramp.common.formatting import parse_count

if TYPE_CHECKING:
    from offramp.scaling.cluster import WorkerShape
    from offramp.scaling.offline import Asked

verbs = typer.Typer()

FIT_PACKAGES = ("torch", "timm", "matplotlib")


@verbs.command()
def export(
    run: Annotated[
        str,
        typer.Argument(
            help="A run or model that was evaluated and calibrated, a torch bundle, or a network that comes trained."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The bundle's folder; it must not be there yet.")],
    policy: Annotated[Path | None, typer.Option(help="A policy file; default: RUN/policy.json.")] = None,
    format: Format = None,
    half: Annotated[bool, typer.Option(help="Round weights to bfloat16 and store them so: half the size.")] = False,
    images: Annotated[
        bool, typer.Option(help="Golden inputs are test images; without, drawn ones: no image of the data leaves.")
    ] = True,
) -> None:
    """Write a bundle: the network, its policy and everything else that answering needs, verified.

    For example: offramp export runs/first --out bundle --format onnx
    """
    from offramp.running.bundle import checked
    from offramp.running.export import export_run

    path = export_run(run, out, policy=policy, format=format, half=half, images=images)
    written, card, _ = checked(path)
    size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    needs = [f"{name} {version}" for name, version in card.packages.items()]
    needs += [f"--import {plugin}" for plugin in card.imports]
    say(f"bundle: {path} ({written['format']}, {size:.1f} MB), equal to its golden outputs")
    if needs:
        say(f"whoever loads it needs {', '.join(needs)}; with --format onnx nobody would")
    say(f"next: {trying(path, _photos_of(Path(run)))}")


def _photos_of(run: Path) -> Path | None:
    """The folder of photos that a run was trained on, where it is still there."""
    from offramp.runs.folder import holds_run, read_config

    data = read_config(run).data if holds_run(run) else None
    known = Path(data.dir) if data is not None and data.name == "imagefolder" and data.dir else None
    return known if known is not None and known.is_dir() else None


@verbs.command("serve")
def serve_command(
    bundle: BundlePath,
    host: Annotated[str, typer.Option(help="Address to listen on; loopback unless told otherwise.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes any that is free.")] = 8000,
    workers: Annotated[
        int,
        typer.Option(
            help="Processes that answer at this address. They share the cores, and each has its share of --queue and "
            "of --client-mul-adds-per-s: a client with one connection gets no more than that."
        ),
    ] = 1,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads for the stages of a worker; default: its share of the cores, with one worker all but one."
        ),
    ] = None,
    ray: RayAddress = None,
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N | LEAST:MOST",
            rich_help_panel=ON_RAY,
            help="Replicas; of a range, as many as those who wait need. Each has a --queue of its own; "
            "--client-mul-adds-per-s is divided by MOST.",
        ),
    ] = "1",
    worker_cpus: WorkerCpus = 1.0,
    worker_gpus: WorkerGpus = 0.0,
    batch: Annotated[int, typer.Option(help="Images that a stage runs together at most.")] = 64,
    wait_ms: Annotated[float, typer.Option(help="How long an image may wait for a fuller batch.")] = 2.0,
    queue: Annotated[int, typer.Option(help="Images inside at most; more are answered 503.")] = 256,
    max_bytes: Annotated[int, typer.Option(help="Size of a request's body at most.")] = 10_000_000,
    max_images: Annotated[int, typer.Option(help="Images in a request at most.")] = 64,
    max_pixels: MaxPixels = None,
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
    from offramp.serve import ServeConfig, serve

    ceiling = None if client_mul_adds_per_s is None else parse_count(client_mul_adds_per_s, "--client-mul-adds-per-s")
    config = ServeConfig(
        batch=batch,
        wait_ms=wait_ms,
        queue=queue,
        max_bytes=max_bytes,
        max_images=max_images,
        max_pixels=pixels_allowed(max_pixels),
        client_mul_adds_per_s=ceiling,
        overload_exit=overload_exit,
        reveal_exit=reveal_exit,
        deadline_ms=deadline_ms,
        trust_forwarded=trust_forwarded,
    )
    if ray is None:
        if replicas != "1":
            raise ValueError("--replicas needs --ray; on this machine alone use --workers")
        serve(bundle, host, port, config, device, workers, threads)
        return
    if workers != 1 or threads is not None:
        raise ValueError(
            "--workers and --threads are for serving without Ray; with --ray give --replicas and --worker-cpus"
        )
    from offramp.serve.ray_app import Replicas, serve_on_ray

    wanted = Replicas.parse(replicas, worker_cpus, worker_gpus)
    serve_on_ray(bundle, ray, wanted, host, port, config, device)


@verbs.command("fit")
def fit_command(
    source: Annotated[str, typer.Argument(help="A folder with a folder of photos per class, or a recipe.")],
    out: Annotated[Path, typer.Option(help="Folder for the networks, the bundle and the report.")],
    budget: Budget = None,
    budget_ms: Annotated[
        float | None, typer.Option(help="Mean milliseconds allowed per image, as measured on this machine.")
    ] = None,
    max_drop_points: Annotated[
        float | None, typer.Option(help="The cheapest within so many points of the single network; default: 0.5.")
    ] = None,
    risk: Annotated[
        float | None, typer.Option(help="Largest share of images lost: wrong, though the single network is right.")
    ] = None,
    probability: Annotated[float, typer.Option(help="With which the promise about --risk holds.")] = 0.95,
    time: Annotated[str | None, typer.Option(help="How long it may take, about: 20m, 2h.", metavar="TIME")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            help="The network to start from, timm/NAME or torchvision/NAME, or two: SMALL,LARGE. Default: "
            "EfficientNet-Lite0 and -Lite2."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Train one plain network and try nothing else.")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Trust what too few images say about what is lost.")] = False,
    batch: Annotated[int, typer.Option(help="Images that will be answered together; times are for that.")] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads that will answer; default: one per core.")] = None,
    format: Format = None,
    settings: Settings = None,
    data_dir: Annotated[Path | None, typer.Option(help="With a recipe: the folder that holds its data set.")] = None,
    device: Device = "auto",
) -> None:
    """Turn a folder of photos into the best network for what is asked; called again, it goes on where it was.

    For example: offramp fit photos --out fitted --time 20m

    docs/fit.md explains it from the start. With a recipe, that is trained, evaluated, calibrated and exported.
    """
    if Path(source).is_dir():
        if data_dir is not None:
            raise ValueError(f"--data-dir is for recipes, but {source} is a folder of photos itself")
        require(*FIT_PACKAGES, *(() if format == "torch" else ("onnx", "onnxscript", "onnxruntime")))
    from offramp.cli.tables import policy_table
    from offramp.fitting.fit import fit
    from offramp.fitting.timing import Serving
    from offramp.measuring.calibrate import PolicyRequest

    wanted = None if budget is None else parse_count(budget, "--budget")
    request = PolicyRequest(None, wanted, budget_ms, max_drop_points, risk, probability, anyway=anyway)
    found = fit(
        source,
        out,
        request,
        backbone=backbone,
        time=time,
        quick=quick,
        serving=Serving(format, "cpu" if device == "cpu" else "auto", batch, threads),
        settings=tuple(with_data_dir(settings, data_dir)),
        device=device,
    )
    print_table(*policy_table(found.policies))
    say(f"run: {found.run}\nbundle: {found.bundle}\nreport: {found.report.page}")
    say(f"next: {trying(found.bundle, Path(source) if Path(source).is_dir() else None)}\n")
    say(found.sentence)


@verbs.command("predict")
def predict_command(
    bundle: BundlePath,
    images: Annotated[
        list[str],
        typer.Argument(
            help="Files, folders, globs, or - for a list on standard input. With --ray one source: a folder, a file "
            "with a path or URI per line, or Parquet; local or s3://."
        ),
    ],
    budget: Budget = None,
    q: Annotated[float | None, typer.Option(help="The bundle's policy nearest to this q.")] = None,
    out: Annotated[
        str | None,
        typer.Option(help="Write results to a .csv or .jsonl file; with --ray the folder, or s3://, for Parquet."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Images that run together.")] = 64,
    max_exit: Annotated[int | None, typer.Option(help="No image goes beyond this exit.")] = None,
    max_mul_adds: Annotated[str | None, typer.Option(help="No image costs more than this.", metavar="COUNT")] = None,
    max_pixels: MaxPixels = None,
    device: Device = "auto",
    as_json: AsJson = False,
    ray: RayAddress = None,
    workers: Workers = None,
    worker_cpus: WorkerCpus = 1.0,
    worker_gpus: WorkerGpus = 0.0,
    part_images: Annotated[
        int | None, typer.Option(help="Images of a part and of a call; 1024 or more.", rich_help_panel=ON_RAY)
    ] = None,
    image_column: Annotated[
        str | None, typer.Option(help="Of Parquet: the column of encoded images.", rich_help_panel=ON_RAY)
    ] = None,
    key_column: Annotated[
        str | None, typer.Option(help="Of Parquet: the column of keys; default: FILE#ROW.", rich_help_panel=ON_RAY)
    ] = None,
    max_unreadable: Annotated[
        float, typer.Option(help="Share of images that may be unreadable; more stop it.", rich_help_panel=ON_RAY)
    ] = 0.01,
    retry_unreadable: Annotated[
        bool, typer.Option("--retry-unreadable", help="Do parts with unreadable images again.", rich_help_panel=ON_RAY)
    ] = False,
) -> None:
    """Classify images with a bundle; each pays for what it uses.

    An image that cannot be read is named in the results, and the exit code is 1 at the end.

    Millions of images, on many machines, into Parquet; started again, it goes on where it was:
    offramp predict bundle s3://photos/2026 --ray --out answers
    """
    wanted = None if budget is None else parse_count(budget, "--budget")
    limit = None if max_mul_adds is None else parse_count(max_mul_adds, "--max-mul-adds")
    pixels = pixels_allowed(max_pixels)
    if ray is not None:
        from offramp.scaling.cluster import WorkerShape
        from offramp.scaling.offline import Asked

        rest = (part_images, batch, device, max_unreadable, retry_unreadable)
        asked = Asked(wanted, q, max_exit, limit, pixels, *rest)
        shape = WorkerShape(workers, worker_cpus, worker_gpus)
        _predict_on_ray(bundle, images, out, asked, (image_column, key_column), ray, shape, as_json)
        return
    if any(option is not None for option in (workers, part_images, image_column, key_column)) or retry_unreadable:
        raise ValueError("--workers, --part-images, --image-column, --key-column and --retry-unreadable need --ray")
    from offramp.measuring.sentences import policy_sentence
    from offramp.running.bundle import load_bundle
    from offramp.running.predict import expand, predict, result_table, write_rows

    loaded = load_bundle(bundle, device=device)
    policy = loaded.policy(wanted, q)
    if out is not None and Path(out).suffix not in (".csv", ".jsonl"):
        raise ValueError(f"--out must end in .csv or .jsonl, got {out}")
    found = predict(
        loaded,
        expand(images),
        policy=policy,
        batch=batch,
        max_exit=max_exit,
        max_mul_adds=limit,
        max_pixels=pixels,
        silent=as_json,
    )
    if out is not None:
        write_rows(Path(out), found.rows)
    if as_json:
        print(json.dumps({**found.to_json(), "policy": policy.to_json()}))
    else:
        say(f"results: {out}") if out is not None else print_table(*result_table(found.rows), whole=True)
        say(str(found))
        say(f"its policy: {policy_sentence(loaded.policies, policy)}")
    if found.unreadable:
        raise typer.Exit(1)


def _predict_on_ray(
    bundle: Path,
    sources: list[str],
    out: str | None,
    asked: Asked,
    columns: tuple[str | None, str | None],
    address: str,
    shape: WorkerShape,
    as_json: bool,
) -> None:
    from offramp.scaling.offline import SMALLEST_PART, predict_source
    from offramp.scaling.sources import open_source

    if len(sources) != 1 or out is None:
        raise ValueError("with --ray give one source (a folder, a list of paths or URIs, or Parquet) and --out FOLDER")
    if asked.part_images is not None and asked.part_images < SMALLEST_PART:
        raise ValueError(f"--part-images must be {SMALLEST_PART:,} or more, got {asked.part_images:,}")
    if not as_json:
        say(f"listing {sources[0]}")
    source = open_source(sources[0], *columns)
    found = predict_source(bundle, source, out, asked, address=address, shape=shape, silent=as_json)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        say(f"{found}\nresults: {out}")
    if found.unreadable:
        raise typer.Exit(1)
