"""Pieces of one's own: docs/extending.md, file by file and command by command, and where their names turn up."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.runs import SMALL_RUN, call
from offramp.cli.app import take_imports
from offramp.common import registry
from offramp.training.weighting import WEIGHTINGS, Weighting

DOC = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
FILES = {code.split()[1]: code for code in re.findall(r"```python\n(# \w+\.py\n.*?)```", DOC, re.DOTALL)}
COMMANDS = re.findall(r"^    (offramp .*)$", DOC, re.MULTILINE)
SMALL = [setting for setting in SMALL_RUN if not setting.startswith("model.") and "data.test" not in setting]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files in a folder of their own; what they register is gone afterwards."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    before = registry.loaded[:]
    registry.loaded.clear()
    from offramp.data.augment import AUGMENTATIONS
    from offramp.data.dataset import DATASETS
    from offramp.models.registry import MODELS
    from offramp.training.forks import FORKS
    from offramp.training.objectives import OBJECTIVES
    from offramp.training.optimizers import OPTIMIZERS

    for names in (AUGMENTATIONS, DATASETS, FORKS, MODELS, OBJECTIVES, OPTIMIZERS, WEIGHTINGS):
        monkeypatch.setattr(names, "_entries", dict(names._entries))
    for name in FILES:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    yield tmp_path
    registry.loaded[:] = before


def test_the_page_has_an_example_of_every_kind() -> None:
    kinds = ("model", "weighting", "objective", "fork", "dataset", "augmentation", "optimizer")
    assert all(any(f"offramp.register_{kind}(" in code for code in FILES.values()) for kind in kinds)
    assert {name for command in COMMANDS for name in FILES if name in command} == set(FILES)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_pages_commands_run(
    command: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "train":
        words += [word for setting in SMALL for word in ("--set", setting)]
    assert call(monkeypatch, *words, *(["--device", "cpu"] if words[0] == "train" else [])) == 0
    out = capsys.readouterr().out
    if words[0] == "train":  # and what it says to do next can be copied as it is
        following = shlex.split(out.rsplit("next: ", 1)[1])
        assert following[-2:] == ["--import", words[words.index("--import") + 1]]
        assert call(monkeypatch, *following[1:], "--device", "cpu") == 0


def test_a_weighting_is_known_by_its_name_everywhere(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--import", "my_weighting.py"]
    for name in ("uniform", "sure-early"):
        settings = [*SMALL_RUN, f"weighting.name={name}"]
        words = [word for setting in settings for word in ("--set", setting)]
        assert call(monkeypatch, *own, "train", "digits-baseline", "--out", name, *words, "--device", "cpu") == 0
        assert call(monkeypatch, "eval", name, "--device", "cpu", *own) == 0
    assert json.loads((files / "sure-early" / "config.json").read_text())["weighting"]["name"] == "sure-early"
    assert call(monkeypatch, "report", "uniform", "sure-early", "--out", "report.html") == 0
    assert "sure-early weights" in (files / "report-files" / "anytime.md").read_text()
    (files / "kept").mkdir()
    assert call(monkeypatch, "results", "keep", "uniform", "sure-early", "--into", "kept/1-all") == 0
    (files / "kept" / "1-all" / "section.toml").write_text('title = "All"\ntext = "Both."\n')
    assert call(monkeypatch, "results", "page", "kept", "--out", "results.md") == 0
    page = (files / "results.md").read_text()
    assert re.search(r"\| sure-early weights, msdnet-tiny[^|]* minus baseline", page)


def test_learned_weights_takes_a_weighting_of_ones_own(files: Path) -> None:
    import torch
    from torch import nn

    from helpers.nets import Theirs, loader
    from offramp import LearnedWeights

    registry.load_plugin("my_weighting.py")
    model: nn.Module = Theirs()
    weights = LearnedWeights(
        model, torch.optim.SGD(model.parameters(), lr=0.1), num_exits=2, weighting="sure-early", options={"strength": 2}
    )
    assert isinstance(weights.weighting, Weighting) and weights.weighting.slope_K.tolist() == [2, -2]
    assert weights.step(*loader(1)[0])["loss"] > 0


@pytest.mark.parametrize(
    "what", ["weighting.name", "objective.name", "train.optimizer", "data.name", "data.augmentation"]
)
def test_an_unknown_name_is_a_sentence_and_leaves_no_folder(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert (
        call(monkeypatch, "train", "digits-baseline", "--out", out, "--set", f"{what}=nothing", "--device", "cpu") == 2
    )
    said = capsys.readouterr().err
    assert "'nothing' is unknown" in said and "--import" in said and not out.exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("objective.options.warmth=3", "objective.options do not fit the objective 'cross_entropy'"),
        ("train.optimizer_options.warmth=3", "train.optimizer_options do not fit 'sgd'"),
    ],
)
def test_options_that_do_not_fit_are_a_sentence(
    setting: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert call(monkeypatch, "train", "digits-baseline", "--out", out, "--set", setting, "--device", "cpu") == 2
    assert words in capsys.readouterr().err and not out.exists()


def test_an_optimiser_without_a_look_ahead_does_not_go_with_learned_weights(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "digits-learned", "--out", "run", "--set", "train.optimizer=rmsprop", "--device", "cpu"]
    assert call(monkeypatch, *words, "--import", "my_optimizer.py") == 2
    assert "learned weights need one of the optimizers SGD, AdamW, got RMSprop" in capsys.readouterr().err
    assert not (files / "run").exists()


def test_import_may_stand_anywhere() -> None:
    assert take_imports(["--import", "a", "info", "x", "--import=b.py"]) == (["a", "b.py"], ["info", "x"])
    assert take_imports(["predict", "--", "--import", "c"]) == ([], ["predict", "--", "--import", "c"])
    assert take_imports(["info", "--import"]) == ([], ["info", "--import"])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere_to_be_found", "--import nowhere_to_be_found failed: No module named"),
        ("gone.py", "--import gone.py failed: gone.py is not there"),
        ("broken.py", "--import broken.py failed: invalid syntax"),
        ("json.py", "a module 'json' is loaded already"),
    ],
)
def test_what_cannot_be_imported_is_a_sentence(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "json.py").write_text("")
    assert call(monkeypatch, "models", "--import", source) == 2
    assert words in capsys.readouterr().err
