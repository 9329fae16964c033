"""What is published: what a wheel and an sdist hold, and that each extra alone runs its verbs in an empty environment.

Environments are made with ordinary pip and the versions of constraints.txt. `OFFRAMP_PYTHONS` may name other
interpreters, such as python3.12:python3.13, for which everything is done again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import offramp
from offramp.common.extras import CHECKOUT_ONLY, MissingExtra, explained

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = [sys.executable, *filter(None, os.environ.get("OFFRAMP_PYTHONS", "").split(":"))]
BUNDLE = ROOT / "tests" / "fixtures" / "0.1" / "bundle-onnx"
TRAINED = {"msdnet5-cifar100", "msdnet7-cifar100"}


def run(*words: object, cwd: Path | None = None, code: int = 0) -> str:
    """A command with nothing of this environment in it; what it said."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONWARNINGS")}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


class Environment:
    """An empty environment, and what is installed into it."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        run(python, "-m", "venv", folder)
        self.python, self.offramp = folder / "bin" / "python", folder / "bin" / "offramp"

    def install(self, *what: object) -> None:
        run(self.python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *what)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with wheel and sdist, made of what the repository tracks."""
    folder = tmp_path_factory.mktemp("built")
    tracked = run("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard").splitlines()
    for name in (name for name in tracked if not name.startswith("results/") or name.endswith(".toml")):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name)
    tools = Environment(folder / "tools")
    tools.install("hatchling")
    run(tools.python, "-m", "hatchling", "build", "-d", folder / "dist", cwd=folder / "source")
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def names_in(archive: Path) -> set[str]:
    if archive.suffix == ".whl":
        return set(zipfile.ZipFile(archive).namelist())
    with tarfile.open(archive) as files:
        return {name.partition("/")[2] for name in files.getnames()}


