"""What a bundle needs to be loaded: an ONNX one nothing but ONNX Runtime, a torch one what builds its network."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offramp
from helpers.runs import call
from offramp.common import registry
from offramp.common.extras import MissingExtra
from offramp.models.exits import ModelSpec
from offramp.models.libraries import LIBRARIES
from offramp.models.registry import MODELS, register_model
from offramp.running.engines import onnx_engine

PREPARED = offramp.Preprocessing(16, 18, (0.5,) * 3, (0.25,) * 3, "bicubic")
MODULE = """
import offramp
from torch import nn

@offramp.register_model("own-net", num_classes=4)
def build(num_classes, width=4):
    stages = [nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.ReLU()), nn.Conv2d(width, width, 3)]
    heads = [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)) for _ in stages]
    return offramp.ExitNet.from_parts(stages, heads, (3, 16, 16))
"""


def build(num_classes: int = 4, width: int = 4) -> offramp.ExitNet:
    stages = [nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.ReLU()), nn.Conv2d(width, width, 3)]
    heads = [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)) for _ in stages]
    return offramp.ExitNet.from_parts(stages, heads, (3, 16, 16))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone afterwards."""
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    before = registry.loaded[:]
    registry.loaded.clear()
    yield
    registry.loaded[:] = before


def batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(20, 3, 16, 16, generator=draw), torch.randint(4, (20,), generator=draw)) for _ in range(count)]


def evaluated(model: nn.Module, folder: Path) -> Path:
    offramp.evaluate(
        model, calibration=batches(3, 0), test=batches(2, 1), out=folder, classes="abcd", preprocessing=PREPARED
    )
    offramp.calibrate(folder, offramp.PolicyRequest(q=0.9))
    return folder


def card_of(bundle: Path) -> dict[str, Any]:
    return json.loads((bundle / "model.json").read_text())


def test_a_network_without_a_name_becomes_an_onnx_bundle(tmp_path: Path) -> None:
    model = build().train()
    folder = evaluated(model, tmp_path / "mine")
    bundle = offramp.export(model, folder, out=tmp_path / "bundle")
    assert model.training
    loaded = offramp.load_bundle(bundle)
    assert loaded.format == "onnx" and loaded.classes == tuple("abcd") and loaded.card.preprocessing == PREPARED
    assert card_of(bundle)["model"] == {"name": None, "num_classes": 4, "overrides": {}}
    assert loaded.check_golden() < 1e-4
    images = np.random.default_rng(0).integers(0, 256, (5, 40, 30, 3), dtype=np.uint8)
    with torch.inference_mode():
        wanted = torch.stack(model.eval()(torch.from_numpy(loaded.prepare(images))))
    found = loaded(images)
    rows = np.arange(5)
    np.testing.assert_array_equal(found.labels, wanted.numpy().argmax(-1)[found.exits - 1, rows])
    with pytest.raises(ValueError, match="no name to be rebuilt from; export it as onnx"):
        offramp.export(model, folder, out=tmp_path / "no", format="torch")
    with pytest.raises(ValueError, match="half the size is for torch bundles"):
        offramp.export(model, folder, out=tmp_path / "no", half=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "mine"]


def test_an_onnx_bundle_needs_neither_torch_nor_the_code_of_its_network(tmp_path: Path) -> None:
    """Without torch, timm and offramp's own training: what it says is what it says here."""
    model = build()
    model.spec = ModelSpec("timm/nobody-knows-it", 4, {})  # as cut networks are named
    bundle = offramp.export(model, evaluated_without_saving(model, tmp_path / "mine"), out=tmp_path / "bundle")
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'timm', 'torchvision', 'safetensors', 'onnx')))\n"
        "import numpy as np, offramp\n"
        f"bundle = offramp.load_bundle({str(bundle)!r})\n"
        "assert bundle.check_golden() < 1e-3\n"
        f"print(bundle(np.load({str(tmp_path / 'images.npy')!r})).exits.tolist())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == offramp.load_bundle(bundle)(images).exits.tolist()
    assert "packages" not in card_of(bundle) and "imports" not in card_of(bundle)


