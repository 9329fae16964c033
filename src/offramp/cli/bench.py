"""The verbs of `offramp bench`: what training, leaving early and serving take on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from offramp.cli.options import AsJson, BundlePath, Device, RayAddress, numbers
from offramp.common.console import print_table, say
from offramp.common.pretrained import DEFAULT_BACKBONE

verbs = typer.Typer(no_args_is_help=True, help="Measure speed on this machine.")


@verbs.command("train")
def bench_train_command(
    model: Annotated[str | None, typer.Option(help="A model's name. Default: msdnet5, or the recipe's.")] = None,
    batch: Annotated[int, typer.Option(help="Loader batch: two updates of half of it.")] = 64,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe whose network, objective and updates are timed; its data are not read.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change one of its settings: objective.name=distillation.")
    ] = None,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Timed rounds; the median counts.")] = 7,
    only: Annotated[str, typer.Option(help="Only steps with this in their name, beside the baseline.")] = "",
    way: Annotated[str | None, typer.Option(help="Only this way: eager, graph or fast.")] = None,
    where: Annotated[
        bool, typer.Option(help="Instead: where the time of one step goes: a learned one, or the last of --only.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time a training step with learned weights, by each engine, beside conventional training, and IMTA's second phase.

    On a GPU each is run eagerly, as a CUDA graph, and as one with offramp's own kernels (fast).
    """
    from offramp.bench.train import (
        asked_rows,
        asked_ways,
        bench_train,
        lower_bound_line,
        what_to_bench,
        where_time_goes,
    )
    from offramp.common.device import device_name, pick_device

    config = what_to_bench(model or (None if recipe else "msdnet5"), recipe, settings or [])
    model = recipe or config.model.name
    chosen = pick_device(device)
    place = device_name(chosen)
    if where:
        step, way = asked_rows(config, only or "forward_mode")[-1], asked_ways(chosen, way)[-1]
        spent = where_time_goes(step, way, config, batch, device, precision)
        if as_json:
            about = {"model": model, "batch": batch, "device": place, "step": step, "way": way}
            print(json.dumps({**about, "spent": spent}))
            return
        cells = [[name, f"{calls:,.0f}", f"{ms:,.2f}"] for name, calls, ms in spent[:25]]
        print_table(f"{step}: {model}, loader batch {batch}, {place}, {way}", ["what", "calls", "ms"], cells)
        return
    rows = bench_train(config, batch, device, precision, repeats, only, way, silent=as_json)
    floor = lower_bound_line(config, batch, device, precision)
    if as_json:
        found = {"model": model, "batch": batch, "device": place, "rows": [r.to_json() for r in rows], "floor": floor}
        print(json.dumps(found))
        return
    cells = [
        [r.name, r.way, f"{r.milliseconds:,.1f}", f"{r.images_per_s:,.0f}", f"{r.peak_mb:,.0f}", f"{r.ratio:.2f}"]
        for r in rows
    ]
    title = f"{model}, loader batch {batch}, {place}"
    print_table(title, ["step", "way", "ms", "images/s", "peak MB", "ratio"], cells, whole=True)
    say(floor)


@verbs.command("finetune")
def bench_finetune_command(
    model: Annotated[str, typer.Argument(help="A library's network, such as timm/resnet50.")] = DEFAULT_BACKBONE,
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels. Default: its own.")] = None,
    exits: Annotated[int, typer.Option(help="How many exits it gets.")] = 4,
    batch: Annotated[int, typer.Option(help="Images of one update.")] = 64,
    device: Device = "auto",
    repeats: Annotated[int, typer.Option(help="Timed rounds; the median counts.")] = 7,
    compiled: Annotated[bool, typer.Option(help="Also the plain loop under torch.compile.")] = True,
    as_json: AsJson = False,
) -> None:
    """Time fine-tuning of a library's network with exits, beside plain loops that make the same updates."""
    from offramp.bench.finetune import bench_finetune
    from offramp.common.device import device_name, pick_device

    rows = bench_finetune(model, image_size, exits, batch, device, repeats, compiled, silent=as_json)
    place = device_name(pick_device(device))
    if as_json:
        print(json.dumps({"model": model, "batch": batch, "device": place, "rows": [row.to_json() for row in rows]}))
        return
    cells = [[r.name, f"{r.update_ms:,.2f}", f"{r.images_per_s:,.0f}", f"{r.times_plain:.2f}"] for r in rows]
    title = f"{model}, {exits} exits, updates of {batch}, {place}"
    print_table(title, ["way", "ms", "images/s", "times the plain loop"], cells)


