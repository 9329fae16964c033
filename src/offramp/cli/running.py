"""The verbs that put a trained network to work: export, predict, serve, and fit, which does it all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from offramp.cli.options import AsJson, Budget, BundlePath, Device, Format, MaxPixels, Settings, command, pixels_allowed
from offramp.common.console import print_table, say
from offramp.common.formatting import parse_count

verbs = typer.Typer()


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
    say(f"next: {command('predict', path, 'IMAGES')}")


@verbs.command("serve")
def serve_command(
    bundle: BundlePath,
    host: Annotated[str, typer.Option(help="Address to listen on; loopback unless told otherwise.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes any that is free.")] = 8000,
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
    serve(bundle, host, port, config, device)


@verbs.command("fit")
def fit_command(
    source: Annotated[str, typer.Argument(help="A folder with a folder of images per class, or a recipe.")],
    out: Annotated[Path, typer.Option(help="Folder for the run, the bundle and the report.")],
    budget: Budget = None,
    max_drop_points: Annotated[
        float | None, typer.Option(help="The cheapest policy within so many points of the whole network.")
    ] = None,
    format: Format = None,
    settings: Settings = None,
    device: Device = "auto",
) -> None:
    """Train, evaluate, calibrate, export and report in one go; called again, it goes on where it was.

    For example: offramp fit photos --out fitted
    """
    from offramp.cli.tables import policy_table
    from offramp.fitting.fit import fit
    from offramp.measuring.calibrate import PolicyRequest

    wanted = None if budget is None else parse_count(budget, "--budget")
    request = PolicyRequest(budget_mul_adds=wanted, max_drop_points=max_drop_points)
    found = fit(source, out, request, format=format, settings=tuple(settings or ()), device=device)
    print_table(*policy_table(found.policies))
    say(f"{found.answer}\nrun: {found.run}\nbundle: {found.bundle}\nreport: {found.report.page}")
    say(f"next: {command('predict', found.bundle, 'IMAGES')}")


@verbs.command("predict")
def predict_command(
    bundle: BundlePath,
    images: Annotated[list[str], typer.Argument(help="Files, folders, globs, or - for a list on standard input.")],
    budget: Budget = None,
    q: Annotated[float | None, typer.Option(help="The bundle's policy nearest to this q.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write results to a .csv or .jsonl file.")] = None,
    batch: Annotated[int, typer.Option(help="Images that run together.")] = 64,
    max_exit: Annotated[int | None, typer.Option(help="No image goes beyond this exit.")] = None,
    max_mul_adds: Annotated[str | None, typer.Option(help="No image costs more than this.", metavar="COUNT")] = None,
    max_pixels: MaxPixels = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Classify images with a bundle; each pays for what it uses.

    An image that cannot be read is named in the results, and the exit code is 1 at the end.
    """
    from offramp.measuring.sentences import policy_sentence
    from offramp.running.bundle import load_bundle
    from offramp.running.predict import expand, predict, result_table, write_rows

    loaded = load_bundle(bundle, device=device, own_process=True)
    policy = loaded.policy(None if budget is None else parse_count(budget, "--budget"), q)
    limit = None if max_mul_adds is None else parse_count(max_mul_adds, "--max-mul-adds")
    if out is not None and out.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"--out must end in .csv or .jsonl, got {out}")
    found = predict(
        loaded,
        expand(images),
        policy=policy,
        batch=batch,
        max_exit=max_exit,
        max_mul_adds=limit,
        max_pixels=pixels_allowed(max_pixels),
        silent=as_json,
    )
    if out is not None:
        write_rows(out, found.rows)
    if as_json:
        print(json.dumps({**found.to_json(), "policy": policy.to_json()}))
    else:
        say(f"results: {out}") if out is not None else print_table(*result_table(found.rows), whole=True)
        say(str(found))
        say(f"its policy: {policy_sentence(loaded.policies, policy)}")
    if found.unreadable:
        raise typer.Exit(1)
