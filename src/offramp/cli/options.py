"""Options that several verbs share, and commands that they print."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from offramp.common.formatting import parse_count
from offramp.common.images import MAX_PIXELS
from offramp.common.registry import loaded
from offramp.runs.config import data_dir_setting

NAME = "offramp"

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto is the GPU if there is one.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder that holds the data set; digits needs none.")]
DataName = Annotated[
    str | None, typer.Option(help="For a bundle or a saved model: the data set, imagefolder or cifar100 say.")
]
DataSettings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="With --data: a setting of the data.")
]
BundlePath = Annotated[
    Path,
    typer.Argument(
        help="A bundle folder, or msdnet5-cifar100 or msdnet7-cifar100, which come trained.", metavar="BUNDLE"
    ),
]
Budget = Annotated[str | None, typer.Option(help="Mean mul-adds allowed per image, for example 15M.", metavar="COUNT")]
MaxPixels = Annotated[
    str | None,
    typer.Option(help=f"Pixels that an image may have; default: {MAX_PIXELS / 1e6:g}M.", metavar="COUNT"),
]
Times = Annotated[Path | None, typer.Option(help="Stage times that `offramp bench infer --json` wrote.")]
Measure = Annotated[str, typer.Option(help="Confidence: max_softmax, margin or entropy.")]
Temperature = Annotated[bool, typer.Option(help="Fit a temperature per exit first.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Format = Annotated[
    str | None,
    typer.Option(help="torch, or onnx, which needs no torch to run; default: torch for our networks, onnx for others."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting (docs/training.md has all); may be repeated."),
]

ON_RAY = "With --ray"  # the panel of the help that these options stand in
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Run on Ray: on one that is started here, or on the cluster at HOST:PORT, or auto, that this machine is "
        "part of (docs/scaling.md).",
    ),
]
Workers = Annotated[int | None, typer.Option(help="How many workers; default: as many as fit.", rich_help_panel=ON_RAY)]
WorkerCpus = Annotated[float, typer.Option(help="Cores of a worker, or of a replica.", rich_help_panel=ON_RAY)]
WorkerGpus = Annotated[
    float, typer.Option(help="GPUs of a worker or replica: 1, or a share such as 0.25.", rich_help_panel=ON_RAY)
]


def with_data_dir(settings: Iterable[str] | None, data_dir: Path | None) -> list[str]:
    """Settings, and the folder of the data as one of them."""
    own = [] if data_dir is None else [data_dir_setting(data_dir)]
    return [*(settings or ()), *own]


def command(*words: object) -> str:
    """A command that can be copied as it is: with everything that was imported for this one."""
    imports = (word for plugin in loaded for word in ("--import", plugin))
    return shlex.join([_program(), *map(str, words), *imports])


def _program() -> str:
    """What this program is called by: its name where the shell finds that, else the path it was started from."""
    own = sys.argv[0]
    return own if Path(own).name == NAME and shutil.which(NAME) is None else NAME


def trying(bundle: Path, photos: Path | None = None) -> str:
    """A command that tries a bundle: on photos that are known, else on one that it holds, else on the server's page."""
    images = photos or next(iter(sorted(bundle.glob("photo-*.*"))), None)
    return command("serve", bundle) if images is None else command("predict", bundle, images)


def pixels_allowed(text: str | None) -> int:
    """What `--max-pixels` says."""
    return MAX_PIXELS if text is None else int(parse_count(text, "--max-pixels"))


def numbers(text: str, kind: type[Any]) -> list[Any]:
    """1,8,64 -> [1, 8, 64]."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{text!r} is not a list of numbers such as 1,8,64") from error