@verbs.command("infer")
def bench_infer_command(
    source: Annotated[str, typer.Argument(help="A bundle, or a model's name (fresh params).")],
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,64,256",
    q: Annotated[str, typer.Option(help="The shares of exits, by the paper's q.")] = "0.5,0.75",
    engine: Annotated[str | None, typer.Option(help="For a model: torch (as it is) or onnx.")] = None,
    device: Device = "auto",
    repeats: Annotated[int, typer.Option(help="Timed calls of each kind.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Time leaving early against the whole network and against the ideal.

    The JSON holds stage_ms, which `offramp calibrate --budget-ms --times` reads.
    """
    from offramp.bench.infer import bench_table, infer_report

    found = infer_report(source, numbers(batch, int), numbers(q, float), engine, device, repeats, silent=as_json)
    if as_json:
        print(json.dumps(found))
        return
    print_table(*bench_table(found), whole=True)
    for line in found["packing"]:
        say(line)


@verbs.command("predict")
def bench_predict_command(
    bundle: Annotated[Path, typer.Argument(help="A bundle.", metavar="BUNDLE")] = Path("msdnet5-cifar100"),
    ray: RayAddress = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "1,2",
    images: Annotated[
        str | None, typer.Option(help="A folder or a list of images; default: the bundle's golden ones as files.")
    ] = None,
    parts: Annotated[int, typer.Option(help="Parts of 1,024 images for each worker in the steady state.")] = 4,
    nodes: Annotated[int, typer.Option(help="Nodes of a cluster on this machine.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Time workers of `offramp predict --ray` against plain processes on the same cores."""
    from offramp.bench.predict import bench_predict, cost_line, predict_table

    if ray != "local":
        raise ValueError("bench predict compares with plain processes of this machine: give --ray without an address")
    rows, cost = bench_predict(bundle, numbers(workers, int), images, parts, nodes, silent=as_json)
    if as_json:
        print(json.dumps({"bundle": str(bundle), "rows": [row.to_json() for row in rows], "image": asdict(cost)}))
        return
    print_table(*predict_table(bundle, rows))
    say(cost_line(cost))


@verbs.command("serve")
def bench_serve_command(
    bundle: BundlePath,
    seconds: Annotated[float, typer.Option(help="How long to load each server.")] = 30.0,
    clients: Annotated[str, typer.Option(help="Connections, each with one request at a time: 1,16,64.")] = "64",
    workers: Annotated[str, typer.Option(help="Workers of the servers that are compared: 1,2.")] = "1",
    ray: Annotated[
        str | None,
        typer.Option(metavar="[local]", help="Also Ray Serve on this machine, with as many replicas as most workers."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Load servers on loopback until they are saturated, and check that every answer comes once and is right."""
    from offramp.bench.serve import bench_serve, serve_table

    if ray not in (None, "local"):
        raise ValueError(f"bench serve starts a Ray of its own; give --ray without an address, not {ray}")
    rows = bench_serve(bundle, seconds, numbers(clients, int), numbers(workers, int), on_ray=ray is not None)
    passed = all(row.load.passed for row in rows)
    if as_json:
        print(json.dumps({"bundle": str(bundle), "rows": [row.to_json() for row in rows], "passed": passed}))
    else:
        print_table(*serve_table(str(bundle), rows), whole=True)
    if not passed:
        raise typer.Exit(1)
