"""Runs that are killed, damaged, out of room or trained twice at once: nothing is lost, and nothing without a word."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.runs import SMALL_RUN, Config, call, same_weights
from offramp import evaluate_run, load_model
from offramp.common.files import read_json
from offramp.runs.config import RunConfig
from offramp.runs.folder import LOCK, read_metrics
from offramp.runs.manifest import read_manifest
from offramp.training.checkpoint import load_checkpoint
from offramp.training.loop import Setup
from offramp.training.train import train_run, training

SAVED = Path(__file__).parents[1] / "fixtures" / "0.1"
FailAt = Callable[..., None]


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def files(run: Path) -> set[str]:
    """What a run folder holds, without TensorBoard's files, of which each call writes one."""
    found = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith("tensorboard/") and "last.1/" not in name}


def without_speed(run: Path) -> list[dict[str, object]]:
    return [{k: v for k, v in row.items() if k not in ("images_per_s", "seconds")} for row in read_metrics(run)]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def train_until(config: RunConfig, run: Path, steps: int) -> Path:
    """A run that ends after some steps as if it had been killed."""
    under_way = training(config, run, Setup(torch.device("cpu")), resume=False)
    for _ in range(steps + 1):
        next(under_way)
    under_way.close()  # type: ignore[attr-defined]
    return run


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.message for record in caplog.records if record.name == "offramp"]
    caplog.clear()
    return found


@pytest.mark.parametrize("trouble", [KeyboardInterrupt, full_disk])
def test_a_run_disturbed_at_any_file_is_whole_in_the_end(
    tmp_path: Path, small_config: Config, fail_at: FailAt, trouble: Callable[[], BaseException]
) -> None:
    config = small_config("train.epochs=1", "data.train=128", "train.save_seconds=1000")
    whole = train_run(config, tmp_path / "whole", device="cpu")
    for nth in range(1, 100):
        run = tmp_path / str(nth)
        fail_at("replace", nth, trouble)
        try:
            train_run(config, run, device="cpu")
            break
        except (KeyboardInterrupt, OSError):
            train_run(config, run, device="cpu", resume=True)
        assert files(run) == files(whole)
        assert read_json(run / "data.json") == read_json(whole / "data.json")
        assert same_weights(run, whole) and without_speed(run) == without_speed(whole)
        assert read_manifest(run).keys() >= files(run) - {n for n in files(run) if "last/" in n or "manifest" in n}
    assert nth > 12