@pytest.mark.slow
def test_what_is_published_holds_the_package_and_two_networks_and_nothing_else(built: Path, wheel: Path) -> None:
    assert wheel.name == f"offramp-{offramp.__version__}-py3-none-any.whl"
    (source,) = built.glob("*.tar.gz")
    inside, packed = names_in(wheel), names_in(source)
    assert {name.split("/")[2] for name in inside if name.startswith("offramp/pretrained/")} == TRAINED
    for kept in ("cli/app.py", "py.typed", "serve/page.html", "reporting/page.js", "runs/recipes/digits-learned.toml"):
        assert f"offramp/{kept}" in inside and f"src/offramp/{kept}" in packed
    assert {name.partition("/")[0] for name in inside} == {"offramp", f"offramp-{offramp.__version__}.dist-info"}
    assert {name.partition("/")[0] for name in packed} <= {
        *("src", "PKG-INFO", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", ".gitignore")
    }
    assert not {f"{name.replace('.', '/')}.py" for name in CHECKOUT_ONLY} & inside
    assert wheel.stat().st_size < 16e6 and (built / source.name).stat().st_size < 16e6


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_the_core_alone(python: str, wheel: Path, tmp_path: Path) -> None:
    own = Environment(tmp_path / "env", python)
    own.install(wheel)
    assert run(own.offramp, "--version") == f"offramp {offramp.__version__}\n"
    assert "digits-baseline" in run(own.offramp, "recipes")
    finished = shutil.copytree(ROOT / "tests" / "fixtures" / "0.1" / "finished", tmp_path / "finished")
    assert "saved, with" in run(own.offramp, "calibrate", finished, "--q", "0.7")
    for verb, extra in ((("models",), "train"), (("predict", BUNDLE, "x.png"), "onnx"), (("serve", BUNDLE), "serve")):
        assert f"pip install 'offramp[{extra}]'" in run(own.offramp, *verb, code=2)
    assert "comes with a checkout of the repository" in run(own.offramp, "figures", finished, code=2)
    installed = run(own.python, "-m", "pip", "list", "--format", "freeze").lower()
    assert not re.search(r"^(torch|onnx|fastapi|matplotlib|scikit)", installed, re.MULTILINE)


@pytest.mark.slow
def test_an_sdist_installs_what_the_wheel_does(built: Path, wheel: Path, tmp_path: Path) -> None:
    own = Environment(tmp_path / "env")
    (source,) = built.glob("*.tar.gz")
    own.install(source)
    assert run(own.offramp, "--version") == f"offramp {offramp.__version__}\n"
    assert "digits-baseline" in run(own.offramp, "recipes")
    place = Path(run(own.python, "-c", "import offramp; print(offramp.__path__[0])").strip())
    files = {path.relative_to(place.parent).as_posix() for path in place.rglob("*") if path.is_file()}
    packed = {name for name in names_in(wheel) if name.startswith("offramp/")}
    assert {name for name in files if "__pycache__" not in name} == packed


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_onnx_alone(python: str, wheel: Path, tmp_path: Path) -> None:
    own = Environment(tmp_path / "env", python)
    own.install(f"{wheel}[onnx]")
    photo = ROOT / "src" / "offramp" / "pretrained" / "msdnet5-cifar100" / "photo-1.png"
    assert '"exit"' in run(own.offramp, "predict", BUNDLE, photo, "--json")
    assert "cumulative cost" in run(own.offramp, "info", BUNDLE)
    assert "speed-up" in run(own.offramp, "bench", "infer", BUNDLE, "--batch", "1", "--repeats", "1")
    script = "import offramp, sys; print(offramp.load_bundle(sys.argv[1]).check_golden(), 'torch' in sys.modules)"
    difference, torch_is_there = run(own.python, "-c", script, BUNDLE).split()
    assert float(difference) < 1e-3 and torch_is_there == "False"


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_serve_alone_and_with_onnx(python: str, wheel: Path, tmp_path: Path) -> None:
    own = Environment(tmp_path / "env", python)
    own.install(f"{wheel}[serve]")
    script = "from offramp.serve import ServeConfig, create_app; print(ServeConfig().queue)"
    assert run(own.python, "-c", script) == "256\n"
    assert "pip install 'offramp[onnx]'" in run(own.offramp, "serve", BUNDLE, code=2)
    own.install(f"{wheel}[serve,onnx]")
    said = run(own.offramp, "bench", "serve", BUNDLE, "--seconds", "1", "--clients", "2", "--json")
    assert json.loads(said)["passed"]


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("python", PYTHONS)
def test_everything_together(python: str, wheel: Path, tmp_path: Path) -> None:
    own = Environment(tmp_path / "env", python)
    own.install(f"{wheel}[all]")
    small = ("data.train=256", "data.calibration=60", "data.test=60", "train.epochs=1", "train.batch=64")
    settings = [word for setting in small for word in ("--set", setting)]
    run(own.offramp, "train", "digits-learned", "--out", "runs/first", *settings, cwd=tmp_path)
    run(own.offramp, "eval", "runs/first", cwd=tmp_path)
    run(own.offramp, "calibrate", "runs/first", cwd=tmp_path)
    run(own.offramp, "report", "runs/first", "--out", "report.html", cwd=tmp_path)
    for format_ in ("torch", "onnx"):
        run(own.offramp, "export", "runs/first", "--out", format_, "--format", format_, cwd=tmp_path)
        run(own.offramp, "predict", format_, f"{format_}/photo-1.png", cwd=tmp_path)
    run(own.offramp, "info", "timm/tf_efficientnet_lite0", "--image-size", "96", cwd=tmp_path)
    said = run(own.offramp, "bench", "serve", "torch", "--seconds", "1", "--clients", "2", "--json", cwd=tmp_path)
    assert json.loads(said)["passed"]


def test_what_a_wheel_goes_without_is_listed_once() -> None:
    left_out = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]
    assert {name.removeprefix("/src/").removesuffix(".py").replace("/", ".") for name in left_out} == CHECKOUT_ONLY
    assert all((ROOT / name.lstrip("/")).is_file() for name in left_out)


def test_nothing_that_ships_imports_what_does_not() -> None:
    names = "|".join(re.escape(name) for name in sorted(CHECKOUT_ONLY))
    gone = {f"{name.replace('.', '/')}.py" for name in CHECKOUT_ONLY}
    for path in sorted((ROOT / "src").rglob("*.py")):
        if str(path.relative_to(ROOT / "src")) not in gone:  # verbs import inside their functions
            assert not re.search(rf"^(?:from|import) (?:{names})\b", path.read_text(), re.MULTILINE), path


def test_a_verb_of_the_checkout_is_a_sentence_without_one() -> None:
    with pytest.raises(MissingExtra, match="comes with a checkout of the repository"), explained():
        raise ModuleNotFoundError(name="offramp.reporting.kept_runs")


def test_the_version_is_the_same_everywhere() -> None:
    assert f"version: {offramp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {offramp.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = [version for page in pages for version in re.findall(r"offramp-(\d[\w.]*)-py3", page.read_text())]
    assert len(named) >= 6 and set(named) == {offramp.__version__}
