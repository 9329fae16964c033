"""What the README and the docs show works: their Python and the commands."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import is_dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from helpers.runs import SMALL_RUN
from offramp.cli import main
from offramp.runs.config import RunConfig
from offramp.runs.recipe import load_recipe

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


def blocks(kind: str) -> dict[str, str]:
    """The block of a kind on each page that has one."""
    found = [(page.name, re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL)) for page in PAGES]
    assert all(len(codes) <= 1 for _, codes in found)
    return {name: codes[0] for name, codes in found if codes}


def test_every_block_of_code_has_a_test() -> None:
    """Python is run as it stands; what is called `py` is not, and has a test of its own below, as TOML has."""
    kinds = {kind for page in PAGES for kind in re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)}
    assert kinds == {"python", "py", "shell", "toml"}  # commands in shell: tests/test_site.py
    assert set(blocks("py")) == {"serving.md", "scaling.md"} and set(blocks("toml")) == {"recipes.md"}


def test_the_recipe_of_ones_own_loads(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(blocks("toml")["recipes.md"])
    assert load_recipe(str(tmp_path / "mine.toml")).config.train.epochs == 100


def test_the_client_tries_again() -> None:
    known: dict[str, Any] = {}
    exec(compile(blocks("py")["serving.md"], "serving.md", "exec"), known)
    said, asked = [503, 200], []

    class Busy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(said[len(asked) - 1])
            self.end_headers()
            self.wfile.write(b'{"results": []}')

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        answer = known["classify"](f"http://127.0.0.1:{server.server_port}", b"an image")
        server.shutdown()
    assert answer == {"results": []} and asked == [{"images": ["YW4gaW1hZ2U="]}] * 2


def test_the_memory_of_keys_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("py")["scaling.md"].replace("10**6", "10**3"), "scaling.md", "exec"), {})
    assert re.fullmatch(r"[\d.]+ bytes\n", capsys.readouterr().out)


def prose_of(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a link can name after `#`: headings, as GitHub and the site write them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", prose_of(page)):
            place = page.parent / target if target else page
            assert place.exists(), (page.name, target)
            assert not anchor or anchor in anchors(place), (page.name, target, anchor)


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
