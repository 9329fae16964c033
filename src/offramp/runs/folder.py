"""A run folder: what was asked for, where it ran, what it logged.

`environment.json`, `data.json` and, last, `config.json` are written when the run begins, so that a folder with
`config.json` has all three. `metrics.jsonl` and the TensorBoard events grow by a row per epoch, `model.safetensors` and
then the manifest (manifest.py) appear at the end. Resume states are in training/checkpoint.py.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from offramp import __version__
from offramp.common.files import naming, read_json, remove_stale_parts, write_bytes, write_json
from offramp.runs.config import RunConfig

if TYPE_CHECKING:
    import torch

log = logging.getLogger("offramp")

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
DATA = "data.json"
POLICY = "policy.json"
WEIGHTS = "model.safetensors"  # the trained network, at the end
SAMPLES, TENSORBOARD = "samples", "tensorboard"  # folders with a file per epoch, and per call
LOCK = ".train.lock"  # there while the run is trained (lock.py)
BEGINNING = {ENVIRONMENT: "packages", DATA: "identity"}  # written before the configuration; a key that each has
PHASE1 = "phase1"  # the first of two phases is a run of its own, in the folder of the whole


class KnownData(Protocol):
    """What a run remembers of its data."""

    name: str
    class_names: tuple[str, ...]

    @property
    def identity(self) -> str:
        """A digest of what decides classes and splits."""

    @property
    def held_out(self) -> str:
        """A digest of which samples training holds out."""


def begin_run(folder: Path, config: RunConfig, data: KnownData, device: torch.device, resume: bool) -> None:
    """Make the folder, or check that it holds the same run if it is to go on."""
    remove_stale_parts(folder)
    if (folder / CONFIG).exists():
        if not resume:
            raise ValueError(f"{folder} holds a run already; add --resume to go on with it or choose another --out")
        before, now = read_config(folder).to_json(), read_back(config).to_json()
        _refuse_difference(before["data"], now["data"], folder, "data")
        refuse_other_data(folder, data)  # first: settings of the model may follow from the data
        _refuse_difference(before, now, folder)
        _add_missing(folder, data, device)
        return
    if folder.exists() and not all(map(_is_left_over, folder.iterdir())):
        raise ValueError(f"{folder} is not empty and not a run; choose another --out")
    _write_beginning(folder, list(BEGINNING), data, device)
    write_json(folder / CONFIG, config.to_json())  # last: with it the folder is a run


def _write_beginning(folder: Path, names: list[str], data: KnownData, device: torch.device) -> None:
    """Write down where the run takes place, and on which data."""
    if ENVIRONMENT in names:
        write_json(folder / ENVIRONMENT, environment(device))
    if DATA in names:
        known = {"classes": list(data.class_names), "identity": data.identity, "held_out": data.held_out}
        write_json(folder / DATA, {"schema": 1, **known})


def _add_missing(folder: Path, data: KnownData, device: torch.device) -> None:
    """Write what a run lacks of its beginning, and say so: nobody knows whether the data are those it began with."""
    missing = [name for name in BEGINNING if not (folder / name).is_file()]
    if missing:
        log.warning("%s has no %s; written now, as things are today", folder, " and no ".join(missing))
        _write_beginning(folder, missing, data, device)


def _is_left_over(path: Path) -> bool:
    """Whether a file is one of a run that was killed while it began, and not somebody's own."""
    if path.name == LOCK or path.name.endswith(".part"):
        return True
    if path.name not in BEGINNING:
        return False
    with suppress(ValueError):
        found = read_json(path)
        return isinstance(found, dict) and BEGINNING[path.name] in found
    return False


RESUMED = "the same command with --resume goes on"


@contextmanager
def going_on_explained(run: Path) -> Iterator[None]:
    """Turn what the disk says while a run is written into a sentence: which file, why, and how to go on."""
    try:
        yield
    except OSError as error:
        file, why = error.filename or run, error.strerror or str(error)
        raise OSError(f"{file} cannot be written: {why}; once it can, {RESUMED}") from error


def refuse_other_data(folder: Path, data: KnownData) -> None:
    """Raise if a run began with other data: what it was trained on could now be among what it is tested on."""
    if not (folder / DATA).is_file():  # runs of older versions do not tell
        return
    known = read_json(folder / DATA)
    if not isinstance(known, dict) or "identity" not in known:
        raise ValueError(f"{folder / DATA} is damaged: it must say which data the run was trained on")
    if known["identity"] != data.identity:
        raise ValueError(
            f"{folder} was trained on other data: in {data.name} classes or files were added, removed or renamed "
            "since, so other images are held out now. Put them back as they were, or train a new run"
        )


