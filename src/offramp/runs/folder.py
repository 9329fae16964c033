"""A run folder: what was asked for, where it ran, what it logged.

`config.json` and `environment.json` are written when the run begins, `metrics.jsonl` and the TensorBoard
events grow by a row per epoch, `model.safetensors` appears at the end. Resume states are in checkpoint.py.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from offramp import __version__
from offramp.common.files import read_json, write_bytes, write_json
from offramp.runs.config import RunConfig

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
DATA = "data.json"
POLICY = "policy.json"
WEIGHTS = "model.safetensors"  # the trained network, at the end
PHASE1 = "phase1"  # the first of two phases is a run of its own, in the folder of the whole


class KnownData(Protocol):
    """What a run remembers of its data."""

    name: str
    class_names: tuple[str, ...]

    @property
    def identity(self) -> str:
        """A digest of what decides classes and splits."""


def begin_run(folder: Path, config: RunConfig, data: KnownData, device: torch.device, resume: bool) -> None:
    """Make the folder, or check that it holds the same run if it is to go on."""
    known = folder / CONFIG
    if known.exists():
        if not resume:
            raise ValueError(f"{folder} holds a run already; add --resume to go on with it or choose another --out")
        before, now = read_config(folder).to_json(), read_back(config).to_json()
        _refuse_difference(before["data"], now["data"], folder, "data")
        refuse_other_data(folder, data)  # first: settings of the model may follow from the data
        _refuse_difference(before, now, folder)
        return
    if folder.exists() and any(not p.name.endswith(".part") for p in folder.iterdir()):
        raise ValueError(f"{folder} is not empty and not a run; choose another --out")
    write_json(known, config.to_json())
    write_json(folder / DATA, {"schema": 1, "classes": list(data.class_names), "identity": data.identity})
    write_json(folder / ENVIRONMENT, environment(device))


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
    made = (CONFIG, DATA, ENVIRONMENT, METRICS, "tensorboard")
    if folder.is_dir() and not read_metrics(folder) and {path.name for path in folder.iterdir()} <= set(made):
        shutil.rmtree(folder)
        if folder.name == PHASE1:
            forget_unsaved(folder.parent)


def read_config(folder: str | Path) -> RunConfig:
    """The configuration of a run folder."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not a run folder: it has no {CONFIG}")
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


class MetricsLog:
    """`metrics.jsonl` and TensorBoard events; rows after `step` (a killed run's) are cut off."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder / METRICS
        self.rows = [row for row in read_metrics(folder) if row["step"] <= step]
        earlier = self.rows or read_metrics(folder / PHASE1)
        self.seconds_before = float(earlier[-1].get("seconds", 0.0)) if earlier else 0.0  # by phases and epochs before
        self._write()
        self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._write()
        for key, value in row.items():
            for at, number in enumerate(value) if isinstance(value, list) else [(None, value)]:
                tag = key if at is None else f"{key}/exit{at + 1}"
                self.events.add_scalar(tag, number, row["step"])
        self.events.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.events.close()

    def _write(self) -> None:
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.rows)
        write_bytes(self.path, text.encode())


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
