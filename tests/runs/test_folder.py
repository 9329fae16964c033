"""A run folder: how it begins, who may train into it, what killed processes leave, and what its manifest sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from helpers.runs import Config
from offramp.common.files import read_sealed_json, remove_stale_parts, write_bytes, write_sealed_json
from offramp.runs.folder import LOCK, begin_run, forget_unsaved, read_config
from offramp.runs.lock import locked
from offramp.runs.manifest import name_damage, read_manifest, refuse_damaged_network, write_manifest

CPU = torch.device("cpu")
BEGUN = {"config.json", "data.json", "environment.json"}


@dataclass
class Known:
    name: str = "digits"
    class_names: tuple[str, ...] = ("a", "b")
    identity: str = "of today"
    held_out: str = "these"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def dead_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_run_killed_while_it_began_has_all_its_files_in_the_end(
    tmp_path: Path, small_config: Config, fail_at: Callable[..., None], nth: int, resume: bool
) -> None:
    run = tmp_path / "run"
    fail_at("replace", nth, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        begin_run(run, small_config(), Known(), CPU, resume=False)
    assert not (run / "config.json").exists()
    begin_run(run, small_config(), Known(), CPU, resume)
    assert names(run) == BEGUN
    with pytest.raises(ValueError, match="was trained on other data"):
        begin_run(run, small_config(), Known(identity="of tomorrow"), CPU, resume=True)


def test_somebodys_own_files_are_no_leftovers(tmp_path: Path, small_config: Config) -> None:
    for text in ('{"years": "of work"}', "5", "{"):
        (tmp_path / "data.json").write_text(text)
        with pytest.raises(ValueError, match="not empty and not a run"):
            begin_run(tmp_path, small_config(), Known(), CPU, resume=True)
        assert (tmp_path / "data.json").read_text() == text


def test_a_run_of_an_older_version_is_told_what_it_lacks(
    tmp_path: Path, small_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    begin_run(tmp_path, small_config(), Known(), CPU, resume=False)
    (tmp_path / "data.json").unlink()
    for _ in range(2):
        begin_run(tmp_path, small_config(), Known(), CPU, resume=True)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path} has no data.json; written now, as things are today"
    ]
    assert names(tmp_path) == BEGUN


def test_what_killed_processes_left_half_written_goes(tmp_path: Path, small_config: Config) -> None:
    begin_run(tmp_path, small_config(), Known(), CPU, resume=False)
    (tmp_path / "samples").mkdir()
    stale = [tmp_path / f".config.json.{dead_process()}.part", tmp_path / "samples" / f".a.npz.{dead_process()}.part"]
    others = [tmp_path / f".metrics.jsonl.{os.getppid()}.part", tmp_path / "notes.part", tmp_path / ".mine.part"]
    for path in (*stale, *others):
        path.write_bytes(b"{")
    begin_run(tmp_path, small_config(), Known(), CPU, resume=True)
    assert [path.exists() for path in (*stale, *others)] == [False, False, True, True, True]
    remove_stale_parts(tmp_path / "not there")


def test_one_training_at_a_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with locked(run):
        message = f"run is being trained by process {os.getpid()}; wait for it or choose another --out"
        with pytest.raises(ValueError, match=message), locked(run):
            pass
        with locked(tmp_path / "other"):
            pass
    with locked(run):
        pass
    assert not names(run)


def test_a_lock_without_its_process_holds_nobody_up(tmp_path: Path, small_config: Config) -> None:
    (tmp_path / LOCK).write_text("1")
    with ExitStack() as theirs:
        with locked(tmp_path):
            begin_run(tmp_path, small_config(), Known(), CPU, resume=False)
            forget_unsaved(tmp_path)
            assert not tmp_path.exists()
            theirs.enter_context(locked(tmp_path))  # another training, where this one has gone
        assert names(tmp_path) == {LOCK}


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """As processes that load data are: they outlive a killed training by seconds."""
    script = (
        "import os, time; from pathlib import Path; from offramp.runs.lock import locked\n"
        f"with locked(Path({str(tmp_path)!r})):\n"
        "    if not os.fork(): print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        try:
            process.wait()
            assert (tmp_path / LOCK).exists()
            with locked(tmp_path):
                pass
        finally:
            os.kill(child, 9)


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match="run is a file; choose another --out"), locked(tmp_path / "run"):
        pass


def test_sealed_json_notices_any_change(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_sealed_json(path, {"step": 7, "info": {"seconds": 0.1, "rows": (1, 2)}})
    assert read_sealed_json(path) == {"step": 7, "info": {"seconds": 0.1, "rows": [1, 2]}}
    path.write_text(path.read_text().replace("7", "3", 1))
    with pytest.raises(ValueError, match=r"state\.json is damaged"):
        read_sealed_json(path)
    path.write_text('{"step": 3}')  # older versions wrote no digest
    assert read_sealed_json(path) == {"step": 3}


def test_the_manifest_names_what_is_not_as_it_was_written(
    tmp_path: Path, small_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    begin_run(tmp_path, small_config(), Known(), CPU, resume=False)
    later = ["eval/eval.json", "policy.json", "last/state.json", LOCK, "samples/.x.1.part"]
    for name in ("model.safetensors", "metrics.jsonl", "samples/epoch-0001.npz", "tensorboard/events.1", *later):
        write_bytes(tmp_path / name, b"whole")
    write_manifest(tmp_path, {})
    assert read_manifest(tmp_path).keys() == {
        *BEGUN,
        *("model.safetensors", "metrics.jsonl", "samples/epoch-0001.npz", "tensorboard/events.1"),
    }
    name_damage(tmp_path)
    refuse_damaged_network(tmp_path)
    assert not caplog.records
    (tmp_path / "samples/epoch-0001.npz").write_bytes(b"holes")
    (tmp_path / "environment.json").unlink()
    (tmp_path / "policy.json").unlink()
    name_damage(tmp_path)
    assert {record.message for record in caplog.records} == {
        f"{tmp_path}/samples/epoch-0001.npz is not the file that was written",
        f"{tmp_path}/environment.json is missing",
    }
    (tmp_path / "config.json").write_text(json.dumps(read_config(tmp_path).to_json()))
    with pytest.raises(ValueError, match=r"config\.json is not the file that was written"):
        refuse_damaged_network(tmp_path)
    (tmp_path / "manifest.json").write_text((tmp_path / "manifest.json").read_text().replace("a", "b"))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        refuse_damaged_network(tmp_path)