def test_another_step_in_a_state_is_noticed(
    tmp_path: Path, small_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train_run(small_config(), tmp_path / "whole", device="cpu")
    run = train_until(small_config(), tmp_path / "run", 7)
    state = run / "last/state.json"
    state.write_text(state.read_text().replace('"step": 7', '"step": 3'))
    train_run(small_config(), run, device="cpu", resume=True)
    (said,) = messages(caplog)
    assert "trying the one before it" in said and "last/state.json is damaged" in said
    assert same_weights(run, whole) and without_speed(run) == without_speed(whole)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_network_is_refused_by_name(tmp_path: Path, small_config: Config, name: str) -> None:
    run = train_run(small_config("train.epochs=1"), tmp_path / "run", device="cpu")
    damage(run / name)
    if name == "config.json":
        (run / name).write_text(json.dumps(json.loads((run / name).read_bytes()[:-1]) | {"seed": 5}))
    for use in (load_model, evaluate_run):
        with pytest.raises(ValueError, match=f"{name} is not the file that was written"):
            use(run)
    assert not (run / "eval").exists()


def test_a_damaged_network_is_written_again_from_the_last_state(
    tmp_path: Path, small_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    run = train_run(small_config("train.epochs=1"), tmp_path / "run", device="cpu")
    before = (run / "model.safetensors").read_bytes()
    damage(run / "model.safetensors")
    train_run(small_config("train.epochs=1"), run, device="cpu", resume=True)
    assert messages(caplog) == [f"{run}/model.safetensors is not the file that was written"]
    assert (run / "model.safetensors").read_bytes() == before
    evaluate_run(run, device="cpu")
    assert not messages(caplog)


@pytest.mark.parametrize("text", ["", "{", None])
def test_epochs_that_the_log_lost_are_restored(
    tmp_path: Path, small_config: Config, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    whole = train_run(small_config(), tmp_path / "whole", device="cpu")
    run = train_until(small_config(), tmp_path / "run", 9)
    before = read_metrics(run)
    assert [row["epoch"] for row in before] == [1, 2]
    if text is None:
        (run / "metrics.jsonl").unlink()
    else:
        (run / "metrics.jsonl").write_text(text)
    train_run(small_config(), run, device="cpu", resume=True)
    assert messages(caplog) == [f"{run}/metrics.jsonl is damaged: restored up to step 9 from the resume state"]
    assert read_metrics(run)[:2] == before and without_speed(run) == without_speed(whole)


@pytest.mark.parametrize("finished", [False, True])
def test_other_damage_is_named_whenever_a_run_is_used(
    tmp_path: Path, small_config: Config, caplog: pytest.LogCaptureFixture, finished: bool
) -> None:
    config = small_config()
    run = train_until(config, tmp_path / "run", 9) if not finished else train_run(config, tmp_path / "run")
    damage(run / "samples/epoch-0001.npz")
    (run / "samples/epoch-0002.npz").unlink()
    (run / "environment.json").write_text(json.dumps(read_json(run / "environment.json") | {"device": "another"}))
    damaged = {f"{run}/samples/epoch-0001.npz", f"{run}/environment.json"}
    if finished:
        (events,) = (run / "tensorboard").iterdir()
        damage(events)
        damaged.add(str(events))
    wanted = {f"{path} is not the file that was written" for path in damaged}
    wanted.add(f"{run}/samples/epoch-0002.npz is missing")
    for _ in range(2):
        train_run(config, run, device="cpu", resume=True)
        assert set(messages(caplog)) == wanted
        evaluate_run(run, device="cpu")
        assert set(messages(caplog)) == wanted


def test_each_of_two_phases_has_a_manifest(
    tmp_path: Path, small_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config("imta.equilibrium=true", "imta.collaboration=true", "train.epochs=1")
    run = train_run(config, tmp_path / "run", device="cpu")
    for folder in (run, run / "phase1"):
        assert {"config.json", "data.json", "model.safetensors"} < read_manifest(folder).keys()
    assert not list(run.rglob(LOCK))
    evaluate_run(run, device="cpu")
    assert not messages(caplog)
    damage(run / "phase1/samples/epoch-0001.npz")
    evaluate_run(run, device="cpu")
    assert messages(caplog) == [f"{run}/phase1/samples/epoch-0001.npz is not the file that was written"]
    damage(run / "phase1/model.safetensors")
    with pytest.raises(ValueError, match="phase1 is damaged"):
        load_model(run / "phase1")


def test_two_trainings_do_not_share_a_folder(tmp_path: Path, small_config: Config) -> None:
    """The one that is there is killed in the end, and its lock goes with it."""
    run, other = tmp_path / "run", small_config("train.epochs=500")
    settings = [word for setting in (*SMALL_RUN, "train.epochs=500") for word in ("--set", setting)]
    words = ["train", "digits-baseline", "--out", str(run), *settings, "--device", "cpu"]
    process = subprocess.Popen([sys.executable, "-m", "offramp", *words], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (run / "last").is_dir():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        for resume in (False, True):
            with pytest.raises(ValueError, match=f"run is being trained by process {process.pid}; wait for it"):
                train_run(other, run, device="cpu", resume=resume)
    finally:
        process.kill()
        process.wait()
    under_way = training(other, run, Setup(torch.device("cpu")), resume=True)
    assert next(under_way).done > 0 and (run / LOCK).read_text() == str(os.getpid())
    under_way.close()  # type: ignore[attr-defined]
    assert not (run / LOCK).exists()


@pytest.mark.parametrize("phases", [1, 2])
def test_the_lock_is_held_from_the_first_step_to_the_last(tmp_path: Path, small_config: Config, phases: int) -> None:
    parts = ("imta.equilibrium=true", "imta.collaboration=true") if phases == 2 else ()
    config = small_config("train.epochs=1", *parts)
    for _ in training(config, tmp_path / "run", Setup(torch.device("cpu")), resume=False):
        with pytest.raises(ValueError, match="is being trained by process"):
            train_run(config, tmp_path / "run", device="cpu", resume=True)
    assert not list(tmp_path.rglob(LOCK))


@pytest.mark.parametrize(("nth", "name"), [(1, "environment.json"), (3, "config.json"), (4, "metrics.jsonl")])
def test_a_full_disk_is_a_sentence_that_names_the_file(
    tmp_path: Path, small_config: Config, fail_at: FailAt, nth: int, name: str
) -> None:
    config, run = small_config("train.epochs=1"), tmp_path / "run"
    fail_at("fsync", nth, full_disk)
    with pytest.raises(OSError) as failed:
        train_run(config, run, device="cpu")
    wanted = f"{run}/{name} cannot be written: No space left on device; once it can, the same command with --resume"
    assert str(failed.value) == f"{wanted} goes on"
    assert not list(run.rglob("*.part"))
    train_run(config, run, device="cpu", resume=True)
    assert same_weights(run, train_run(config, tmp_path / "other", device="cpu"))


def test_a_full_disk_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: FailAt, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = [word for setting in SMALL_RUN for word in ("--set", setting)]
    words = ["train", "digits-baseline", "--out", run, *settings, "--device", "cpu"]
    fail_at("fsync", 7, full_disk)
    assert call(monkeypatch, *words) == 2
    shown = capsys.readouterr().err
    assert f"offramp: {run}/last.new/" in shown and "the same command with --resume goes on" in shown
    assert call(monkeypatch, *words, "--resume") == 0


def test_runs_of_0_1_go_on_and_are_evaluated_without_complaint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("finished", "unfinished"):
        run = Path(shutil.copytree(SAVED / name, tmp_path / name))
        config = RunConfig.from_json(read_json(run / "config.json"))
        train_run(config, run, device="cpu", resume=True)
        evaluate_run(run, device="cpu")
        state = load_checkpoint(run)
        assert state is not None and len(read_metrics(run)) == config.train.epochs
        assert {"samples/epoch-0001.npz", "model.safetensors"} < read_manifest(run).keys()
    assert not messages(caplog)
