"""Files that cannot be written: the error names the file that was asked for, not its name until it is whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import call
from offramp.common.files import name_the_real_file, new_folder, write_bytes, write_json


def forbid(monkeypatch: pytest.MonkeyPatch, name: str, ends: str) -> None:
    """Permission is denied as the system does it, for what ends so; the tests may run as root, who may do anything."""
    real = getattr(os, name)

    def denied(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(ends):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path), None, *map(str, args[:1]))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, name, denied)


def test_a_file_that_cannot_be_moved_into_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, "replace", ".part")
    with pytest.raises(PermissionError) as failed:
        write_bytes(tmp_path / "policy.json", b"")
    assert str(failed.value) == f"[Errno 13] Permission denied: '{tmp_path / 'policy.json'}'"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, "mkdir", ".part")
    with pytest.raises(PermissionError) as failed, new_folder(tmp_path / "bundle"):
        pass
    assert str(failed.value) == f"[Errno 13] Permission denied: '{tmp_path / 'bundle'}'"


def test_a_file_in_a_folder_that_is_being_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, "replace", ".part")
    with pytest.raises(PermissionError) as failed, new_folder(tmp_path / "bundle") as part:
        write_json(part / "model.json", {})
    assert failed.value.filename == str(tmp_path / "bundle" / "model.json")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("part", "real"),
    [
        ("/a/.policy.json.17.part", "/a/policy.json"),
        ("/a/.bundle.17.part/.model.json.18.part", "/a/bundle/model.json"),
        ("run/eval.part/test/labels.npy", "run/eval/test/labels.npy"),
        (".bundle.17.part", "bundle"),
        ("/a/.hidden/whole.json", "/a/.hidden/whole.json"),
        ("/a/partner/x.parted", "/a/partner/x.parted"),
    ],
)
def test_the_real_name_of_a_part(part: str, real: str) -> None:
    error = PermissionError(errno.EACCES, "no", part)
    name_the_real_file(error)
    assert error.filename == real


def test_the_command_line_says_it_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forbid(monkeypatch, "mkdir", ".part")
    assert call(monkeypatch, "export", "msdnet5-cifar100", "--out", tmp_path / "bundle") == 2
    assert capsys.readouterr().err == f"offramp: {tmp_path / 'bundle'}: Permission denied\n"
