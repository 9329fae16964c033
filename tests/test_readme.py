"""What the README and the docs show works: their Python and the commands."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from helpers.runs import SMALL_RUN
from offramp.cli import main
from offramp.runs.config import RunConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_ELSEWHERE = ("backbones.md", "extending.md", "fit.md", "research.md", "your-own-loop.md")  # tests/cli
PYTHON = [
    code
    for page in PAGES
    if page.name not in RUN_ELSEWHERE
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]
COMMANDS = re.findall(r"^    (offramp .*?)(?: *#.*)?$", README, re.MULTILINE)


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_the_python_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
            assert (page.parent / target).exists(), (page.name, target)


def test_every_setting_is_in_the_docs() -> None:
    docs = ROOT / "docs"
    training = (docs / "training.md").read_text()
    own = {"data": (docs / "data.md").read_text(), "weighting": (docs / "methods/learned-weights.md").read_text()}
    for name, part in vars(RunConfig()).items():
        for field in vars(part) if is_dataclass(part) else ():
            assert f"`{name}.{field}`" in training or f"`{field}`" in own.get(name, ""), f"{name}.{field}"


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) >= 6
    for command in COMMANDS:
        words = shlex.split(command)
        if words[1:3] == ["bench", "infer"]:
            words += ["--repeats", "1"]
        if words[1] == "train":  # the same run, made small
            words += [word for setting in SMALL_RUN for word in ("--set", setting)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 0, command
    assert (tmp_path / "runs/first/eval/eval.json").is_file()
