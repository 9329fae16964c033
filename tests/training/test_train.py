"""Training: what a run folder holds, that it resumes bit for bit, and that it stops where it should."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.runs import Config, call, same_weights
from offramp import ExitNet, load_model, register_model
from offramp.common.signals import Stopped
from offramp.data import load_dataset
from offramp.models.weights import read_tensors
from offramp.runs.config import RunConfig, with_settings
from offramp.runs.folder import read_config, read_metrics
from offramp.runs.recipe import load_recipe
from offramp.training.checkpoint import load_checkpoint
from offramp.training.train import names, refuse_other_size, train_run, train_runs

CHECKPOINT = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "tally.safetensors",
    "weighting.safetensors",
)


def test_a_run_folder_holds_what_it_should(tmp_path: Path, small_config: Config) -> None:
    run = train_run(small_config(), tmp_path / "run", device="cpu")
    names = {p.name for p in run.iterdir()}
    assert names == {
        "config.json",
        "data.json",
        "environment.json",
        "manifest.json",
        "metrics.jsonl",
        "model.safetensors",
        "samples",
        "tensorboard",
        "last",
        "last.1",
    }
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["num_classes"] == 10 and config["recipe"] == "digits-baseline"
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__.split("+")[0]
    assert sorted(p.name for p in (run / "last").iterdir()) == sorted(CHECKPOINT)
    rows = read_metrics(run)
    assert [row["epoch"] for row in rows] == [1, 2, 3] and [row["step"] for row in rows] == [4, 8, 12]
    assert rows[-1]["train_loss"][0] < rows[0]["train_loss"][0]
    assert list((run / "tensorboard").glob("events*"))
    model = load_model(run)
    assert model.num_exits == len(rows[0]["calibration_top1"]) == 2


def test_a_damaged_state_is_reported_and_the_one_before_used(
    tmp_path: Path, small_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    run = train_run(small_config(), tmp_path / "run", device="cpu")
    other = train_run(small_config(), tmp_path / "other", device="cpu")
    broken = run / "last" / "optimizer.safetensors"
    data = bytearray(broken.read_bytes())
    data[-1] ^= 1
    broken.write_bytes(data)
    (run / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING, "offramp"):
        train_run(small_config(), run, device="cpu", resume=True)
    assert "optimizer.safetensors is not the file that was written" in caplog.text
    assert same_weights(run, other)
    for state in ("last", "last.1"):
        (run / state / "state.json").write_text("{")
    with pytest.raises(ValueError, match="no resume state of .* is whole"):
        load_checkpoint(run)


def test_a_network_of_ones_own_says_how_its_size_is_set() -> None:
    own = ExitNet.from_parts([nn.Flatten(), nn.Identity()], [nn.Linear(12288, 10)] * 2, input_shape=(3, 64, 64))
    with pytest.raises(ValueError, match=r"build it with input_shape=\(3, 32, 32\)"):
        refuse_other_size(own, load_dataset("digits", train=100, test=100))


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path, small_config: Config) -> None:
    run = train_run(small_config("train.epochs=1"), tmp_path / "run", device="cpu")
    before = (run / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="holds a run already; add --resume"):
        train_run(small_config("train.epochs=1"), run, device="cpu")
    with pytest.raises(ValueError, match=r"begun with train\.epochs = 1, not 2"):
        train_run(small_config("train.epochs=2"), run, device="cpu", resume=True)
    with pytest.raises(ValueError, match=r"begun with data\.train = \d+, not 300; resume with the same settings"):
        train_run(small_config("train.epochs=1", "data.train=300"), run, device="cpu", resume=True)
    train_run(small_config("train.epochs=1"), run, device="cpu", resume=True)
    assert (run / "model.safetensors").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not empty and not a run"):
        train_run(small_config(), tmp_path / "mine", device="cpu")


def test_a_run_killed_while_it_began_can_begin_again(tmp_path: Path, small_config: Config) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".config.json.123.part").write_bytes(b"{")
    train_run(small_config("train.epochs=1"), run, device="cpu", resume=True)
    other = train_run(small_config("train.epochs=1"), tmp_path / "other", device="cpu")
    assert same_weights(run, other) and read_config(run) == read_config(other)


def test_settings_given_as_tuples_resume(tmp_path: Path, small_config: Config) -> None:
    from dataclasses import replace

    config = small_config("train.epochs=1")
    overrides = {**config.model.overrides, "blocks": (1, 1)}
    config = replace(config, model=replace(config.model, overrides=overrides))
    run = train_run(config, tmp_path / "run", device="cpu")
    before = read_tensors(run / "model.safetensors")
    assert read_config(run).model.overrides["blocks"] == [1, 1]
    train_run(config, run, device="cpu", resume=True)  # a list now, and still the same setting
    after = read_tensors(run / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_network_that_does_not_fit_the_data_is_refused(tmp_path: Path, small_config: Config) -> None:
    with pytest.raises(ValueError, match="digits has 10 classes"):
        train_run(small_config("model.num_classes=7"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"set model\.overrides\.image_size=32"):
        train_run(small_config("model.overrides.image_size=64"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_network_of_ones_own_with_dropout_trains_and_resumes(tmp_path: Path, small_config: Config) -> None:
    def build(num_classes: int) -> ExitNet:
        one = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Dropout(0.3))
        two = nn.Sequential(nn.Conv2d(4, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
        heads = [nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes)) for _ in range(2)]
        net = ExitNet.from_parts([one, two], heads)
        net(torch.zeros(2, 3, 32, 32))
        return net

    register_model("train-test-dropout", build)
    own = ("model.name=train-test-dropout", "model.overrides={}", "train.learning_rate=0.02")
    runs = [train_run(small_config(*own), tmp_path / str(at), device="cpu") for at in range(2)]
    assert same_weights(*runs)
    (runs[1] / "model.safetensors").unlink()
    for name in CHECKPOINT:  # go back one save
        os.replace(runs[1] / "last.1" / name, runs[1] / "last" / name)
    train_run(small_config(*own), runs[1], device="cpu", resume=True)
    assert same_weights(*runs)


def test_training_on_an_image_folder(tmp_path: Path, small_config: Config, image_folder: Callable[..., Path]) -> None:
    root = image_folder()
    config = RunConfig.from_json(
        {
            "model": {
                "name": "msdnet-tiny",
                "overrides": {"blocks": [1, 1], "base_width": 4, "growth": 4, "head_width": 8},
            },
            "data": {"name": "imagefolder", "dir": str(root), "image_size": 32, "workers": 1, "calibration": 6},
            "train": {"epochs": 4, "batch": 16, "learning_rate": 0.05},
        }
    )
    run = train_run(config, tmp_path / "run", device="cpu")
    assert read_metrics(run)[-1]["train_top1"][-1] > 0.6


def test_several_seeds_are_the_runs_they_would_be_alone(
    tmp_path: Path, small_config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        'model = {name = "msdnet-tiny", overrides = {blocks = [1, 1], base_width = 4, growth = 4, head_width = 8}}\n'
        'data = {name = "digits", train = 256, calibration = 40, test = 60}\n'
        "train = {epochs = 2, batch = 64}\n"
    )
    words = ["train", str(recipe), "--out", str(tmp_path / "runs"), "--device", "cpu", "--seeds", "0,3,0"]
    assert call(monkeypatch, *words) == 0
    shown = capsys.readouterr().out
    assert "trained: " + str(tmp_path / "runs/seed-3") in shown
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["seed-0", "seed-3"]
    alone = train_run(with_settings(load_recipe(str(recipe)).config, ["seed=3"]), tmp_path / "alone", device="cpu")
    assert same_weights(alone, tmp_path / "runs/seed-3") and not same_weights(alone, tmp_path / "runs/seed-0")


def test_runs_that_share_a_device_take_turns(tmp_path: Path, small_config: Config) -> None:
    """One step of each in turn: what `--seeds` does on a GPU gives what each run gives alone."""
    from offramp.common.console import progress
    from offramp.training.loop import Setup
    from offramp.training.train import drive, training

    device = torch.device("cpu")
    configs = {f"seed-{seed}": small_config(f"seed={seed}", f"train.epochs={2 + seed}") for seed in (0, 1)}
    runs = {name: training(c, tmp_path / name, Setup(device), False) for name, c in configs.items()}
    with progress("training", 0, silent=True) as bar:
        drive(runs, bar, device)
    for name, config in configs.items():
        assert same_weights(tmp_path / name, train_run(config, tmp_path / f"alone-{name}", device="cpu"))


def test_runs_that_share_a_device_are_told_apart() -> None:
    assert names([Path("a/seed-0"), Path("a/seed-1")]) == ["seed-0", "seed-1"]
    assert names([Path("a/seed-0"), Path("b/seed-0")]) == ["a/seed-0", "b/seed-0"]
    config = load_recipe("digits-baseline").config
    with pytest.raises(ValueError, match="a folder of its own"):
        train_runs([(config, Path("a")), (config, Path("a"))], device="cpu")


def test_a_signal_stops_all_runs_and_saves_each(tmp_path: Path, small_config: Config) -> None:
    from offramp.common.console import progress
    from offramp.training.loop import Setup
    from offramp.training.train import drive, training

    caught = [int(signal.SIGTERM)]
    runs = {
        str(seed): training(
            small_config(f"seed={seed}"), tmp_path / str(seed), Setup(torch.device("cpu"), caught=caught), False
        )
        for seed in (0, 1)
    }
    with progress("training", 0, silent=True) as bar, pytest.raises(Stopped):
        drive(runs, bar, torch.device("cpu"))
    assert all((state := load_checkpoint(tmp_path / str(seed))) is not None and state.step == 1 for seed in (0, 1))


def test_one_runs_trouble_is_not_the_others(
    tmp_path: Path, small_config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    from offramp.common.console import progress
    from offramp.training.loop import Setup
    from offramp.training.train import drive, training

    configs = [small_config("train.learning_rate=1e25", "train.save_seconds=1000"), small_config("seed=1")]
    device = torch.device("cpu")
    runs = {str(at): training(c, tmp_path / str(at), Setup(device), False) for at, c in enumerate(configs)}
    with progress("training", 0) as bar, pytest.raises(ValueError, match="not finite"):
        drive(runs, bar, device)
    shown = capsys.readouterr().out
    assert "0: the loss was not finite at step" in shown and "1: epoch   3/3" in shown
    assert not (tmp_path / "0/model.safetensors").exists() and (tmp_path / "1/model.safetensors").exists()
