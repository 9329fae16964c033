"""The command line: verbs are typed functions in files of this room, and heavy imports happen inside them.

A user's mistake is one plain sentence on standard error and exit code 2.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from offramp import __version__
from offramp.cli.bench import verbs as bench
from offramp.cli.measuring import verbs as measuring
from offramp.cli.networks import verbs as networks
from offramp.cli.running import verbs as running
from offramp.cli.training import verbs as training
from offramp.common.console import log_to_console
from offramp.common.extras import MissingExtra, explained
from offramp.common.images import quiet_pillow
from offramp.common.registry import load_plugin
from offramp.common.signals import Stopped

RAY_ADDRESS = re.compile(r"local|auto|ray://.+|[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+")

START_HERE = ("demo", "fit", "predict", "serve")
ORDER = (*START_HERE, "info", "models", "recipes", "train", "eval", "calibrate", "report", "export")


class InOrder(TyperGroup):
    """Lists the verbs in the order in which people meet them; others follow."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


app = typer.Typer(
    cls=InOrder,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Early-exit image classifiers: train them, measure them, run them.",
)

for _group in (networks, training, measuring, running):
    app.add_typer(_group)
app.add_typer(bench, name="bench")


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
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module, or a FILE.py, that registers networks, weightings, data sets, ... of yours. "
            "May stand before or after the verb, and may be repeated.",
        ),
    ] = None,
) -> None:
    """`--import` is here for its help; `main` takes it out of the words wherever it stands."""


def take_imports(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The modules that `--import` names, and all other words; what follows `--` is left alone."""
    plugins: list[str] = []
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return plugins, [*rest, word, *left]
        if word == "--import" and left:
            plugins.append(left.pop(0))
        elif word.startswith("--import="):
            plugins.append(word.removeprefix("--import="))
        else:
            rest.append(word)
    return plugins, rest


def with_ray_address(words: Sequence[str]) -> list[str]:
    """`--ray` may stand alone: where no address follows it, it is given the one of a Ray that is started here."""
    given = list(words)
    for at, word in enumerate(words):
        if word == "--":
            break
        following = words[at + 1] if at + 1 < len(words) else ""
        if word == "--ray" and not RAY_ADDRESS.fullmatch(following):
            given[at] = "--ray=local"
    return given


def run(words: Sequence[str]) -> None:
    """Import what the user brings, then do what the verb says."""
    plugins, rest = take_imports(words)
    for plugin in plugins:
        load_plugin(plugin)
    app(args=with_ray_address(rest))


def main() -> None:
    """Run the command line; a mistake is one sentence, not a traceback."""
    log_to_console()
    quiet_pillow()
    code = 2
    try:
        with explained():
            run(sys.argv[1:])
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        message = f"{error.filename}: {error.strerror}" if named else str(error)
    except (ValueError, MissingExtra) as error:
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
