"""What the README shows works: its Python and its commands."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from conftest import SMALL_RUN
from offramp.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^    (offramp .*?)(?: *#.*)?$", README, re.MULTILINE)


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_the_python_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) >= 6
    for command in COMMANDS:
        words = shlex.split(command)
        if words[1] == "train":  # the same run, made small
            words += [word for setting in SMALL_RUN for word in ("--set", setting)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 0, command
    assert (tmp_path / "runs/first/eval/eval.json").is_file()
