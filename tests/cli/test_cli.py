"""The command line as people meet it: tables, JSON, one plain sentence for a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.runs import SMALL_RUN
from offramp.cli import main
from offramp.cli.options import command, trying


def offramp(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command in this process; its exit code, standard output and standard error."""
    before, sys.argv = sys.argv, ["offramp", *words]
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    code = left.value.code
    assert isinstance(code, int)
    return code, out, err


def test_what_tries_a_bundle_can_be_copied(tmp_path: Path) -> None:
    bundle = Path(__file__).parents[1] / "fixtures" / "0.1" / "bundle-onnx"  # of a version that put no photos into it
    assert trying(bundle) == command("serve", bundle)
    (tmp_path / "photo-1.png").write_bytes(b"")
    assert trying(tmp_path) == command("predict", tmp_path, tmp_path / "photo-1.png")
    assert trying(bundle, tmp_path) == command("predict", bundle, tmp_path)


def test_info_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = offramp(capsys, "info", "msdnet5", "--num-classes", "100", "--image-size", "32", "--json")
    table = json.loads(out)
    assert code == 0
    assert (table["model"], table["num_classes"]) == ("msdnet5", 100)
    assert table["exits"][0] == {"exit": 1, "params": 299704, "mul_adds": 6859876, "macs": 6792704}
    assert [e["exit"] for e in table["exits"]] == [1, 2, 3, 4, 5]


def test_info_prints_a_table_and_lazy_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "6,859,876" in offramp(capsys, "info", "msdnet5")[1]
    assert "5,959,780" in offramp(capsys, "info", "msdnet5", "--lazy")[1]


def test_info_takes_overrides_sizes_and_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from offramp import create_model

    _, out, _ = offramp(capsys, "info", "msdnet5", "--set", "growth=4", "--image-size", "64", "--json")
    assert json.loads(out)["exits"][0]["mul_adds"] > 6859876
    folder = create_model("msdnet5", 7, growth=4, image_size=64).save(tmp_path)
    _, again, _ = offramp(capsys, "info", str(folder), "--num-classes", "100", "--json")
    assert json.loads(again) == json.loads(out)
    assert json.loads(offramp(capsys, "info", str(folder), "--json")[1])["num_classes"] == 7


def test_models_and_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ranet-c2" in offramp(capsys, "models")[1]
    assert "msdnet5" in json.loads(offramp(capsys, "models", "--json")[1])
    assert "digits-baseline" in offramp(capsys, "recipes")[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("info", "msdnet55"), "did you mean 'msdnet5'?"),
        (("info", "msdnet5-cifar10"), "did you mean 'msdnet5-cifar100'?"),
        (("info", "runs/typo"), "runs/typo is not there"),
        (("bench", "infer", "runs/typo"), "runs/typo is not there"),
        (("info", "msdnet5", "--image-size", "9"), "too small"),
        (("info", "msdnet5", "--num-classes", "1"), "num_classes must be"),
        (("info", "msdnet5", "--num-classes", "0"), "num_classes must be"),
        (("info", "msdnet5", "--set", "num_classes=10"), "not an override"),
        (("info", "msdnet5", "--set", "blocks=3"), "do not fit model 'msdnet5'"),
        (("info", "msdnet5", "--set", "head_width=-1"), "do not fit model 'msdnet5'"),
        (("train", "digits-baseline", "--out", "x", "--set", "model.overrides.num_classes=5"), "set model.num_classes"),
        (("train", "digits-baseline", "--out", "x", "--device", "cuda:7"), "GPUs here"),
        (("train", "digits-baseline", "--out", "x", "--set", "weighting.q=inf"), "finite number"),
        (("bench", "train", "--precision", "bf16"), "did you mean 'bfloat16'"),
        (("bench", "train", "--repeats", "0"), "repeats must be 1 or more"),
        (("train", "digits-bseline", "--out", "x"), "did you mean 'digits-baseline'?"),
        (("train", "digits-baseline", "--out", "x", "--set", "train.epoch=3"), "did you mean 'train.epochs'?"),
        (("train", "digits-baseline", "--out", "x", "--device", "tpu"), "use auto, cpu, cuda"),
        (("train", "cifar100-msdnet5-baseline", "--out", "x"), "give --data-dir"),
        (("eval", "nowhere"), "nowhere is not there"),
        (("predict", "msdnet5-cifar100", "x.png", "--budget", "5"), "budget 5 is below exit 1's cost, 6.86M"),
        (("calibrate", "x", "--budget", "1M", "--max-drop-points", "1"), "not for budget and max drop points"),
        (("--import", "no_such_module", "models"), "No module named 'no_such_module'"),
    ],
)
def test_a_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = offramp(capsys, *words)
    assert code == 2
    assert err.startswith("offramp: ") and err.count("\n") == 1
    assert sentence in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["models", "info", "recipes", "train", "eval", "bench", "demo"])
