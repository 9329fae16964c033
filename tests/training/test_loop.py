"""The loop: what is logged and saved, and that a run stopped anywhere goes on as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.runs import SMALL_RUN, Config, same_weights
from offramp import ExitNet
from offramp.common.files import read_json, write_sealed_json
from offramp.common.signals import Stopped
from offramp.runs.folder import read_metrics
from offramp.training.checkpoint import load_checkpoint
from offramp.training.loop import Setup
from offramp.training.optimizers import cosine
from offramp.training.train import train_run, training


def without_speed(run: Path) -> list[dict[str, object]]:
    rows = read_metrics(run)
    spent = [row["seconds"] for row in rows]
    assert spent == sorted(spent)  # earlier calls' time counts in
    return [{k: v for k, v in row.items() if k not in ("images_per_s", "seconds")} for row in rows]


GOLDEN = [4.704306, 4.685682, 4.584213, 4.604468, 4.578219]  # torch 2.15, two threads, AVX2


def command(run: Path, *more: str) -> list[str]:
    settings = [word for setting in SMALL_RUN for word in ("--set", setting)]
    return [
        *(sys.executable, "-m", "offramp", "train", "digits-baseline", "--out", str(run)),
        *settings,
        *("--device", "cpu", *more),
    ]


def saved_step(run: Path) -> int:
    try:
        return int(json.loads((run / "last" / "state.json").read_text())["step"])
    except (OSError, ValueError):
        return 0


def test_the_loss_curve_is_the_one_it_has_always_been(tmp_path: Path, small_config: Config) -> None:
    """Few updates, because rounding grows from update to update and differs between machines."""
    run = train_run(
        small_config("data.train=64", "train.epochs=5", "train.learning_rate=0.01"), tmp_path / "run", device="cpu"
    )
    losses = [sum(row["train_loss"]) for row in read_metrics(run)]
    np.testing.assert_allclose(losses, GOLDEN, rtol=1e-3)


def test_the_seed_decides(tmp_path: Path, small_config: Config) -> None:
    runs = [
        train_run(small_config("train.epochs=1", f"seed={seed}"), tmp_path / str(at), device="cpu")
        for at, seed in enumerate((0, 0, 1))
    ]
    assert same_weights(runs[0], runs[1])
    assert not same_weights(runs[0], runs[2])


def test_a_run_killed_anywhere_ends_with_the_same_weights(tmp_path: Path, small_config: Config) -> None:
    whole = train_run(small_config(), tmp_path / "whole", device="cpu")
    killed = tmp_path / "killed"
    draw = np.random.default_rng()
    for at_step in (1, 6, 10):
        process = subprocess.Popen(
            command(killed, *(["--resume"] if killed.exists() else [])),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 120
        while saved_step(killed) < at_step:
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.03))
        process.kill()
        process.communicate()
    train_run(small_config(), killed, device="cpu", resume=True)
    assert same_weights(whole, killed)
    assert without_speed(whole) == without_speed(killed)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves_with_a_sentence(
    tmp_path: Path, small_config: Config, signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_run(small_config(), tmp_path / "whole", device="cpu")
    import offramp.training.loop as training

    real, calls, before = training.train_step, [], signal.getsignal(signal.SIGINT)

    def update(*args: object) -> object:
        calls.append(0)
        if len(calls) == 6:
            os.kill(os.getpid(), signum)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "train_step", update)
    run = tmp_path / "run"
    with pytest.raises(
        Stopped, match="stopped at step 6 of 12, saved; go on with the same command and --resume"
    ) as stopped:
        train_run(small_config("train.save_seconds=1000"), run, device="cpu")
    assert stopped.value.signum == signum
    assert not (run / "model.safetensors").exists()
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    state = read_json(run / "last/state.json")
    assert 0 < state["info"]["seconds"] < 600
    del state["digest"]
    write_sealed_json(run / "last/state.json", state | {"info": state["info"] | {"seconds": 5000.0}})
    train_run(small_config("train.save_seconds=1000"), run, device="cpu", resume=True)
    assert same_weights(whole, run)
    assert without_speed(whole) == without_speed(run)
    assert read_metrics(run)[-1]["seconds"] > 5000  # what was spent before it was stopped counts


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, small_config: Config) -> None:
    run = tmp_path / "run"
    config = small_config("train.learning_rate=1e25", "train.save_seconds=1000")
    with pytest.raises(ValueError, match=r"the loss was not finite at step [0-3]; nothing was saved yet"):
        train_run(config, run, device="cpu")
    assert not (run / "model.safetensors").exists() and not (run / "last").exists()


def test_params_that_are_not_finite_are_never_saved(
    tmp_path: Path, small_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    import offramp.training.loop as training

    real = training.train_step

    def update(model: ExitNet, *args: object) -> object:
        halves = real(model, *args)  # type: ignore[arg-type]
        if args[4] == 5:
            next(model.parameters()).data.fill_(float("inf"))
        return halves

    monkeypatch.setattr(training, "train_step", update)
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="not finite"):
        train_run(small_config(), run, device="cpu")
    state = load_checkpoint(run)
    assert state is not None and state.step == 5
    assert all(t.isfinite().all() for t in state.parts["model"].values())


@pytest.mark.parametrize("imta", [False, True])
@pytest.mark.parametrize(
    ("setting", "words"), [("train.batch=100000", "is larger than"), ("train.learning_rate=1e30", "not finite")]
)
def test_what_fails_before_anything_is_saved_leaves_no_folder(
    tmp_path: Path, small_config: Config, setting: str, words: str, imta: bool
) -> None:
    parts = ("imta.equilibrium=true", "imta.collaboration=true") if imta else ()
    with pytest.raises(ValueError, match=words):
        train_run(small_config(setting, "train.save_seconds=1000", *parts), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_the_rate_falls_along_a_cosine() -> None:
    assert [round(cosine(step, 4), 6) for step in range(5)] == [1.0, 0.853553, 0.5, 0.146447, 0.0]


def test_a_phase_tells_what_it_does(tmp_path: Path, small_config: Config) -> None:
    config = small_config("train.epochs=2", "train.eval_every=2")
    events = list(training(config, tmp_path / "run", Setup(torch.device("cpu")), resume=False))
    assert (events[0].total, events[0].done) == (8, 0)
    assert [event.images for event in events[1:]] == [64] * 8
    lines = [event.line for event in events if event.line]
    assert len(lines) == 2 and "train top-1 per exit" in lines[0] and "calibration top-1 per exit" in lines[1]
    assert [event.now for event in events[1:]] == ["epoch 1/2"] * 3 + ["epoch 2/2"] * 4 + ["training"]
    again = list(training(config, tmp_path / "run", Setup(torch.device("cpu")), resume=True))
    assert [(event.total, event.done) for event in again] == [(8, 8)]


def test_states_are_saved_as_often_as_asked_for(tmp_path: Path, small_config: Config) -> None:
    seldom = small_config("train.epochs=1", "train.save_seconds=600")
    steps = training(seldom, tmp_path / "run", Setup(torch.device("cpu")), resume=False)
    for _ in range(3):  # its beginning and two steps
        next(steps)
    assert load_checkpoint(tmp_path / "run") is None
    steps = training(small_config("train.epochs=1"), tmp_path / "often", Setup(torch.device("cpu")), False)
    for _ in range(3):
        next(steps)
    found = load_checkpoint(tmp_path / "often")
    assert found is not None and found.step == 2