def forget_unsaved(folder: Path) -> None:
    """Remove the folder of a run that failed before there was anything to go on from or to look at."""
    made = {CONFIG, DATA, ENVIRONMENT, METRICS, TENSORBOARD, LOCK}
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= made and not read_metrics(folder):
        shutil.rmtree(folder)
        if folder.name == PHASE1:
            forget_unsaved(folder.parent)


def holds_run(folder: str | Path) -> bool:
    """Whether a folder says how its network was trained; one of a mere model does not."""
    path = Path(folder) / CONFIG
    config = read_json(path) if path.is_file() else None
    return isinstance(config, dict) and "train" in config


def read_config(folder: str | Path) -> RunConfig:
    """The configuration of a run folder."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        why = f"is not a run folder: it has no {CONFIG}" if Path(folder).exists() else "is not there"
        raise ValueError(f"{folder} {why}")
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict) or "train" not in config:
        raise ValueError(f"{folder} holds a model, not a run: its {CONFIG} says nothing of training")
    return RunConfig.from_json(config)


def read_back(config: RunConfig) -> RunConfig:
    """A configuration as it would be read from its file: lists, not tuples."""
    return RunConfig.from_json(json.loads(json.dumps(config.to_json())))


def _refuse_difference(before: Any, now: Any, folder: Path, path: str = "") -> None:
    """Raise for the first setting that changed; where the data lie may change."""
    if path == "data.dir" or before == now:
        return
    if not (isinstance(before, dict) and isinstance(now, dict)):
        raise ValueError(f"{folder} was begun with {path} = {before!r}, not {now!r}; resume with the same settings")
    for key in {**before, **now}:
        _refuse_difference(before.get(key), now.get(key), folder, f"{path}.{key}" if path else key)


def sample_name(epoch: int) -> str:
    """The file with a sample of an epoch's weights, as seen from the run folder."""
    return f"{SAMPLES}/epoch-{epoch:04d}.npz"


class MetricsLog:
    """`metrics.jsonl` and TensorBoard events; rows after `step` (a killed run's) are cut off.

    `kept` are the rows up to there as the resume state has them: where the file says something else, they count.
    """

    def __init__(self, folder: Path, step: int, kept: list[dict[str, Any]] | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path, self.folder = folder / METRICS, folder / TENSORBOARD
        self.rows = _rows_until(folder, step) if kept is None else _restored(folder, step, kept)
        earlier = self.rows or read_metrics(folder / PHASE1)
        self.seconds_before = float(earlier[-1].get("seconds", 0.0)) if earlier else 0.0  # by phases and epochs before
        self._write()
        with naming(self.folder):
            self.events = SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._write()
        with naming(self.folder):
            self._add_events(row)

    def _add_events(self, row: dict[str, Any]) -> None:
        for key, value in row.items():
            for at, number in enumerate(value) if isinstance(value, list) else [(None, value)]:
                tag = key if at is None else f"{key}/exit{at + 1}"
                self.events.add_scalar(tag, number, row["step"])
        self.events.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *failed: object) -> None:
        with suppress(OSError) if any(failed) else naming(self.folder):  # what went wrong first is told
            self.events.close()

    def _write(self) -> None:
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.rows)
        write_bytes(self.path, text.encode())


def _rows_until(folder: Path, step: int) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder) if row["step"] <= step]


def _restored(folder: Path, step: int, kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that the resume state kept, with a warning where the file has others."""
    found: list[dict[str, Any]] | None = None
    with suppress(ValueError):
        found = _rows_until(folder, step)
    if found != kept:
        log.warning("%s is damaged: restored up to step %d from the resume state", folder / METRICS, step)
    return list(kept)


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`; none if the run has not logged yet."""
    path = Path(folder) / METRICS
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not all(isinstance(row, dict) and "step" in row for row in rows):
        raise ValueError(f"{path} is damaged: it must hold one logged step per line")
    return rows


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and git state, so that a result can be traced."""
    from offramp.common.device import device_name

    packages = ("torch", "torchvision", "numpy", "safetensors", "scikit-learn")
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {"offramp": __version__, **{name: _version(name) for name in packages}},
        "device": device_name(device),
        "git": _git_state(),
        "command": sys.argv[1:],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of the code that runs, if it is in a git checkout."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *args], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