def test_every_verb_has_help(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, out, _ = offramp(capsys, verb, "--help")
    assert code == 0 and "Usage" in out


def test_a_plugin_registers_models(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_cli_nets.py").write_text(
        "import offramp\n"
        "from torch import nn\n"
        "def build(num_classes):\n"
        "    heads = [nn.Sequential(nn.Flatten(), nn.Linear(3072, num_classes)) for _ in range(2)]\n"
        "    return offramp.ExitNet.from_parts([nn.ReLU(), nn.ReLU()], heads)\n"
        "offramp.register_model('cli-test-net', build, num_classes=4, about='two heads')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = offramp(capsys, "--import", "my_cli_nets", "info", "cli-test-net", "--json")
    assert code == 0
    assert json.loads(out)["exits"][0]["macs"] == 3072 * 4
    code, _, err = offramp(capsys, "info", "cli-test-net", "--lazy")
    assert code == 2 and "not made of cells" in err


def test_a_plugin_may_lie_in_the_folder_one_works_in(tmp_path: Path) -> None:
    (tmp_path / "here_nets.py").write_text("import offramp\nofframp.register_model('here', print, about='mine')\n")
    (tmp_path / "safetensors.py").write_text("raise SystemExit('a file of the folder was taken for a package')\n")
    script = "import sys; sys.path.remove(''); from offramp.cli import main; main()"  # as the installed script has it
    words = [sys.executable, "-c", script, "--import", "here_nets", "models"]
    env = {**os.environ, "PYTHONPATH": str(Path(sys.modules["offramp"].__file__ or "").parents[1])}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "mine" in done.stdout, done.stderr


def test_a_model_folder_is_not_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from offramp import create_model

    create_model("msdnet-tiny").save(tmp_path)
    code, _, err = offramp(capsys, "eval", str(tmp_path))
    assert code == 2 and "holds a model, not a run" in err


def test_bench_prints_nothing_but_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from offramp.bench import train as benches
    from offramp.common import console as consoles

    monkeypatch.setattr(consoles, "PLAIN_SECONDS", 0.0)
    monkeypatch.setattr(benches, "peak_megabytes", lambda *_: 0.0)
    words = ("--model", "msdnet-tiny", "--batch", "8", "--device", "cpu", "--repeats", "1", "--json")
    code, out, _ = offramp(capsys, "bench", "train", *words)
    assert code == 0 and len(json.loads(out)["rows"]) == len(benches.ROWS)


def test_train_then_eval(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = [word for setting in SMALL_RUN for word in ("--set", setting)]
    run = str(tmp_path / "run")
    code, out, _ = offramp(capsys, "train", "digits-baseline", "--out", run, *settings, "--device", "cpu")
    assert code == 0 and "next: offramp eval" in out and "epoch   3/3" in out
    code, out, _ = offramp(capsys, "eval", run, "--device", "cpu")
    assert code == 0 and "top-1 %" in out
    code, _, err = offramp(capsys, "train", "digits-baseline", "--out", run, *settings)
    assert code == 2 and "add --resume" in err


def test_printed_commands_start_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.cli.options.loaded", [])
    monkeypatch.setattr(sys, "argv", [".venv/bin/offramp", "info"])
    monkeypatch.setenv("PATH", "")
    assert command("eval", "a run") == ".venv/bin/offramp eval 'a run'"
    monkeypatch.setattr(sys, "argv", ["/lib/offramp/__main__.py"])
    assert command("eval", "run") == "offramp eval run"


def test_ctrl_c_is_answered_with_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("offramp.training.evaluate.evaluate_run", interrupted)
    code, _, err = offramp(capsys, "eval", str(tmp_path))
    assert (code, err.strip()) == (130, "offramp: interrupted")


def test_a_network_of_ones_own_is_asked_for_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = offramp(capsys, "info", "my-net")
    assert code == 2 and "model 'my-net' is unknown" in err and "--import MODULE" in err


def without(*modules: str) -> str:
    return f"import sys; sys.modules.update(dict.fromkeys({modules!r})); sys.argv[0] = 'offramp'; "


def test_the_core_works_without_torch_and_says_what_is_missing() -> None:
    script = without("torch", "sklearn", "safetensors", "torchvision") + "from offramp.cli import main; main()"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)

    assert "digits-baseline" in run("recipes").stdout
    assert run("--version").stdout.startswith("offramp 0.")
    missing = run("models")
    assert missing.returncode == 2
    assert missing.stderr == "offramp: this needs torch; install it with: pip install 'offramp[train]'\n"


def test_the_public_names_are_the_ones_type_checkers_see() -> None:
    import ast

    import offramp as package

    tree = ast.parse(Path(package.__file__).read_text())
    seen = {
        a.name
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        for a in ast.walk(node)
        if isinstance(a, ast.alias)
    }
    assert seen == set(package._HOME)
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))