def test_graphs_hold_nothing_of_the_machine_that_wrote_them(onnx_bundle: Path) -> None:
    for stage in sorted(onnx_bundle.glob("stage-*.onnx")):
        data = stage.read_bytes()
        assert not [word for word in (b"site-packages", b"stack_trace", __file__.encode(), b".py") if word in data]


def test_info_tells_what_graphs_cost_without_building_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build()
    bundle = offramp.export(model, evaluated(model, tmp_path / "mine"), out=tmp_path / "bundle")
    assert call(monkeypatch, "info", bundle, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    costs = [{"exit": cost.exit, "mul_adds": cost.mul_adds} for cost in offramp.exit_costs(model)]
    assert found == {"model": None, "num_classes": 4, "exits": costs}
    assert call(monkeypatch, "info", bundle) == 0
    assert f"{costs[1]['mul_adds']:,}" in capsys.readouterr().out


def evaluated_without_saving(model: offramp.ExitNet, folder: Path) -> Path:
    spec, model.spec = model.spec, None
    evaluated(model, folder)
    model.spec = spec
    return folder


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    registry.load_plugin("own_module.py")
    return evaluated(offramp.create_model("own-net"), tmp_path / "run")


def test_the_import_of_a_registered_network_is_recorded_and_asked_for(
    own_module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "export", "run", "--out", "onnx") == 0
    assert "bundle: onnx (onnx, " in capsys.readouterr().out  # the default for networks that are not ours
    assert call(monkeypatch, "export", "run", "--out", "bundle", "--format", "torch") == 0
    said = capsys.readouterr().out
    assert "whoever loads it needs --import own_module.py; with --format onnx nobody would" in said
    assert said.splitlines()[-1] == "next: offramp predict bundle bundle/photo-1.png --import own_module.py"
    assert card_of(Path("bundle"))["imports"] == ["own_module.py"] and "imports" not in card_of(Path("onnx"))
    offramp.load_bundle("bundle", device="cpu").check_golden()
    MODELS._entries.pop("own-net")
    with pytest.raises(ValueError, match="It is not imported by itself: if you trust it, add --import own_module.py"):
        offramp.load_bundle("bundle", device="cpu")
    assert offramp.load_bundle("onnx").check_golden() < 1e-3


def test_a_network_registered_in_a_program_names_its_module(tmp_path: Path) -> None:
    register_model("own-net", build, num_classes=4)
    model = offramp.create_model("own-net")
    bundle = offramp.export(model, evaluated(model, tmp_path / "run"), out=tmp_path / "bundle", format="torch")
    assert card_of(bundle)["imports"] == [build.__module__]


@pytest.fixture
def made_with_timm(tmp_path: Path) -> Path:
    """A torch bundle of a network that timm builds."""
    model = offramp.create_model("timm/test_resnet", 4, exits=2, image_size=16)
    return offramp.export(model, evaluated(model, tmp_path / "run"), out=tmp_path / "bundle", format="torch")


def test_the_package_that_builds_a_network_is_recorded(made_with_timm: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert card_of(made_with_timm)["packages"] == {"timm": metadata.version("timm")}
    offramp.load_bundle(made_with_timm, device="cpu")
    assert not caplog.records


def test_another_version_is_said_and_the_golden_outputs_decide(
    made_with_timm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1")
    with caplog.at_level(logging.WARNING, "offramp"):
        offramp.load_bundle(made_with_timm, device="cpu")
    assert "here is 0.0.1: its golden outputs decide" in caplog.text

    built = LIBRARIES["timm"].build

    def otherwise(*given: Any) -> nn.Module:
        module = built(*given)
        module.act1 = nn.Hardtanh(0, 0.1)  # what another version may do to a network of the same name
        return module

    monkeypatch.setitem(LIBRARIES, "timm", replace(LIBRARIES["timm"], build=otherwise))
    with pytest.raises(ValueError, match="does not give its golden outputs"):
        offramp.load_bundle(made_with_timm, device="cpu")


def test_a_missing_package_is_a_sentence_with_its_command(
    made_with_timm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = metadata.version("timm")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(MissingExtra, match=f"needs timm; install it with: pip install 'timm=={version}'"):
        offramp.load_bundle(made_with_timm, device="cpu")
    assert call(monkeypatch, "predict", made_with_timm, "x.png") == 2
    assert "pip install 'timm==" in capsys.readouterr().err


def test_ours_are_torch_bundles_and_say_nothing_of_others(run: Path, tmp_path: Path) -> None:
    bundle = offramp.export_run(run, tmp_path / "bundle")
    assert offramp.load_bundle(bundle, device="cpu").format == "torch"
    assert (
        not {"packages", "imports"} & card_of(bundle).keys() and "interpolation" not in card_of(bundle)["preprocessing"]
    )
    assert json.loads((bundle / "bundle.json").read_text())["schema"] == 1


def test_what_older_readers_would_resize_wrongly_they_refuse(tmp_path: Path) -> None:
    model = build()
    bundle = offramp.export(model, evaluated(model, tmp_path / "mine"), out=tmp_path / "bundle")
    assert json.loads((bundle / "bundle.json").read_text())["schema"] == 2
    assert card_of(bundle)["preprocessing"]["interpolation"] == "bicubic"


@pytest.mark.parametrize("words", [["predict", "x.png"], ["serve"], ["eval", "--data", "digits"], ["bench"]])
def test_a_device_that_is_not_there_is_refused(
    words: list[str],
    onnx_bundle: Path,
    torch_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    verb = ["bench", "infer"] if words == ["bench"] else words[:1]
    for bundle in (onnx_bundle, torch_bundle):
        assert call(monkeypatch, *verb, bundle, *words[1:], "--device", "banana") == 2
        assert "device 'banana' is unknown; use auto, cpu, cuda or cuda:N" in capsys.readouterr().err
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    assert call(monkeypatch, *verb, onnx_bundle, *words[1:], "--device", "cuda") == 2
    assert "the onnxruntime here has no CUDAExecutionProvider; use --device cpu" in capsys.readouterr().err


class Session:
    """Stands for ONNX Runtime's: it has the providers that it was asked for, but those that are not `there`."""

    there: tuple[str, ...] = ()
    asked: list[Any] = []

    def __init__(self, graph: bytes, options: object, providers: list[Any]) -> None:
        type(self).asked = providers

    def get_providers(self) -> list[str]:
        names = [one if isinstance(one, str) else one[0] for one in self.asked]
        return [name for name in names if name in (onnx_engine.CPU, *self.there)]

    def get_inputs(self) -> list[Any]:
        return []


def test_on_a_gpu_the_cuda_provider_is_taken(onnx_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of ONNX Runtime; that it then runs there can only be seen on such a machine."""
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [onnx_engine.CUDA, onnx_engine.CPU])
    monkeypatch.setattr("onnxruntime.InferenceSession", Session)
    monkeypatch.setattr(Session, "there", (onnx_engine.CUDA,))
    for device, number in (("auto", "0"), ("cuda", "0"), ("cuda:1", "1")):
        engine = offramp.load_bundle(onnx_bundle, device=device).engine
        assert Session.asked == [(onnx_engine.CUDA, {"device_id": number, "use_tf32": "0"}), onnx_engine.CPU]
        assert engine.place == f"CUDA device {number}"
    assert "CPU" in offramp.load_bundle(onnx_bundle, device="cpu").engine.place
    monkeypatch.setattr(Session, "there", ())  # the provider is installed, but there is no GPU
    assert "CPU" in offramp.load_bundle(onnx_bundle, device="auto").engine.place
    with pytest.raises(ValueError, match="device 'cuda' was asked for, but onnxruntime finds no such GPU here"):
        offramp.load_bundle(onnx_bundle, device="cuda")
